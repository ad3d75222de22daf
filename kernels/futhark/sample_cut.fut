-- | top-k, top-p and min-p. In the order of tokens each keeps a prefix, so together they are one cut: the rank of the last
-- token kept. The end of a prefix is found by radix selection on the ranks: exact, without sorting.

import "sampling"
import "token_order"

local def level_bits : u64 = 11
local def bins : i64 = 2048
local def levels : i64 = 5

-- | For each sample the rank of the last token of the shortest prefix whose weight reaches `target`, or the highest number
-- if all tokens together fall short. A token weighs 1, or what its probability is to that of the best one.
#[noinline]
local def prefix_end [s] [cols] (first: i64) (keys: [s][cols]u32) (best: [s]u32) (by_count: bool) (target: [s]f64)
                     : *[s]u64 =
  #[unsafe]
  let (prefixes, _, short) =
    loop (prefixes, before, short) = (replicate s 0u64, replicate s 0u64, replicate s false)
    for level < levels do
      let shift = level_bits * u64.i64 (levels - 1 - level)
      let bin (sample: i64) (c: i64) =
        let token = rank keys[sample, c] (first + c)
        in if (token >> (shift + level_bits)) == prefixes[sample]
           then i64.u64 ((token >> shift) & (u64.i64 bins - 1))
           else -1
      let sums =
        tabulate s (\sample ->
                      let places = tabulate cols (bin sample)
                      let weight (c: i64) = if by_count then 1 else weight_below best[sample] keys[sample, c]
                      let weights = tabulate cols (\c -> if places[c] < 0 then 0 else weight c)
                      in scan (+) 0 (hist (+) 0 bins places weights))
      let crossing =
        tabulate s (\sample ->
                      map (\sum -> i64.bool (f64.u64 (before[sample] + sum) < target[sample])) sums[sample]
                      |> reduce (+) 0)
      let next (sample: i64) =
        let bin = i64.min crossing[sample] (bins - 1)
        in ( (prefixes[sample] << level_bits) | u64.i64 bin
           , before[sample] + (if bin == 0 then 0 else sums[sample, bin - 1])
           , short[sample] || crossing[sample] == bins
           )
      in unzip3 (tabulate s next)
  in map2 (\short prefix -> if short then u64.highest else prefix) short prefixes

-- | Weight of the tokens kept by a cut.
local def mass_kept [s] [cols] (first: i64) (keys: [s][cols]u32) (best: [s]u32) (cut: [s]u64) : [s]u64 =
  #[unsafe]
  let weight (sample: i64) (c: i64) =
    let key = keys[sample, c]
    in if rank key (first + c) <= cut[sample] then weight_below best[sample] key else 0
  in tabulate s (\sample -> reduce_comm (+) 0 (tabulate cols (weight sample)))

-- | Step 2 of glm_sample_args: the rank of the last token kept; `best` has the key of each sample's best token.
def cut_of [s] [w] [cols] (first: i64) (asked: [s](sampling [w])) (keys: [s][cols]u32) (best: [s]u32) : *[s]u64 =
  #[unsafe]
  let by_count =
    if any (\a -> a.top_k > 0) asked
    then let target = map (\a -> if a.top_k > 0 then f64.i32 a.top_k else f64.inf) asked
         in prefix_end first keys best true target
    else replicate s u64.highest
  let by_mass =
    if any (\a -> a.top_p < 1) asked
    then let mass = mass_kept first keys best by_count
         let target = map2 (\a mass -> if a.top_p < 1 then f64.f32 a.top_p * f64.u64 mass else f64.inf) asked mass
         in prefix_end first keys best false target
    else replicate s u64.highest
  let by_probability (a: sampling [w]) (best: u32) =
    if a.min_p > 0
    then last_of_key (key_of (f32.f64 (f64.f32 (value_of best) + f64.log (f64.f32 a.min_p))))
    else u64.highest
  in map3 (\a b c -> u64.min a (u64.min b c)) by_count by_mass (map2 by_probability asked best)
