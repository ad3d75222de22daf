-- | page_table[slot][index] = page for each update (slot, index, page).
def update_pages [u] [slots] [pages]
                 (updates: [u][3]i32)
                 (page_table: *[slots][pages]i32) : *[slots][pages]i32 =
  let places = map (\update -> (i64.i32 update[0], i64.i32 update[1])) updates
  in scatter_2d page_table places (map (\update -> update[2]) updates)
