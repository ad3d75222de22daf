-- | Where a KV page holds a token: [pages][kv_heads][16][head_dim], flat.

def page_size : i64 = 16

-- | The first element of a token of one head; `page` and `kv_head` choose the head's part of a page.
def kv_offset (kv_heads: i64) (head_dim: i64) (page: i64) (kv_head: i64) (token: i64) : i64 =
  ((page * kv_heads + kv_head) * page_size + token) * head_dim
