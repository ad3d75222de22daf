-- Prints size and offsets of every struct that a driver shares with C, as Terra lays them out: lines "expression value".
--   INCLUDE=DIRS terra layout.t

local directory = arg[0]:match("^(.*)/[^/]*$") or "."
package.terrapath = directory .. "/?.t;" .. package.terrapath

local C = require("abi")
local constants = require("constants")

local structs = terralib.newlist()
for _, kind in ipairs(constants.kinds) do
  structs:insert("glm_" .. kind .. "_args")
end
structs:insertall({ "glm_tensor", "glm_weight", "glm_expert_weights", "glm_kv_layer", "glm_step_inputs", "glm_kernels" })
structs:insertall({ "glm_driver_op", "glm_driver_mark", "glm_driver_binding", "glm_driver_fault", "glm_driver_plan" })
structs:insert("glm_driver")

for _, name in ipairs(structs) do
  print(("sizeof(%s) %d"):format(name, terralib.sizeof(C[name])))
  for _, entry in ipairs(C[name]:getentries()) do
    print(("offsetof(%s,%s) %d"):format(name, entry.field, terralib.offsetof(C[name], entry.field)))
  end
end
