-- | Products of rows of x with channels of weights. A product's bits depend on its row and channel alone, not on how many
-- rows there are nor on which function computes it. No matrix of weights is ever expanded, at most one channel of it.

import "element"
import "fp8"
import "lanes"

-- | Columns of a block of weights that has a scale.
def scale_block : i64 = 128

-- | Rows from which on a channel is expanded to f32 once for all of them.
def kept_from : i64 = 4

-- | sum over blocks b of `block` columns of scaled(b, sum over the block of x * w).
local def dot (cols: i64) (block: i64) (x: i64 -> f32) (w: i64 -> f32) (scaled: i64 -> f32 -> f32) : f32 =
  let blocks = (cols + block - 1) / block
  in loop total = 0f32
     for b < blocks do
       let end = i64.min cols ((b + 1) * block)
       in total + scaled b (sum_range (b * block) end (\i -> x i * w i))

-- | The products of the first `count` of n rows with one channel, the rest 0, each weight expanded where it is used.
def channel_products (n: i64)
                     (count: i64)
                     (cols: i64)
                     (block: i64)
                     (x: i64 -> i64 -> f32)
                     (w: i64 -> f32)
                     (scaled: i64 -> i64 -> f32 -> f32) : [n]f32 =
  #[sequential]
  map (\r -> if r < count then dot cols block (x r) w (scaled r) else 0) (iota n)

-- | The same of a channel that is expanded first.
def channel_products_kept (n: i64)
                          (count: i64)
                          (cols: i64)
                          (block: i64)
                          (x: i64 -> i64 -> f32)
                          (w: i64 -> f32)
                          (scaled: i64 -> i64 -> f32 -> f32) : [n]f32 =
  #[unsafe]
  let channel = #[sequential] map w (iota cols)
  in channel_products n count cols block x (\i -> channel[i]) scaled

-- | Products of t rows with n channels, the channels in parallel. scaled channel row block: a block's sum, made whole.
local def all_products [t] [cols]
                       (n: i64)
                       (block: i64)
                       (x: [t][cols]f32)
                       (w: i64 -> i64 -> f32)
                       (scaled: i64 -> i64 -> i64 -> f32 -> f32) : [n][t]f32 =
  #[unsafe]
  let element (r: i64) (i: i64) = x[r, i]
  in if t < kept_from
     then tabulate n (\c -> channel_products t t cols block element (w c) (scaled c))
     else tabulate n (\c -> channel_products_kept t t cols block element (w c) (scaled c))

module mk_products (W: element) = {
  #[noinline]
  def products [t] [cols] [n] [sw] (x: [t][cols]f32) (w: [n][sw]W.t) : [n][t]f32 =
    #[unsafe]
    all_products n cols x (\c i -> W.load w[c, i]) (\_ _ _ sum -> sum)
}

-- | Rows of FP8 codes as products want them.
def activations [t] [sx] (cols: i64) (x: [t][sx]u8) : [t][cols]f32 =
  #[unsafe]
  tabulate t (\r -> tabulate cols (\c -> activation x[r, c]))

-- | (sum x.w) * x_scale * w_scale.
#[noinline]
def products_fp8_channel [t] [cols] [ss] [n] [sw]
                         (x: [t][cols]f32)
                         (x_scale: [t][ss]f32)
                         (w: [n][sw]u8)
                         (w_scale: [n]f32) : [n][t]f32 =
  #[unsafe]
  let scaled c r _ sum = sum * sum_factor * x_scale[r, 0] * w_scale[c]
  in all_products n cols x (\c i -> decode_weight w[c, i]) scaled

-- | sum over blocks of (sum x.w) * x_scale[block] * w_scale[block].
#[noinline]
def products_fp8_block [t] [cols] [ss] [n] [sw] [bn] [sws]
                       (x: [t][cols]f32)
                       (x_scale: [t][ss]f32)
                       (w: [n][sw]u8)
                       (w_scale: [bn][sws]f32) : [n][t]f32 =
  #[unsafe]
  let scaled c r b sum = sum * sum_factor * x_scale[r, b] * w_scale[c / scale_block, b]
  in all_products n scale_block x (\c i -> decode_weight w[c, i]) scaled
