"""How a checkpoint marks its reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class ReasoningStyle:
    """`tag_ids`: those of THINK and END_THINK that are one token, by which alone they are then known."""

    tag_ids: Mapping[str, int]
