//! `foliomem bench density`: counts the sandboxes that fit into a fixed amount of memory: plain,
//! swapped out to zram by the kernel, and under `foliomem run --idle`.
//!
//! A sandbox is [`SANDBOX`], a Python program that groups a data frame of ratings and then forks;
//! the child idles while the parent waits. Sandboxes start one after the other, each when the
//! others are idle and compressed. Their memory is the proportional set size (`Pss`) of all their
//! processes, including foliomem's own, and the memory of zram and of foliomem's shared stores. A
//! sandbox that makes this memory exceed the total, even for a moment, does not fit, and is ended.
//!
//! Then each sandbox answers a query over all its data, in an order without a pattern. The next
//! query follows when the last sandbox is idle again. Every answer must equal the sandbox's first.

use crate::kernel::{Folios, Group, KernelSwap, MmStat, Root, said};
use crate::tree::proportional_bytes;
use crate::{Error, MIB, python};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The program.
pub const SANDBOX: &str = include_str!("programs/sandbox.py");
/// The rows of a frame by default: 153 MiB.
pub const RATINGS: u64 = 5_000_000;
/// The total in MiB by default.
pub const TOTAL_MIB: u64 = 2048;
/// After this time without CPU foliomem compresses a sandbox, and somebody has the kernel swap it
/// out.
const IDLE: Duration = Duration::from_secs(5);
/// Limit in bytes of a sandbox's group, which it does not reach.
const GROUP_BYTES: u64 = 1 << 40;
/// Time between two looks at the memory.
const LOOK: Duration = Duration::from_millis(100);
/// Memory that has not shrunk for this long is settled: longer than foliomem waits for idleness.
const SETTLED: Duration = Duration::from_secs(8);
/// A change of the memory below this does not count, in bytes.
const NOISE_BYTES: u64 = MIB;
/// A sandbox without an answer after this time hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// Maximum number of sandboxes.
const MAX_SANDBOXES: usize = 200;
/// Step between the sandboxes that are asked one after the other: a prime, for an order without a
/// pattern.
const STRIDE: usize = 7919;

/// How the sandboxes are started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// By this program.
    Plain,
    /// Each in a memory cgroup. When all are idle, everything in the groups is swapped out to zram.
    Kernel,
    /// By `foliomem run --idle`.
    Foliomem,
}

/// One setting, measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// How the sandboxes were started.
    pub setting: Setting,
    /// How many fit.
    pub sandboxes: usize,
    /// What all of them take when they are idle.
    pub total_mib: f64,
    /// Seconds from the start of a sandbox until it is ready: the 99th percentile.
    pub seconds_to_ready_p99: f64,
    /// Seconds until an idle sandbox has answered: the 99th percentile.
    pub resume_seconds_p99: f64,
}

/// The settings of the benchmark.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `foliomem` executable.
    pub foliomem: PathBuf,
    /// The memory of all sandboxes.
    pub total_mib: u64,
    /// The rows of a sandbox's frame.
    pub ratings: u64,
}

/// A running sandbox. Dropping it ends it.
struct Sandbox {
    child: Child,
    group: Option<Group>,
    queries: ChildStdin,
    lines: Receiver<String>,
    answer: Option<String>,
}

