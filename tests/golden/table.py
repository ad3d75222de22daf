"""What the golden checkpoints run on. Needs nothing but Python, so that it is there on a bare machine with a GPU."""

import os
from pathlib import Path

# The kernel table under test: GLM_TEST_TABLE=cuda where there is a GPU; futhark, futhark_cuda, futhark_opencl.
TABLE = os.environ.get("GLM_TEST_TABLE", "cpu")
MAX_CONTEXT = 64


def most_ranks() -> int:
    """That the table runs on here: on GPUs, one each. Futhark's have no groups."""
    if TABLE.startswith("futhark"):
        return 1
    return 64 if TABLE == "cpu" else len(list(Path("/dev").glob("nvidia[0-9]*")))
