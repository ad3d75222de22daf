-- Attention over pages.

import "../codec"
import "../paged_attention"

local module attention = mk_paged_attention f32c bf16c

-- Values equal their position, keys are zero: a row at position p has the mean of 0 .. p. Position 17 is on a second page,
-- which lies first; later positions hold NaN.
-- ==
-- entry: means
-- input { [0i32, 1i32, 15i32, 16i32, 17i32] } output { [0f32, 0.5f32, 7.5f32, 8f32, 8.5f32] }
-- input { empty([0]i32) } output { empty([0]f32) }
entry means [t] (positions: [t]i32) : [t]f32 =
  let element (place: i64) = if place < 16 then place + 16 else place - 16
  let v = tabulate 32 (\place -> bf16c.store (if element place > 17 then f32.nan else f32.i64 (element place)))
  let k = tabulate 32 (\place -> if element place > 17 then 0x7fc0u16 else 0)
  let q = replicate t (replicate 2 1f32)
  let out =
    attention.paged_attention positions (replicate t 0) [[1, 0]] q k v 2 1 1 1 (replicate t (replicate 2 0f32))
  in map (\row -> row[0]) out

-- A score far above the others takes all; its query head reads its own KV head.
-- ==
-- entry: best_key
-- input { 1000f32 } output { [[3f32, 7f32]] }
-- input { -1000f32 } output { [[0f32, 4f32]] }
entry best_key (query: f32) : [1][2]f32 =
  let k = tabulate 32 (\place -> bf16c.store (f32.i64 (place % 16)))
  let v = tabulate 32 (\place -> bf16c.store (f32.i64 (if place < 16 then place else place - 12)))
  in attention.paged_attention [3] [0] [[0]] [[query, query]] k v 2 2 1 1 (replicate 1 (replicate 2 0f32))
