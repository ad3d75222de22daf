"""Chat templates in the style of GLM's, and a model that has one: tags and roles are tokens, as GLM's are."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer

from router.model import TextModel
from router.text.chat_template import ChatTemplate
from router.text.reasoning import END_THINK, THINK
from router.text.tokenizer import TextTokenizer
from router.text.tool_calls import TAGS
from tests.unit.router_harness import raw_tokenizer

ROLES = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GAPS = ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>")
OBSERVATION = "<|observation|>"

_TOOLS = """
{%- if tools %}<|system|>
Tools, one a line:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{%- endif %}
"""
GLM_COMPACT = (
    """[gMASK]<sop>"""
    + _TOOLS
    + """
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
    {%- set keeps = loop.index0 > ns.last_user or (clear_thinking is defined and not clear_thinking) %}
    {%- if keeps and m.reasoning_content %}<think>{{ m.reasoning_content.strip() }}</think>{% else %}</think>{% endif %}
    {{- m.content.strip() }}
    {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
        {%- for key, value in call.function.arguments.items() -%}
        <arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
        {%- endfor %}</tool_call>
    {%- endfor %}
{%- elif m.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}<|observation|>{% endif -%}
    <tool_response>{{ m.content }}</tool_response>
{%- else %}<|{{ m.role }}|>{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif %}"""
)
GLM_LINES = (
    """[gMASK]<sop>"""
    + _TOOLS
    + """
{%- set off = enable_thinking is defined and not enable_thinking %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
<think>{{ (m.reasoning_content or '').strip() }}</think>
{%- if m.content %}{{ '\\n' + m.content.strip() }}{% endif %}
    {%- for call in m.tool_calls or [] %}
{{ '\\n<tool_call>' + call.function.name }}
        {%- for key, value in call.function.arguments.items() %}
{{ '\\n<arg_key>' + key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
        {%- endfor %}{{ '\\n</tool_call>' }}
    {%- endfor %}
{%- elif m.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- else %}<|{{ m.role }}|>
{{ m.content }}{{ '/nothink' if off and m.role == 'user' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '\\n<think></think>' if off }}
{%- endif %}"""
)
HERMES = """{% if tools %}<|system|>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{% endfor %}<|assistant|>"""


@functools.cache
def glm_raw_tokenizer() -> Tokenizer:
    """Roles are control tokens, tags are not."""
    raw = Tokenizer.from_str(raw_tokenizer().to_str())
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*ROLES, *GAPS)])
    raw.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (THINK, END_THINK, *TAGS)])
    return raw


@functools.cache
def glm_model(template: str = GLM_COMPACT) -> TextModel:
    raw = Tokenizer.from_str(glm_raw_tokenizer().to_str())
    return TextModel.of(TextTokenizer(raw, raw.get_vocab_size() + 8), ChatTemplate(template, {}), {})


def glm_encode(text: str) -> list[int]:
    ids: list[int] = glm_raw_tokenizer().encode(text).ids
    return ids