impl Sandbox {
    fn start(options: &Options, host: &mut Host, number: usize) -> Result<Sandbox, Error> {
        let python = python();
        let (mut command, mut group) = (Command::new(&python), None);
        if let Host::Foliomem = host {
            command = Command::new(&options.foliomem);
            command.args(["run", "--quiet", "--idle", &format!("{}s", IDLE.as_secs()), "--"]).arg(python);
        }
        command.args(["-c", SANDBOX, &options.ratings.to_string(), &number.to_string()]);
        if let Host::Kernel(swap) = host {
            group = swap.group(GROUP_BYTES)?;
            let Some(group) = &group else { return Err(Error::WrongResult("there is no memory cgroup".to_owned())) };
            command = group.inside(&command);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let doing = "starting a sandbox";
        let mut child = command.spawn().map_err(Error::doing(doing))?;
        let (Some(queries), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::WrongResult("a sandbox has no pipes".to_owned()));
        };
        let (sender, lines) = channel();
        // Ends with the sandbox, or when nobody receives any more.
        std::thread::spawn(move || {
            BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Ok(Sandbox { child, group, queries, lines, answer: None })
    }

    /// Waits for a line, and calls `look` meanwhile. Returns `None` if `look` returns false.
    fn line(&mut self, mut look: impl FnMut() -> bool) -> Result<Option<String>, Error> {
        let clock = Instant::now();
        loop {
            match self.lines.recv_timeout(LOOK) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Timeout) if clock.elapsed() < PATIENCE => {}
                Err(_) => return Err(self.failure()),
            }
            if !look() {
                return Ok(None);
            }
        }
    }

    /// Returns the error of a sandbox that does not answer.
    fn failure(&mut self) -> Error {
        let _ = self.child.kill();
        let mut text = Vec::new();
        let read = self.child.stderr.as_mut().map(|stderr| std::io::Read::read_to_end(stderr, &mut text));
        match self.child.wait() {
            Ok(status) if read.is_some_and(|read| read.is_ok()) => {
                Error::Command { command: "a sandbox (Python with pandas)".to_owned(), said: said(&status, &text) }
            }
            _ => Error::WrongResult("a sandbox does not answer".to_owned()),
        }
    }

