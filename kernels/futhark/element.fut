-- | How elements in memory become f32 and back.

import "fp8"
import "half"

module type element = {
  type t
  val load : t -> f32
  -- | Nearest even.
  val store : f32 -> t
}

module f32_element : element with t = f32 = {
  type t = f32
  def load (x: f32) = x
  def store (x: f32) = x
}

module bf16_element : element with t = u16 = {
  type t = u16
  def load = bf16_decode
  def store = bf16_encode
}

module f16_element : element with t = u16 = {
  type t = u16
  def load = f16_decode
  def store = f16_encode
}

-- | Saturates at 448.
module fp8_element : element with t = u8 = {
  type t = u8
  def load = decode
  def store = encode
}
