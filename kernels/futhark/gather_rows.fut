import "codec"

module mk_gather_rows (A: codec) = {
  -- | out[i] = x[sample_rows[i]].
  def gather_rows [s] [t] [sx] [so]
                  (sample_rows: [s]i32)
                  (x: [t][sx]A.t)
                  (cols: i64)
                  (out: *[s][so]A.t) : *[s][so]A.t =
    #[unsafe]
    let rows = map (\row -> tabulate cols (\c -> x[i64.i32 row, c])) sample_rows
    in out with [:, 0:cols] = rows
}
