"""The exceptions of the engine worker.

    WorkerError
    ├── ConfigError            a setting is missing, unknown or out of range
    ├── CheckpointError        a checkpoint contradicts its config, its index or itself
    ├── UnsupportedError       this build, kernel table or machine cannot do what was asked
    ├── InvalidRequestError    the caller's values are out of range; nothing has changed
    ├── OutOfMemoryError       an allocation failed; the message says how many bytes and for what
    └── EngineFailedError      the engine cannot go on and has to be made anew
        ├── DeviceError        a device or communicator call failed
        ├── EngineStuckError   a step does not end; the engine cannot even be closed
        └── InternalError      the engine contradicted itself

Every message is one line that names the offending thing and what was expected.
"""


class WorkerError(Exception):
    """Base of all errors that the engine worker raises on purpose."""


class ConfigError(WorkerError):
    """A setting is missing, unknown or out of range."""


class CheckpointError(WorkerError):
    """A checkpoint contradicts its config, its index or itself."""


class UnsupportedError(WorkerError):
    """This build, kernel table or machine cannot do what was asked."""


class InvalidRequestError(WorkerError):
    """The caller's values are out of range; nothing has changed."""


class OutOfMemoryError(WorkerError):
    """An allocation failed."""


class EngineFailedError(WorkerError):
    """The engine cannot go on and has to be made anew."""


class DeviceError(EngineFailedError):
    """A device or communicator call failed."""


class EngineStuckError(EngineFailedError):
    """A step does not end; the engine cannot even be closed."""


class InternalError(EngineFailedError):
    """The engine contradicted itself."""
