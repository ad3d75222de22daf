-- The args of an op as far as the plan's text decides them. A pointer is nil or, where the runtime has to give an address,
-- PRESENT. The semantics are those of the binder (native/src/exec/bind_*.cpp), against which each field is held at start.

local C = require("abi")
local ffi = require("ffi")

ffi.cdef("float strtof(const char*, char**);")

local PRESENT = ffi.cast("void*", 1)
local DTYPES = { f32 = C.GLM_F32, bf16 = C.GLM_BF16, fp8 = C.GLM_FP8_E4M3, i32 = C.GLM_I32 }
local FORMATS = {
  f32 = C.GLM_W_F32,
  bf16 = C.GLM_W_BF16,
  f16 = C.GLM_W_F16,
  fp8_channel = C.GLM_W_FP8_CHANNEL,
  fp8_block = C.GLM_W_FP8_BLOCK,
}

local Reader = {}
Reader.__index = Reader

function Reader:fail(key, message)
  error(("%s, line %d: op %s %s: %s: %s"):format(
    self.plan.path, self.op.line, self.op.kind, self.op.label, key, message), 0)
end

function Reader:value(key)
  return self.op.values[key] or self:fail(key, "expected " .. key .. "=...")
end

function Reader:declared(key, map, what)
  return map[self:value(key)] or self:fail(key, ("no %s is named '%s'"):format(what, self:value(key)))
end

function Reader:integer(key)
  return tonumber(self:value(key)) or self:fail(key, "'" .. self:value(key) .. "', expected an integer")
end

-- Rounded once, as the runtime rounds it.
function Reader:float(key)
  return ffi.C.strtof(self:value(key), nil)
end

function Reader:has(key)
  return self.op.values[key] ~= nil
end

function Reader:address(key)
  return self:has(key) and PRESENT or nil
end

-- `absent`: the dtype of a tensor that is not there.
function Reader:tensor(field, absent, key)
  key = key or field
  local tensor = self.args[field]
  tensor.dtype = DTYPES[absent or "f32"]
  if not self:has(key) then return end
  local buffer = self:declared(key, self.plan.buffers, "buffer")
  tensor.data, tensor.dtype, tensor.cols, tensor.stride = PRESENT, DTYPES[buffer.dtype], buffer.cols, buffer.cols
end

function Reader:act(...)
  for _, field in ipairs({ ... }) do
    self:tensor(field, self.plan.act)
  end
end

-- What is quantised to, beside `out`.
function Reader:quantized()
  self:tensor("q", "fp8")
  self:tensor("scale", "f32")
end

local function is_fp8(format)
  return format:match("^fp8_") ~= nil
end

function Reader:input(format)
  self:tensor("x", is_fp8(format) and "fp8" or self.plan.act)
  self:tensor("x_scale", "f32")
end

local function put_weight(weight, format, part)
  weight.data, weight.rows = PRESENT, part.rows
  weight.scale = is_fp8(format) and PRESENT or nil
end

function Reader:whole(field, key)
  local matrix = self:declared(key, self.plan.matrices, "matrix")
  self.args.format = FORMATS[matrix.format]
  put_weight(self.args[field], matrix.format, matrix.parts[1])
  return matrix
end

function Reader:experts(field)
  local experts, to = self:declared(field, self.plan.experts, "experts"), self.args[field]
  to.experts, to.format, to.first = PRESENT, FORMATS[experts.format], experts.first
  to.count, to.rows, to.cols = experts.count, experts.rows, experts.cols
  return experts
end

function Reader:integers(...)
  for _, field in ipairs({ ... }) do
    self.args[field] = self:integer(field)
  end
end

function Reader:addresses(...)
  for _, field in ipairs({ ... }) do
    self.args[field] = PRESENT
  end
end

function Reader:kv()
  local kv = self.plan.kv or self:fail("layer", "the plan has no kv record")
  local to = self.args.kv
  to.k, to.v, to.dtype, to.kv_heads, to.head_dim = PRESENT, PRESENT, DTYPES[kv.dtype], kv.heads, kv.head_dim
end

local ops = {}

