"""Settings of the router."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from glmserve.service.listen_settings import ListenSettings, is_loopback
from glmserve.service.logs import LogLevel
from glmserve.service.telemetry import TelemetrySettings
from glmserve.service.tls import Channels, TlsFiles
from router.dispatch.discovery import DNS_SCHEME, is_name

_WORKER = re.compile(r"(dns:///)?[^/]+:\d{1,5}")


class RouterConfig(ListenSettings, TelemetrySettings):
    """Flags, GLM_ROUTER_* environment variables, or keys of the TOML file."""

    model_config = SettingsConfigDict(env_prefix="GLM_ROUTER_")

    model: Path = Field(description="Checkpoint directory: config.json, tokenizer.json and what goes with them.")
    worker: Annotated[tuple[str, ...], NoDecode] = Field(
        min_length=1,
        description="The engine workers: HOST:PORT, or dns:///NAME:PORT for all addresses of a name. Several: given "
        "several times, or with commas.",
    )
    listen: str = Field(
        "127.0.0.1:50050", description="Address to serve on, HOST:PORT; port 0: any free one.", pattern=r"^.+:\d+$"
    )
    http_listen: str | None = Field(
        None,
        pattern=r"^.+:\d{1,5}$",
        description="Address of the OpenAI and Anthropic APIs and of the chat page over HTTP, HOST:PORT; port 0: any "
        "free one; unset: none. With the same certificates and keys.",
    )
    ready_file: Path | None = Field(
        None, description="Written with the bound address and the process id once it is listening."
    )
    log_level: LogLevel = Field("info", description="Least severe log lines to write.")
    max_requests: int = Field(1024, ge=1, description="Requests in flight, at most.")
    max_prompt_tokens: int = Field(
        1_000_000, ge=1, description="Prompt tokens of requests that have no token yet, at most."
    )
    max_queue_s: float = Field(
        30.0, gt=0, description="Expected wait, by the pace that the workers measure, beyond which is refused, seconds."
    )
    retry_after_ms: int = Field(
        1000, ge=1, description="What a refused client is told while no pace has been measured, milliseconds."
    )
    heartbeat_s: float = Field(
        1.5, gt=0, description="Silence after which a worker is asked, and again until it is given up, seconds."
    )
    resolve_s: float = Field(10.0, gt=0, description="How often names of workers are looked up, seconds.")
    failover_moves: int = Field(
        3, ge=0, description="How often a request is moved when its worker is lost; 0: it fails with its worker."
    )
    failover_wait_s: float = Field(
        30.0, ge=0, description="How long a request that lost its worker waits for one that takes it, seconds."
    )
    drain_s: float = Field(30.0, ge=0, description="Time for running requests at shutdown, seconds.")
    stall_s: float = Field(
        60.0, gt=0, description="Time for a client to take a response, before its request is ended, seconds."
    )
    stream_interval_ms: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="Least time between two messages of a stream, milliseconds: tokens within it are merged, which "
        "saves CPU here and in clients. 0: each step's tokens at once.",
    )
    max_message_bytes: int = Field(
        4 << 20, ge=1 << 16, description="Largest request, or message of a response, of the public API, bytes."
    )
    keys_file: Path | None = Field(
        None, description="TOML file of the API keys that callers must have (`glm key create`). Read when it changes."
    )
    worker_tls_ca: Path | None = Field(
        None, description="CA certificates, PEM, that sign for the worker; unset: plain text. Read when it changes."
    )
    worker_tls_cert: Path | None = Field(
        None, description="Certificate to show to the worker, PEM; with worker_tls_key. Read when it changes."
    )
    worker_tls_key: Path | None = Field(None, description="Key of worker_tls_cert, PEM, without a password.")
    worker_tls_name: str | None = Field(
        None, description="Name that the worker's certificate is for; unset: the host of its address."
    )

    @field_validator("worker", mode="before")
    @classmethod
    def _split_workers(cls, given: object) -> object:
        items = [given] if isinstance(given, str) else given
        if not isinstance(items, list | tuple):
            return given
        return tuple(part.strip() for item in items for part in str(item).split(","))

    @field_validator("worker")
    @classmethod
    def _check_workers(cls, workers: tuple[str, ...]) -> tuple[str, ...]:
        for worker in workers:
            if not _WORKER.fullmatch(worker):
                raise ValueError(f"{worker!r} is neither HOST:PORT nor dns:///NAME:PORT")
        return workers

    @property
    def knows_callers(self) -> bool:
        """Whether a stranger is turned away."""
        return self.keys_file is not None or super().knows_callers

    def worker_channels(self) -> Channels:
        """How to reach the worker. Raises SettingsError: a file cannot be used."""
        if self.worker_tls_ca is None:
            return Channels(None)
        files = TlsFiles(self.worker_tls_cert, self.worker_tls_key, self.worker_tls_ca)
        return Channels(files, self.worker_tls_name)

    @property
    def tls_files(self) -> TlsFiles | None:
        """Of both fronts; None: plain text."""
        return None if self.tls_cert is None else TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def _callers_setting(self) -> str:
        return "keys_file or tls_client_ca"

    @property
    def _addresses(self) -> Mapping[str, str]:
        http = {} if self.http_listen is None else {"http_listen": self.http_listen}
        return {**super()._addresses, **http}

    @model_validator(mode="after")
    def _check_worker_tls(self) -> Self:
        if (self.worker_tls_cert is None) != (self.worker_tls_key is None):
            raise ValueError("worker_tls_cert and worker_tls_key: give both or neither")
        if self.worker_tls_ca is None and (self.worker_tls_cert or self.worker_tls_name):
            raise ValueError("worker_tls_cert, worker_tls_key and worker_tls_name: need worker_tls_ca")
        exposed = [source for source in self.worker if not is_loopback(source.removeprefix(DNS_SCHEME))]
        if self.worker_tls_ca is None and not self.insecure and exposed:
            raise ValueError(
                f"worker: {exposed[0]} is not loopback, where plain text is allowed; set worker_tls_ca, or insecure"
            )
        if self.worker_tls_ca and self.worker_tls_name is None and any(is_name(source) for source in self.worker):
            raise ValueError("worker: a dns:/// name with worker_tls_ca needs worker_tls_name, the certificates' name")
        return self
