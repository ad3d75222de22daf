-- | One token for each sample (glm_sample_args): every step for all samples, each sample by itself.

import "sample_cut"
import "sample_draw"
import "sample_logits"
import "sample_logprobs"
import "sampling"
import "token_order"

-- | Ids of the tokens: -1 where every token is -inf.
local def tokens [s] [w] [cols] (any_draw: bool)
                                (first: i64)
                                (asked: [s](sampling [w]))
                                (position: [s]i32)
                                (draws: [s]bool)
                                (forced: [s]i32)
                                (keys: [s][cols]u32) : *[s]i32 =
  #[unsafe]
  let best =
    tabulate s (\sample -> best_rank (tabulate cols (\c -> rank keys[sample, c] (first + c))))
  let best_key = map (\token -> key_of (value_of_rank token)) best
  let drawn =
    if any_draw
    then let cut = if any cuts asked then cut_of first asked keys best_key else replicate s u64.highest
         in draw first asked position keys cut
    else replicate s 0i32
  let token (sample: i64) =
    if forced[sample] >= 0 then forced[sample]
    else if best_key[sample] == never then -1
    else if draws[sample] then drawn[sample]
    else i32.i64 (id_of_rank best[sample])
  in tabulate s token

-- | A count goes up by one, and saturates.
local def counted (count: u16) : u16 = if (count & 0x7fff) == 0x7fff then count else count + 1

def sample [slots] [words] [t] [s] [m] [mw] [sl] [vocab] [top]
           (sampling: [slots][words]u32)
           (positions: [t]i32)
           (sample_rows: [s]i32)
           (sample_slots: [s]i32)
           (sample_masks: [s]i32)
           (forced: [s]i32)
           (masks: [m][mw]u32)
           (logits: *[s][sl]f32)
           (first: i64)
           (cols: i64)
           (last_token: *[slots]i32)
           (counts: *[slots][vocab]u16)
           (out_token_ids: *[s]i32)
           (out_logprobs: *[s]f32)
           (out_top_ids: *[s][top]i32)
           (out_top_logprobs: *[s][top]f32)
           : (*[s][sl]f32, *[slots]i32, *[slots][vocab]u16, *[s]i32, *[s]f32, *[s][top]i32, *[s][top]f32) =
  #[unsafe]
  let slot = map i64.i32 sample_slots
  let asked = map (\b -> sampling_of sampling[b]) slot
  let position = map (\row -> positions[i64.i32 row] + 1) sample_rows
  let sampled = map2 (\p a -> p - a.prompt_len) position asked
  let allowed (sample: i64) (id: i64) =
    let mask = i64.i32 sample_masks[sample]
    in mask < 0 || (masks[mask, id / 32] >> u32.i64 (id % 32)) & 1 != 0
  let draws = map2 (\a id -> is_noisy a && id < 0) asked forced
  -- One reduction: where a kernel makes two, their flags of the last block share a word without a barrier in between.
  let needs = reduce (|) 0u8 (map2 (\a draw -> u8.bool draw | (u8.bool (changes_logits a) << 1)) asked draws)
  let count (sample: i64) (id: i64) = counts[slot[sample], id]
  let keys = changed_keys (needs & 2 != 0) first cols asked sampled count allowed logits
  let token = tokens (needs & 1 != 0) first asked position draws forced keys
  -- Log-probabilities, for the samples that report them.
  let wanted = map2 (\a id -> if id < 0 then -1 else i64.i32 a.num_logprobs) asked token
  let most_wanted = reduce i64.max (-1) wanted
  let most = i64.max 0 most_wanted
  let (normalizer, best) =
    if most_wanted >= 0
    then let raw = tabulate s (\sample -> tabulate cols (\c -> key_of logits[sample, c]))
         in (log_normalizers raw, best_tokens first most raw)
    else (replicate s 0, replicate most (replicate s 0))
  let log_probability (sample: i64) (value: f32) = f32.f64 (f64.f32 value - normalizer[sample])
  let own (sample: i64) =
    let c = i64.i32 token[sample] - first
    in log_probability sample (if c >= 0 && c < cols then value_of (key_of logits[sample, c]) else -f32.inf)
  let out_logprobs =
    scatter out_logprobs (tabulate s (\sample -> if wanted[sample] >= 0 then sample else -1)) (tabulate s own)
  let place (i: i64) = let (sample, j) = (i / most, i % most) in (sample, if j < wanted[sample] then j else -1)
  let places = tabulate (s * most) place
  let is_token (token: u64) = token != u64.highest
  let top_id (i: i64) =
    let token = best[i % most, i / most]
    in if is_token token then i32.i64 (id_of_rank token) else -1
  let top_logprob (i: i64) =
    let token = best[i % most, i / most]
    in log_probability (i / most) (if is_token token then value_of_rank token else -f32.inf)
  -- The state of the slots: a forced token leaves it as it is.
  let changes (sample: i64) = token[sample] >= 0 && forced[sample] < 0
  let slot_changed = tabulate s (\sample -> if changes sample then slot[sample] else -1)
  let new_counts =
    tabulate s (\sample -> if changes sample then counted counts[slot[sample], i64.i32 token[sample]] else 0)
  in ( logits
     , scatter last_token slot_changed token
     , scatter_2d counts (zip slot_changed (map i64.i32 token)) new_counts
     , scatter out_token_ids (iota s) token
     , out_logprobs
     , scatter_2d out_top_ids places (tabulate (s * most) top_id)
     , scatter_2d out_top_logprobs places (tabulate (s * most) top_logprob)
     )
