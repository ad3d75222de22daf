-- | The 16-bit floats, by their bits: no type that a device may lack.

def bf16_decode (x: u16) : f32 = f32.from_bits (u32.u16 x << 16)

-- | Nearest even; NaN stays NaN.
def bf16_encode (x: f32) : u16 =
  let bits = f32.to_bits x
  let rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16
  let nan = (bits >> 16) | 0x40
  in u16.u32 (if (bits & 0x7fffffff) > 0x7f800000 then nan else rounded)

def f16_decode (x: u16) : f32 =
  let magnitude = u32.u16 (x & 0x7fff)
  let normal = (magnitude << 13) + (112 << 23)
  let denormal = f32.to_bits (f32.u32 magnitude * 5.9604644775390625e-8f32)
  let special = (magnitude << 13) | 0x7f800000
  let finite = if magnitude < 0x400 then denormal else normal
  let value = if magnitude >= 0x7c00 then special else finite
  in f32.from_bits (value | (u32.u16 (x & 0x8000) << 16))

-- | Nearest even; beyond 65504 becomes infinity; NaN stays NaN.
def f16_encode (x: f32) : u16 =
  let bits = f32.to_bits x
  let magnitude = bits & 0x7fffffff
  -- 1/2 has an ulp of 2^-24, the spacing of f16 denormals: the addition itself rounds.
  let denormal = f32.to_bits (f32.from_bits magnitude + 0.5) - 0x3f000000
  let rounded = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112 << 10)
  let finite = if magnitude < 0x38800000 then denormal else rounded
  let bounded = if magnitude >= 0x477ff000 then 0x7c00 else finite
  let value = if magnitude > 0x7f800000 then 0x7e00 else bounded
  in u16.u32 (value | ((bits >> 16) & 0x8000))
