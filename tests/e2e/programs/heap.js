// A Node heap of about ARGV[2] thousand objects: built, partly replaced, walked at random; prints a checksum.
const count = Number(process.argv[2]) * 1000;
const text = "lorem ipsum dolor sit amet ".repeat(8);
const make = (i) => ({ id: i, name: `object ${i}`, tags: [i % 7, i % 11, i % 13], body: Buffer.from(`${i}:${text}`).toString("latin1"), next: null });
const all = [];
for (let i = 0; i < count; i++) all.push(make(i));
for (let i = 0; i < count; i++) all[i].next = all[(i * 7919 + 13) % count];
for (let i = 0; i < count; i += 5) { const fresh = make(i); fresh.next = all[i].next; all[i] = fresh; }
let sum = 0, at = all[0];
for (let i = 0; i < count; i++) {
  const o = i % 2 ? at : all[i];
  sum = (sum * 31 + o.id + o.name.length + o.tags[0] * 3 + o.tags[2] + o.body.charCodeAt(i % o.body.length)) % 1000000007;
  if (!o.body.startsWith(`${o.id}:`) || o.name !== `object ${o.id}`) throw new Error(`object ${o.id} is damaged`);
  at = at.next;
}
console.log("checksum", sum, all.length);
