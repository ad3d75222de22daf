-- | exp, log and silu in f32 without branches. Polynomials: Moshier, Cephes expf and logf (about 2 ulp).

-- | 0 below -87 (results would be denormal); x is held to 88, where exp is 1.7e38; NaN stays NaN.
def exp_f32 (x: f32) : f32 =
  let held = if x > 88 then 88 else x
  -- Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
  let shifted = held * 1.44269504088896341f32 + 12582912f32
  let n = shifted - 12582912f32
  let r = (held - n * 0.693359375f32) + n * 2.12194440e-4f32
  let p = 1.9875691500e-4f32
  let p = p * r + 1.3981999507e-3f32
  let p = p * r + 8.3334519073e-3f32
  let p = p * r + 4.1665795894e-2f32
  let p = p * r + 1.6666665459e-1f32
  let p = p * r + 5.0000001201e-1f32
  let p = (p * r) * r + r + 1
  let exponent = (f32.to_bits shifted - 0x4b400000 + 127) << 23
  let value = p * f32.from_bits exponent
  in if x < -87 then 0 else value

-- | x must be normal and positive.
def log_f32 (x: f32) : f32 =
  let bits = f32.to_bits x
  -- Mantissa in [sqrt(1/2), sqrt(2)): small results keep their relative precision.
  let exponent = i32.u32 (bits - 0x3f3504f3) >> 23
  let mantissa = f32.from_bits (bits - (u32.i32 exponent << 23))
  let n = f32.i32 exponent
  let f = mantissa - 1
  let square = f * f
  let p = 7.0376836292e-2f32
  let p = p * f - 1.1514610310e-1f32
  let p = p * f + 1.1676998740e-1f32
  let p = p * f - 1.2420140846e-1f32
  let p = p * f + 1.4249322787e-1f32
  let p = p * f - 1.6668057665e-1f32
  let p = p * f + 2.0000714765e-1f32
  let p = p * f - 2.4999993993e-1f32
  let p = p * f + 3.3333331174e-1f32
  let tail = (p * f) * square - n * 2.12194440e-4f32
  in ((tail - 0.5f32 * square) + f) + n * 0.693359375f32

def silu (x: f32) : f32 = x / (1 + exp_f32 (-x))
