-- The C ABI as Terra reads it from the headers themselves. INCLUDE: their directories, separated by colons.

local flags = terralib.newlist()
for directory in os.getenv("INCLUDE"):gmatch("[^:]+") do
  flags:insert("-I" .. directory)
end

return terralib.includecstring('#include "glm/driver.h"\n#include <string.h>\n', flags)
