"""`glm chat`: a conversation in the terminal."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import (
    ApiKeyOption,
    MaxTokensOption,
    SeedOption,
    ServedModelOption,
    TargetOption,
    TemperatureOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    check_utf8,
)


def chat(
    *,
    model: ServedModelOption = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Whether to reason first. Neither: as the model does."),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Tools that the model may call, in OpenAI's form."),
    ] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    target: TargetOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Talk with a model. Ctrl-C ends an answer, Ctrl-D the conversation.

    Its reasoning goes to stderr, dimmed. You are asked for the result of each tool call.
    """
    check_utf8("--system", system or "")

    from deploy.cli.access import Access  # noqa: PLC0415
    from deploy.cli.client import inference, requested_name  # noqa: PLC0415
    from deploy.cli.conversation import Conversation, converse  # noqa: PLC0415
    from deploy.cli.tool_file import read_tools  # noqa: PLC0415
    from glmserve.inference.v1 import inference_pb2  # noqa: PLC0415 - gRPC is slow to import

    request = inference_pb2.ChatRequest(
        model=requested_name(model, target),
        sampling=inference_pb2.SamplingOptions(max_tokens=max_tokens, temperature=temperature, seed=seed),
        enable_thinking=thinking,
        tools=None if tools is None else read_tools(tools),
    )
    with inference(model, target, Access(tls_ca, tls_cert, tls_key, api_key)) as client:
        converse(Conversation(client, request, system))
