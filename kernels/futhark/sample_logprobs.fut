-- | Log-probabilities of the model's own logits.

import "token_order"

-- | Per sample the logarithm of the softmax denominator, and the value of one column: -inf outside of the columns.
def log_normalizers [s] [cols] (keys: [s][cols]u32) : *[s]f64 =
  #[unsafe]
  let normalizer (row: [cols]u32) =
    let best = reduce_comm u32.min u32.highest row
    let sum = reduce_comm (+) 0 (map (weight_below best) row)
    in f64.f32 (value_of best) + f64.log (f64.u64 sum * 9.094947017729282379150390625e-13)
  in map normalizer keys

-- | The ranks of each sample's `most` best tokens, [most][s]; the highest number where there are no more tokens.
def best_tokens [s] [cols] (first: i64) (most: i64) (keys: [s][cols]u32) : *[most][s]u64 =
  #[unsafe]
  let (tops, _) =
    loop (tops, floor) = (replicate most (replicate s u64.highest), replicate s 0u64)
    for i < most do
      let next (sample: i64) (c: i64) =
        let token = rank keys[sample, c] (first + c)
        in if token >= floor[sample] then token else u64.highest
      let best = tabulate s (\sample -> best_rank (tabulate cols (next sample)))
      in (tops with [i] = best, map (\token -> if token == u64.highest then token else token + 1) best)
  in tops
