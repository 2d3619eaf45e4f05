# The records of `foliomem bench languages` in Ruby: arguments are the records and the rounds. Each round replaces a
# quarter of the records and reads others at random; the printed total depends on all of them.
COUNT, ROUNDS = ARGV.map(&:to_i)
WORDS = %w[north river stone market winter copper garden silver
           harbour meadow lantern orchard thunder village whisper yellow].freeze

class Entry
  attr_reader :name, :counts, :sum

  def initialize(name, counts)
    @name = name
    @counts = counts
    @sum = counts.sum
  end

  def verify
    raise "a record has changed: #{@name}" if @counts.sum != @sum
  end
end

$seed = 1
$total = 0

def random(below)
  $seed = $seed * 16807 % 2147483647
  $seed % below
end

def make
  name = "#{WORDS[random(16)]}-#{WORDS[random(16)]}-#{random(100000)}"
  Entry.new(name, Array.new(8) { random(1000) })
end

def add(number)
  $total = ($total * 31 + number) % 2147483647
end

entries = Array.new(COUNT) { make }
ROUNDS.times do
  start = random(COUNT)
  (COUNT / 4).times do |k|
    i = (start + k) % COUNT
    old = entries[i]
    old.verify
    entries[i] = make
    add(old.name.split("-").reverse.join("+").length)
  end
  (COUNT / 16).times { add(entries[random(COUNT)].sum) }
end
entries.each do |entry|
  entry.verify
  add(entry.sum + entry.name.length)
end
puts $total