    /// Sends a query to the sandbox and waits for the answer. Returns the seconds until the answer.
    fn query(&mut self) -> Result<f64, Error> {
        let clock = Instant::now();
        self.queries.write_all(b"query\n").map_err(Error::doing("asking a sandbox"))?;
        let Some(answer) = self.line(|| true)? else { unreachable!("nothing else ends the wait") };
        let seconds = clock.elapsed().as_secs_f64();
        if *self.answer.get_or_insert_with(|| answer.clone()) != answer {
            return Err(Error::WrongResult(format!("a sandbox answers {answer} after {:?}", self.answer)));
        }
        Ok(seconds)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            // foliomem passes it on. The forked child ends with its standard input.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

/// The way in which the sandboxes of a setting are started and compressed.
enum Host {
    Plain,
    Kernel(KernelSwap),
    Foliomem,
}

impl Host {
    /// Prepares the kernel's swap. Returns `None` if it, or a cgroup, is impossible here.
    fn kernel() -> Result<Option<Host>, Error> {
        let Some(mut swap) = KernelSwap::set_up(&Root::default(), 4, Folios::Everywhere)? else { return Ok(None) };
        Ok(swap.group(GROUP_BYTES)?.map(|_| Host::Kernel(swap)))
    }

    fn setting(&self) -> Setting {
        match self {
            Host::Plain => Setting::Plain,
            Host::Kernel(_) => Setting::Kernel,
            Host::Foliomem => Setting::Foliomem,
        }
    }

    fn taken_bytes(&self, sandboxes: &[Sandbox]) -> Result<u64, Error> {
        let zram_bytes = match self {
            Host::Kernel(swap) => MmStat::read(swap.mm_stat_path())?.mem_used_total,
            Host::Plain | Host::Foliomem => 0,
        };
        Ok(zram_bytes + sandboxes.iter().map(|sandbox| proportional_bytes(sandbox.child.id())).sum::<u64>())
    }

    /// Waits until idle sandboxes are compressed.
    fn settle(&self, sandboxes: &[Sandbox]) -> Result<(), Error> {
        match self {
            Host::Plain => {}
            Host::Kernel(_) => {
                std::thread::sleep(IDLE);
                sandboxes.iter().filter_map(|sandbox| sandbox.group.as_ref()).try_for_each(Group::reclaim_all)?;
            }
            Host::Foliomem => {
                let (mut least_bytes, mut since, begun) = (u64::MAX, Instant::now(), Instant::now());
                while since.elapsed() < SETTLED && begun.elapsed() < PATIENCE {
                    let bytes = self.taken_bytes(sandboxes)?;
                    if bytes.saturating_add(NOISE_BYTES) < least_bytes {
                        (least_bytes, since) = (bytes, Instant::now());
                    }
                    std::thread::sleep(LOOK);
                }
            }
        }
        Ok(())
    }
}

/// Measures all settings. `done` gets each row. Returns the rows, and why a setting has none.
///
/// # Errors
/// Fails if a sandbox cannot be started, does not answer, or answers wrongly.
pub fn run(options: &Options, done: &mut dyn FnMut(&Row)) -> Result<(Vec<Row>, Vec<String>), Error> {
    let (mut rows, mut skipped) = (Vec::new(), Vec::new());
    let mut add = |mut host: Host| {
        let row = measure(options, &mut host)?;
        if let Host::Kernel(swap) = host {
            swap.restore()?;
        }
        done(&row);
        rows.push(row);
        Ok(())
    };
    add(Host::Plain)?;
    match Host::kernel()? {
        Some(host) => add(host)?,
        None => skipped.push("Kernel: needs root, zram and a memory cgroup".to_owned()),
    }
    add(Host::Foliomem)?;
    Ok((rows, skipped))
}

fn measure(options: &Options, host: &mut Host) -> Result<Row, Error> {
    let total_bytes = options.total_mib * MIB;
    let mut sandboxes: Vec<Sandbox> = Vec::new();
    let mut ready_seconds = Vec::new();
    while sandboxes.len() < MAX_SANDBOXES {
        let taken_bytes = host.taken_bytes(&sandboxes)?;
        let clock = Instant::now();
        let mut next = Sandbox::start(options, host, sandboxes.len())?;
        let pid = next.child.id();
        let fits = || taken_bytes + proportional_bytes(pid) <= total_bytes;
        if next.line(fits)?.is_none() || !fits() {
            break;
        }
        ready_seconds.push(clock.elapsed().as_secs_f64());
        // The first answer, which later ones are compared with.
        next.query()?;
        sandboxes.push(next);
        host.settle(&sandboxes)?;
    }
    let taken_bytes = host.taken_bytes(&sandboxes)?;
    let mut resume_seconds = Vec::new();
    for turn in 0..sandboxes.len() {
        let index = turn * STRIDE % sandboxes.len();
        resume_seconds.push(sandboxes[index].query()?);
        host.settle(&sandboxes)?;
    }
    Ok(Row {
        setting: host.setting(),
        sandboxes: sandboxes.len(),
        total_mib: taken_bytes as f64 / MIB as f64,
        seconds_to_ready_p99: percentile_99(ready_seconds),
        resume_seconds_p99: percentile_99(resume_seconds),
    })
}

/// Returns the 99th percentile of `values` by the nearest rank; 0 without values.
fn percentile_99(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() * 99).div_ceil(100);
    rank.checked_sub(1).map_or(0.0, |index| values[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentile_is_that_of_the_nearest_rank() {
        assert_eq!(percentile_99(vec![]), 0.0);
        assert_eq!(percentile_99(vec![3.0, 1.0, 2.0]), 3.0);
        assert_eq!(percentile_99((1..=200).map(f64::from).collect()), 198.0);
    }

    #[test]
    fn every_sandbox_is_asked_once() {
        assert!((1..=MAX_SANDBOXES).all(|count| {
            let asked: std::collections::BTreeSet<_> = (0..count).map(|turn| turn * STRIDE % count).collect();
            asked.len() == count
        }));
    }

    #[test]
    fn a_sandbox_that_cannot_start_is_an_error() {
        let options = Options { foliomem: "/bin/false".into(), total_mib: 64, ratings: 1 };
        assert!(matches!(measure(&options, &mut Host::Foliomem), Err(Error::Command { .. })));
    }
}
