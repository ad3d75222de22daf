"""Settings from a TOML file, the environment and flags; the later of these weighs more. An unknown key is an error."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)


class SettingsError(ValueError):
    """A setting is unknown, missing or out of range. The text names the key and what is allowed."""


class ServiceSettings(BaseSettings):
    """Base of a service's settings: a subclass sets `env_prefix` and its fields. Field descriptions become `--help`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    config: Path | None = Field(None, description="TOML file with any of these settings.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment, then what `load` read from the file; pydantic-settings itself puts flags before both."""
        assert isinstance(init_settings, InitSettingsSource)
        assert isinstance(env_settings, EnvSettingsSource)
        return env_settings, init_settings

    @classmethod
    def load(cls, argv: Sequence[str], *, prog: str) -> Self:
        """Read all three sources. `--help` prints and exits 0; an unknown flag prints the usage and exits 2.

        Raises SettingsError: a key is unknown, a value is not allowed, or the file cannot be read.
        """
        cls._refuse_unknown_environment(os.environ)
        path = cls._config_path(argv, os.environ)
        values = cls._read_file(path) if path else {}
        try:
            return cls(_cli_parse_args=list(argv), _cli_prog_name=prog, **values)
        except ValidationError as error:
            raise SettingsError("; ".join(_describe(item) for item in error.errors())) from None

    @classmethod
    def _refuse_unknown_environment(cls, environ: Mapping[str, str]) -> None:
        prefix = cls.model_config.get("env_prefix", "")
        known = {f"{prefix}{name}".upper() for name in cls.model_fields}
        unknown = sorted(key for key in environ if prefix and key.startswith(prefix) and key not in known)
        if unknown:
            raise SettingsError(f"unknown environment variable {unknown[0]}; known: {', '.join(sorted(known))}")

    @classmethod
    def _config_path(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Path | None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config")
        flag: str | None = parser.parse_known_args(list(argv))[0].config
        given = flag or environ.get(f"{cls.model_config.get('env_prefix', '')}CONFIG")
        return Path(given) if given else None

    @classmethod
    def _read_file(cls, path: Path) -> dict[str, Any]:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"cannot read settings file {path}: {error}") from None
        unknown = sorted(set(values) - set(cls.model_fields))
        if unknown:
            raise SettingsError(f"unknown key {unknown[0]!r} in {path}; known: {', '.join(sorted(cls.model_fields))}")
        return values


def _describe(item: Mapping[str, Any]) -> str:
    if not item["loc"]:  # of several settings together: the text names them
        return str(item["msg"]).removeprefix("Value error, ")
    name = ".".join(str(part) for part in item["loc"])
    given = "" if item["type"] == "missing" else f" (given: {item['input']!r})"
    return f"{name}: {item['msg']}{given}"
