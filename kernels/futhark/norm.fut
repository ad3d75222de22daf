-- | RMSNorm of one row (Zhang & Sennrich 2019).

import "codec"
import "lanes"

def inverse_rms (n: i64) (eps: f32) (x: i64 -> f32) : f32 =
  1 / f32.sqrt (sum_of n (\i -> x i * x i) / f32.i64 n + eps)

module mk_norm (A: codec) = {
  def round (x: f32) : f32 = A.load (A.store x)

  -- | weight * act(x / rms), rounded to act.
  def normalized (inverse: f32) (weight: f32) (x: f32) : f32 = round (weight * round (x * inverse))
}
