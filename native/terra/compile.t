-- Compiles the plans of a rank to a driver (native/include/glm/driver.h):
--   INCLUDE=DIRS terra compile.t OBJECT MIXED DECODE RANK NUM_RANKS release|debug
-- writes a relocatable object, which any C compiler links: cc -shared OBJECT -o DRIVER.so

local directory = arg[0]:match("^(.*)/[^/]*$") or "."
package.terrapath = directory .. "/?.t;" .. package.terrapath

local C = require("abi")
local plans = require("plan")
local step = require("step")

local TARGET = { Triple = "x86_64-unknown-linux-gnu", CPU = "x86-64-v3" }

local function made(path, name, layout)
  local plan = plans.read(path)
  if plan.name ~= name then error(("%s: name %s, expected %s"):format(path, tostring(plan.name), name), 0) end
  return step.make(plan, layout)
end

local function literal(plan)
  return `C.glm_driver_plan {
    num_ops = [plan.num_ops],
    context_bytes = [plan.context_bytes],
    start = [plan.start],
    forward = [plan.forward],
    sample = [plan.sample],
    stop = [plan.stop],
  }
end

local function main(object, mixed, decode, rank, num_ranks, build)
  if build ~= "release" and build ~= "debug" then error("'" .. tostring(build) .. "', expected release or debug", 0) end
  local layout = { rank = tonumber(rank), num_ranks = tonumber(num_ranks), debug = build == "debug" }
  local compiler = "terra " .. tostring(terralib.version)
  local mixed_plan, decode_plan = literal(made(mixed, "mixed", layout)), literal(made(decode, "decode", layout))
  local driver = global(C.glm_driver, `C.glm_driver {
    version = C.GLM_DRIVER_VERSION,
    kernels_version = C.GLM_KERNELS_VERSION,
    compiler = compiler,
    debug = [layout.debug and 1 or 0],
    mixed = mixed_plan,
    decode = decode_plan,
  }, "driver", false, true)
  local terra query(version: uint32): &C.glm_driver
    if version ~= C.GLM_DRIVER_VERSION then return nil end
    return &driver
  end
  terralib.saveobj(object, "object", { glm_driver_query = query }, nil, terralib.newtarget(TARGET))
end

local ok, message = pcall(main, ...)
if not ok then
  io.stderr:write(tostring(message), "\n")
  os.exit(1)
end
