-- | The number formats, each with the functions whose inner loops read it. Those are compiled once a format, whatever
-- operation calls them: they take and give f32.

import "attend"
import "element"
import "expert_products"
import "matmul"

module type codec = {
  include element

  -- | Products of rows of x with every row of w.
  val products [t] [cols] [n] [sw] : (x: [t][cols]f32) -> (w: [n][sw]t) -> [n][t]f32

  -- | See expert_products.fut.
  val expert_products [r] [cols] [m] [c1] [n] [count] :
    (x: [r][cols]f32)
    -> (source: [m]i64)
    -> (offsets: [c1]i32)
    -> (w: [n]t)
    -> (at: [count]i64)
    -> (stride: i64)
    -> (rows: i64)
    -> [m][rows]f32

  -- | See attend.fut.
  val attend [t] [slots] [pages] [heads] [d] [n] :
    (positions: [t]i32)
    -> (row_slots: [t]i32)
    -> (page_table: [slots][pages]i32)
    -> (query: [t][heads][d]f32)
    -> (k: [n]t)
    -> (v: [n]t)
    -> (kv_heads: i64)
    -> [t][heads][d]f32
}

local module mk_codec (E: element) : codec with t = E.t = {
  open E
  open mk_products E
  open mk_expert_products E
  open mk_attend E
}

module f32c : codec with t = f32 = mk_codec f32_element
module bf16c : codec with t = u16 = mk_codec bf16_element
module f16c : codec with t = u16 = mk_codec f16_element
module fp8c : codec with t = u8 = mk_codec fp8_element
