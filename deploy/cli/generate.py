"""`glm generate`: one prompt through the public API."""

from typing import Annotated

import typer

from deploy.cli.options import (
    ApiKeyOption,
    EpOption,
    ExecutorOption,
    KernelsOption,
    MaxTokensOption,
    SeedOption,
    ServedModelOption,
    TargetOption,
    TemperatureOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TpOption,
    check_utf8,
    parse_ids,
    rank_args,
)


def generate(
    *,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The text to continue.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="The token ids to continue, instead of --prompt.")
    ] = None,
    model: ServedModelOption = None,
    tp: TpOption = None,
    ep: EpOption = None,
    executor: ExecutorOption = None,
    kernels: KernelsOption = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, max=20, metavar="K", help="With --json: log-probabilities, of K alternatives too."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="S", help="End the text before this string; may be given again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    target: TargetOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Continue a prompt. The text goes to stdout as it comes, figures to stderr."""
    if (prompt is None) == (prompt_ids is None):
        raise typer.BadParameter("give exactly one of the two", param_hint="--prompt / --prompt-ids")
    if logprobs is not None and not as_json:
        raise typer.BadParameter("shown only with --json", param_hint="--logprobs")
    for flag, text in (("--prompt", prompt or ""), *(("--stop", text) for text in stop or [])):
        check_utf8(flag, text)
    if target is not None and (tp or ep or executor or kernels):
        raise typer.BadParameter(
            "of a worker that is started here, not of --target", param_hint="--tp / --ep / --executor / --kernels"
        )
    ids = None if prompt_ids is None else parse_ids("--prompt-ids", prompt_ids)

    from deploy.cli.access import Access  # noqa: PLC0415
    from deploy.cli.answer import run  # noqa: PLC0415
    from deploy.cli.client import requested_name  # noqa: PLC0415
    from glmserve.inference.v1 import inference_pb2  # noqa: PLC0415 - gRPC is slow to import

    request = inference_pb2.GenerateRequest(
        model=requested_name(model, target),
        sampling=inference_pb2.SamplingOptions(
            max_tokens=max_tokens, temperature=temperature, seed=seed, logprobs=logprobs, stop=stop
        ),
        return_prompt_ids=as_json,
    )
    if ids is not None:
        request.prompt_ids.ids.extend(ids)
    elif prompt is not None:
        request.prompt = prompt
    access = Access(tls_ca, tls_cert, tls_key, api_key)
    run(request, model, target, access, as_json=as_json, worker_args=rank_args(tp, ep, executor, kernels))
