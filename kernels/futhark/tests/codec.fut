-- The number formats: every code, ties, saturation, NaN.

import "../codec"
import "../half"
module fp8 = import "../fp8"

-- | E4M3 by its definition.
local def exact (code: u8) : f32 =
  let (exponent, mantissa) = (i32.u8 ((code >> 3) & 15), f32.u8 (code & 7))
  let magnitude =
    if exponent == 0 then mantissa / 512 else (8 + mantissa) * (2 ** f32.i32 (exponent - 10))
  in if code >= 128 then -magnitude else magnitude

local def same (a: f32) (b: f32) = f32.to_bits a == f32.to_bits b || (f32.isnan a && f32.isnan b)

-- Codes whose value is not the definition's, or that do not survive decode and encode; weights' codes likewise.
-- ==
-- entry: wrong_fp8_codes
-- input { } output { 0i64 }
entry wrong_fp8_codes : i64 =
  let is_wrong (code: u8) =
    let is_nan = (code & 0x7f) == 0x7f
    let value = if is_nan then f32.nan else exact code
    let product = fp8.decode_weight code * fp8.activation 0x38 * fp8.sum_factor
    in !(same (fp8.decode code) value) || fp8.encode (fp8.decode code) != code
       || (!is_nan && fp8.decode_weight code != 0 && product != value)
  in reduce (+) 0 (map (\code -> i64.bool (is_wrong (u8.i64 code))) (iota 256))

-- | Halves between neighbours go to the even code, and what is just beside them to the nearer one.
-- ==
-- entry: wrong_fp8_ties
-- input { } output { 0i64 }
entry wrong_fp8_ties : i64 =
  let is_wrong (i: i64) =
    let (low, high) = (u8.i64 i, u8.i64 i + 1)
    let tie = (fp8.decode low + fp8.decode high) / 2
    let even = if low % 2 == 0 then low else high
    in fp8.encode tie != even
       || fp8.encode (f32.nextafter tie 0) != low
       || fp8.encode (f32.nextafter tie 1000) != high
       || fp8.encode (-tie) != even | 0x80
  in reduce (+) 0 (map (\i -> i64.bool (is_wrong i)) (iota 126))

-- ==
-- entry: fp8_encode
-- input { [448f32, 463.99997f32, 464f32, 1e30f32, f32.inf, -f32.inf, 0f32, -0f32, 1e-45f32, -0.0009765625f32] }
-- output { [0x7eu8, 0x7eu8, 0x7eu8, 0x7eu8, 0x7eu8, 0xfeu8, 0u8, 0x80u8, 0u8, 0x80u8] }
entry fp8_encode [n] (x: [n]f32) : [n]u8 = map fp8.encode x

-- ==
-- entry: bf16_encode_all
-- input { [1f32, 1.00390625f32, 1.01171875f32, f32.inf, 3.4e38f32, -0f32] }
-- output { [0x3f80u16, 0x3f80u16, 0x3f82u16, 0x7f80u16, 0x7f80u16, 0x8000u16] }
-- input { empty([0]f32) } output { empty([0]u16) }
entry bf16_encode_all [n] (x: [n]f32) : [n]u16 = map bf16_encode x

-- | 16-bit codes that do not survive decode and encode; NaN may become another one.
-- ==
-- entry: wrong_halves
-- input { } output { 0i64 }
entry wrong_halves : i64 =
  let is_wrong (i: i64) =
    let code = u16.i64 i
    let bf16_survives = f32.isnan (bf16c.load code) || bf16c.store (bf16c.load code) == code
    let f16_survives = f32.isnan (f16c.load code) || f16c.store (f16c.load code) == code
    in !(bf16_survives && f16_survives && same (f16c.load code) (f32.f16 (f16.from_bits code)))
  in reduce (+) 0 (map (\i -> i64.bool (is_wrong i)) (iota 65536))

-- | NaN stays NaN.
-- ==
-- entry: nans
-- input { } output { true }
entry nans : bool =
  let x = f32.from_bits 0x7f800001
  in f32.isnan (bf16c.load (bf16c.store x)) && f32.isnan (f16c.load (f16c.store x)) && f32.isnan (fp8c.load (fp8c.store x))
