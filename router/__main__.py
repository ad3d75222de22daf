"""`python -m router`."""

import sys

from router.server import main

sys.exit(main(sys.argv[1:]))
