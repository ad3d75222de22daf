-- | Assignments packed by expert: a stable counting sort. Chunks of assignments are counted, and later placed, in parallel.

local def chunk_size : i64 = 256

-- | offsets[e] .. offsets[e + 1]: the places of expert first + e's assignments in `order`, ascending; those of experts
-- elsewhere are left out. To `loads`, if any, is added what rows of other slots than `spare_slot` ask of each expert.
def moe_group [t] [si] [tl] [c1] [n] [cl]
              (ids: [t][si]i32)
              (top_k: i64)
              (first: i64)
              (row_slots: [tl]i32)
              (spare_slot: i32)
              (offsets: *[c1]i32)
              (order: *[n]i32)
              (loads: *[cl]u64) : (*[c1]i32, *[n]i32, *[cl]u64) =
  #[unsafe]
  let count = c1 - 1
  let assignments = t * top_k
  let expert (a: i64) = i64.i32 ids[a / top_k, a % top_k] - first
  let is_local (e: i64) = e >= 0 && e < count
  let chunks = (assignments + chunk_size - 1) / chunk_size
  let counts =
    tabulate chunks (\chunk ->
                       loop counts = replicate count 0i32
                       for i < i64.min chunk_size (assignments - chunk * chunk_size) do
                         let e = expert (chunk * chunk_size + i)
                         in if is_local e then counts with [e] = counts[e] + 1 else counts)
  let before = map (scan (+) 0) (transpose counts)
  let ends = scan (+) 0 (map (\sums -> if chunks == 0 then 0 else sums[chunks - 1]) before)
  let start (e: i64) = if e == 0 then 0 else ends[e - 1]
  let places =
    tabulate chunks (\chunk ->
                       let next = tabulate count (\e -> start e + before[e, chunk] - counts[chunk, e])
                       let (_, places) =
                         loop (next, places) = (next, replicate chunk_size (-1i64))
                         for i < i64.min chunk_size (assignments - chunk * chunk_size) do
                           let e = expert (chunk * chunk_size + i)
                           in if is_local e
                              then let place = next[e]
                                   in (next with [e] = place + 1, places with [i] = i64.i32 place)
                              else (next, places)
                       in places)
  let asked =
    tabulate (tl * top_k) (\a -> if row_slots[a / top_k] == spare_slot then -1 else expert a)
  let order = scatter order (flatten places) (map i32.i64 (iota (chunks * chunk_size)))
  in ( scatter offsets (iota c1) (tabulate c1 start)
     , order
     , reduce_by_index loads (+) 0 asked (replicate (tl * top_k) 1)
     )
