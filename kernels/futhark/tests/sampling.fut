-- The sampler: its generator, the order of tokens, cuts, masks, penalties and log-probabilities.

import "../philox"
import "../sample"
import "../token_order"

-- Random123's known answers.
-- ==
-- entry: words
-- input { [0u32, 0u32, 0u32, 0u32] [0u32, 0u32] } output { [0x6627e8d5u32, 0xe169c58du32, 0xbc57ac4cu32, 0x9b00dbd8u32] }
-- input { [0xffffffffu32, 0xffffffffu32, 0xffffffffu32, 0xffffffffu32] [0xffffffffu32, 0xffffffffu32] } output { [0x408f276du32, 0x41c83b0eu32, 0xa20bc7c6u32, 0x6d5451fdu32] }
-- input { [0x243f6a88u32, 0x85a308d3u32, 0x13198a2eu32, 0x03707344u32] [0xa4093822u32, 0x299f31d0u32] } output { [0xd16cfe09u32, 0x94fdccebu32, 0x5001e420u32, 0x24126ea1u32] }
entry words (counter: [4]u32) (key: [2]u32) : [4]u32 =
  let (a, b, c, d) = philox (counter[0], counter[1], counter[2], counter[3]) (key[0], key[1])
  in [a, b, c, d]

-- Larger values come first, 0 and -0 are one, NaN is -inf.
-- ==
-- entry: keys_descend
-- input { [f32.inf, 3f32, 1e-45f32, 0f32, -1e-45f32, -2f32, -f32.inf] } output { true }
entry keys_descend [n] (values: [n]f32) : bool =
  let keys = map key_of values
  in and (tabulate (n - 1) (\i -> keys[i] < keys[i + 1]))
     && and (map2 (\key value -> value_of key == value) keys values)
     && key_of 0 == key_of (-0) && key_of f32.nan == never

-- One sample of the five tokens with these logits and settings: token, log-probability, the two best, the token's count.
local def run (temperature: f32) (top_k: i32) (top_p: f32) (min_p: f32) (presence: f32) (mask: u32) (logits: [5]f32)
              : (i32, f32, [2]i32, u16) =
  let request =
    [7, 0, f32.to_bits temperature, f32.to_bits top_p, f32.to_bits min_p, f32.to_bits 1, 0, f32.to_bits presence
    , u32.i32 top_k, 0, 3, 2, 0, 0] ++ replicate 664 0
  let counts = [[0, 0x8000, 1, 0, 0u16]]
  let (_, _, counts, token, logprob, top, _) =
    sample [request] [4] [0] [0] [if mask == 0 then -1 else 0] [-1] [[mask]] [logits] 0 5 [-7] counts [0] [0]
           (replicate 1 (replicate 2 0)) (replicate 1 (replicate 2 0f32))
  in (token[0], logprob[0], top[0], counts[0, i64.i32 (i32.max 0 token[0])])

-- The best, ties to the lower id; a mask; a penalty on what was sampled; nothing possible.
-- ==
-- entry: greedy
-- input { 0f32 0u32 [1f32, 3f32, 3f32, 2f32, f32.nan] } output { 1i32 [1i32, 2i32] 0x8001u16 }
-- input { 0f32 0xcu32 [1f32, 3f32, 3f32, 2f32, f32.nan] } output { 2i32 [1i32, 2i32] 2u16 }
-- input { 2f32 0xcu32 [1f32, 3f32, 3f32, 2f32, f32.nan] } output { 3i32 [1i32, 2i32] 1u16 }
-- input { 0f32 0x10u32 [1f32, 3f32, 3f32, 2f32, f32.nan] } output { -1i32 [0i32, 0i32] 0u16 }
entry greedy (presence: f32) (mask: u32) (logits: [5]f32) : (i32, [2]i32, u16) =
  let (token, _, top, count) = run 0 0 1 0 presence mask logits
  in (token, top, count)

-- Whatever the noise, what is cut is not drawn.
-- ==
-- entry: cut_to_one
-- input { 1i32 1f32 0f32 } output { 2i32 }
-- input { 0i32 0.2f32 0f32 } output { 2i32 }
-- input { 0i32 1e-30f32 0f32 } output { 2i32 }
-- input { 0i32 1f32 1f32 } output { 2i32 }
entry cut_to_one (top_k: i32) (top_p: f32) (min_p: f32) : i32 =
  let (token, _, _, _) = run 1 top_k top_p min_p 0 0 [1, 1, 1.1, 1, 1]
  in token

-- Of two equal tokens the log-probability is -log(2).
-- ==
-- entry: log_probability
-- input { } output { -0.6931472f32 }
entry log_probability : f32 =
  let (_, logprob, _, _) = run 1 0 1 0 0 0 [5, -f32.inf, 5, -f32.inf, f32.nan]
  in logprob
