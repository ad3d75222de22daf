"""`glm chat`: a conversation in the terminal."""

from typing import Annotated

import typer

from deploy.cli.options import (
    MaxTokensOption,
    SeedOption,
    ServedModelOption,
    TargetOption,
    TemperatureOption,
    check_utf8,
)


def chat(
    *,
    model: ServedModelOption = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    target: TargetOption = None,
) -> None:
    """Talk with a model. Ctrl-C ends an answer, Ctrl-D the conversation."""
    check_utf8("--system", system or "")

    from deploy.cli.client import inference, requested_name  # noqa: PLC0415
    from deploy.cli.conversation import Conversation, converse  # noqa: PLC0415
    from glmserve.inference.v1 import inference_pb2  # noqa: PLC0415 - gRPC is slow to import

    sampling = inference_pb2.SamplingOptions(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with inference(model, target) as stub:
        converse(Conversation(stub, requested_name(model, target), sampling, system))
