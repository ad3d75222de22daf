-- Products: linear in every format, the router, packing, and the experts.

import "../codec"
import "../linear"
import "../moe_down"
import "../moe_gate_up"
import "../moe_group"
import "../moe_route"

local module plain = mk_linear f32c bf16c f32c
local module by_channel = mk_linear_fp8_channel f32c
local module by_block = mk_linear_fp8_block f32c
local module router = mk_moe_route f32c f32c
local module gate_up = mk_moe_gate_up f32c f32c
local module down = mk_moe_down f32c f32c

local def zeros (t: i64) (n: i64) : *[t][n]f32 = replicate t (replicate n 0f32)

-- Row r is r + 1 everywhere, the weights of channel c are c: 19 columns, more than the lanes; any number of rows.
-- ==
-- entry: linear
-- input { 1i64 } output { [[10f32, 29f32, 48f32]] }
-- input { 0i64 } output { empty([0][3]f32) }
-- input { 5i64 } output { [[10f32, 29f32, 48f32], [10f32, 48f32, 86f32], [10f32, 67f32, 124f32], [10f32, 86f32, 162f32], [10f32, 105f32, 200f32]] }
entry linear (t: i64) : [t][3]f32 =
  let x = tabulate_2d t 20 (\r c -> if c == 19 then f32.nan else f32.i64 (r + 1))
  let w = tabulate_2d 3 19 (\c _ -> bf16c.store (f32.i64 c))
  in plain.linear x w 19 [10, 10, 10] (zeros t 3)

-- A row's bits are its own, whether its channel was expanded first or not.
-- ==
-- entry: rows_differ
-- input { } output { false }
entry rows_differ : bool =
  let element (r: i64) (c: i64) = u8.i64 ((r * 37 + c * 11) % 126)
  let x = tabulate_2d 9 300 element
  let scale = replicate 9 [0.01f32]
  let w = tabulate_2d 5 300 (\n c -> element (n + 3) c | u8.i64 (c % 2) << 7)
  let product [t] (x: [t][300]u8) (s: [t][1]f32) =
    by_channel.linear_fp8_channel x s w (replicate 5 0.3) 300 [] (zeros t 5)
  let together = product x scale
  let alone = tabulate 9 (\r -> (product x[r:r + 1] scale[r:r + 1])[0])
  in or (map2 (\a b -> or (map2 (!=) a b)) together alone)

-- 0x38 is 1 and 0x40 is 2: 130 columns in blocks of 128 and 2, each with its scale.
-- ==
-- entry: linear_fp8_block
-- input { } output { [[1292f32]] }
entry linear_fp8_block : [1][1]f32 =
  by_block.linear_fp8_block [replicate 130 0x38u8] [[5, 3f32]] [replicate 130 0x40u8] [[1, 2f32]] 130 [] (zeros 1 1)
  |> map (map (\x -> x - 12))

-- Ties go to the lower id, order of choice; NaN is chosen last.
-- ==
-- entry: route
-- input { [0f32, 0f32, 0f32, 0f32] 1i64 1i64 } output { [0i32, 1i32] [0.5f32, 0.5f32] }
-- input { [0f32, 0f32, 1f32, 0f32] 1i64 1i64 } output { [2i32, 0i32] [0.5f32, 0.5f32] }
-- input { [f32.nan, f32.nan, f32.nan, 0f32] 1i64 1i64 } output { [3i32, 0i32] [0.5f32, 0.5f32] }
-- input { [0.9f32, 0f32, 0.5f32, 0.5f32] 2i64 1i64 } output { [2i32, 3i32] [0.5f32, 0.5f32] }
entry route (bias: [4]f32) (groups: i64) (topk_groups: i64) : ([2]i32, [2]f32) =
  let w = replicate 4 [0f32]
  let (ids, weights) =
    router.moe_route [[1]] w 1 bias [] 2 groups topk_groups true 1 (replicate 1 (replicate 2 0)) (zeros 1 2)
  in (ids[0], weights[0])

-- Assignments of experts 1 and 2 of rows [2, 1], [1, 0], [2, 3]; row 1 is of the spare slot.
-- ==
-- entry: group
-- input { [[2i32, 1i32], [1i32, 0i32], [2i32, 3i32]] } output { [0i32, 2i32, 4i32] [1i32, 2i32, 0i32, 4i32, -1i32, -1i32] [11u64, 12u64] }
-- input { [[0i32, 0i32], [0i32, 0i32], [3i32, 0i32]] } output { [0i32, 0i32, 0i32] [-1i32, -1i32, -1i32, -1i32, -1i32, -1i32] [10u64, 10u64] }
entry group (ids: [3][2]i32) : ([3]i32, [6]i32, [2]u64) =
  moe_group ids 2 1 [4, 9, 4] 9 (replicate 3 7) (replicate 6 (-1)) [10, 10]

-- 300 assignments, more than a chunk, of 3 experts in turn: places that are not in order.
-- ==
-- entry: misplaced
-- input { } output { 0i64 }
entry misplaced : i64 =
  let ids = tabulate_2d 300 1 (\r _ -> i32.i64 (r % 3))
  let (_, order, _) = moe_group ids 1 0 [] (-1) (replicate 4 0) (replicate 300 0) []
  in i64.sum (tabulate 300 (\i -> i64.bool (i64.i32 order[i] != i / 100 + i % 100 * 3)))

-- Two experts with 1 x 1 matrices 2 and 3 for gate and up: y = silu(w x) * (w x); the unlisted row stays.
-- ==
-- entry: expert_rows
-- input { } output { [[196f32], [441f32], [-1f32], [900f32]] }
entry expert_rows : [4][1]f32 =
  let w = [0, 2, 3f32]
  let order = [0, 1, 3, 0i32]
  let (out, _, _) =
    gate_up.moe_gate_up [[7], [10f32]] order [0, 1, 3] w [1, 2] 1 w [1, 2] 1 1 1 2 1 (replicate 4 [-1f32]) (replicate 0 [0u8])
                        (replicate 0 [0f32])
  in out

-- base + sum of weights * products; expert 5 is elsewhere.
-- ==
-- entry: combined
-- input { [[100f32]] } output { [[116f32]] }
-- input { empty([0][1]f32) } output { [[16f32]] }
entry combined [tb] (base: [tb][1]f32) : [1][1]f32 =
  down.moe_down [[7], [f32.nan], [4f32]] [2, 0, 0] [0, 1, 2] [2, 3f32] [0, 1] 1 1 1 3 0 [[1, 5, 0]] [[0.38095236f32, 9, 1]] base
                (zeros 1 1)
