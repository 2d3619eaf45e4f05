//! Counts the memory of processes of a run that have no agent, and reports that memory.
//!
//! - A child can escape the agent: it is static, its parent cleared its environment, or its root
//!   directory or pid namespace has neither agent nor control segment. The supervisor counts
//!   the child's memory from outside and adds it to the tree's. Managed processes then give way,
//!   and a hard limit applies to the child, too.
//! - Shared memory is not managed: PostgreSQL's buffers, the heap of Java's ZGC. A warning names
//!   processes with much of it.
//!
//! The supervisor searches the tree once a second, and all the time shortly after any process was
//! started on the machine, because a child has its parent's agent until it executes its own
//! program, or after a process of the run has lost its agent. It reads the sizes of the processes
//! found more often.

use crate::preflight;
use crate::proc_file;
use crate::run_delay::Schedule;
use crate::supervise::AGENT;
use crate::threads::threads_of;
use foliomem_session::find_run;
use foliomem_session::messages::Excess;
use foliomem_session::segment::Control;
use foliomem_types::size::format_mib;
use rustix::process::Pid;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest time between two searches.
const INTERVAL: Duration = Duration::from_secs(1);
/// For this long after a process was started, or lost its agent, there may be new ones to find.
const MAX_EXECUTING: Duration = Duration::from_millis(200);
/// Searches take at most 1/100 of the time, because a search over thousands of threads is slow.
const SHARE: u32 = 100;
/// Divisor of the limit: shared memory below this share of the limit, or below [`LEAST_BYTES`],
/// causes no warning.
const LIMIT_SHARE: u64 = 4;
/// Memory in bytes below which no warning appears. The loader does not take that much, either.
const LEAST_BYTES: u64 = 16 << 20;
/// A program without libraries that has not loaded the agent after this time has not loaded it at
/// all. Times in which the program waits for a CPU do not count.
const MAX_LOADING: Duration = Duration::from_millis(200);
/// A program that has loaded the agent, which has not reported after this time, runs without it:
/// the agent does not find the run. Before the agent starts, the loader prepares all libraries,
/// which it may have to read first.
const MAX_STARTING: Duration = Duration::from_secs(1);
/// The tree may be beyond its limit by this share (1/2^5) for this long, while managed processes
/// give way to the others.
const TOLERANCE_SHIFT: u32 = 5;
const MAX_EXCESS: Duration = Duration::from_secs(1);
/// Processes that are named at the end.
const MAX_NAMED: usize = 4;

/// A process without the agent.
#[derive(Debug)]
struct Process {
    name: String,
    seen: Instant,
    /// What its first thread had run and waited when it was seen.
    scheduled: Schedule,
    /// Whether the process certainly has no agent.
    is_certain: bool,
    bytes: u64,
    peak_bytes: u64,
}

/// The processes of a run that have no agent.
#[derive(Debug)]
pub struct Census {
    /// Time of the last search, and how long it took.
    searched: Instant,
    search_time: Duration,
    /// The last process that was started, as the kernel numbers it, and the processes with an
    /// agent.
    last_pid: String,
    managed: Vec<u32>,
    /// When one of these changed.
    changed: Instant,
    processes: BTreeMap<u32, Process>,
    /// Peaks in bytes of those that have ended, with their names.
    ended: Vec<(u64, String)>,
    /// Since when the tree is beyond its limit.
    over_since: Option<Instant>,
    least_bytes: u64,
    said_shared: bool,
}

impl Census {
    /// Creates a census whose first search is due.
    pub fn new(limit_bytes: u64) -> Census {
        let now = Instant::now();
        Census {
            searched: now,
            search_time: Duration::ZERO,
            last_pid: String::new(),
            managed: Vec::new(),
            changed: now,
            processes: BTreeMap::new(),
            ended: Vec::new(),
            over_since: None,
            least_bytes: LEAST_BYTES.max(limit_bytes / LIMIT_SHARE),
            said_shared: false,
        }
    }

    /// Looks at the run of `program`, and publishes what its unmanaged processes take.
    pub fn look(&mut self, program: Pid, control: &Control) {
        let now = Instant::now();
        let since = now - self.searched;
        let may_have_new = self.may_have_new_process(now, last_pid(), control.pids());
        if since >= self.search_time * SHARE && (since >= INTERVAL || may_have_new) {
            self.search(program, &control.companions());
            (self.searched, self.search_time) = (now, now.elapsed());
        }
        // What has registered itself meanwhile is managed.
        let managed = control.pids();
        self.processes.retain(|pid, process| {
            let is_left = process.look(*pid, managed.contains(pid));
            if !is_left && process.is_certain && process.peak_bytes > 0 {
                self.ended.push((process.peak_bytes, process.name.clone()));
            }
            is_left
        });
        let certain = self.processes.values().filter(|process| process.is_certain);
        control.set_unmanaged_bytes(certain.map(|process| process.bytes).sum());
        self.check_limit(control, now);
    }

