"""A Chat request as the engine and the reader of its answer need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.constraints import check_constraint, engine_constraint, tool_call_constraint
from router.conversation import Prompt, render
from router.errors import UnsupportedError
from router.model import TextModel
from router.text.answer import AnswerPlan, AnswerReader
from router.text.detokenizer import Detokenizer
from router.text.reader import Reader
from router.text.reasoning import END_THINK
from router.tools import check_tools


@dataclass(frozen=True)
class ChatPlan:
    """`constraint` None: any answer will do. `new_reader`: for the answer of one choice."""

    prompt: str
    constraint: engine_pb2.Constraint | None
    new_reader: Callable[[], Reader]


async def chat_plan(request: inference_pb2.ChatRequest, model: TextModel) -> ChatPlan:
    """Raises InvalidArgumentError: a message, a tool or the constraint is wrong.

    Raises UnsupportedError: the checkpoint cannot do what is asked for.
    """
    if request.sampling.HasField("prompt_logprobs"):
        raise InvalidArgumentError("sampling.prompt_logprobs", "set; allowed only in a GenerateRequest")
    tools = check_tools(request)
    prompt = render(model, request, tools)
    plan = AnswerPlan(
        in_reasoning=prompt.in_reasoning,
        after_reasoning=prompt.after_reasoning,
        tools=tools.types if _may_call(request) else None,
        single_call=_is_single(request),
        stops=request.sampling.stop,
        min_tokens=request.sampling.min_tokens,
    )
    constraint = await _constraint(request, model, prompt)
    return ChatPlan(prompt.text, constraint, lambda: AnswerReader(Detokenizer(model.tokenizer), model.answers, plan))


def _may_call(request: inference_pb2.ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice.mode != inference_pb2.TOOL_MODE_NONE


def _is_single(request: inference_pb2.ChatRequest) -> bool:
    several = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True
    return not several or bool(request.tool_choice.name)


async def _constraint(
    request: inference_pb2.ChatRequest, model: TextModel, prompt: Prompt
) -> engine_pb2.Constraint | None:
    made = None
    if request.HasField("constraint"):
        await check_constraint("constraint", request.constraint)
        made = engine_constraint(request.constraint, None)
    if _may_call(request):
        style = model.answers.tools
        if style is None:
            raise UnsupportedError("tools: how the served checkpoint's chat template writes tool calls is not known")
        # The reader ends the answer after a single call: by itself that needs no mask.
        free = made is None and not any(tool.strict for tool in request.tools)
        parallel = free or not _is_single(request)
        made = await tool_call_constraint(
            request.tools, request.tool_choice, parallel=parallel, style=style, content=made
        )
    if made is not None and prompt.in_reasoning:
        made.begin_after_token_id = _end_of_reasoning(model)
    return made


def _end_of_reasoning(model: TextModel) -> int:
    """Raises UnsupportedError: it is no token, so the engine cannot know where the reasoning ends."""
    assert model.answers.reasoning is not None
    token_id = model.answers.reasoning.tag_ids.get(END_THINK)
    if token_id is None:
        raise UnsupportedError(
            f"constraint: the served checkpoint's tokeniser has no token {END_THINK}; set enable_thinking to false"
        )
    return token_id
