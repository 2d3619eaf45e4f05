//! Samples the runs that go on: what `foliomem ps` and `foliomem top` show.
//!
//! The sampler reads the control segments of the runs, and `/proc` for names. Runs need not
//! cooperate.

use crate::args::{Args, Command};
use crate::figures::{Figures, Rates};
use crate::proc_file;
use crate::proc_stat::ProcStat;
use clap::Parser;
use foliomem_session::find_run::{Inode, Run, Runs};
use foliomem_session::segment::Control;
use foliomem_sys::shared_memory::Mapped;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time between two searches for new runs. A search goes over all processes, so only every second
/// sample of `top` makes one.
const LOOK_INTERVAL: Duration = Duration::from_millis(900);
/// Time after which the name and the parent of a process are read again: a program may rename
/// itself, and is another one after an exec.
const NAME_LIFETIME: Duration = Duration::from_secs(1);

/// The identity of a run, unique among all runs that a sampler has seen.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RunId(pub u64);

/// A run at one moment.
#[derive(Clone, Debug)]
pub struct RunSample {
    /// Its identity.
    pub id: RunId,
    /// The pid of its supervisor.
    pub pid: u32,
    /// The program and its arguments.
    pub program: Vec<String>,
    /// The limit, in bytes.
    pub limit_bytes: u64,
    /// Memory that the run would take without compression, in bytes.
    pub needed_bytes: u64,
    /// The time since the start of the program.
    pub elapsed: Duration,
    /// The figures of the run.
    pub figures: Figures,
    /// The rates since the sample before; `None` in the first one.
    pub rates: Option<Rates>,
    /// The processes that live.
    pub processes: Vec<ProcessSample>,
}

/// A process of a run at one moment.
#[derive(Clone, Debug)]
pub struct ProcessSample {
    /// Its pid.
    pub pid: u32,
    /// The pid of its parent, and its program and arguments.
    pub name: Arc<Name>,
    /// The figures of the process.
    pub figures: Figures,
    /// The rates since the sample before; `None` in the first one.
    pub rates: Option<Rates>,
}

/// What `/proc` says about a process.
#[derive(Default, Debug)]
pub struct Name {
    /// The pid of its parent; 0 if it has ended.
    pub parent_pid: u32,
    /// The program and its arguments.
    pub program: Vec<String>,
}

/// Knowledge about a run from the sample before.
struct SeenRun {
    id: RunId,
    control: Arc<Mapped<Control>>,
    program: Vec<String>,
    figures: Figures,
    processes: BTreeMap<u32, SeenProcess>,
}

/// Knowledge about a process from the sample before.
struct SeenProcess {
    figures: Figures,
    name: Arc<Name>,
    name_read_at: Instant,
}

/// Whether processes are sampled, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Detail {
    /// Runs, with the number of their processes.
    Runs,
    /// Runs, and what `/proc` says about each process.
    Processes,
}

/// Takes samples of the same runs again and again.
pub struct Sampler {
    detail: Detail,
    runs: Runs,
    /// The runs that the last look has found, and its time.
    found: Vec<Run>,
    looked_at: Option<Instant>,
    seen: BTreeMap<Inode, SeenRun>,
    /// The number of runs that were seen so far.
    count: u64,
}

impl Sampler {
    /// Returns a sampler of all runs, or of `only` one.
    pub fn new(detail: Detail, only: Option<Inode>) -> Sampler {
        let runs = only.map_or_else(Runs::default, Runs::only);
        Sampler { detail, runs, found: Vec::new(), looked_at: None, seen: BTreeMap::new(), count: 0 }
    }

    /// Takes two samples, `interval` apart, and returns those of runs that were there at both.
    pub fn sample_twice(&mut self, interval: Duration) -> Vec<RunSample> {
        if self.sample().is_empty() {
            return Vec::new();
        }
        std::thread::sleep(interval);
        self.sample().into_iter().filter(|run| run.rates.is_some()).collect()
    }