    /// Returns the sizes of the processes, by pid, in bytes.
    pub fn sizes(&self) -> impl Iterator<Item = (u32, u64)> {
        self.processes.iter().map(|(&pid, process)| (pid, process.bytes))
    }

    /// Returns the message about the memory of the processes, if there were any.
    pub fn summary(&self) -> Option<String> {
        let running = self.processes.values().filter(|process| process.is_certain);
        let running = running.map(|process| (process.peak_bytes, process.name.clone()));
        let mut all: Vec<(u64, String)> = self.ended.iter().cloned().chain(running).collect();
        all.sort_by(|(one, _), (other, _)| other.cmp(one));
        let named = all.iter().take(MAX_NAMED).map(|(bytes, name)| format!("{name} {}", format_mib(*bytes)));
        let named: Vec<String> = named.collect();
        let more = all.len().saturating_sub(MAX_NAMED);
        let rest = if more > 0 { format!(", and {more} more") } else { String::new() };
        (!named.is_empty()).then(|| {
            format!(
                "foliomem: without the agent ran, counted but not compressed: {}{rest} (static, or \
                 started with another environment, root directory or pid namespace)",
                named.join(", ")
            )
        })
    }

    /// Returns whether some process was started, or has lost its agent, a short time ago: it may be
    /// about to execute its program, or have done so. `managed` are the processes with an agent.
    fn may_have_new_process(&mut self, now: Instant, last_pid: String, managed: Vec<u32>) -> bool {
        if last_pid != self.last_pid || managed != self.managed {
            (self.last_pid, self.managed, self.changed) = (last_pid, managed, now);
        }
        now - self.changed < MAX_EXECUTING
    }

    /// Searches the tree: the program's descendants, and those that have lost their parents, but
    /// for `companions`.
    fn search(&mut self, program: Pid, companions: &[u32]) {
        let mut rest = children(std::process::id());
        rest.push(program.as_raw_nonzero().get() as u32);
        while let Some(pid) = rest.pop() {
            if companions.contains(&pid) {
                continue;
            }
            let is_managed = self.managed.contains(&pid);
            if !is_managed || !self.said_shared {
                self.look_at(pid, is_managed);
            }
            rest.extend(children(pid));
        }
    }

    fn look_at(&mut self, pid: u32, is_managed: bool) {
        let status = status(pid);
        let Some(name) = field(&status, "Name:") else { return };
        let shared = bytes(&status, "RssShmem:");
        if !self.said_shared && shared >= self.least_bytes {
            self.said_shared = true;
            eprintln!(
                "foliomem: {name} (process {pid}) takes {} of shared memory, for which the limit does not hold",
                format_mib(shared)
            );
        }
        // A process without memory has ended.
        if is_managed || self.processes.contains_key(&pid) || field(&status, "VmRSS:").is_none() {
            return;
        }
        if Loaded::of(pid) == Loaded::Segment {
            return;
        }
        // The supervisor of a run inside this one takes next to nothing.
        if preflight::is_foliomem(Path::new(&format!("/proc/{pid}/exe"))) {
            return;
        }
        let (name, seen) = (name.to_owned(), Instant::now());
        let scheduled = schedule(pid);
        self.processes.insert(pid, Process { name, seen, scheduled, is_certain: false, bytes: 0, peak_bytes: 0 });
    }

    /// Warns that the run exceeds its limit, or stops it if the limit is hard, once managed
    /// processes have nothing left to swap out.
    fn check_limit(&mut self, control: &Control, now: Instant) {
        let (limit_bytes, taken_bytes) = (control.limit_bytes(), control.tree_anon_bytes().0);
        let is_over = taken_bytes > limit_bytes + (limit_bytes >> TOLERANCE_SHIFT)
            && control.tree_excess() == Excess::WithoutAgent;
        let since = *self.over_since.get_or_insert(now);
        if !is_over {
            self.over_since = None;
        } else if control.unmanaged_bytes() > limit_bytes || now - since > MAX_EXCESS {
            control.limit_exceeded(Excess::WithoutAgent);
        }
    }
}

