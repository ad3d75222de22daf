-- | Causal attention over pages: online softmax (Dao 2022) page by page, for each row and head by itself, so that a row's
-- bits depend on its own sequence only.

import "element"
import "float_math"
import "kv_page"
import "lanes"

module mk_attend (K: element) = {
  -- | Softmax of one query over a page's first `count` keys, added to what earlier pages gave: the maximum, the sum of the
  -- weights relative to it, and the weighted values.
  local def attend_page [n] [d]
                        (query: [d]f32)
                        (k: [n]K.t)
                        (v: [n]K.t)
                        (base: i64)
                        (count: i64)
                        (max: f32, total: f32, acc: *[d]f32) : (f32, f32, *[d]f32) =
    #[unsafe]
    let score (key: i64) = sum_of d (\i -> query[i] * K.load k[base + key * d + i])
    let scores =
      loop scores = replicate page_size (-f32.inf)
      for key < count do
        scores with [key] = score key
    let best =
      loop best = max
      for key < page_size do
        if scores[key] > best then scores[key] else best
    let weights = #[sequential] map (\score -> exp_f32 (score - best)) scores
    let rescale = exp_f32 (max - best)
    let sum = loop sum = 0f32 for key < page_size do sum + weights[key]
    let acc = loop acc for i < d do acc with [i] = acc[i] * rescale
    let acc =
      loop acc
      for key < count do
        let weight = weights[key]
        in loop acc for i < d do
             acc with [i] = acc[i] + weight * K.load v[base + key * d + i]
    in (best, total * rescale + sum, acc)

  -- | The heads of each row, whose queries carry the softmax's scale.
  #[noinline]
  def attend [t] [slots] [pages] [heads] [d] [n]
             (positions: [t]i32)
             (row_slots: [t]i32)
             (page_table: [slots][pages]i32)
             (query: [t][heads][d]f32)
             (k: [n]K.t)
             (v: [n]K.t)
             (kv_heads: i64) : [t][heads][d]f32 =
    #[unsafe]
    let group = heads / kv_heads
    let attend_head (r: i64) (head: i64) =
      let keys = i64.i32 positions[r] + 1
      let (_, total, acc) =
        loop state = (-f32.inf, 0, replicate d 0f32)
        for index < (keys + page_size - 1) / page_size do
          let page = i64.i32 page_table[i64.i32 row_slots[r], index]
          let base = kv_offset kv_heads d page (head / group) 0
          in attend_page query[r, head] k v base (i64.min page_size (keys - index * page_size)) state
      in #[sequential] map (* (1 / total)) acc
    in unflatten (tabulate (t * heads) (\i -> attend_head (i / heads) (i % heads)))
}
