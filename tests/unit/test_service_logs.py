"""What both services write to stderr."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, threading
import structlog
from glmserve.service import logs

logs.configure("router", "info")

def write(where):
    structlog.get_logger().info("ours", where=where)
    logging.getLogger("library").warning("theirs %s", where)

write("main")
thread = threading.Thread(target=write, args=("thread",))
thread.start()
thread.join()
structlog.get_logger().debug("not this")
try:
    1 / 0
except ZeroDivisionError as error:
    structlog.get_logger().error("failed", exc_info=error)
"""


def test_every_line_is_json_and_names_its_service_whatever_thread_wrote_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    events = ["ours", "theirs main", "ours", "theirs thread", "failed"]
    assert [line["event"] for line in lines] == events
    assert {line["service"] for line in lines} == {"router"}
    assert all({"level", "timestamp"} <= set(line) for line in lines)
    assert "ZeroDivisionError" in lines[-1]["exception"]
