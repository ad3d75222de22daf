"""The public gRPC API as the commands use it: the channel, the local pair behind it, errors in one line."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import typer

from deploy.cli.access import PLAIN_TEXT, Access
from deploy.cli.console import messages, model_directory
from deploy.errors import DeployError
from deploy.local import LocalOptions, local_cluster
from deploy.models.catalog import DEFAULT_MODEL
from glmserve.inference.v1 import inference_pb2_grpc

InferenceClient = inference_pb2_grpc.InferenceServiceStub

_CALLER_S_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}


class RequestError(DeployError):
    """The router answered with an error status; wrong arguments end a command as its own would."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        if code in _CALLER_S_FAULT:
            self.exit_code = 2


@contextmanager
def request_errors() -> Iterator[None]:
    """RpcError becomes RequestError."""
    try:
        yield
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        raise RequestError(error.code(), error.details()) from None


def requested_name(model: str | None, target: str | None) -> str:
    """A request's `model` field: a worker calls its model by the directory's name. Empty: whatever is served."""
    return Path(model).resolve().name if model and target else ""


@contextmanager
def inference(
    model: str | None, target: str | None, access: Access = PLAIN_TEXT, worker_args: Sequence[str] = ()
) -> Iterator[InferenceClient]:
    """A client of the router at `target`, or of a pair started here and stopped at the end."""
    if target is None and access != PLAIN_TEXT:
        raise typer.BadParameter("needed by --tls-ca, --tls-cert, --tls-key and --api-key", param_hint="--target")
    with router_address(model, target, worker_args) as address, access.channel(address) as channel:
        yield InferenceClient(channel)


@contextmanager
def router_address(model: str | None, target: str | None, worker_args: Sequence[str] = ()) -> Iterator[str]:
    """`target`, or the address of a pair started here and stopped at the end."""
    if target is not None:
        yield target
        return
    options = LocalOptions(model=model_directory(model or DEFAULT_MODEL), worker_args=worker_args)
    with ExitStack() as stack:
        status = stack.enter_context(messages.status("starting"))
        cluster = stack.enter_context(local_cluster(options, status.update))
        status.stop()
        try:
            yield cluster.router
        except RequestError:
            cluster.check()  # if a service died, its own last words say more than the status
            raise
