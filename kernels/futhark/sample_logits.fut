-- | Step 1 of glm_sample_args and the temperature: the logits that tokens are chosen by.

import "sampling"
import "token_order"

-- | Repetition, frequency and presence. Bit 15 of a count: in the prompt; bits 0-14: times sampled.
local def penalised [w] (asked: sampling [w]) (count: u16) (logit: f32) : f32 =
  let times = count & 0x7fff
  let repeated = if logit > 0 then logit / asked.repetition else logit * asked.repetition
  let logit = if count != 0 then repeated else logit
  let logit = logit - asked.frequency * f32.u16 times
  in logit - (if times != 0 then asked.presence else 0)

-- | Adds every request's biases, one after another, so that repeated ids add up in order.
local def add_bias [s] [w] [cols] (first: i64) (asked: [s](sampling [w])) (values: *[s][cols]f32) : *[s][cols]f32 =
  #[unsafe]
  let most = i64.i32 (i32.maximum (map (\a -> a.num_bias) asked))
  in loop values for i < most do
       let column (a: sampling [w]) = if i < i64.i32 a.num_bias then bias_id a i - first else -1
       let columns = map column asked
       let biased =
         tabulate s (\sample ->
                       let c = columns[sample]
                       in if c >= 0 && c < cols then values[sample, c] + bias_value asked[sample] i else 0)
       in scatter_2d values (zip (iota s) columns) biased

-- | Stop ids become -inf while fewer than min_tokens have been sampled.
local def mask_stops [s] [w] [cols] (first: i64) (asked: [s](sampling [w])) (sampled: [s]i32) (values: *[s][cols]f32)
                     : *[s][cols]f32 =
  #[unsafe]
  let place (i: i64) =
    let (sample, index) = (i / max_stop_ids, i % max_stop_ids)
    let a = asked[sample]
    let applies = index < i64.i32 a.num_stop_ids && sampled[sample] < a.min_tokens
    in (sample, if applies then stop_id a index - first else -1)
  let n = s * max_stop_ids
  in scatter_2d values (tabulate n place) (replicate n (-f32.inf))

def changes_logits [w] (asked: sampling [w]) : bool = asked.num_bias > 0 || asked.min_tokens > 0

-- | The keys of the changed logits. `allowed` sample id: in the sample's mask; `any_change`: of biases or stops.
def changed_keys [s] [w] [sl] (any_change: bool)
                              (first: i64)
                              (cols: i64)
                              (asked: [s](sampling [w]))
                              (sampled: [s]i32)
                              (count: i64 -> i64 -> u16)
                              (allowed: i64 -> i64 -> bool)
                              (logits: [s][sl]f32) : *[s][cols]u32 =
  #[unsafe]
  let finish (sample: i64) (c: i64) (value: f32) =
    let a = asked[sample]
    let scaled = if is_noisy a then value / a.temperature else value
    in if allowed sample (first + c) then key_of scaled else never
  let penalise (sample: i64) (c: i64) =
    let a = asked[sample]
    in if has_penalty a then penalised a (count sample (first + c)) logits[sample, c] else logits[sample, c]
  in if any_change
     then let values = add_bias first asked (tabulate s (\sample -> tabulate cols (penalise sample)))
          let values = mask_stops first asked sampled values
          in tabulate s (\sample -> tabulate cols (\c -> finish sample c values[sample, c]))
     else tabulate s (\sample -> tabulate cols (\c -> finish sample c (penalise sample c)))
