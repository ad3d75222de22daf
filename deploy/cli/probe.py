"""`glm probe`: what an orchestrator asks of a service that speaks gRPC with TLS."""

from typing import Annotated, Any

import grpc
import typer

from deploy.cli.options import TlsCaOption, TlsCertOption, TlsKeyOption


def probe(
    *,
    target: Annotated[str, typer.Option(metavar="HOST:PORT", help="A router or a worker.")],
    service: Annotated[str, typer.Option(metavar="NAME", help="Health name: empty for readiness, or liveness.")] = "",
    seconds: Annotated[float, typer.Option(min=0.1, metavar="S", help="How long to wait for the answer.")] = 5.0,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Ask the gRPC health service. Exit code 0: it serves; 1: it does not, or does not answer."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415 - gRPC is slow to import

    from deploy.cli.access import Access  # noqa: PLC0415

    with Access(tls_ca, tls_cert, tls_key).channel(target) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=seconds)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            print(f"{error.code().name}: {error.details()}")
            raise typer.Exit(1) from None
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(1)
