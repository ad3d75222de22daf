-- | The router (DeepSeek-V3 2024, as Glm4MoeTopkRouter), everything in f32.

import "codec"

-- | The largest choice that is not taken (NaN), ties to the lower index.
local def best_of [n] (choices: [n]f32) : i64 =
  #[unsafe]
  loop best = -1
  for i < n do
    if f32.isnan choices[i] then best
    else if best < 0 then i
    else if choices[i] > choices[best] then i else best

-- | The sum of the two largest choices of a group.
local def group_score [n] (size: i64) (choices: [n]f32) (group: i64) : f32 =
  #[unsafe]
  let (first, second) =
    loop (first, second) = (-f32.inf, if size > 1 then -f32.inf else 0)
    for i < size do
      let choice = choices[group * size + i]
      in if choice > first then (choice, if size > 1 then first else 0)
         else if choice > second then (first, choice)
         else (first, second)
  in first + second

-- | Takes all experts of all groups but the `kept` best.
local def drop_groups [n] (groups: i64) (kept: i64) (choices: [n]f32) : *[n]f32 =
  #[unsafe]
  let size = n / groups
  let scores =
    loop scores = tabulate groups (group_score size choices)
    for _i < kept do
      let best = best_of scores
      in scores with [best] = f32.nan
  in tabulate n (\i -> if f32.isnan scores[i / size] then choices[i] else f32.nan)

module mk_moe_route (A: codec) (W: codec) = {
  def moe_route [t] [sx] [e] [sw] [eb] [ep] [si] [sg]
                (x: [t][sx]A.t)
                (w: [e][sw]W.t)
                (cols: i64)
                (bias: [eb]f32)
                (places: [ep]i32)
                (top_k: i64)
                (groups: i64)
                (topk_groups: i64)
                (normalize: bool)
                (scale: f32)
                (ids: *[t][si]i32)
                (weights: *[t][sg]f32) : (*[t][si]i32, *[t][sg]f32) =
    #[unsafe]
    let logits = W.products (tabulate t (\r -> tabulate cols (\i -> A.load x[r, i]))) w
    let scores = tabulate t (\r -> tabulate e (\expert -> 1 / (1 + f32.exp (-logits[expert, r]))))
    -- NaN is the mark of what is taken: a choice that is NaN comes last, so that top_k distinct experts are always found.
    let choice (r: i64) (expert: i64) =
      let choice = if eb == 0 then scores[r, expert] else scores[r, expert] + bias[expert]
      in if f32.isnan choice then -f32.inf else choice
    let chosen (r: i64) : [top_k]i64 =
      let all = tabulate e (choice r)
      let (_, chosen) =
        loop (choices, chosen) = (if groups > 1 then drop_groups groups topk_groups all else copy all, replicate top_k 0)
        for j < top_k do
          let best = best_of choices
          in (choices with [best] = f32.nan, chosen with [j] = best)
      in chosen
    let experts = tabulate t chosen
    let weight (r: i64) : [top_k]f32 =
      let total = loop total = 0f32 for j < top_k do total + scores[r, experts[r, j]]
      in map (\expert ->
                let own = scores[r, expert]
                in (if normalize then own / (total + 1e-20f32) else own) * scale)
             experts[r]
    let place (expert: i64) = if ep == 0 then i32.i64 expert else places[expert]
    in (ids with [:, 0:top_k] = map (map place) experts, weights with [:, 0:top_k] = tabulate t weight)
}
