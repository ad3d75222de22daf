-- | Step 3 of glm_sample_args: the kept token with the largest value + Gumbel noise.

import "float_math"
import "philox"
import "sampling"
import "token_order"

-- | -log(-log(u)), u = ((word >> 9) + 0.5) * 2^-23.
def gumbel (word: u32) : f32 =
  let u = (f32.u32 (word >> 9) + 0.5f32) * 1.1920928955078125e-7f32
  in -(log_f32 (-(log_f32 u)))

type choice = {score: f32, id: i32}

local def none : choice = {score = -f32.inf, id = i32.highest}

-- | The larger score, then the lower id.
local def better (a: choice) (b: choice) : choice =
  if a.score > b.score || (a.score == b.score && a.id < b.id) then a else b

-- | The best of the four tokens of a counter; `key_at` gives a column's key.
local def draw_four (seed: (u32, u32)) (position: u32) (cut: u64) (id: i64) (key_at: i64 -> u32) : choice =
  let kept (j: i64) = rank (key_at j) (id + j) <= cut && key_at j != never
  in if kept 0 || kept 1 || kept 2 || kept 3
     then let (w0, w1, w2, w3) = philox (u32.i64 (id / 4), position, 0, 0) seed
          let score (j: i64) (word: u32) =
            if kept j then {score = value_of (key_at j) + gumbel word, id = i32.i64 (id + j)} else none
          in better (better (score 0 w0) (score 1 w1)) (better (score 2 w2) (score 3 w3))
     else none

-- | For each sample the id of the token drawn. `first` is a multiple of 4.
def draw [s] [w] [cols] (first: i64) (asked: [s](sampling [w])) (position: [s]i32) (keys: [s][cols]u32) (cut: [s]u64)
         : *[s]i32 =
  #[unsafe]
  let four (sample: i64) (i: i64) =
    let key_at (j: i64) = if i * 4 + j < cols then keys[sample, i * 4 + j] else never
    in draw_four asked[sample].seed (u32.i32 position[sample]) cut[sample] (first + i * 4) key_at
  let fours = (cols + 3) / 4
  let drawn = tabulate s (\sample -> reduce_comm better none (tabulate fours (four sample)))
  in map (\choice -> choice.id) drawn