impl Process {
    /// Reads the size of the process. Returns whether it still exists and has no agent.
    fn look(&mut self, pid: u32, is_managed: bool) -> bool {
        let status = status(pid);
        if is_managed || field(&status, "VmRSS:").is_none() {
            return false;
        }
        self.bytes = bytes(&status, "RssAnon:");
        if !self.is_certain {
            if is_stopped(&status) {
                // A debugger may hold it before it loads anything.
                (self.seen, self.scheduled) = (Instant::now(), schedule(pid));
            }
            // It may have executed another program, or be about to load the agent.
            let has_no_agent = match Loaded::of(pid) {
                Loaded::Segment => return false,
                Loaded::Agent => self.time(pid, &status) > MAX_STARTING,
                Loaded::OnlyOthers => true,
                Loaded::Nothing => self.time(pid, &status) > MAX_LOADING || self.bytes >= LEAST_BYTES,
            };
            self.is_certain = has_no_agent || preflight::unfit(Path::new(&format!("/proc/{pid}/exe"))).is_some();
            field(&status, "Name:").unwrap_or_default().clone_into(&mut self.name);
        }
        self.peak_bytes = self.peak_bytes.max(self.bytes);
        true
    }

    /// Returns the time since the process was seen in which its first thread did not wait for a
    /// CPU.
    fn time(&self, pid: u32, status: &str) -> Duration {
        let now = schedule(pid);
        if field(status, "State:").is_some_and(|state| state.starts_with('R')) {
            // A wait that is not over is not counted yet.
            return Duration::from_nanos(now.ran_ns.saturating_sub(self.scheduled.ran_ns));
        }
        let queued_ns = now.queued_ns.saturating_sub(self.scheduled.queued_ns);
        self.seen.elapsed().saturating_sub(Duration::from_nanos(queued_ns))
    }
}

/// What a process has loaded, in the order of its start: the loader maps the agent's library before
/// those that the program needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Loaded {
    /// Neither the agent nor the C library.
    Nothing,
    /// The C library, and not the agent.
    OnlyOthers,
    /// The agent's library.
    Agent,
    /// The control segment of a run. Beside managed processes, four kinds map one: a forked process
    /// that is about to register itself, a process that shares its parent's memory (`vfork`), a
    /// companion, and a process of a nested run with its own limit.
    Segment,
}

impl Loaded {
    /// Reads the mappings of a process. A process that this user may not inspect counts as one with
    /// a segment, so that no warning names it.
    fn of(pid: u32) -> Loaded {
        proc_file::read(format!("/proc/{pid}/maps"))
            .map_or(Loaded::Segment, |maps| Loaded::among(&String::from_utf8_lossy(&maps)))
    }

    fn among(maps: &str) -> Loaded {
        let has = |is_one: fn(&str) -> bool| {
            maps.lines().any(|line| line.contains('/') && is_one(line.rsplit('/').next().unwrap_or_default()))
        };
        if find_run::has_segment(maps) {
            Loaded::Segment
        } else if has(|file| file.starts_with(AGENT)) {
            Loaded::Agent
        } else if has(|file| file.starts_with("libc.so") || file.starts_with("libc-2")) {
            Loaded::OnlyOthers
        } else {
            Loaded::Nothing
        }
    }
}

/// Returns the pid of the process that was started last on the machine.
fn last_pid() -> String {
    let text = proc_file::read_text("/proc/loadavg").unwrap_or_default();
    text.rsplit(' ').next().unwrap_or_default().to_owned()
}

/// Returns the times of a process's first thread; zeros where the kernel does not count.
fn schedule(pid: u32) -> Schedule {
    Schedule::of(Path::new(&format!("/proc/{pid}"))).unwrap_or_default()
}

/// Returns the children of all threads of a process.
fn children(pid: u32) -> Vec<u32> {
    let of_thread = |thread: PathBuf| proc_file::read_text(thread.join("children")).unwrap_or_default();
    let lists: Vec<String> = threads_of(pid).map(of_thread).collect();
    lists.iter().flat_map(|list| list.split_ascii_whitespace()).filter_map(|child| child.parse().ok()).collect()
}

/// Returns whether a signal or a debugger has stopped the process.
fn is_stopped(status: &str) -> bool {
    field(status, "State:").is_some_and(|state| state.starts_with(['T', 't']))
}

