import "codec"

module mk_paged_attention (A: codec) (K: codec) = {
  -- | Causal softmax(q k^T * scale) v over each row's pages.
  def paged_attention [t] [slots] [pages] [sq] [n] [so]
                      (positions: [t]i32)
                      (row_slots: [t]i32)
                      (page_table: [slots][pages]i32)
                      (q: [t][sq]A.t)
                      (k: [n]K.t)
                      (v: [n]K.t)
                      (heads: i64)
                      (kv_heads: i64)
                      (head_dim: i64)
                      (softmax_scale: f32)
                      (out: *[t][so]A.t) : *[t][so]A.t =
    #[unsafe]
    let query =
      tabulate t (\r ->
                    tabulate heads (\h -> tabulate head_dim (\i -> A.load q[r, h * head_dim + i] * softmax_scale)))
    let values = K.attend positions row_slots page_table query k v kv_heads
    let width = heads * head_dim
    let rows = map (\row -> map A.store (flatten row) :> [width]A.t) values
    in out with [:, 0:width] = rows
}
