"""All parts of the HTTP front together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from glmserve.service.reload import Reloaded
from glmserve.service.tls import TlsFiles
from router.access.keys import Keys
from router.http.app import build_app
from router.http.gate import Gate, GateLimits
from router.http.health import Probes
from router.http.server import HttpBinding, HttpServer
from router.http.tls import server_context
from router.inference import InferenceCore
from router.wire import StreamPace

# For a whole request to come; a slower line than 70 KB a second is no use for the largest ones.
_BODY_S = 60.0


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """`listen`: HOST:PORT. `tls` None: plain text. `registry`: of the metrics that are shown."""

    listen: str
    tls: TlsFiles | None
    max_connections: int
    max_body_bytes: int
    pace: StreamPace
    registry: CollectorRegistry | None


async def start_front(
    core: InferenceCore, keys: Reloaded[Keys] | None, settings: FrontSettings, is_ready: Callable[[], bool]
) -> HttpServer:
    """Listen. `keys` None: everybody may call.

    Raises OSError: the address cannot be bound. Raises SettingsError: the certificates cannot be used.
    """
    app = build_app(core, Probes(is_ready, settings.registry), settings.pace.interval_s)
    gate = Gate(app, keys, GateLimits(settings.max_body_bytes, _BODY_S, settings.pace.stall_s))
    tls = None if settings.tls is None else server_context(settings.tls)
    return await HttpServer.start(gate, HttpBinding(settings.listen, tls, settings.max_connections))
