"""This engine beside others on the same CPU: see `python -m tests.bench.peers --help`."""
