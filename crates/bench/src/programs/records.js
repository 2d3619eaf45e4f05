// The records of `foliomem bench languages` in JavaScript: arguments are the records and the rounds. Each round
// replaces a quarter of the records and reads others at random; the printed total depends on all of them.
"use strict";
const [count, rounds] = process.argv.slice(2).map(Number);
const words = ["north", "river", "stone", "market", "winter", "copper", "garden", "silver",
  "harbour", "meadow", "lantern", "orchard", "thunder", "village", "whisper", "yellow"];
let seed = 1;
let total = 0;

function random(below) {
  seed = seed * 16807 % 2147483647;
  return seed % below;
}

function make() {
  const name = `${words[random(16)]}-${words[random(16)]}-${random(100000)}`;
  const counts = Array.from({ length: 8 }, () => random(1000));
  return { name, counts, sum: counts.reduce((sum, number) => sum + number, 0) };
}

function verify(record) {
  if (record.counts.reduce((sum, number) => sum + number, 0) !== record.sum) {
    throw new Error(`a record has changed: ${record.name}`);
  }
}

function add(number) {
  total = (total * 31 + number) % 2147483647;
}

const records = Array.from({ length: count }, make);
for (let round = 0; round < rounds; round++) {
  const start = random(count);
  for (let k = 0; k < Math.floor(count / 4); k++) {
    const i = (start + k) % count;
    const old = records[i];
    verify(old);
    records[i] = make();
    add(old.name.split("-").reverse().join("+").length);
  }
  for (let k = 0; k < Math.floor(count / 16); k++) {
    add(records[random(count)].sum);
  }
}
for (const record of records) {
  verify(record);
  add(record.sum + record.name.length);
}
console.log(total);
