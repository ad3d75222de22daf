"""structlog as JSON lines on stderr."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Literal, TextIO, cast

import structlog

LogLevel = Literal["debug", "info", "warning", "error"]


class _Stderr(io.TextIOBase):
    """stderr, or nowhere once nobody reads it: what is being served does not end with a launcher that was killed."""

    def write(self, text: str) -> int:
        with _lasting():
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with _lasting():
            sys.stderr.flush()


@contextlib.contextmanager
def _lasting() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor is what is wanted
            os.dup2(nowhere.fileno(), sys.stderr.fileno())


def configure(service: str, level: LogLevel) -> None:
    """Send structlog's and the standard library's records to stderr, one JSON object a line, each with `service`."""

    def of_service(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**event, "service": service}

    shared: list[structlog.typing.Processor] = [
        of_service,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Stderr())),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(_Stderr())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
