// The action's end: a table in the job's summary of what each step took.
"use strict";
const fs = require("node:fs");
const path = require("node:path");

const mib = (bytes) => `${Math.round(bytes / 2 ** 20)} MiB`;
const seconds = (ns) => `${(ns / 1e9).toFixed(1)} s`;
const cell = (text) => text.trim().slice(0, 60).replaceAll("|", "\\|").replaceAll("`", "'");

/** A step's row. */
function row(folder, name) {
  const step = `\`${cell(fs.readFileSync(path.join(folder, `${name}.name`), "utf8")) || "(empty)"}\``;
  let stats;
  try {
    stats = JSON.parse(fs.readFileSync(path.join(folder, `${name}.json`), "utf8"));
  } catch {
    return `| ${step} | ended without statistics | | | | |`;
  }
  const waited = Object.values(stats.faults).reduce((sum, kind) => sum + kind.total_ns, 0);
  const ratio = stats.peak_bytes ? `${(stats.need_peak_bytes / stats.peak_bytes).toFixed(1)}x` : "";
  const over = stats.limit_exceeded ? " (went over)" : "";
  const values = [`${mib(stats.limit_bytes)}${over}`, mib(stats.peak_bytes), `${mib(stats.need_peak_bytes)} ${ratio}`,
    seconds(stats.elapsed_ns), seconds(waited)];
  return `| ${step} | ${values.join(" | ")} |`;
}

const folder = process.env.STATE_stats;
const steps = folder && fs.existsSync(folder) ? fs.readdirSync(folder).filter((file) => file.endsWith(".name")).sort() : [];
if (steps.length > 0) {
  const head = ["### foliomem", "", "| step | limit | peak | needed | duration | waited for faults |",
    "|---|---|---|---|---|---|"];
  const rows = steps.map((file) => row(folder, path.basename(file, ".name")));
  fs.appendFileSync(process.env.GITHUB_STEP_SUMMARY, `${[...head, ...rows].join("\n")}\n`);
}
