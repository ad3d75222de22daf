import "codec"
import "dynamic_fp8"
import "norm"

module mk_rms_norm (A: codec) = {
  local module N = mk_norm A

  -- | residual += delta, then its norm to `out` and, quantised, to `q`. Absent tensors have no rows.
  def rms_norm [t] [sr] [td] [sd] [d] [to] [so] [tq] [sq] [ss]
               (residual: *[t][sr]A.t)
               (delta: [td][sd]A.t)
               (weight: [d]f32)
               (eps: f32)
               (group: i64)
               (out: *[to][so]A.t)
               (q: *[tq][sq]u8)
               (scale: *[tq][ss]f32) : (*[t][sr]A.t, *[to][so]A.t, *[tq][sq]u8, *[tq][ss]f32) =
    #[unsafe]
    let added =
      tabulate td (\r ->
                     tabulate d (\c -> A.store (A.load residual[r, c] + A.load delta[r, c])))
    let residual = residual with [0:td, 0:d] = added
    let y =
      tabulate t (\r ->
                    let x (c: i64) = A.load residual[r, c]
                    let inverse = inverse_rms d eps x
                    in tabulate d (\c -> A.store (N.normalized inverse weight[c] (x c))))
    let groups = num_groups d group
    let (codes, scales) = quantized tq d groups group (\r c -> A.load y[r, c])
    in ( residual
       , out with [:, 0:d] = y[0:to]
       , q with [:, 0:d] = codes
       , scale with [:, 0:groups] = scales
       )
}
