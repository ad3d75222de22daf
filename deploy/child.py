"""One service as a child process: started, watched, stopped; what it logged last is kept."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from deploy.errors import ServiceError

STOP_SECONDS = 35.0  # more than the time that a service by default gives its running requests
_KEPT_LINES = 50
_LOG_FIELDS = ("timestamp", "level", "service", "event")


class Child:
    """`python -m MODULE ARGS`, in a session of its own: a Ctrl-C at the terminal is for the launcher to pass on.

    Its stdin is a pipe that nothing is written to: it ends when we do, even by SIGKILL. With `echo` its stderr also
    goes to ours.
    """

    def __init__(self, name: str, module: str, args: Sequence[str], echo: bool = False) -> None:
        self.name = name
        self._echo = echo
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._drain, name=f"{name}-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """ServiceError with the exit status and the last log line if it has ended; a refused start keeps its code 2."""
        status = self._process.poll()
        if status is None:
            return
        self._reader.join(STOP_SECONDS)
        ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        last = next((line for line in reversed(self._lines) if line.strip()), "it logged nothing")
        raise ServiceError(f"the {self.name} {ended}: {readable(last)}", exit_code=2 if status == 2 else 1)

    def stop(self) -> None:
        """Ask it to stop, wait, and kill it if it takes longer than STOP_SECONDS."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._reader.join(STOP_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _drain(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for raw in stream:
                self._lines.append(raw.decode(errors="replace"))
                if self._echo:
                    os.write(sys.stderr.fileno(), raw)


def readable(line: str) -> str:
    """A log line for people: `event key=value ...` of a JSON record, any other line as it is."""
    try:
        record = json.loads(line)
    except ValueError:
        return line.strip()
    if not isinstance(record, dict) or "event" not in record:
        return line.strip()
    fields = [f"{key}={value}" for key, value in record.items() if key not in _LOG_FIELDS]
    return " ".join([str(record["event"]), *fields])
