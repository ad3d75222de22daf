-- | Gate and up projections of the listed assignments, and SwiGLU.

import "codec"
import "dynamic_fp8"
import "expert_products"
import "listed"
import "matmul"
import "silu_mul"

local module mk_gate_up (A: codec) = {
  local module S = mk_swiglu A

  local def round (x: f32) : f32 = A.load (A.store x)

  -- | y of every listed assignment from its products, to `out` and, quantised, to `q`.
  def gate_up [m] [rows] [n] [to] [so] [tq] [sq] [ss]
              (order: [n]i32)
              (group: i64)
              (gate: [m][rows]f32)
              (up: [m][rows]f32)
              (out: *[to][so]A.t)
              (q: *[tq][sq]u8)
              (scale: *[tq][ss]f32) : (*[to][so]A.t, *[tq][sq]u8, *[tq][ss]f32) =
    #[unsafe]
    let y =
      tabulate m (\i ->
                    tabulate rows (\c -> S.swiglu (round gate[i, c]) (round up[i, c])))
    let groups = num_groups rows group
    let quantised = if tq == 0 then 0 else m
    let (codes, scales) = quantized quantised rows groups group (\i c -> A.load y[i, c])
    in (store_listed order y out, store_listed order codes q, store_listed order scales scale)
}

module mk_moe_gate_up (A: codec) (W: codec) = {
  local module G = mk_gate_up A

  def moe_gate_up [t] [sx] [n] [c1] [wg] [wu] [count] [to] [so] [tq] [sq] [ss]
                  (x: [t][sx]A.t)
                  (order: [n]i32)
                  (offsets: [c1]i32)
                  (gate: [wg]W.t)
                  (gate_at: [count]i64)
                  (gate_stride: i64)
                  (up: [wu]W.t)
                  (up_at: [count]i64)
                  (up_stride: i64)
                  (rows: i64)
                  (cols: i64)
                  (top_k: i64)
                  (group: i64)
                  (out: *[to][so]A.t)
                  (q: *[tq][sq]u8)
                  (scale: *[tq][ss]f32) : (*[to][so]A.t, *[tq][sq]u8, *[tq][ss]f32) =
    #[unsafe]
    let floats = tabulate t (\r -> tabulate cols (\c -> A.load x[r, c]))
    let source = sources top_k order offsets
    in G.gate_up order group
                 (W.expert_products floats source offsets gate gate_at gate_stride rows)
                 (W.expert_products floats source offsets up up_at up_stride rows)
                 out q scale
}

module mk_moe_gate_up_fp8_channel (A: codec) = {
  local module G = mk_gate_up A

  def moe_gate_up_fp8_channel [t] [sx] [s1] [n] [c1] [wg] [gs] [wu] [us] [count] [to] [so] [tq] [sq] [ss]
                              (x: [t][sx]u8)
                              (x_scale: [t][s1]f32)
                              (order: [n]i32)
                              (offsets: [c1]i32)
                              (gate: [wg]u8)
                              (gate_at: [count]i64)
                              (gate_stride: i64)
                              (gate_scale: [gs]f32)
                              (gate_scale_at: [count]i64)
                              (up: [wu]u8)
                              (up_at: [count]i64)
                              (up_stride: i64)
                              (up_scale: [us]f32)
                              (up_scale_at: [count]i64)
                              (rows: i64)
                              (cols: i64)
                              (top_k: i64)
                              (group: i64)
                              (out: *[to][so]A.t)
                              (q: *[tq][sq]u8)
                              (scale: *[tq][ss]f32) : (*[to][so]A.t, *[tq][sq]u8, *[tq][ss]f32) =
    #[unsafe]
    let floats = activations cols x
    let source = sources top_k order offsets
    let scales = map (\r -> x_scale[r, 0:1]) source
    in G.gate_up order group
                 (expert_products_fp8_channel floats source scales offsets gate gate_at gate_stride gate_scale
                                              gate_scale_at rows)
                 (expert_products_fp8_channel floats source scales offsets up up_at up_stride up_scale up_scale_at
                                              rows)
                 out q scale
}

module mk_moe_gate_up_fp8_block (A: codec) = {
  local module G = mk_gate_up A

  def moe_gate_up_fp8_block [t] [sx] [s1] [n] [c1] [wg] [gs] [wu] [us] [count] [to] [so] [tq] [sq] [ss]
                            (x: [t][sx]u8)
                            (x_scale: [t][s1]f32)
                            (order: [n]i32)
                            (offsets: [c1]i32)
                            (gate: [wg]u8)
                            (gate_at: [count]i64)
                            (gate_stride: i64)
                            (gate_scale: [gs]f32)
                            (gate_scale_at: [count]i64)
                            (gate_scale_stride: i64)
                            (up: [wu]u8)
                            (up_at: [count]i64)
                            (up_stride: i64)
                            (up_scale: [us]f32)
                            (up_scale_at: [count]i64)
                            (up_scale_stride: i64)
                            (rows: i64)
                            (cols: i64)
                            (top_k: i64)
                            (group: i64)
                            (out: *[to][so]A.t)
                            (q: *[tq][sq]u8)
                            (scale: *[tq][ss]f32) : (*[to][so]A.t, *[tq][sq]u8, *[tq][ss]f32) =
    #[unsafe]
    let floats = activations cols x
    let source = sources top_k order offsets
    let blocks = (cols + scale_block - 1) / scale_block
    let scales = map (\r -> x_scale[r, 0:blocks]) source
    in G.gate_up order group
                 (expert_products_fp8_block floats source scales offsets gate gate_at gate_stride gate_scale
                                            gate_scale_at gate_scale_stride rows)
                 (expert_products_fp8_block floats source scales offsets up up_at up_stride up_scale up_scale_at
                                            up_scale_stride rows)
                 out q scale
}