fn status(pid: u32) -> String {
    proc_file::read_text(format!("/proc/{pid}/status")).unwrap_or_default()
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Returns the value of a line of `/proc/PID/status` in bytes.
fn bytes(status: &str, name: &str) -> u64 {
    let kib = field(status, name).and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::settings::{Configuration, Limit};
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};
    use std::sync::atomic::Ordering;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Lets one test at a time have a child: a census finds those of the others, too.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn the_loader_maps_the_agent_before_other_libraries() {
        let line = |file: &str| format!("7f0000000000-7f0000001000 r-xp 00000000 fe:01 77   {file}\n");
        let mut maps = line("/usr/bin/python3") + &line("/usr/lib/ld-linux-x86-64.so.2") + "7ffd0-7ffe0 rw-p 00:00 0\n";
        assert_eq!(Loaded::among(&maps), Loaded::Nothing);
        for library in ["/usr/lib/libc.so.6", "/lib/libc-2.31.so"] {
            assert_eq!(Loaded::among(&(maps.clone() + &line(library))), Loaded::OnlyOthers);
        }
        maps += &line("/a b/libfoliomem_agent.so (deleted)");
        assert_eq!(Loaded::among(&maps), Loaded::Agent);
        maps += &line("/usr/lib/libc.so.6");
        assert_eq!(Loaded::among(&maps), Loaded::Agent);
        maps += "7f0000000000-7f0000001000 rw-s 00000000 00:01 9   /memfd:foliomem-control (deleted)\n";
        assert_eq!(Loaded::among(&maps), Loaded::Segment);
    }

    #[test]
    fn a_wait_for_a_cpu_is_no_time_of_loading() {
        let process = |scheduled| Process {
            name: String::new(),
            seen: Instant::now() - Duration::from_secs(2),
            scheduled,
            is_certain: false,
            bytes: 0,
            peak_bytes: 0,
        };
        let own = std::process::id();
        let (before, runs, sleeps) = (Schedule::default(), "State:\tR (running)\n", "State:\tS (sleeping)\n");
        let now = schedule(own);
        assert!(process(before).time(own, sleeps) <= Duration::from_secs(3));
        assert!(process(now).time(own, sleeps) >= Duration::from_secs(1));
        assert!(process(now).time(own, runs) < Duration::from_secs(1), "it has hardly run since");
    }

    fn control(hard: bool) -> (&'static Control, rustix::fd::OwnedFd) {
        let configuration = Configuration { hard, ..Configuration::plain(Limit::Bytes(16 << 20)) };
        Control::create(&configuration).unwrap()
    }

    /// Starts a process that takes `mib` MiB, and waits until it does.
    fn hog(mib: u32) -> (Child, Pid) {
        let script = format!("import sys\nx = b'x' * ({mib} << 20)\nprint('there', flush=True)\nsys.stdin.read()");
        let mut child = Command::new("python3");
        let mut child = child.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        (child, pid)
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_without_the_agent_counts_until_it_ends() {
        let _alone = alone();
        let ((control, _segment), (child, pid)) = (control(false), hog(40));
        let mut census = Census::new(1 << 30);
        assert!(census.summary().is_none());
        census.search(pid, &[]);
        census.look(pid, control);
        let taken_bytes = control.tree_anon_bytes().0;
        assert!((40 << 20..80 << 20).contains(&taken_bytes), "{taken_bytes}");
        assert!(census.sizes().any(|(pid, bytes)| pid == child.id() && bytes == taken_bytes));
        end(child);
        census.look(pid, control);
        assert_eq!(control.unmanaged_bytes(), 0);
        assert!(census.summary().unwrap().contains(&format!("python3 {}", format_mib(taken_bytes))));
    }

    #[test]
    fn a_process_that_gets_a_slot_is_not_counted() {
        let _alone = alone();
        let ((control, _segment), (child, pid)) = (control(false), hog(40));
        let mut census = Census::new(1 << 30);
        control.claim_slot(pid).unwrap();
        census.search(pid, &[]);
        census.look(pid, control);
        assert_eq!(control.unmanaged_bytes(), 0);
        end(child);
    }

    #[test]
    fn a_companion_is_not_counted() {
        let _alone = alone();
        let ((control, _segment), (child, pid)) = (control(false), hog(1));
        let slot = control.claim_slot(rustix::process::getpid()).unwrap();
        control.process(slot).companion.store(child.id(), Ordering::Relaxed);
        let mut census = Census::new(1 << 30);
        census.search(pid, &[]);
        assert_eq!(census.sizes().count(), 1);
        census.processes.clear();
        census.search(pid, &control.companions());
        assert_eq!(census.sizes().count(), 0);
        end(child);
    }

    #[test]
    fn a_search_is_due_when_a_process_has_started_or_lost_its_agent() {
        let mut census = Census::new(1 << 30);
        let mut now = Instant::now();
        for (last_pid, managed) in [("7", vec![]), ("8", vec![]), ("8", vec![8]), ("8", vec![])] {
            let mut is_due = |time: Duration| {
                now += time;
                census.may_have_new_process(now, last_pid.to_owned(), managed.clone())
            };
            assert!(is_due(Duration::from_secs(10)), "{last_pid} {managed:?}");
            assert!(is_due(MAX_EXECUTING / 2));
            assert!(!is_due(MAX_EXECUTING));
        }
    }

    #[test]
    fn a_hard_limit_binds_what_has_no_agent() {
        let _alone = alone();
        let ((control, _segment), (child, pid)) = (control(true), hog(40));
        let mut census = Census::new(16 << 20);
        census.search(pid, &[]);
        census.look(pid, control);
        assert!(control.failure().unwrap().contains("without the agent"));
        end(child);
    }
}