function ops.embed(r)
  r:addresses("step", "slots")
  r:act("out")
  r:whole("table", "table")
end

function ops.rms_norm(r)
  r:act("residual", "delta", "out")
  r:quantized()
  r:addresses("weight")
  r.args.eps = r:float("eps")
  r.args.reduce = r:has("reduce") and r:integer("reduce") or 0
end

function ops.quantize(r)
  r:act("x")
  r:quantized()
end

function ops.linear(r)
  local matrix = r:declared("w", r.plan.matrices, "matrix")
  r.args.format, r.args.num_parts = FORMATS[matrix.format], #matrix.parts
  r:input(matrix.format)
  for i, part in ipairs(matrix.parts) do
    put_weight(r.args.parts[i - 1], matrix.format, part)
    r.args.bias[i - 1] = part.bias and PRESENT or nil
  end
  r:act("out")
end

function ops.qk_norm_rope_store(r)
  r:addresses("step", "slots", "rope_cos", "rope_sin")
  r:kv()
  r:integers("heads")
  r:act("qkv", "out")
  r.args.q_norm, r.args.k_norm = r:address("q_norm"), r:address("k_norm")
  if r:has("eps") then r.args.eps = r:float("eps") end
  r.args.rotary_dim = r:declared("rope", r.plan.ropes, "rope").rotary_dim
end

function ops.paged_attention(r)
  r:addresses("step", "slots")
  r:kv()
  r:integers("heads")
  r:act("q", "out")
  r.args.softmax_scale = r:float("softmax_scale")
end

function ops.silu_mul(r)
  r:act("x", "out")
  r:quantized()
end

function ops.moe_route(r)
  r:act("x")
  r.args.experts = r:whole("weight", "w").rows
  r.args.bias, r.args.places = r:address("bias"), r:address("placement")
  r:integers("top_k", "groups", "topk_groups", "normalize")
  r.args.scale = r:float("scale")
  r:tensor("ids", "i32")
  r:tensor("weights", "f32")
end

function ops.moe_group(r)
  r:integers("top_k", "first", "count")
  r:tensor("ids", "i32")
  r:addresses("offsets", "order", "loads", "step")
end

function ops.moe_gate_up(r)
  r:integers("top_k")
  local gate = r:experts("gate")
  r:experts("up")
  r:input(gate.format)
  r:addresses("offsets", "order")
  r:act("out")
  r:quantized()
end

function ops.moe_down_each(r)
  r:integers("top_k")
  r:input(r:experts("down").format)
  r:addresses("offsets", "order")
  r:act("out")
end

function ops.moe_down(r)
  ops.moe_down_each(r)
  r:tensor("ids", "i32")
  r:tensor("weights", "f32")
  r:act("base")
end

function ops.moe_dispatch(r)
  r:integers("top_k", "first", "count")
  r:tensor("ids", "i32")
  r:act("x")
  r:tensor("x_scale", "f32")
end

function ops.moe_combine(r)
  r:integers("top_k", "count")
  r:tensor("ids", "i32")
  r:tensor("weights", "f32")
  r:act("products", "base", "out")
end

function ops.all_reduce(r)
  r:act("x")
end
ops.reduce_scatter, ops.all_gather = ops.all_reduce, ops.all_reduce

function ops.gather_rows(r)
  r:addresses("step")
  r:act("x", "out")
end

function ops.sample(r)
  r:addresses("step", "slots")
  r:tensor("logits", "f32")
  r.args.first = r:has("first") and r:integer("first") or 0
end

-- The args struct of a kind of op.
local function args_type(kind)
  return C["glm_" .. kind .. "_args"]
end

local function make(plan, op)
  local fill = ops[op.kind]
  if not fill then error(("%s, line %d: unknown op '%s'"):format(plan.path, op.line, op.kind), 0) end
  local reader = setmetatable({ plan = plan, op = op, args = terralib.new(args_type(op.kind)) }, Reader)
  fill(reader)
  return reader.args
end

local kinds = terralib.newlist()
for kind in pairs(ops) do
  kinds:insert(kind)
end
table.sort(kinds)

return { make = make, args_type = args_type, kinds = kinds }
