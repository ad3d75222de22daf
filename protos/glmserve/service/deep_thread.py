"""A thread for libraries that recurse deeply: llguidance does so from rule to rule of a grammar."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

# With less, a chain of rules in a grammar of an allowed size overflows the stack.
_STACK_BYTES = 256 << 20


def deep_thread(name: str) -> ThreadPoolExecutor:
    """One thread with a stack of 256 MiB, already running; what is submitted waits in line."""
    previous = threading.stack_size(_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        pool.submit(int).result()  # starts the thread, which has the stack of now
    finally:
        threading.stack_size(previous)
    return pool
