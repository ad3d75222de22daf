-- | FP8 E4M3 ("fn": bias 7, no infinity, 0x7f and 0xff are NaN, largest finite value 448), exact both ways.

-- | The value of a code. No denormal f32 arises, so it is exact on devices that flush them.
def decode (code: u8) : f32 =
  let magnitude = u32.u8 (code & 0x7f)
  let normal = f32.from_bits ((magnitude << 20) + (120 << 23))
  let denormal = f32.u32 magnitude * 0.001953125f32
  let finite = if magnitude < 8 then denormal else normal
  let value = if magnitude == 0x7f then f32.nan else finite
  in f32.from_bits ((f32.to_bits value & 0x7fffffff) | (u32.u8 (code & 0x80) << 24))

-- | The value of a weight's code times 2^-120, in two shifts: its fields lie where an f32 has them, 4 exponent bits of
-- bias 7 in 8 of bias 127. The NaN codes, which weights do not have, read as +-480.
def decode_weight (code: u8) : f32 =
  f32.from_bits ((u32.u8 (code & 0x80) << 24) | (u32.u8 (code & 0x7f) << 20))

-- | The value of an activation's code times 2^110: no product with a weight from `decode_weight` is denormal.
def activation (code: u8) : f32 = decode code * 1.298074214633706907132624082305024e33f32

-- | What a sum of products of the two lacks.
def sum_factor : f32 = 1024

-- | Nearest even; beyond 448 (and infinity) saturates; NaN keeps its sign.
def encode (x: f32) : u8 =
  let bits = f32.to_bits x
  let magnitude = bits & 0x7fffffff
  -- 2^14 has an ulp of 2^-9, the spacing of FP8 denormals: the addition itself rounds, and carries into the first normal.
  let low = f32.to_bits (f32.from_bits magnitude + 16384) - 0x46800000
  let rounded = (magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20
  let normal = if magnitude < 0x3c800000 then low else rounded - (120 << 3)
  let finite = if magnitude >= 0x43e80000 then 0x7e else normal
  let code = if magnitude > 0x7f800000 then 0x7f else finite
  in u8.u32 (code | ((bits >> 24) & 0x80))