    /// Takes a sample of each run, in the order of pids. Runs that end meanwhile are left out.
    pub fn sample(&mut self) -> Vec<RunSample> {
        let now = Instant::now();
        if self.looked_at.is_none_or(|looked_at| now - looked_at > LOOK_INTERVAL) {
            (self.found, self.looked_at) = (self.runs.look(), Some(now));
        }
        // Drop ended runs, which unmaps their segments.
        self.found.retain(|run| !run.control.has_ended());
        let (mut before, found) = (std::mem::take(&mut self.seen), self.found.clone());
        found.iter().filter_map(|run| self.sample_run(run, before.remove(&run.segment))).collect()
    }

    /// Returns the segment of a run that was found at the last sample.
    pub fn control_of(&self, id: RunId) -> Option<Arc<Mapped<Control>>> {
        self.seen.values().find(|run| run.id == id).map(|run| Arc::clone(&run.control))
    }

    fn sample_run(&mut self, run: &Run, seen: Option<SeenRun>) -> Option<RunSample> {
        let control: &Control = &run.control;
        let mut figures = Figures::of_run(control);
        let (id, program, earlier, mut seen_processes) = match seen {
            Some(seen) => (seen.id, seen.program, Some(seen.figures), seen.processes),
            None => (RunId(self.count), program_of(run.pid)?, None, BTreeMap::new()),
        };
        let (mut processes, mut seen_now) = (Vec::new(), BTreeMap::new());
        for (pid, figures) in processes_of(control) {
            let (process, seen) = self.sample_process(pid, figures, seen_processes.remove(&pid));
            processes.push(process);
            seen_now.insert(pid, seen);
        }
        figures.held_processes = processes.iter().map(|process| process.figures.held_processes).sum();
        let sample = RunSample {
            id,
            pid: run.pid,
            program: program.clone(),
            limit_bytes: control.limit_bytes(),
            needed_bytes: control.tree_needed_bytes(),
            elapsed: control.elapsed(),
            figures,
            rates: earlier.map(|earlier| figures.since(&earlier)),
            processes,
        };
        // Skip a run that ended while its figures were read: they may lack its processes.
        if control.has_ended() {
            return None;
        }
        self.count += u64::from(earlier.is_none());
        let control = Arc::clone(&run.control);
        self.seen.insert(run.segment, SeenRun { id, control, program, figures, processes: seen_now });
        Some(sample)
    }

    fn sample_process(&self, pid: u32, figures: Figures, seen: Option<SeenProcess>) -> (ProcessSample, SeenProcess) {
        let now = Instant::now();
        let rates = seen.as_ref().map(|seen| figures.since(&seen.figures));
        let known = seen.filter(|seen| now - seen.name_read_at < NAME_LIFETIME);
        let (name, name_read_at) = match (known, self.detail) {
            (Some(seen), _) => (seen.name, seen.name_read_at),
            (None, Detail::Processes) => (Arc::new(Name::of(pid)), now),
            (None, Detail::Runs) => (Arc::default(), now),
        };
        let seen = SeenProcess { figures, name: Arc::clone(&name), name_read_at };
        (ProcessSample { pid, name, figures, rates }, seen)
    }
}

/// Returns the figures of the processes of a run that live, by their pids.
fn processes_of(control: &Control) -> BTreeMap<u32, Figures> {
    let mut processes: BTreeMap<u32, Figures> = BTreeMap::new();
    for (pid, slot) in control.living_processes() {
        let figures = Figures::of_process(control, slot);
        // A process that executes another program has two slots for a moment.
        processes.entry(pid).and_modify(|first| *first = first.plus(&figures)).or_insert(figures);
    }
    processes
}

/// Returns the words of the command line of process `pid`; `None` if it has ended or has none.
fn command_line(pid: u32) -> Option<Vec<OsString>> {
    let line = proc_file::read(format!("/proc/{pid}/cmdline")).ok().filter(|line| !line.is_empty())?;
    let words = line.strip_suffix(b"\0").unwrap_or(&line).split(|&byte| byte == 0);
    Some(words.map(|word| OsString::from_vec(word.to_vec())).collect())
}

