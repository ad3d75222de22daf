"""A worker of which one GPU hangs at SIGUSR1 and fails at SIGUSR2.

`GLM_FAULT_GPU=1 python -m tests.chaos.faulty_gpu_worker ARGS`, with a worker's ARGS.
"""

from __future__ import annotations

import os
import signal
import sys

from engine_worker import server
from tests.golden.gpu_faults import fail, hang, open_gpu


def main() -> int:
    gpu = open_gpu(int(os.environ["GLM_FAULT_GPU"]))
    signal.signal(signal.SIGUSR1, lambda *_: hang(gpu))
    signal.signal(signal.SIGUSR2, lambda *_: fail(gpu))
    return server.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
