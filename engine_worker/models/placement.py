"""Which rank holds which expert: the placement file, and one that evens out recorded loads.

A static form of expert-parallel load balancing (DeepSeek-AI 2024, EPLB) without copies of experts: every group of ranks
holds as many experts as before, and which ones is chosen by Graham's longest-processing-time rule (1969).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_worker.errors import ConfigError
from engine_worker.models.config import ModelConfig

Groups = tuple[tuple[int, ...], ...]  # the experts of each group of ranks


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """For each layer, by its number, the experts of each group of ranks; a layer without has them in order of id."""

    layers: Mapping[int, Groups]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()

    def of_layer(self, layer: int) -> tuple[int, ...] | None:
        """The experts in order of place."""
        groups = self.layers.get(layer)
        return None if groups is None else tuple(expert for group in groups for expert in group)

    def text(self) -> str:
        """The file's."""
        layers = {str(layer): groups for layer, groups in sorted(self.layers.items())}
        return json.dumps({"version": 1, "layers": layers}) + "\n"

    def check(self, c: ModelConfig, ep: int) -> None:
        """Raises ConfigError, naming layer and expert, if it is not one for this model in `ep` groups."""
        for layer, groups in self.layers.items():
            if not c.first_k_dense_replace <= layer < c.num_hidden_layers:
                last = c.num_hidden_layers - 1
                raise _error(
                    f"layer {layer} has no experts: those with experts are {c.first_k_dense_replace} to {last}"
                )
            _check_groups(layer, groups, c.n_routed_experts, ep)


def read_placement(path: Path) -> ExpertPlacement:
    """Raises ConfigError that names the file and what is wrong in it."""
    return ExpertPlacement(
        {
            layer: tuple(map(tuple, groups))
            for layer, groups in read_layers(path, _is_groups, "lists of expert ids").items()
        }
    )


def read_loads(path: Path) -> dict[int, list[int]]:
    """Tokens of each expert, by layer, as `glm worker --expert-loads` keeps them. Raises ConfigError."""
    loads = read_layers(path, _is_counts, "tokens of each expert")
    if not loads:
        raise ConfigError(f"{path}: no layers: a worker keeps such a file with --expert-loads")
    return loads


def read_layers(path: Path, suits: Any, expected: str) -> dict[int, Any]:
    """`layers` of a file {"version": 1, "layers": {"3": ...}}; `suits(value)` for each. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(content, dict) or content.get("version") != 1 or not isinstance(content.get("layers"), dict):
        raise ConfigError(f'{path}: expected {{"version": 1, "layers": {{"0": ..., ...}}}}')
    for layer, value in content["layers"].items():
        if not layer.isdecimal() or not suits(value):
            raise ConfigError(f"{path}: layer {layer!r}: expected its number and {expected}")
    return {int(layer): value for layer, value in content["layers"].items()}


def balanced(loads: Mapping[int, Sequence[int]], ep: int) -> ExpertPlacement:
    """Of `loads[layer][expert]` tokens. Raises ConfigError if a layer's experts do not divide into `ep` groups."""
    return ExpertPlacement({layer: _balance(layer, counts, ep) for layer, counts in loads.items()})


def group_loads(counts: Sequence[int], groups: Groups) -> list[int]:
    """Tokens of each group."""
    return [sum(counts[expert] for expert in group) for group in groups]


def even_groups(experts: int, ep: int) -> Groups:
    """In order of id: what there is without a placement."""
    size = experts // ep
    return tuple(tuple(range(size * group, size * (group + 1))) for group in range(ep))


def imbalance(counts: Sequence[int]) -> float:
    """The largest over the mean; 1 if nothing has been counted."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def _balance(layer: int, counts: Sequence[int], ep: int) -> Groups:
    """Experts by falling load, each to the group with the least that has room; ties by the lower number."""
    if len(counts) % ep:
        raise ConfigError(f"layer {layer}: {len(counts)} experts do not divide into {ep} groups")
    groups: list[list[int]] = [[] for _ in range(ep)]
    sums = [0] * ep
    for expert in sorted(range(len(counts)), key=lambda e: -counts[e]):
        group = min((g for g in range(ep) if len(groups[g]) < len(counts) // ep), key=lambda g: sums[g])
        groups[group].append(expert)
        sums[group] += counts[expert]
    return tuple(tuple(sorted(group)) for group in groups)


def _check_groups(layer: int, groups: Groups, experts: int, ep: int) -> None:
    if len(groups) != ep:
        raise _error(f"layer {layer} has {len(groups)} groups, this layout has ep={ep}")
    seen: set[int] = set()
    for group, members in enumerate(groups):
        if len(members) != experts // ep:
            raise _error(f"layer {layer}, group {group} has {len(members)} experts, expected {experts // ep}")
        for expert in members:
            if not 0 <= expert < experts:
                raise _error(f"layer {layer}, group {group}: expert {expert}, the model has 0 to {experts - 1}")
            if expert in seen:
                raise _error(f"layer {layer}: expert {expert} is placed twice")
            seen.add(expert)


def _error(message: str) -> ConfigError:
    return ConfigError(f"expert placement: {message}; make one with `glm plan place --ep N`")


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(count) is int and count >= 0 for count in value)


def _is_groups(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, list) and all(type(e) is int for e in group) for group in value
    )
