"""Rendering equals transformers' apply_chat_template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from router.errors import CheckpointError
from router.text.chat_template import ChatTemplate, TemplateRefusalError
from tests.unit.router_harness import TEMPLATE, raw_tokenizer

GLM_STYLE = """[gMASK]<sop>
{%- macro visible(content) -%}{{ content if content is string else content | tojson }}{%- endmacro -%}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{% set ns.last_user = loop.index0 -%}{%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'system' %}<|system|>{{ visible(m.content) }}
{%- elif m.role == 'user' %}<|user|>{{ visible(m.content) }}
{%- else -%}
<|assistant|>
    {%- if loop.index0 > ns.last_user and '</think>' in m.content %}
{{ '<think>' + m.content.split('</think>')[0].strip() + '</think>' }}
    {%- else %}</think>{% endif %}
    {% generation %}{{ m.content.split('</think>')[-1].strip() }}{% endgeneration %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif %}
"""
FEATURES = """{% for m in messages %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% if m.content == '' %}{% continue %}{% endif %}
    {{ m | tojson }} {{ {'a': 'é<b>', 'c': [1, none, true]} | tojson(indent=2) }}
{% endfor %}
{{ eos_token }}{{ bos_token is defined }}{{ tools is none }}{{ dict(a=1).a }}{{ strftime_now('%Y') | length }}
"""
TEMPLATES = {"simple": TEMPLATE, "glm": GLM_STYLE, "features": FEATURES}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  spaces and\nlines  "},
        {"role": "assistant", "content": "<think>why</think>  because "},
        {"role": "user", "content": "你好 <b>&amp;</b> {{ not_a_template }} 🙂"},
        {"role": "assistant", "content": "<think>again</think>yes"},
    ],
    "empty": [{"role": "user", "content": ""}, {"role": "user", "content": "x"}],
}


def write(directory: Path, template: str, *, own_file: bool) -> Path:
    raw_tokenizer().save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    if own_file:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("own_file", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_equals_apply_chat_template(tmp_path: Path, template: str, chat: str, own_file: bool) -> None:
    directory = write(tmp_path, TEMPLATES[template], own_file=own_file)
    reference = AutoTokenizer.from_pretrained(directory)
    expected = reference.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=True)
    ours = ChatTemplate.load(directory)
    assert ours is not None
    assert ours.render(CHATS[chat]) == expected


def test_a_special_token_may_be_written_as_an_object(tmp_path: Path) -> None:
    config = {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<end>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([]) == "<end>"


def test_no_template_is_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


def test_the_template_may_refuse_in_its_own_words() -> None:
    with pytest.raises(TemplateRefusalError, match="not this one"):
        ChatTemplate(TEMPLATE, {}).render([{"role": "user", "content": "refuse me"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ dict.__init__.__globals__ }}",
        "{{ strftime_now.__globals__.json }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(TemplateRefusalError):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ '{x}'.format() }}", "{{ 'a'.nothing.more }}", "{{ 5 + 'a' }}"])
def test_whatever_fails_in_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateRefusalError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% generation %}"])
def test_a_broken_template_stops_start_up(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template, line 1"):
        ChatTemplate(source, {})


def test_a_damaged_tokenizer_config_stops_start_up(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="tokenizer_config.json"):
        ChatTemplate.load(tmp_path)


def test_the_router_starts_without_transformers_and_torch() -> None:
    code = "import router.server, sys; sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
