"""Grammars that generated tokens must follow: compiled beside the event loop, followed beside the steps."""
