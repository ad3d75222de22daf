-- | Products of the listed assignments' rows with their experts' channels. Assignments are cut into tiles, each of one
-- expert, whose rows share its weights; where experts have many rows a channel is expanded once a tile.
--
-- Expert e has assignments [offsets[e], offsets[e + 1]) of the list; assignment i takes row source[i] of x. Weight c of
-- channel n of expert e is w[at[e] + n * stride + c].

import "element"
import "fp8"
import "matmul"

-- | The tiles of expert e are [starts[e], starts[e + 1]); a tile has at most `size` assignments.
local type tiles [c1] = {size: i64, starts: [c1]i64}

local def tiles_of [c1] (offsets: [c1]i32) : tiles [c1] =
  #[unsafe]
  let listed = i64.i32 offsets[c1 - 1]
  let size = if listed < (c1 - 1) * kept_from then 1 else 16
  let tiles (e: i64) = (i64.i32 (offsets[e + 1] - offsets[e]) + size - 1) / size
  let ends = scan (+) 0 (tabulate (c1 - 1) tiles)
  in {size = size, starts = tabulate c1 (\e -> if e == 0 then 0 else ends[e - 1])}

-- | The last e with start(e) <= i, of c1 - 1 segments: the one that i is in.
local def segment_of (c1: i64) (start: i64 -> i64) (i: i64) : i64 =
  let (low, _) =
    loop (low, high) = (0, c1 - 1)
    while high - low > 1 do
      let middle = (low + high) / 2
      in if start middle <= i then (middle, high) else (low, middle)
  in low

-- | [m][rows]: weight e n c, and scaled e n i b: a block's sum, made whole, of channel n of expert e and assignment i.
local def listed_products [r] [cols] [m] [c1]
                          (block: i64)
                          (x: [r][cols]f32)
                          (source: [m]i64)
                          (offsets: [c1]i32)
                          (rows: i64)
                          (weight: i64 -> i64 -> i64 -> f32)
                          (scaled: i64 -> i64 -> i64 -> i64 -> f32 -> f32) : [m][rows]f32 =
  #[unsafe]
  let tile = tiles_of offsets
  let expert_of (i: i64) = segment_of c1 (\e -> tile.starts[e]) i
  let first_of (i: i64) (e: i64) = i64.i32 offsets[e] + (i - tile.starts[e]) * tile.size
  let element (first: i64) (row: i64) (c: i64) = x[source[first + row], c]
  let num_tiles = tile.starts[c1 - 1]
  let values =
    if tile.size == 1
    then tabulate (num_tiles * rows)
                  (\j ->
                     let (i, n) = (j / rows, j % rows)
                     let e = expert_of i
                     let first = first_of i e
                     in channel_products tile.size 1 cols block (element first) (weight e n) (\row -> scaled e n (first + row)))
    else tabulate (num_tiles * rows)
                  (\j ->
                     let (i, n) = (j / rows, j % rows)
                     let e = expert_of i
                     let first = first_of i e
                     let count = i64.min tile.size (i64.i32 offsets[e + 1] - first)
                     in channel_products_kept tile.size count cols block (element first) (weight e n)
                                              (\row -> scaled e n (first + row)))
  in tabulate m
              (\i ->
                 let e = segment_of c1 (\e -> i64.i32 offsets[e]) i
                 let at = i - i64.i32 offsets[e]
                 let index = tile.starts[e] + at / tile.size
                 let slot = at % tile.size
                 in tabulate rows (\n -> values[index * rows + n, slot]))

module mk_expert_products (W: element) = {
  #[noinline]
  def expert_products [r] [cols] [m] [c1] [n] [count]
                      (x: [r][cols]f32)
                      (source: [m]i64)
                      (offsets: [c1]i32)
                      (w: [n]W.t)
                      (at: [count]i64)
                      (stride: i64)
                      (rows: i64) : [m][rows]f32 =
    #[unsafe]
    listed_products cols x source offsets rows (\e n c -> W.load w[at[e] + n * stride + c]) (\_ _ _ _ sum -> sum)
}

-- | x as `activations` gives it; x_scale: of each assignment's row; channel n of expert e has scale[scale_at[e] + n].
#[noinline]
def expert_products_fp8_channel [r] [cols] [m] [ss] [c1] [n] [s] [count]
                                (x: [r][cols]f32)
                                (source: [m]i64)
                                (x_scale: [m][ss]f32)
                                (offsets: [c1]i32)
                                (w: [n]u8)
                                (at: [count]i64)
                                (stride: i64)
                                (scale: [s]f32)
                                (scale_at: [count]i64)
                                (rows: i64) : [m][rows]f32 =
  #[unsafe]
  let scaled e n i _ sum = sum * sum_factor * x_scale[i, 0] * scale[scale_at[e] + n]
  in listed_products cols x source offsets rows (\e n c -> decode_weight w[at[e] + n * stride + c]) scaled

-- | Block (n / 128, b) of expert e has scale[scale_at[e] + n / 128 * scale_stride + b].
#[noinline]
def expert_products_fp8_block [r] [cols] [m] [ss] [c1] [n] [s] [count]
                              (x: [r][cols]f32)
                              (source: [m]i64)
                              (x_scale: [m][ss]f32)
                              (offsets: [c1]i32)
                              (w: [n]u8)
                              (at: [count]i64)
                              (stride: i64)
                              (scale: [s]f32)
                              (scale_at: [count]i64)
                              (scale_stride: i64)
                              (rows: i64) : [m][rows]f32 =
  #[unsafe]
  let scaled e n i b sum =
    sum * sum_factor * x_scale[i, b] * scale[scale_at[e] + n / scale_block * scale_stride + b]
  in listed_products scale_block x source offsets rows (\e n c -> decode_weight w[at[e] + n * stride + c]) scaled
