import "codec"
import "dynamic_fp8"

module mk_quantize (A: codec) = {
  def quantize [t] [sx] [sq] [ss]
               (x: [t][sx]A.t)
               (cols: i64)
               (group: i64)
               (q: *[t][sq]u8)
               (scale: *[t][ss]f32) : (*[t][sq]u8, *[t][ss]f32) =
    #[unsafe]
    let groups = num_groups cols group
    let (codes, scales) = quantized t cols groups group (\r c -> A.load x[r, c])
    in (q with [:, 0:cols] = codes, scale with [:, 0:groups] = scales)
}
