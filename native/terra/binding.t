-- Brings together an op's constants and the addresses of the op that the runtime has bound.

local C = require("abi")
local constants = require("constants")

-- Scalars that loading decides, not the plan; `rows` is each step's.
local LOADED = {
  [C.glm_weight] = { stride = true, scale_stride = true },
  [C.glm_moe_group_args] = { spare_slot = true },
}

-- Calls each(path, own, bound, type, loaded) for all scalars and pointers below `own` and `bound`, lvalues of `type`.
local function each_field(type, own, bound, path, loaded, each)
  if type:isstruct() then
    for _, entry in ipairs(type:getentries()) do
      local name = path == "" and entry.field or path .. "." .. entry.field
      local decided = (LOADED[type] and LOADED[type][entry.field]) or name == "rows"
      each_field(entry.type, `own.[entry.field], `bound.[entry.field], name, decided, each)
    end
  elseif type:isarray() then
    for i = 0, type.N - 1 do
      each_field(type.type, `own[i], `bound[i], ("%s[%d]"):format(path, i), false, each)
    end
  else
    each(path, own, bound, type, loaded)
  end
end

-- Terra function of an args type: takes over what loading decided. Gives the first field in which the plan's constants
-- and the bound op differ, or nil.
local merge = terralib.memoize(function(Args)
  local own, bound = symbol(&Args), symbol(&Args)
  local body = terralib.newlist()
  each_field(Args, `@own, `@bound, "", false, function(path, mine, theirs, type, loaded)
    if type:ispointer() then
      body:insert(quote
        if (mine ~= nil) ~= (theirs ~= nil) then return path end
        mine = theirs
      end)
    elseif loaded then
      body:insert(quote mine = theirs end)
    else
      body:insert(quote if mine ~= theirs then return path end end)
    end
  end)
  local terra merged([own], [bound]): rawstring
    [body]
    return nil
  end
  merged:setinlined(false)
  return merged
end)

-- Quote that fills `place` (an lvalue of the op's args) from `bound` (its glm_driver_op); `refuse(what)` is a quote of what
-- to do where they differ.
local function bind(plan, op, place, bound, refuse)
  local Args = constants.args_type(op.kind)
  local made = terralib.constant(constants.make(plan, op))
  local kind = C["GLM_OP_" .. op.kind:upper()]
  return quote
    if bound.kind ~= kind then [refuse(`"kind")] end
    C.memcpy(&place, &made, sizeof(Args))
    var differs = [merge(Args)](&place, [&Args](bound.args))
    if differs ~= nil then [refuse(differs)] end
  end
end

return { bind = bind, each_field = each_field }
