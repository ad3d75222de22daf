"""Options that several commands share, and checks of what the shell passed."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deploy.models.catalog import DEFAULT_MODEL

ModelOption = Annotated[
    str, typer.Option(metavar="DIR|NAME", help="A checkpoint directory, or a model that `glm model fetch` knows.")
]
ServedModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|NAME",
        help=f"The model to start, {DEFAULT_MODEL} if not given; with --target, the model that it must be serving.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="A running router; without it, a worker and a router are started."),
]
TpOption = Annotated[
    int | None, typer.Option(min=1, max=64, metavar="N", help="Ranks of the started worker: tensor parallelism.")
]
EpOption = Annotated[
    int | None, typer.Option(min=1, max=64, metavar="N", help="Groups of ranks that experts are divided among.")
]


class Executor(StrEnum):
    """What runs a step: see native/terra/README.md."""

    NATIVE = "native"
    TERRA = "terra"
    TERRA_DEBUG = "terra-debug"


ExecutorOption = Annotated[
    Executor | None,
    typer.Option(help="Of the started worker: native walks the plan, terra compiles it, terra-debug adds checks."),
]


class Kernels(StrEnum):
    """Whose kernels: see kernels/futhark/README.md."""

    NATIVE = "native"
    FUTHARK = "futhark"


KernelsOption = Annotated[
    Kernels | None,
    typer.Option(help="Of the started worker: native in C++ and CUDA, futhark the portable table."),
]
TlsCaOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Speak TLS with --target, and trust these CA certificates (PEM).")
]
TlsCertOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate to show to --target (PEM); with --tls-key.")
]
TlsKeyOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Key of --tls-cert (PEM).")]
ApiKeyOption = Annotated[
    str | None, typer.Option(metavar="KEY", help="API key for --target; without it, that of GLM_API_KEY.")
]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, max=2**32 - 1, metavar="N", help="Tokens to generate, at most.")
]
TemperatureOption = Annotated[float | None, typer.Option(metavar="T", help="0 to 2; 0 is greedy.")]
SeedOption = Annotated[
    int | None, typer.Option(min=0, max=2**64 - 1, metavar="S", help="The same seed gives the same text.")
]


def check_utf8(flag: str, text: str) -> None:
    """Bytes of an argument that are not UTF-8 reach Python as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"not valid UTF-8 at character {error.start}", param_hint=flag) from None


def rank_args(
    tp: int | None, ep: int | None, executor: Executor | None = None, kernels: Kernels | None = None
) -> list[str]:
    """The worker's flags for a layout, and for what runs its steps."""
    flags = (("--tp", tp), ("--ep", ep), ("--executor", executor), ("--kernels", kernels))
    return [arg for flag, value in flags if value is not None for arg in (flag, str(value))]


def parse_ids(flag: str, text: str) -> list[int]:
    """Token ids written as 1,2,3."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of token ids like 1,2,3", param_hint=flag) from None
    for token_id in ids:
        if not 0 <= token_id < 2**32:
            raise typer.BadParameter(f"{token_id} is not in the range 0 to {2**32 - 1}", param_hint=flag)
    return ids
