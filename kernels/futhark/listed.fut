-- | The listed assignments, order[0:offsets[count]], as rows of their own.

-- | The row of a matrix with one row for `per_row` assignments that each listed assignment has.
def sources [n] [c1] (per_row: i64) (order: [n]i32) (offsets: [c1]i32) : []i64 =
  #[unsafe]
  map (\a -> i64.i32 a / per_row) order[0:i64.i32 offsets[c1 - 1]]

-- | Row i of a result to row order[i] of `out`, whose first columns it is. An absent `out` has no rows.
def store_listed 'a [m] [n] [rows] [o] [so] (order: [n]i32) (value: [m][rows]a) (out: *[o][so]a) : *[o][so]a =
  #[unsafe]
  let count = if o == 0 then 0 else m * rows
  let places = tabulate count (\i -> (i64.i32 order[i / rows], i % rows))
  in scatter_2d out places (tabulate count (\i -> value[i / rows, i % rows]))
