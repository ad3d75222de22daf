-- Reads a plan text (native/PLAN.md): what of it the args of its ops are made of.

local kinds = {}

local function fail(plan, message)
  error(("%s, line %d: %s"):format(plan.path, plan.line, message), 0)
end

local function words_and_values(plan, text)
  local words, values = {}, {}
  for field in text:gmatch("[^ ]+") do
    local key, value = field:match("^([^=]+)=(.+)$")
    if key then
      if values[key] then fail(plan, "key '" .. key .. "' is given twice") end
      values[key] = value
    else
      table.insert(words, field)
    end
  end
  return words, values
end

local function number(plan, text)
  return tonumber(text) or fail(plan, "'" .. tostring(text) .. "', expected a number")
end

function kinds.name(plan, words)
  plan.name = words[2]
end

function kinds.act(plan, words)
  plan.act = words[2]
end

function kinds.kv(plan, _, values)
  plan.kv = { dtype = values.dtype, heads = number(plan, values.kv_heads), head_dim = number(plan, values.head_dim) }
end

function kinds.rope(plan, words, values)
  plan.ropes[words[2]] = { rotary_dim = number(plan, values.rotary_dim) }
end

function kinds.buffer(plan, words)
  plan.buffers[words[2]] = { dtype = words[3], cols = number(plan, words[5]) }
end

function kinds.matrix(plan, words)
  plan.matrix = { format = words[3], rows = number(plan, words[4]), parts = {} }
  plan.matrices[words[2]] = plan.matrix
end

function kinds.part(plan, _, values)
  local first, last = values.rows:match("^(%d+):(%d+)$")
  table.insert(plan.matrix.parts, { rows = number(plan, last) - number(plan, first), bias = values.bias ~= nil })
end

function kinds.experts(plan, words, values)
  plan.experts[words[2]] = {
    format = words[3],
    count = number(plan, words[4]),
    rows = number(plan, words[5]),
    cols = number(plan, words[6]),
    first = number(plan, values.first),
  }
end

-- Of the layer that its label is of, if any: layers.17.attn.qkv.
function kinds.op(plan, words, values)
  local op = { kind = words[2], label = words[3], line = plan.line, values = values }
  op.layer = op.label:match("^layers%.(%d+)%.")
  table.insert(plan.ops, op)
end

-- The runtime alone needs these.
for _, kind in ipairs({ "meta", "vocab", "vector", "placement" }) do
  kinds[kind] = function() end
end

local function read(path)
  local plan = { path = path, line = 0, ropes = {}, buffers = {}, matrices = {}, experts = {}, ops = {} }
  for text in io.lines(path) do
    plan.line = plan.line + 1
    local words, values = words_and_values(plan, text)
    if plan.line == 1 then
      if text ~= "glmplan 1" then fail(plan, "'" .. text .. "', expected 'glmplan 1'") end
    elseif text:sub(1, 1) ~= "#" then
      local record = kinds[words[1]] or fail(plan, "unknown record '" .. tostring(words[1]) .. "'")
      record(plan, words, values)
    end
  end
  return plan
end

return { read = read }
