-- | The order of tokens: value descending, then id ascending, as integers. Sums over tokens are of integers too, so no
-- order of adding matters.

import "float_math"

-- | Larger values have smaller keys; 0 and -0 have the same; NaN counts as -inf.
def key_of (value: f32) : u32 =
  let number = if value == 0 then 0 else if f32.isnan value then -f32.inf else value
  let bits = f32.to_bits number
  in if (bits >> 31) != 0 then bits else !(bits | 0x80000000)

def value_of (key: u32) : f32 = f32.from_bits (if (key >> 31) != 0 then key else !key & 0x7fffffff)

-- | The key of -inf: no token that has it is ever chosen.
def never : u32 = 0xff800000

-- | Bits below a key in a token's rank: ids are less than 2^23.
local def id_bits : u64 = 23

def rank (key: u32) (id: i64) : u64 = (u64.u32 key << id_bits) | u64.i64 id

def last_of_key (key: u32) : u64 = ((u64.u32 key + 1) << id_bits) - 1

def id_of_rank (token: u64) : i64 = i64.u64 (token & ((1 << id_bits) - 1))

def value_of_rank (token: u64) : f32 = value_of (u32.u64 (token >> id_bits))

-- | exp(value - max) times 2^40; 2^40 for the maximum itself even where that is infinite.
def weight_below (max: u32) (key: u32) : u64 =
  if key == max then 1 << 40 else u64.f32 (exp_f32 (value_of key - value_of max) * 1.099511627776e12f32)

-- | The best of some tokens' ranks.
def best_rank [n] (tokens: [n]u64) : u64 = reduce_comm u64.min u64.highest tokens
