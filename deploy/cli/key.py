"""`glm key create`."""

from typing import Annotated

import typer

from deploy.cli.console import messages

app = typer.Typer(help="Make API keys.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def create(
    *,
    name: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, dots, dashes, underscores.")],
    max_requests: Annotated[int | None, typer.Option(min=1, metavar="N", help="Requests in flight, at most.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of prompts and completions, at most.")
    ] = None,
    max_priority: Annotated[
        int | None, typer.Option(min=-100, max=100, metavar="P", help="Highest priority of a request.")
    ] = None,
) -> None:
    """Print a new key, once, and the entry that makes a router accept it."""
    from pydantic import ValidationError  # noqa: PLC0415

    from router.access.keys import KeyEntry, key_hash, new_key  # noqa: PLC0415

    key = new_key()
    try:
        entry = KeyEntry(
            name=name,
            hash=key_hash(key),
            max_requests=max_requests,
            tokens_per_minute=tokens_per_minute,
            max_priority=max_priority,
        )
    except ValidationError as error:
        raise typer.BadParameter(f"{name!r}: {error.errors()[0]['msg']}", param_hint="NAME") from None
    messages.print("The key, which is shown this once, and the entry for the router's keys file:")
    print(key)
    print("\n[[key]]")
    for field, value in entry.model_dump(exclude_none=True).items():
        print(f'{field} = "{value}"' if isinstance(value, str) else f"{field} = {value}")
