import "codec"
import "dynamic_fp8"
import "float_math"

module mk_swiglu (A: codec) = {
  local def round (x: f32) : f32 = A.load (A.store x)

  -- | act(act(silu(gate)) * up): Shazeer 2020.
  def swiglu (gate: f32) (up: f32) : A.t = A.store (round (silu gate) * up)
}

module mk_silu_mul (A: codec) = {
  local module S = mk_swiglu A

  def silu_mul [t] [sx] [to] [so] [tq] [sq] [ss]
               (x: [t][sx]A.t)
               (cols: i64)
               (group: i64)
               (out: *[to][so]A.t)
               (q: *[tq][sq]u8)
               (scale: *[tq][ss]f32) : (*[to][so]A.t, *[tq][sq]u8, *[tq][ss]f32) =
    #[unsafe]
    let y =
      tabulate t (\r ->
                    tabulate cols (\c -> S.swiglu (A.load x[r, c]) (A.load x[r, cols + c])))
    let groups = num_groups cols group
    let (codes, scales) = quantized tq cols groups group (\r c -> A.load y[r, c])
    in (out with [:, 0:cols] = y[0:to], q with [:, 0:cols] = codes, scale with [:, 0:groups] = scales)
}
