import "codec"
import "kv_page"
import "norm"

module mk_qk_norm_rope_store (A: codec) (K: codec) = {
  local module N = mk_norm A

  -- | One head of a row: RMSNorm (if `has_norm`), then rotate-half RoPE on the first 2 * half dimensions (Su et al. 2021,
  -- NeoX layout).
  local def normed_and_rotated [half]
                               (head_dim: i64)
                               (has_norm: bool)
                               (weight: i64 -> f32)
                               (eps: f32)
                               (cosines: [half]f32)
                               (sines: [half]f32)
                               (x: i64 -> f32) : [head_dim]f32 =
    #[unsafe]
    let inverse = if has_norm then inverse_rms head_dim eps x else 1
    let y =
      #[sequential]
      map (\i -> if has_norm then N.normalized inverse (weight i) (x i) else x i) (iota head_dim)
    let rotated (i: i64) =
      let (low, sign) = if i < half then (i, -1) else (i - half, 1)
      let other = if i < half then i + half else i - half
      in if i < 2 * half then y[i] * cosines[low] + sign * y[other] * sines[low] else y[i]
    in #[sequential] map rotated (iota head_dim)

  def qk_norm_rope_store [t] [slots] [pages] [sx] [dq] [dk] [p] [half] [n] [so]
                         (positions: [t]i32)
                         (row_slots: [t]i32)
                         (page_table: [slots][pages]i32)
                         (qkv: [t][sx]A.t)
                         (q_norm: [dq]f32)
                         (k_norm: [dk]f32)
                         (eps: f32)
                         (rope_cos: [p][half]f32)
                         (rope_sin: [p][half]f32)
                         (heads: i64)
                         (kv_heads: i64)
                         (head_dim: i64)
                         (k: *[n]K.t)
                         (v: *[n]K.t)
                         (out: *[t][so]A.t) : (*[n]K.t, *[n]K.t, *[t][so]A.t) =
    #[unsafe]
    let position (r: i64) = i64.i32 positions[r]
    let element (r: i64) (head: i64) (i: i64) = A.load qkv[r, head * head_dim + i]
    let width = heads * head_dim
    let rotated =
      tabulate (t * (heads + kv_heads))
               (\i ->
                  let (r, head) = (i / (heads + kv_heads), i % (heads + kv_heads))
                  let is_query = head < heads
                  let weight (i: i64) = if is_query then q_norm[i] else k_norm[i]
                  let has_norm = if is_query then dq != 0 else dk != 0
                  in normed_and_rotated head_dim has_norm weight eps rope_cos[position r] rope_sin[position r]
                                        (element r head))
      |> unflatten
    let queries = map (\row -> map A.store (flatten row[0:heads]) :> [width]A.t) rotated
    let keys = tabulate t (\r -> tabulate kv_heads (\h -> map K.store rotated[r, heads + h]))
    let values =
      tabulate_3d t kv_heads head_dim (\r h i -> K.store (element r (heads + kv_heads + h) i))
    let place (r: i64) (h: i64) (i: i64) =
      let page = i64.i32 page_table[i64.i32 row_slots[r], position r / page_size]
      in kv_offset kv_heads head_dim page h (position r % page_size) + i
    let places = flatten_3d (tabulate_3d t kv_heads head_dim place)
    in ( scatter k places (flatten_3d keys)
       , scatter v places (flatten_3d values)
       , out with [:, 0:width] = queries
       )
}
