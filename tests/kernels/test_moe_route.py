"""moe_route against float64; and the routing faults that other engines shipped."""

from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.harness import (
    BF16,
    F32,
    I32,
    Array,
    Buffer,
    Device,
    F64Array,
    assert_bits_equal,
    assert_close,
    output,
    tensor,
)
from tests.kernels.matrices import Format, Weights, random_weights

Dtype = np.dtype[Any]


class Route:
    def __init__(self, weights: Weights, bias: Array | None, top_k: int, groups: int = 1, topk_groups: int = 1) -> None:
        self.weights, self.bias, self.top_k = weights, bias, top_k
        self.groups, self.topk_groups = groups, topk_groups

    def run(
        self, device: Device, x: Array, normalize: bool = True, scale: float = 2.5, places: Array | None = None
    ) -> tuple[Array, Array]:
        rows, experts = x.shape[0], self.weights.data.shape[0]
        bound_x, bound_w = tensor(x), self.weights.bind()
        bias = None if self.bias is None else Buffer(self.bias)
        ids, weights = output(rows, self.top_k, I32, self.top_k + 1), output(rows, self.top_k, F32)
        args = abi.MoeRouteArgs(rows, bound_x.struct, bound_w.struct, self.weights.format, bias and bias.pointer)
        args.experts, args.top_k, args.groups, args.topk_groups = experts, self.top_k, self.groups, self.topk_groups
        args.normalize, args.scale, args.ids, args.weights = int(normalize), scale, ids.struct, weights.struct
        bound_places = None if places is None else Buffer(places)
        args.places = bound_places and bound_places.pointer
        device.run(abi.Op.MOE_ROUTE, args)
        return ids.read(), weights.read()

    def scores(self, x: Array) -> F64Array:
        scores: F64Array = 1.0 / (1.0 + np.exp(-(x.astype(np.float64) @ self.weights.value.T)))
        return scores

    def expected_ids(self, x: Array) -> Array:
        choice = self.scores(x) + (0 if self.bias is None else self.bias.astype(np.float64))
        size = choice.shape[1] // self.groups
        for row in choice if self.groups > 1 else ():
            totals = np.sort(row.reshape(self.groups, size), axis=1)[:, -2:].sum(axis=1)
            dropped = np.argsort(-totals, kind="stable")[self.topk_groups :]
            row.reshape(self.groups, size)[dropped] = -np.inf
        return np.argsort(-choice, axis=1, kind="stable")[:, : self.top_k].astype(np.int32)

    def expected_weights(self, x: Array, ids: Array, normalize: bool, scale: float) -> F64Array:
        weights = np.take_along_axis(self.scores(x), ids, axis=1)
        return weights / (weights.sum(axis=1, keepdims=True) + 1e-20) * scale if normalize else weights * scale


@pytest.mark.parametrize("rows", [0, 1, 2, 17, 65])
@pytest.mark.parametrize(
    "experts,top_k,groups,topk_groups", [(1, 1, 1, 1), (32, 8, 1, 1), (160, 8, 1, 1), (64, 6, 8, 3), (8, 2, 8, 4)]
)
@pytest.mark.parametrize("fmt", [Format.F32, Format.BF16], ids=["w_f32", "w_bf16"])
def test_route_matches_float64(
    device: Device,
    rng: np.random.Generator,
    act: Dtype,
    fmt: Format,
    rows: int,
    experts: int,
    top_k: int,
    groups: int,
    topk_groups: int,
) -> None:
    bias = (rng.standard_normal(experts) * 0.1).astype(np.float32)
    route = Route(random_weights(rng, fmt, experts, 129, gap=4), bias, top_k, groups, topk_groups)
    x = rng.standard_normal((rows, 129)).astype(act)
    ids, weights = route.run(device, x)
    assert ids.tolist() == route.expected_ids(x).tolist()
    assert_close(weights, route.expected_weights(x, ids, True, 2.5), 2e-6)


def zero_route(experts: int, bias: Array | None, top_k: int) -> Route:
    """Every score is exactly 1/2."""
    return Route(Weights(Format.F32, np.zeros((experts, 8), np.float32), None), bias, top_k)


def test_route_breaks_ties_by_the_lower_id(device: Device) -> None:
    ids, weights = zero_route(12, None, 5).run(device, np.ones((3, 8), np.float32), normalize=False, scale=1.0)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert (weights == 0.5).all()