fn readable(words: &[OsString]) -> Vec<String> {
    words.iter().map(|word| word.to_string_lossy().into_owned()).collect()
}

/// Returns the program that supervisor `pid` runs, with its arguments; `None` if the supervisor has
/// ended.
fn program_of(pid: u32) -> Option<Vec<String>> {
    let words = command_line(pid)?;
    let program = match Args::try_parse_from(&words).map(|args| args.command) {
        Ok(Command::Run(run)) => run.program,
        Ok(Command::Record(record)) => record.run.program,
        // Another version of foliomem may have other options: show the whole command line.
        _ => words,
    };
    Some(readable(&program))
}

impl Name {
    /// Returns what `/proc` says about process `pid`.
    fn of(pid: u32) -> Name {
        let stat = ProcStat::of(pid);
        let known = stat.as_ref().and_then(|stat| Some((stat.parent_pid()?, stat.name()?)));
        let (parent_pid, comm) = known.unwrap_or_default();
        // A process without a command line is shown as its name in brackets, as ps(1) does.
        let program = command_line(pid).map_or_else(|| vec![format!("[{comm}]")], |words| readable(&words));
        Name { parent_pid, program }
    }
}

impl RunSample {
    /// Returns the sample as `ps --json` prints it.
    pub fn json(&self) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("pid".to_owned(), json!(self.pid));
        map.insert("program".to_owned(), json!(self.program.join(" ")));
        map.insert("processes".to_owned(), json!(self.processes.len()));
        map.insert("limit_bytes".to_owned(), json!(self.limit_bytes));
        map.insert("needed_bytes".to_owned(), json!(self.needed_bytes));
        insert_figures(&mut map, &self.figures, self.rates);
        map
    }

    /// Returns the sample as `top --json` prints it: with its processes.
    pub fn json_with_processes(&self) -> Map<String, Value> {
        let mut map = self.json();
        map.insert("living".to_owned(), self.processes.iter().map(ProcessSample::json).collect());
        map
    }
}

impl ProcessSample {
    fn json(&self) -> Value {
        let mut map = Map::new();
        map.insert("pid".to_owned(), json!(self.pid));
        map.insert("parent_pid".to_owned(), json!(self.name.parent_pid));
        map.insert("program".to_owned(), json!(self.name.program.join(" ")));
        insert_figures(&mut map, &self.figures, self.rates);
        Value::Object(map)
    }
}

fn insert_figures(map: &mut Map<String, Value>, figures: &Figures, rates: Option<Rates>) {
    let Figures { taken_bytes, stored_bytes, content_bytes, swap_file_bytes, .. } = figures;
    let values = [
        ("taken_bytes", json!(taken_bytes)),
        ("resident_bytes", json!(figures.resident_bytes())),
        ("stored_bytes", json!(stored_bytes)),
        ("content_bytes", json!(content_bytes)),
        ("ratio", json!(figures.ratio())),
        ("swap_file_bytes", json!(swap_file_bytes)),
        ("faults_per_s", json!(rates.map(|rates| rates.faults_per_s))),
        ("waiting_percent", json!(rates.map(|rates| rates.waiting_percent))),
        ("held_processes", json!(figures.held_processes)),
    ];
    map.extend(values.map(|(name, value)| (name.to_owned(), value)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_no_run_is_shown_as_it_is() {
        let own = program_of(std::process::id()).unwrap();
        assert!(own[0].contains("/foliomem"), "{own:?}");
        assert_eq!(program_of(u32::MAX), None);
    }

    #[test]
    fn a_process_has_a_parent_and_a_program() {
        let own = Name::of(std::process::id());
        assert_eq!(own.parent_pid, std::os::unix::process::parent_id());
        assert!(own.program[0].contains("/foliomem"), "{own:?}");
        let none = Name::of(u32::MAX);
        assert_eq!((none.parent_pid, &none.program[..]), (0, &["[]".to_owned()][..]));
    }
}
