-- | Dynamic symmetric FP8 of rows: a scale for each group of columns.

import "fp8"
import "matmul"

-- | The scale of column c, where a group is the whole row of `cols` or 128 columns.
def group_of (group: i64) (cols: i64) (c: i64) : i64 = if group == cols then 0 else c / scale_block

-- | absmax / 448 over columns [begin, end); 1 where that is zero. A NaN makes it NaN: on magnitudes the order of floats is
-- that of their bits, with NaN on top.
def scale_of (begin: i64) (end: i64) (value: i64 -> f32) : f32 =
  let absmax =
    loop absmax = 0u32
    for i < end - begin do
      u32.max absmax (f32.to_bits (value (begin + i)) & 0x7fffffff)
  let scale = f32.from_bits absmax / 448
  in if scale == 0 then 1 else scale

-- | The codes and scales of `rows` rows of values that are already rounded to act.
def quantized (rows: i64) (cols: i64) (groups: i64) (group: i64) (value: i64 -> i64 -> f32)
             : ([rows][cols]u8, [rows][groups]f32) =
  #[unsafe]
  let scales =
    tabulate rows (\r ->
                     tabulate groups (\g -> scale_of (g * group) (i64.min cols ((g + 1) * group)) (value r)))
  let codes =
    tabulate rows (\r ->
                     tabulate cols (\c -> encode (value r c / scales[r, group_of group cols c])))
  in (codes, scales)

def num_groups (cols: i64) (group: i64) : i64 = (cols + group - 1) / group
