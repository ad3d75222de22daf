"""`python -m engine_worker`."""

import sys

from engine_worker.server import main

sys.exit(main(sys.argv[1:]))
