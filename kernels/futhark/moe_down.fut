-- | Down projections of the listed assignments, combined per row in order of choice.

import "codec"
import "expert_products"
import "fp8"
import "listed"
import "matmul"

local module mk_down (A: codec) = {
  local def round (x: f32) : f32 = A.load (A.store x)

  -- | out[t] = base[t] + sum over j ascending of weights[t][j] * act(product of assignment t * top_k + j), rounded once.
  def combine [m] [rows] [n] [t] [si] [sg] [tb] [sb] [so]
              (order: [n]i32)
              (experts: i64)
              (top_k: i64)
              (first: i64)
              (ids: [t][si]i32)
              (weights: [t][sg]f32)
              (base: [tb][sb]A.t)
              (products: [m][rows]f32)
              (out: *[t][so]A.t) : *[t][so]A.t =
    #[unsafe]
    let place_of = scatter (replicate (t * top_k) 0) (map i64.i32 order[0:m]) (iota m)
    let is_local (r: i64) (j: i64) =
      let e = i64.i32 ids[r, j] - first
      in e >= 0 && e < experts
    let combined (r: i64) (c: i64) =
      loop sum = if tb == 0 then 0 else A.load base[r, c]
      for j < top_k do
        if is_local r j
        then sum + weights[r, j] * round products[place_of[r * top_k + j], c]
        else sum
    let result = tabulate t (\r -> tabulate rows (\c -> A.store (combined r c)))
    in out with [:, 0:rows] = result
}

module mk_moe_down (A: codec) (W: codec) = {
  local module D = mk_down A

  def moe_down [n] [sx] [c1] [wd] [count] [t] [si] [sg] [tb] [sb] [so]
               (x: [n][sx]A.t)
               (order: [n]i32)
               (offsets: [c1]i32)
               (down: [wd]W.t)
               (down_at: [count]i64)
               (down_stride: i64)
               (rows: i64)
               (cols: i64)
               (top_k: i64)
               (first: i64)
               (ids: [t][si]i32)
               (weights: [t][sg]f32)
               (base: [tb][sb]A.t)
               (out: *[t][so]A.t) : *[t][so]A.t =
    #[unsafe]
    let rows_of = sources 1 order offsets
    let floats = map (\a -> tabulate cols (\c -> A.load x[a, c])) rows_of
    in D.combine order (c1 - 1) top_k first ids weights base
                 (W.expert_products floats (indices rows_of) offsets down down_at down_stride rows)
                 out
}

module mk_moe_down_fp8_channel (A: codec) = {
  local module D = mk_down A

  def moe_down_fp8_channel [n] [sx] [ss] [c1] [wd] [ds] [count] [t] [si] [sg] [tb] [sb] [so]
                           (x: [n][sx]u8)
                           (x_scale: [n][ss]f32)
                           (order: [n]i32)
                           (offsets: [c1]i32)
                           (down: [wd]u8)
                           (down_at: [count]i64)
                           (down_stride: i64)
                           (down_scale: [ds]f32)
                           (down_scale_at: [count]i64)
                           (rows: i64)
                           (cols: i64)
                           (top_k: i64)
                           (first: i64)
                           (ids: [t][si]i32)
                           (weights: [t][sg]f32)
                           (base: [tb][sb]A.t)
                           (out: *[t][so]A.t) : *[t][so]A.t =
    #[unsafe]
    let rows_of = sources 1 order offsets
    let floats = map (\a -> tabulate cols (\c -> activation x[a, c])) rows_of
    let scales = map (\a -> x_scale[a, 0:1]) rows_of
    in D.combine order (c1 - 1) top_k first ids weights base
                 (expert_products_fp8_channel floats (indices rows_of) scales offsets down down_at down_stride
                                              down_scale down_scale_at rows)
                 out
}

module mk_moe_down_fp8_block (A: codec) = {
  local module D = mk_down A

  def moe_down_fp8_block [n] [sx] [ss] [c1] [wd] [ds] [count] [t] [si] [sg] [tb] [sb] [so]
                         (x: [n][sx]u8)
                         (x_scale: [n][ss]f32)
                         (order: [n]i32)
                         (offsets: [c1]i32)
                         (down: [wd]u8)
                         (down_at: [count]i64)
                         (down_stride: i64)
                         (down_scale: [ds]f32)
                         (down_scale_at: [count]i64)
                         (down_scale_stride: i64)
                         (rows: i64)
                         (cols: i64)
                         (top_k: i64)
                         (first: i64)
                         (ids: [t][si]i32)
                         (weights: [t][sg]f32)
                         (base: [tb][sb]A.t)
                         (out: *[t][so]A.t) : *[t][so]A.t =
    #[unsafe]
    let rows_of = sources 1 order offsets
    let floats = map (\a -> tabulate cols (\c -> activation x[a, c])) rows_of
    let blocks = (cols + scale_block - 1) / scale_block
    let scales = map (\a -> x_scale[a, 0:blocks]) rows_of
    in D.combine order (c1 - 1) top_k first ids weights base
                 (expert_products_fp8_block floats (indices rows_of) scales offsets down down_at down_stride
                                            down_scale down_scale_at down_scale_stride rows)
                 out
}
