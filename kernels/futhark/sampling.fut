-- | glm_sampling as the 32-bit words that it is made of.

-- | What a request asks of the sampler; `words` holds its ids and bias values.
type sampling [words] = {
  seed: (u32, u32),
  temperature: f32,
  top_p: f32,
  min_p: f32,
  repetition: f32,
  frequency: f32,
  presence: f32,
  top_k: i32,
  min_tokens: i32,
  prompt_len: i32,
  num_logprobs: i32,
  num_stop_ids: i32,
  num_bias: i32,
  words: [words]u32
}

def max_stop_ids : i64 = 64
def max_bias : i64 = 300
local def first_list : i64 = 14

def sampling_of [n] (words: [n]u32) : sampling [n] =
  #[unsafe]
  { seed = (words[0], words[1])
  , temperature = f32.from_bits words[2]
  , top_p = f32.from_bits words[3]
  , min_p = f32.from_bits words[4]
  , repetition = f32.from_bits words[5]
  , frequency = f32.from_bits words[6]
  , presence = f32.from_bits words[7]
  , top_k = i32.u32 words[8]
  , min_tokens = i32.u32 words[9]
  , prompt_len = i32.u32 words[10]
  , num_logprobs = i32.u32 words[11]
  , num_stop_ids = i32.u32 words[12]
  , num_bias = i32.u32 words[13]
  , words = words
  }

def stop_id [n] (asked: sampling [n]) (i: i64) : i64 = #[unsafe] i64.i32 (i32.u32 asked.words[first_list + i])

def bias_id [n] (asked: sampling [n]) (i: i64) : i64 =
  #[unsafe] i64.i32 (i32.u32 asked.words[first_list + max_stop_ids + i])

def bias_value [n] (asked: sampling [n]) (i: i64) : f32 =
  #[unsafe] f32.from_bits asked.words[first_list + max_stop_ids + max_bias + i]

def has_penalty [n] (asked: sampling [n]) : bool =
  asked.repetition != 1 || asked.frequency != 0 || asked.presence != 0

def is_noisy [n] (asked: sampling [n]) : bool = asked.temperature != 0

def cuts [n] (asked: sampling [n]) : bool = asked.top_k > 0 || asked.top_p < 1 || asked.min_p > 0
