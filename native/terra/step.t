-- One plan as functions: start, forward, sample, stop. One function a layer, a call after the other.

local C = require("abi")
local binding = require("binding")
local constants = require("constants")

-- Tensors that move on where an op runs on the rows that the rank has to itself (native/src/exec/own_rows.h).
local OWN_ROWS = {
  rms_norm = { "residual", "delta", "out", "q", "scale" },
  linear = { "x", "x_scale", "out" },
  silu_mul = { "x", "out", "q", "scale" },
  moe_route = { "x", "ids", "weights" },
}
local BYTES = { [C.GLM_F32] = 4, [C.GLM_BF16] = 2, [C.GLM_FP8_E4M3] = 1, [C.GLM_I32] = 4 }

-- Runs of consecutive ops of one layer, or of none: lists of places in the plan.
local function runs_of(plan, first, last)
  local runs = terralib.newlist()
  for i = first, last do
    local run = runs[#runs]
    if not run or plan.ops[run[1]].layer ~= plan.ops[i].layer then
      run = terralib.newlist()
      runs:insert(run)
    end
    run:insert(i)
  end
  return runs
end

-- The context: what is bound, then the args of each op, those of a run together; in a debug build a second time, as they
-- were at start. (One struct of thousands of fields takes Terra minutes.)
local function context_type(plan, debug)
  local Context = terralib.types.newstruct("Context_" .. plan.name)
  Context.entries:insertall({
    { field = "kernels", type = &C.glm_kernels },
    { field = "device", type = &C.glm_device },
    { field = "mark", type = &C.glm_driver_mark },
    { field = "ops", type = &C.glm_driver_op },
    { field = "max_rows", type = int32 },
    { field = "max_samples", type = int32 },
  })
  for number, run in ipairs(runs_of(plan, 1, #plan.ops)) do
    local Run = terralib.types.newstruct(("Run_%s_%d"):format(plan.name, number))
    for _, i in ipairs(run) do
      local op = plan.ops[i]
      op.run, op.place, op.sealed = "run_" .. number, "op_" .. i, "sealed_" .. i
      Run.entries:insert({ field = op.place, type = constants.args_type(op.kind) })
      if debug then Run.entries:insert({ field = op.sealed, type = constants.args_type(op.kind) }) end
    end
    Context.entries:insert({ field = "run_" .. number, type = Run })
  end
  return Context
end

local function has_field(Args, name)
  for _, entry in ipairs(Args:getentries()) do
    if entry.field == name then return true end
  end
  return false
end

-- Rows are the step's samples, not its tokens.
local function is_sampled(op)
  return op.values.rows == "S" or op.kind == "sample" or op.kind == "gather_rows"
end

-- Debug builds: what must hold before the op is called.
local function checks(op, i, ctx, rows, fault)
  local Args = constants.args_type(op.kind)
  local function broken(what)
    return quote
      fault.op, fault.what = [i - 1], what
      return C.GLM_INTERNAL
    end
  end
  local list = terralib.newlist()
  -- `rows` comes first in every args struct.
  list:insert(quote
    if C.memcmp([&uint8](&ctx.[op.run].[op.place]) + 4, [&uint8](&ctx.[op.run].[op.sealed]) + 4, [sizeof(Args) - 4]) ~= 0 then
      [broken("its arguments have changed since start")]
    end
  end)
  if has_field(Args, "step") then
    local counted = is_sampled(op) and "num_samples" or "num_rows"
    list:insert(quote
      if ctx.[op.run].[op.place].step.[counted] ~= rows then [broken("the step has another number of rows")] end
    end)
  end
  return list
end

-- The call of an op whose rows are the rank's own.
local function call_own(op, made, ctx, kernels, device, rows, layout)
  local moves, own = terralib.newlist(), symbol(constants.args_type(op.kind))
  local first, last = symbol(int64), symbol(int64)
  for _, field in ipairs(OWN_ROWS[op.kind]) do
    local tensor = made[field]
    if tensor.data ~= nil then
      local bytes = tonumber(tensor.stride) * BYTES[tonumber(tensor.dtype)]
      moves:insert(quote own.[field].data = [&uint8](own.[field].data) + first * bytes end)
    end
  end
  return quote
    var [first] = [int64](rows) * [layout.rank] / [layout.num_ranks]
    var [last] = [int64](rows) * [layout.rank + 1] / [layout.num_ranks]
    var [own]
    C.memcpy(&own, &ctx.[op.run].[op.place], sizeof([constants.args_type(op.kind)]))
    [moves]
    own.rows = [int32](last - first)
  in
    kernels.[op.kind](device, &own)
  end
end

local function call(op, ctx, kernels, device, rows)
  return quote
    ctx.[op.run].[op.place].rows = rows
  in
    kernels.[op.kind](device, &ctx.[op.run].[op.place])
  end
end

-- A run of ops as a function.
local function make_layer(plan, run, Context, layout)
  local ctx, fault = symbol(&Context), symbol(&C.glm_driver_fault)
  local num_rows, num_samples = symbol(int32), symbol(int32)
  local kernels, device = symbol(&C.glm_kernels), symbol(&C.glm_device)
  local mark, calls = symbol(&C.glm_driver_mark), symbol(uint64)
  local body = terralib.newlist()
  for begun, i in ipairs(run) do
    local op = plan.ops[i]
    local rows = is_sampled(op) and num_samples or num_rows
    if layout.debug then body:insertall(checks(op, i, ctx, rows, fault)) end
    local called = op.values.rows == "O" and call_own(op, constants.make(plan, op), ctx, kernels, device, rows, layout)
      or call(op, ctx, kernels, device, rows)
    body:insert(quote
      mark.op = ctx.ops[ [i - 1] ].id
      mark.calls = calls + begun
      var status = called
      if status ~= C.GLM_OK then return status end
    end)
  end
  local terra layer([ctx], [num_rows], [num_samples], [fault]): C.glm_status
    var [kernels], [device], [mark] = ctx.kernels, ctx.device, ctx.mark
    var [calls] = mark.calls
    [body]
    return C.GLM_OK
  end
  layer:setname(("%s_layer_%s"):format(plan.name, plan.ops[run[1]].layer or "none"))
  layer:setinlined(false)
  return layer
end

local function entry_checks(plan, ctx, num_rows, num_samples, fault)
  local function broken(what)
    return quote
      fault.op, fault.what = -1, what
      return C.GLM_INTERNAL
    end
  end
  local list = terralib.newlist()
  list:insert(quote
    if ctx.kernels == nil then [broken("it has not been started")] end
    if num_rows < 0 or num_rows > ctx.max_rows then [broken("rows beyond max_rows")] end
    if num_samples < 0 or num_samples > ctx.max_samples then [broken("samples beyond max_samples")] end
  end)
  if plan.name == "decode" then
    list:insert(quote if num_rows ~= num_samples then [broken("rows of decode that are not sampled")] end end)
  end
  return list
end

local function make_run(plan, first, last, Context, layout)
  local ctx, fault = symbol(&Context), symbol(&C.glm_driver_fault)
  local num_rows, num_samples = symbol(int32), symbol(int32)
  local body = terralib.newlist()
  if layout.debug then body:insertall(entry_checks(plan, ctx, num_rows, num_samples, fault)) end
  for _, ops in ipairs(runs_of(plan, first, last)) do
    local layer = make_layer(plan, ops, Context, layout)
    body:insert(quote
      var status = layer(ctx, num_rows, num_samples, fault)
      if status ~= C.GLM_OK then return status end
    end)
  end
  local terra run(context: &opaque, [num_rows], [num_samples], [fault]): C.glm_status
    var [ctx] = [&Context](context)
    [body]
    return C.GLM_OK
  end
  return run
end

-- Binds the ops of a run.
local function make_start_layer(plan, run, Context, layout)
  local ctx, ops, fault = symbol(&Context), symbol(&C.glm_driver_op), symbol(&C.glm_driver_fault)
  local body = terralib.newlist()
  for _, i in ipairs(run) do
    local op = plan.ops[i]
    body:insert(binding.bind(plan, op, `ctx.[op.run].[op.place], `ops[ [i - 1] ], function(what)
      return quote
        fault.op, fault.what = [i - 1], what
        return C.GLM_INVALID_ARGUMENT
      end
    end))
    if layout.debug then
      body:insert(quote
        C.memcpy(&ctx.[op.run].[op.sealed], &ctx.[op.run].[op.place], sizeof([constants.args_type(op.kind)]))
      end)
    end
  end
  local terra start_layer([ctx], [ops], [fault]): C.glm_status
    [body]
    return C.GLM_OK
  end
  start_layer:setinlined(false)
  return start_layer
end

local function make_start(plan, Context, layout)
  local ctx, bound, fault = symbol(&Context), symbol(&C.glm_driver_binding), symbol(&C.glm_driver_fault)
  local body = terralib.newlist()
  for _, run in ipairs(runs_of(plan, 1, #plan.ops)) do
    local start_layer = make_start_layer(plan, run, Context, layout)
    body:insert(quote
      var status = start_layer(ctx, bound.ops, fault)
      if status ~= C.GLM_OK then return status end
    end)
  end
  local terra start(context: &opaque, [bound], [fault]): C.glm_status
    var [ctx] = [&Context](context)
    ctx.kernels = nil
    fault.op = -1
    fault.what = "the number of ops"
    if bound.num_ops ~= [#plan.ops] then return C.GLM_INVALID_ARGUMENT end
    fault.what = "the rank"
    if bound.rank ~= [layout.rank] or bound.num_ranks ~= [layout.num_ranks] then return C.GLM_INVALID_ARGUMENT end
    [body]
    fault.what = nil
    ctx.device, ctx.mark, ctx.ops = bound.device, bound.mark, bound.ops
    ctx.max_rows, ctx.max_samples = bound.max_rows, bound.max_samples
    ctx.kernels = bound.kernels
    return C.GLM_OK
  end
  return start
end

-- layout: rank, num_ranks, debug. Gives the fields of a glm_driver_plan.
local function make(plan, layout)
  local sample
  for i, op in ipairs(plan.ops) do
    if op.kind == "sample" then sample = i end
  end
  if not sample then error(plan.path .. ": no sample op, expected one", 0) end
  local Context = context_type(plan, layout.debug)
  local terra stop(context: &opaque)
    var ctx = [&Context](context)
    ctx.kernels, ctx.device, ctx.mark, ctx.ops = nil, nil, nil, nil
  end
  return {
    num_ops = #plan.ops,
    context_bytes = terralib.sizeof(Context),
    start = make_start(plan, Context, layout),
    forward = make_run(plan, 1, sample - 1, Context, layout),
    sample = make_run(plan, sample, #plan.ops, Context, layout),
    stop = stop,
  }
end

return { make = make }
