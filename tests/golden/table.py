"""What the golden checkpoints run on. Needs nothing but Python, so that it is there on a bare machine with a GPU."""

import os

# The kernel table under test: GLM_TEST_TABLE=cuda where there is a GPU.
TABLE = os.environ.get("GLM_TEST_TABLE", "cpu")
MAX_CONTEXT = 64
