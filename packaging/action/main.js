// The action: installs foliomem for this job, and puts shells before those of PATH that run each step's script inside a limit.
//
// The runner looks for the shell of a `run:` step in PATH, so no step needs to change. A shell that is started in any other way is
// the real one.
"use strict";
const { execFileSync } = require("node:child_process");
const fs = require("node:fs");
const path = require("node:path");

const SHELLS = ["bash", "sh", "python"];
// What `auto` leaves to the system and the runner.
const AUTO = "90%";
const DEVICE = "/dev/userfaultfd";

const input = (name) => (process.env[`INPUT_${name.toUpperCase()}`] || "").trim();
const append = (file, line) => fs.appendFileSync(process.env[file], `${line}\n`);

/** The archive: that of the release whose tag the workflow names, unless one is given. */
async function archive(folder) {
  let from = input("package");
  if (!from) {
    const { GITHUB_SERVER_URL, GITHUB_ACTION_REPOSITORY, GITHUB_ACTION_REF } = process.env;
    const version = /^v(\d+\.\d+\.\d+)$/.exec(GITHUB_ACTION_REF || "");
    if (!version) {
      throw new Error(`${GITHUB_ACTION_REF || "this reference"} is no release: use the action at vN.N.N, or give \`package\``);
    }
    const file = `foliomem-${version[1]}-linux-x86_64.tar.gz`;
    from = `${GITHUB_SERVER_URL}/${GITHUB_ACTION_REPOSITORY}/releases/download/${version[0]}/${file}`;
  }
  if (!/^https?:/.test(from)) return from;
  const got = await fetch(from);
  if (!got.ok) throw new Error(`cannot fetch ${from}: ${got.status} ${got.statusText}`);
  const target = path.join(folder, "foliomem.tar.gz");
  fs.writeFileSync(target, Buffer.from(await got.arrayBuffer()));
  return target;
}

/** Lets this job use userfaultfd: runners' users may become root. */
function allowDevice() {
  try {
    fs.accessSync(DEVICE, fs.constants.R_OK | fs.constants.W_OK);
  } catch {
    execFileSync("sudo", ["-n", "chmod", "666", DEVICE], { stdio: "inherit" });
  }
}

/** The program that a shell's name means without this action. */
function real(name) {
  for (const folder of process.env.PATH.split(":")) {
    const file = path.join(folder, name);
    try {
      fs.accessSync(file, fs.constants.X_OK);
      return file;
    } catch {
      // Not there.
    }
  }
  return null;
}

const quoted = (word) => `'${word.replaceAll("'", "'\\''")}'`;

/** A shell that runs a step's script inside the limit. */
function wrapper(program, command, stats) {
  return `#!/bin/sh
# A script of the runner's lies in its folder. What runs inside a limit already is left alone.
for last; do :; done
case $last in
${quoted(process.env.RUNNER_TEMP)}/*) ;;
*) exec ${quoted(program)} "$@" ;;
esac
[ -z "\${FOLIOMEM_CONTROL:-}" ] || exec ${quoted(program)} "$@"
step=${quoted(stats)}/$(date +%s%N)-$$
sed -n '/[^[:space:]]/{p;q;}' "$last" >"$step.name"
exec ${command.map(quoted).join(" ")} --stats "$step.json" -- ${quoted(program)} "$@"
`;
}

async function main() {
  const folder = path.join(process.env.RUNNER_TEMP, "foliomem");
  const [stats, shells] = ["stats", "shells"].map((name) => path.join(folder, name));
  [stats, shells].forEach((name) => fs.mkdirSync(name, { recursive: true }));
  const installed = path.join(folder, "installed");
  fs.mkdirSync(installed, { recursive: true });
  execFileSync("tar", ["-xzf", await archive(folder), "-C", installed, "--strip-components=1"], { stdio: "inherit" });
  allowDevice();
  const foliomem = path.join(installed, "bin/foliomem");
  const limit = input("limit") || "auto";
  const command = [foliomem, "run", "--limit", limit === "auto" ? AUTO : limit];
  if (input("swap")) command.push("--swap", input("swap"));
  // A wrong limit ends this step, not all later ones.
  execFileSync(foliomem, [...command.slice(1), "--", "true"], { stdio: "inherit" });
  for (const name of SHELLS) {
    const program = real(name);
    if (program) fs.writeFileSync(path.join(shells, name), wrapper(program, command, stats), { mode: 0o755 });
  }
  append("GITHUB_PATH", path.dirname(foliomem));
  append("GITHUB_PATH", shells);
  append("GITHUB_STATE", `stats=${stats}`);
}

main().catch((error) => {
  console.log(`::error::foliomem: ${error.message.replaceAll("\n", "%0A")}`);
  process.exitCode = 1;
});