def test_route_gives_scores_without_bias_even_where_the_bias_drowns_them(device: Device) -> None:
    """(s + bias) - bias would cancel to zero, and the normalisation then divides 0 by 0."""
    weights = Weights(Format.F32, np.full((10, 8), -30 / 8, np.float32), None)
    route = Route(weights, np.full(10, 11.3, np.float32), 4)
    x = np.ones((2, 8), np.float32)
    _, got = route.run(device, x)
    assert_close(got, np.full((2, 4), 0.25 * 2.5), 1e-5)


def test_route_keeps_bias_in_full_precision(device: Device) -> None:
    """238 biases that bf16 would fold into a few values still order their experts."""
    bias = (11.3 + np.arange(238) * 2.0**-12).astype(np.float32)[::-1].copy()
    ids, _ = zero_route(238, bias, 8).run(device, np.ones((1, 8), np.float32))
    assert ids.tolist() == [list(range(8))]


def test_route_applies_the_scaling_factor_once(device: Device) -> None:
    for normalize in (True, False):
        _, weights = zero_route(16, None, 8).run(device, np.ones((1, 8), np.float32), normalize, 2.5)
        assert_close(weights, np.full((1, 8), (1 / 8 if normalize else 0.5) * 2.5), 1e-6)


def test_route_writes_places_and_chooses_by_ids(device: Device, rng: np.random.Generator) -> None:
    """Ties and order are those of the ids, whichever places ranks hold the experts at."""
    places = rng.permutation(12).astype(np.int32)
    ids, weights = zero_route(12, None, 5).run(device, np.ones((3, 8), np.float32), places=places)
    assert ids.tolist() == [places[:5].tolist()] * 3
    route = Route(random_weights(rng, Format.F32, 12, 129), None, 5)
    x = rng.standard_normal((17, 129)).astype(np.float32)
    ids, weights = route.run(device, x)
    placed_ids, placed_weights = route.run(device, x, places=places)
    assert_bits_equal(placed_ids, places[ids])
    assert_bits_equal(placed_weights, weights)


def test_route_of_nan_still_names_distinct_experts(device: Device) -> None:
    ids, weights = zero_route(6, None, 3).run(device, np.full((1, 8), np.nan, np.float32))
    assert len(set(ids[0].tolist())) == 3 and set(ids[0].tolist()) <= set(range(6))
    assert np.isnan(weights).all()


@pytest.mark.parametrize("cols", [300, 6000])
def test_route_bits_do_not_depend_on_the_batch(
    device: Device, other_device: Device, rng: np.random.Generator, cols: int
) -> None:
    route = Route(random_weights(rng, Format.F32, 32, cols), None, 8)
    x = rng.standard_normal((70, cols)).astype(BF16)
    ids, weights = route.run(device, x)
    for begin, end in [(0, 1), (69, 70), (3, 8), (20, 33), (10, 70)]:
        part_ids, part_weights = route.run(other_device, x[begin:end])
        assert_bits_equal(part_ids, ids[begin:end])
        assert_bits_equal(part_weights, weights[begin:end])


@pytest.mark.parametrize(
    "rows,experts,cols,groups",
    [
        (64, 160, 5120, 1),
        (130, 24, 1000, 1),
        (300, 160, 5120, 1),
        (300, 160, 6000, 1),
        (600, 176, 2064, 1),
        (1100, 40, 1000, 4),
        (1500, 160, 1040, 1),
        (2200, 160, 3080, 1),
    ],
)
@pytest.mark.parametrize("fmt", [Format.F32, Format.BF16], ids=["w_f32", "w_bf16"])
def test_route_of_many_rows_keeps_the_bits_of_few(
    device: Device, rng: np.random.Generator, fmt: Format, rows: int, experts: int, cols: int, groups: int
) -> None:
    bias = (rng.standard_normal(experts) * 0.1).astype(np.float32)
    route = Route(random_weights(rng, fmt, experts, cols, gap=4), bias, 8, groups, groups)
    x = rng.standard_normal((rows, cols)).astype(BF16)
    ids, weights = route.run(device, x)
    for begin in (0, 31, rows // 2, rows - 32):
        few_ids, few_weights = route.run(device, x[begin : begin + 32])
        assert_bits_equal(few_ids, ids[begin : begin + 32])
        assert_bits_equal(few_weights, weights[begin : begin + 32])
