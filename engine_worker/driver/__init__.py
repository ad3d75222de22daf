"""Drivers: a rank's plans compiled to straight-line calls, in place of the built-in executor. See native/terra."""
