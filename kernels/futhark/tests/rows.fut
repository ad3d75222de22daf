-- Row-wise operations: sums in lanes, norms, quantising, SwiGLU, RoPE and the KV store.

import "../codec"
import "../lanes"
import "../qk_norm_rope_store"
import "../quantize"
import "../rms_norm"
import "../silu_mul"

local module quantizer = mk_quantize f32c
local module norms = mk_rms_norm f32c
local module swiglu = mk_silu_mul f32c
local module rope = mk_qk_norm_rope_store f32c f32c

-- Sums of 1 .. n: no block, one block, blocks and a rest.
-- ==
-- entry: sums
-- input { [0i64, 1i64, 15i64, 16i64, 17i64, 33i64, 100i64] } output { [0f32, 1f32, 120f32, 136f32, 153f32, 561f32, 5050f32] }
entry sums [n] (counts: [n]i64) : [n]f32 = map (\n -> sum_of n (\i -> f32.i64 (i + 1))) counts

-- One scale a row; zeros have scale 1; what a row's stride adds is not touched.
-- ==
-- entry: quantize
-- input { [[448f32, -224f32, 9f32], [0f32, -0f32, 9f32]] }
-- output { [[0x7eu8, 0xf6u8, 7u8], [0u8, 0x80u8, 7u8]] [[1f32], [1f32]] }
-- input { empty([0][3]f32) } output { empty([0][3]u8) empty([0][1]f32) }
entry quantize [t] (x: [t][3]f32) : ([t][3]u8, [t][1]f32) =
  quantizer.quantize x 2 2 (replicate t (replicate 3 7u8)) (replicate t [0f32])

-- 130 columns in groups of 128: the last group is short.
-- ==
-- entry: grouped_scales
-- input { } output { [[1f32, 2f32]] }
entry grouped_scales : [1][2]f32 =
  let x = [tabulate 130 (\i -> if i == 0 then -448 else if i == 129 then 896 else 1)]
  let (_, scale) = quantizer.quantize x 130 128 (replicate 1 (replicate 130 0u8)) (replicate 1 (replicate 2 0f32))
  in scale

-- residual += delta; y = weight * residual / rms; no FP8 output.
-- ==
-- entry: norm
-- input { [[1f32, 1f32]] [[2f32, 3f32]] } output { [[3f32, 4f32]] [[0.84852815f32, 2.2627418f32]] }
-- input { [[3f32, 4f32]] empty([0][2]f32) } output { [[3f32, 4f32]] [[0.84852815f32, 2.2627418f32]] }
entry norm [t] [td] (residual: *[t][2]f32) (delta: [td][2]f32) : ([t][2]f32, [t][2]f32) =
  let (residual, out, _, _) =
    norms.rms_norm residual delta [1, 2] 0 2 (replicate t (replicate 2 0f32)) (replicate 0 [0u8]) (replicate 0 [0f32])
  in (residual, out)

-- ==
-- entry: silu_mul
-- input { [[0f32, 100f32, -100f32, 5f32, 2f32, 3f32]] } output { [[0f32, 200f32, -0f32]] }
entry silu_mul [t] (x: [t][6]f32) : [t][3]f32 =
  let (out, _, _) = swiglu.silu_mul x 3 3 (replicate t (replicate 3 0f32)) (replicate 0 [0u8]) (replicate 0 [0f32])
  in out

-- One head of 4, of which the first 2 dimensions rotate by a right angle, at position 17: token 1 of page 3.
-- ==
-- entry: rotate_and_store
-- input { } output { [[-2f32, 1f32, 3f32, 4f32]] [-6f32, 5f32, 7f32, 8f32] [9f32, 10f32, 11f32, 12f32] 8i64 }
entry rotate_and_store : ([1][4]f32, [4]f32, [4]f32, i64) =
  let page = 16 * 4
  let pages = replicate (4 * page) 0f32
  let qkv = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12f32]]
  let (k, v, out) =
    rope.qk_norm_rope_store [17] [1] [[0, 0], [2, 3]] qkv [] [] 0 (replicate 18 [0f32]) (replicate 18 [1f32]) 1 1 4 pages
                            (copy pages) (replicate 1 (replicate 4 0f32))
  let written = i64.sum (map (\x -> i64.bool (x != 0)) (k ++ v))
  in (out, k[3 * page + 4:3 * page + 8] :> [4]f32, v[3 * page + 4:3 * page + 8] :> [4]f32, written)
