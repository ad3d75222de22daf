-- | Sums of floats in one order, whatever the batch and the device: lane l adds terms l, l + 16, ... ascending, the lanes
-- are added in a fixed tree, then what does not fill the lanes one by one. 16 scalars are what a C compiler turns into
-- vector registers, without leave to reorder sums. They are written out because the compiler inlines a few calls in much
-- less time than a recursion of modules.

local type four = (f32, f32, f32, f32)

local def add4 ((a, b, c, d): four) (i: i64) (term: i64 -> f32) : four =
  (a + term i, b + term (i + 1), c + term (i + 2), d + term (i + 3))

local def total4 ((a, b, c, d): four) : f32 = (a + b) + (c + d)

-- | The sum of term i for i in [begin, end).
def sum_range (begin: i64) (end: i64) (term: i64 -> f32) : f32 =
  let blocks = (end - begin) / 16
  let zero: four = (0, 0, 0, 0)
  let (a, b, c, d) =
    loop (a, b, c, d) = (zero, zero, zero, zero)
    for block < blocks do
      let i = begin + block * 16
      in (add4 a i term, add4 b (i + 4) term, add4 c (i + 8) term, add4 d (i + 12) term)
  let rest = begin + blocks * 16
  in loop total = (total4 a + total4 b) + (total4 c + total4 d)
     for i < end - rest do
       total + term (rest + i)

def sum_of (n: i64) (term: i64 -> f32) : f32 = sum_range 0 n term
