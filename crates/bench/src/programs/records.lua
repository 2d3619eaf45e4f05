-- The records of `foliomem bench languages` in Lua: arguments are the records and the rounds. Each round replaces a
-- quarter of the records and reads others at random; the printed total depends on all of them.
local count, rounds = tonumber(arg[1]), tonumber(arg[2])
local words = {"north", "river", "stone", "market", "winter", "copper", "garden", "silver",
               "harbour", "meadow", "lantern", "orchard", "thunder", "village", "whisper", "yellow"}
local seed, total = 1, 0

local function random(below)
  seed = seed * 16807 % 2147483647
  return seed % below
end

local function make()
  local name = words[random(16) + 1] .. "-" .. words[random(16) + 1] .. "-" .. string.format("%d", random(100000))
  local counts, sum = {}, 0
  for i = 1, 8 do
    counts[i] = random(1000)
    sum = sum + counts[i]
  end
  return {name = name, counts = counts, sum = sum}
end

local function verify(record)
  local sum = 0
  for _, number in ipairs(record.counts) do sum = sum + number end
  if sum ~= record.sum then error("a record has changed: " .. record.name) end
end

local function add(number) total = (total * 31 + number) % 2147483647 end

local records = {}
for i = 1, count do records[i] = make() end
for _ = 1, rounds do
  local start = random(count)
  for k = 0, math.floor(count / 4) - 1 do
    local i = (start + k) % count + 1
    local old = records[i]
    verify(old)
    records[i] = make()
    local parts = {}
    for part in string.gmatch(old.name, "[^-]+") do table.insert(parts, 1, part) end
    add(#table.concat(parts, "+"))
  end
  for _ = 1, math.floor(count / 16) do add(records[random(count) + 1].sum) end
end
for i = 1, count do
  verify(records[i])
  add(records[i].sum + #records[i].name)
end
print(string.format("%d", total))
