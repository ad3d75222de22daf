"""Settings of the router."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from glmserve.service.logs import LogLevel
from glmserve.service.settings import ServiceSettings


class RouterConfig(ServiceSettings):
    """Flags, GLM_ROUTER_* environment variables, or keys of the TOML file."""

    model_config = SettingsConfigDict(env_prefix="GLM_ROUTER_")

    model: Path = Field(description="Checkpoint directory: config.json, tokenizer.json and what goes with them.")
    worker: str = Field(description="The engine worker's address, HOST:PORT.", pattern=r"^.+:\d+$")
    listen: str = Field(
        "127.0.0.1:50050", description="Address to serve on, HOST:PORT; port 0: any free one.", pattern=r"^.+:\d+$"
    )
    ready_file: Path | None = Field(
        None, description="Written with the bound address and the process id once it is listening."
    )
    log_level: LogLevel = Field("info", description="Least severe log lines to write.")
    max_requests: int = Field(1024, ge=1, description="Requests in flight, at most.")
    max_prompt_tokens: int = Field(1_000_000, ge=1, description="Prompt tokens of requests in flight, at most.")
    retry_after_ms: int = Field(1000, ge=1, description="When a refused client is told to try again, milliseconds.")
    heartbeat_s: float = Field(
        10.0, gt=0, description="Silence after which the worker is asked, and again until it is given up, seconds."
    )
    drain_s: float = Field(30.0, ge=0, description="Time for running requests at shutdown, seconds.")
    max_message_bytes: int = Field(
        4 << 20, ge=1 << 16, description="Largest request or response of the public API, bytes."
    )
