"""The command `glm`: its commands, and how their errors end it.

Exit codes: 0 done; 1 it failed while running; 2 the arguments, configuration, checkpoint or request are wrong.
Modules that take long to import are imported by the command that needs them.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from deploy.cli import (
    bench,
    chat,
    deploy,
    doctor,
    generate,
    key,
    model,
    plan,
    plan_parity,
    plan_place,
    plan_profile,
    probe,
    services,
    top,
)
from deploy.cli.console import messages
from deploy.errors import DeployError


class ErrorLine(TyperGroup):
    """Ends a DeployError with one line on stderr and its exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DeployError as error:
            messages.print(f"error: {error}", markup=False)
            raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    cls=ErrorLine,
    help="Serve GLM-4.7-FP8, and models of its shape, over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(services.serve)
app.command(context_settings=services.PASS_ON)(services.router)
app.command(context_settings=services.PASS_ON)(services.worker)
app.command()(generate.generate)
app.command()(chat.chat)
app.add_typer(key.app, name="key")
app.command()(top.top)
app.command()(doctor.doctor)
app.command()(probe.probe)
app.add_typer(bench.app, name="bench")
app.add_typer(deploy.app, name="deploy")
app.add_typer(model.app, name="model")
plan.app.command()(plan_profile.profile)
plan.app.command()(plan_parity.parity)
plan.app.command()(plan_place.place)
app.add_typer(plan.app, name="plan")


def main() -> None:
    app()
