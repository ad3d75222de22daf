-- Operations by themselves, at shapes of the embedded model. `python -m tests.bench.futhark_ops` has `futhark bench` time
-- them, and the table in C++ beside it.

import "../codec"
import "../linear"
import "../rms_norm"

local module by_channel = mk_linear_fp8_channel bf16c
local module vocabulary = mk_linear bf16c bf16c f32c
local module norm = mk_rms_norm bf16c

local def hash (a: i64) (b: i64) : i64 = (a * 7919 + b * 104729 + a * b) % 65521

-- | No subnormal numbers, which take the CPU longer.
local def code (a: i64) (b: i64) : u8 = u8.i64 (16 + hash a b % 80) | u8.i64 (hash b a % 2) << 7

local def number (a: i64) (b: i64) : u16 = bf16c.store (f32.i64 (hash a b) / 32768 - 1)

entry fp8_input (rows: i64) : ([rows][576]u8, [rows][1]f32, [1536][576]u8, [1536]f32) =
  (tabulate_2d rows 576 code, replicate rows [0.01f32], tabulate_2d 1536 576 code, replicate 1536 0.01f32)

entry bf16_input (rows: i64) : ([rows][576]u16, [49152][576]u16) =
  (tabulate_2d rows 576 number, tabulate_2d 49152 576 number)

entry norm_input (rows: i64) : ([rows][576]u16, [rows][576]u16, [576]f32) =
  (tabulate_2d rows 576 number, tabulate_2d rows 576 number, replicate 576 1f32)

-- ==
-- entry: linear_fp8_channel
-- "1" script input { fp8_input 1i64 }
-- "16" script input { fp8_input 16i64 }
-- "128" script input { fp8_input 128i64 }
entry linear_fp8_channel [t] [d] [n] (x: [t][d]u8) (x_scale: [t][1]f32) (w: [n][d]u8) (w_scale: [n]f32) : [t][n]u16 =
  by_channel.linear_fp8_channel x x_scale w w_scale d [] (replicate t (replicate n 0u16))

-- ==
-- entry: linear_bf16
-- "1" script input { bf16_input 1i64 }
-- "16" script input { bf16_input 16i64 }
entry linear_bf16 [t] [d] [n] (x: [t][d]u16) (w: [n][d]u16) : [t][n]f32 =
  vocabulary.linear x w d [] (replicate t (replicate n 0f32))

-- ==
-- entry: rms_norm
-- "16" script input { norm_input 16i64 }
-- "128" script input { norm_input 128i64 }
entry rms_norm [t] [d] (residual: [t][d]u16) (delta: [t][d]u16) (weight: [d]f32) : ([t][d]u16, [t][d]u8) =
  let (residual, _, codes, _) =
    let (none, codes) = (replicate 0 (replicate d 0u16), replicate t (replicate d 0u8))
    in norm.rms_norm (copy residual) delta weight 1e-5 d none codes (replicate t [0f32])
  in (residual, codes)
