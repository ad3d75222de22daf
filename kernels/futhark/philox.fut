-- | Philox4x32-10 (Salmon et al. 2011).

local def high_low (a: u32) (b: u32) : (u32, u32) =
  let product = u64.u32 a * u64.u32 b
  in (u32.u64 (product >> 32), u32.u64 product)

-- | The four words at a counter, with a key.
def philox (counter: (u32, u32, u32, u32)) (key: (u32, u32)) : (u32, u32, u32, u32) =
  let ((x0, x1, x2, x3), _) =
    loop ((x0, x1, x2, x3), (key0, key1)) = (counter, key)
    for _i < 10i32 do
      let (high0, low0) = high_low 0xD2511F53 x0
      let (high1, low1) = high_low 0xCD9E8D57 x2
      in ((high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0), (key0 + 0x9E3779B9, key1 + 0xBB67AE85))
  in (x0, x1, x2, x3)
