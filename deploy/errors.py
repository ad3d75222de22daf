"""What deployment raises.

DeployError            one line that names the offending thing and the remedy; exit_code is what a command ends with
+-- ModelError         a model cannot be found, fetched or converted
+-- ServiceError       a service did not start, or ended by itself
"""


class DeployError(Exception):
    exit_code = 1


class ModelError(DeployError):
    exit_code = 2


class ServiceError(DeployError):
    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
