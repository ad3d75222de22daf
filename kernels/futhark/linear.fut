-- | out[t][n] = sum over k of x[t][k] * w[n][k] (+ bias[n]).

import "codec"
import "matmul"

local module mk_outputs (O: codec) = {
  -- | Stores the products of t rows with n channels; no bias has no elements.
  def store [t] [n] [so] [nb] (value: [n][t]f32) (bias: [nb]f32) (out: *[t][so]O.t) : *[t][so]O.t =
    #[unsafe]
    let added (c: i64) (x: f32) = if nb == 0 then x else x + bias[c]
    let rows = tabulate t (\r -> tabulate n (\c -> O.store (added c value[c, r])))
    in out with [:, 0:n] = rows
}

module mk_linear (X: codec) (W: codec) (O: codec) = {
  local module outputs = mk_outputs O

  def linear [t] [sx] [n] [sw] [nb] [so]
             (x: [t][sx]X.t)
             (w: [n][sw]W.t)
             (cols: i64)
             (bias: [nb]f32)
             (out: *[t][so]O.t) : *[t][so]O.t =
    #[unsafe]
    let floats = tabulate t (\r -> tabulate cols (\c -> X.load x[r, c]))
    in outputs.store (W.products floats w) bias out
}

module mk_linear_fp8_channel (O: codec) = {
  local module outputs = mk_outputs O

  def linear_fp8_channel [t] [sx] [ss] [n] [sw] [nb] [so]
                         (x: [t][sx]u8)
                         (x_scale: [t][ss]f32)
                         (w: [n][sw]u8)
                         (w_scale: [n]f32)
                         (cols: i64)
                         (bias: [nb]f32)
                         (out: *[t][so]O.t) : *[t][so]O.t =
    outputs.store (products_fp8_channel (activations cols x) x_scale w w_scale) bias out
}

module mk_linear_fp8_block (O: codec) = {
  local module outputs = mk_outputs O

  def linear_fp8_block [t] [sx] [ss] [n] [sw] [bn] [sws] [nb] [so]
                       (x: [t][sx]u8)
                       (x_scale: [t][ss]f32)
                       (w: [n][sw]u8)
                       (w_scale: [bn][sws]f32)
                       (cols: i64)
                       (bias: [nb]f32)
                       (out: *[t][so]O.t) : *[t][so]O.t =
    outputs.store (products_fp8_block (activations cols x) x_scale w w_scale) bias out
}
