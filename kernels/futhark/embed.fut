-- | Rows of the embedding table, and rows copied for sampling.

import "codec"

module mk_embed (A: codec) (W: codec) = {
  -- | out[r] = table[token(r)]; token -1 stands for the newest one of the row's slot.
  def embed [t] [slots] [v] [sw] [so]
            (token_ids: [t]i32)
            (row_slots: [t]i32)
            (last_token: [slots]i32)
            (table: [v][sw]W.t)
            (cols: i64)
            (out: *[t][so]A.t) : *[t][so]A.t =
    #[unsafe]
    let token (r: i64) =
      i64.i32 (if token_ids[r] == -1 then last_token[i64.i32 row_slots[r]] else token_ids[r])
    let rows =
      tabulate t (\r ->
                    let from = token r
                    in tabulate cols (\c -> A.store (W.load table[from, c])))
    in out with [:, 0:cols] = rows
}
