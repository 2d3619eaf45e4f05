//! Runs the program: sets up the control segment, starts it with the agent preloaded, watches it,
//! passes signals on, prints the messages of the agents, and reports at the end.

use crate::balance::{Balance, Pressure};
use crate::cgroups::Cgroups;
use crate::error::CliError;
use crate::exit_cause::{EXIT_KILLED, End, Largest, OomKills};
use crate::idle::IdleWatcher;
use crate::limit_updater::LimitUpdater;
use crate::metrics::Metrics;
use crate::metrics_target::{MetricsTarget, Publisher};
use crate::preflight;
use crate::record::Recorder;
use crate::relatives::Relatives;
use crate::report::Report;
use crate::run_report::{ReportFile, RunReport};
use crate::settings::{Settings, SwapSetting, TakeTurns};
use crate::stall::StallWatch;
use crate::stillness::Stillness;
use crate::unmanaged::Census;
use foliomem_session::custody::Custody;
use foliomem_session::door::Door;
use foliomem_session::segment::Control;
use foliomem_session::swap_file::{self, Created, Medium};
use foliomem_sys::program_start::Start;
use foliomem_sys::signals;
use foliomem_sys::supervised_program::{self, Child, ProgramEvent};
use foliomem_types::settings::Configuration;
use foliomem_types::size::format_mib;
use foliomem_types::units::CLUSTER_BYTES;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::process::{Pid, Signal};
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

pub(crate) const AGENT: &str = "libfoliomem_agent.so";
/// The directory of the agent in an installation, below its prefix.
const INSTALLED_IN: &str = "lib/foliomem";
/// Time between two searches of the swap file for slots without a holder, which are discarded.
const DISCARD_INTERVAL: Duration = Duration::from_millis(100);
const SAMPLE_INTERVAL: Duration = Duration::from_millis(10);
/// Time between two samples while all processes are idle and compressed.
const IDLE_SAMPLE_INTERVAL: Duration = Duration::from_millis(500);
/// A program whose agent has not reported after this time runs without the agent.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time that the end of a run waits for companions of ended processes.
const COMPANIONS_TIMEOUT: Duration = Duration::from_millis(100);
/// Time between two checks for such companions.
const COMPANIONS_PAUSE: Duration = Duration::from_micros(500);
/// The default size of a swap file, as a multiple of the limit.
const SWAP_LIMITS: u64 = 8;
/// The size of the shared store as a share of the limit: each process has tables for all of it.
const SHARED_STORE_SHARE: u64 = 4;
const EXIT_FAILED: u8 = 125;

/// This executable.
pub fn own_executable() -> Result<PathBuf, CliError> {
    std::env::current_exe().map_err(|error| CliError::System("find the executable of foliomem", error))
}

/// Where the agent lies: beside this executable, as `cargo build` leaves it, or in `lib/foliomem`
/// beside the directory of this executable, as packages install it.
pub fn agent_path() -> Result<PathBuf, CliError> {
    let beside = own_executable()?.with_file_name(AGENT);
    let prefix = beside.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let installed = prefix.join(INSTALLED_IN).join(AGENT);
    let Some(path) = [&beside, &installed].into_iter().find(|path| path.is_file()).cloned() else {
        return Err(CliError::NoAgent(beside, installed));
    };
    if path.as_os_str().as_encoded_bytes().iter().any(|byte| byte.is_ascii_whitespace() || *byte == b':') {
        return Err(CliError::AgentPath(path));
    }
    Ok(path)
}

/// Returns the value of LD_PRELOAD: the agent, followed by the previous value.
fn preload(agent: &Path) -> OsString {
    let mut value = agent.as_os_str().to_owned();
    if let Some(rest) = std::env::var_os("LD_PRELOAD").filter(|rest| !rest.is_empty()) {
        value.push(":");
        value.push(rest);
    }
    value
}

/// The program of a run.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// Its file.
    pub path: &'a Path,
    /// The name by which it was called.
    pub name: &'a OsStr,
    /// Its arguments.
    pub arguments: &'a [OsString],
}

impl Program<'_> {
    /// Returns its name and its arguments.
    fn command(&self) -> Vec<String> {
        let words = std::iter::once(self.name).chain(self.arguments.iter().map(OsString::as_os_str));
        words.map(|word| word.to_string_lossy().into_owned()).collect()
    }
}

/// Runs `program` to its end in `groups`, and records it if there is a recorder. Returns the exit
/// code.
pub fn run(
    settings: &Settings,
    configuration: &Configuration,
    groups: Cgroups,
    program: &Program<'_>,
    recorder: Option<Recorder>,
) -> Result<u8, CliError> {
    let limit_bytes = configuration.limit.most_bytes();
    let stats = settings.stats().map(StatsFile::open).transpose()?;
    let report_file = settings.report().map(ReportFile::open).transpose()?;
    let metrics_target = settings.metrics().map(MetricsTarget::open).transpose()?;
    let (control, segment) = Control::create(configuration)?;
    control.supervise();
    // Kept open to the end of the run: agents open it from here.
    let swap_file = match settings.swap() {
        Some(swap) => Some(open_swap_file(swap, limit_bytes)?),
        None => settings.idle().and_then(|_| create_shared_store(limit_bytes)),
    };
    if let Some(created) = &swap_file {
        let announced = control.swap().announce(created);
        announced.map_err(|errno| CliError::System("make a key for the swap file", std::io::Error::from(errno)))?;
    }
    // A program that finds neither the segment nor the door runs without a limit. A warning names
    // it if it takes much memory.
    let door = Door::open(segment.as_fd(), swap_file.as_ref().map(|created| created.file.as_fd())).ok();
    door.iter().for_each(|door| control.set_door(door.path()));
    let mut command = Command::new(program.path);
    command
        .arg0(program.name)
        .args(program.arguments)
        .env("LD_PRELOAD", preload(&agent_path()?))
        .env("FOLIOMEM_CONTROL", segment_name(&segment, door.as_ref()));
    let mut child = Child::start(&mut command).map_err(|error| start_error(program.path, error))?;
    // From here on all signals are blocked, also in new threads.
    Custody::start(control).map_err(|error| CliError::System("start a thread", error))?;
    control.note_start();
    let_start(&mut child, control, program.path)?;
    let publish = |target| Publisher::start(target, Metrics::new(control, program.name));
    let publisher = metrics_target.map(publish).transpose()?;
    let started = Instant::now();
    // A replay has no turns.
    let turns = if recorder.is_some() { TakeTurns::Off } else { settings.turns() };
    let has_balance = recorder.is_none() && !configuration.torture;
    let run = Run {
        control,
        child,
        swap_file,
        started,
        discarded: started,
        census: Census::new(limit_bytes),
        idle: settings.idle().map(IdleWatcher::new),
        oom_kills: OomKills::count(groups.clone()),
        largest: Largest::default(),
        limit_updater: LimitUpdater::new(configuration.limit, groups),
        stall_watch: StallWatch::new(turns),
        balance: has_balance.then(Balance::default),
        relatives: Relatives::new(),
        stillness: Stillness::new(),
        // A run inside this one prints its own warnings.
        said_unmanaged: preflight::is_foliomem(program.path),
        crashing: Vec::new(),
        said_crashed: false,
        recorder,
        publisher,
        run_report: report_file.map(|file| RunReport::new(file, &program.command())),
    };
    run.finish(settings, stats)
}

/// Lets the program start if its agent has reported. A program whose agent has failed stays held
/// until it is killed. foliomem itself is static and has no agent. In a program of musl the agent
/// reports after the entry point.
fn let_start(child: &mut Child, control: &Control, program: &Path) -> Result<(), CliError> {
    let start = child.hold();
    let executable = child.executable();
    let reports_later = preflight::is_foliomem(program) || preflight::is_for_musl(&executable);
    let has_agent = reports_later || control.hellos() > 0 || control.failure().is_some();
    match start {
        Start::Held if !has_agent => {
            child.signal(Signal::KILL.as_raw());
            Err(CliError::AgentSilent(agent_path()?))
        }
        Start::Held if control.failure().is_none() => {
            child.let_go();
            Ok(())
        }
        Start::Ended(code) if !has_agent && signals::is_crash(i32::from(code) - 128) => {
            Err(CliError::AgentSilent(agent_path()?))
        }
        _ => Ok(()),
    }
}

/// Returns the name by which agents find the control segment.
fn segment_name(segment: &OwnedFd, door: Option<&Door>) -> OsString {
    let mut name = OsString::from(format!("/proc/{}/fd/{}", std::process::id(), segment.as_raw_fd()));
    if let Some(door) = door {
        name.push(":");
        name.push(door.path());
    }
    name
}

/// Opens the swap file, and warns about unusual properties of it.
fn open_swap_file(swap: &SwapSetting, limit_bytes: u64) -> Result<Created, CliError> {
    let created = swap_file::create(&swap.path, swap.bytes, limit_bytes.saturating_mul(SWAP_LIMITS))?;
    let path = swap.path.display();
    if created.was_stale {
        eprintln!("foliomem: removed {path}, which a run that was killed had left behind");
    }
    if created.in_memory {
        eprintln!("foliomem: the swap file {path} is on a file system in memory: choose a disk");
    }
    if swap.bytes.is_some_and(|wanted| wanted > created.bytes + CLUSTER_BYTES) {
        eprintln!("foliomem: the swap file {path} has {}: more cannot be used", format_mib(created.bytes));
    }
    Ok(created)
}

/// Creates the shared store of a run whose idle processes are compressed. Without it, relatives
/// store equal pieces once each.
fn create_shared_store(limit_bytes: u64) -> Option<Created> {
    swap_file::create_shared(limit_bytes / SHARED_STORE_SHARE).ok()
}

/// The file for the counters. It is opened before the program starts, so that an unwritable file is
/// refused at once, not hours later.
struct StatsFile {
    name: String,
    target: Box<dyn Write>,
}

impl StatsFile {
    fn open(name: &str) -> Result<StatsFile, CliError> {
        let target: Box<dyn Write> = match name {
            "-" => Box::new(std::io::stderr()),
            path => Box::new(std::fs::File::create(path).map_err(|error| CliError::Stats(path.to_owned(), error))?),
        };
        Ok(StatsFile { name: name.to_owned(), target })
    }

    fn write(&mut self, text: &str) -> Result<(), CliError> {
        self.target.write_all(text.as_bytes()).map_err(|error| CliError::Stats(self.name.clone(), error))
    }
}

fn start_error(program: &Path, error: std::io::Error) -> CliError {
    let name = program.display().to_string();
    match error.kind() {
        // The file exists, so its interpreter or loader is missing.
        std::io::ErrorKind::NotFound if program.exists() => {
            CliError::NotExecutable(name, "its interpreter or loader is missing".to_owned())
        }
        std::io::ErrorKind::NotFound => CliError::NotFound(name),
        _ => CliError::NotExecutable(name, error.to_string()),
    }
}

struct Run {
    control: &'static Control,
    child: Child,
    swap_file: Option<Created>,
    started: Instant,
    /// The time of the last search of the swap file for slots without a holder.
    discarded: Instant,
    census: Census,
    idle: Option<IdleWatcher>,
    oom_kills: OomKills,
    largest: Largest,
    limit_updater: LimitUpdater,
    stall_watch: StallWatch,
    /// `None` while a run is recorded, because a replay has no balance, and under torture.
    balance: Option<Balance>,
    relatives: Relatives,
    stillness: Stillness,
    said_unmanaged: bool,
    /// Processes that were just stopped because their companions have crashed.
    crashing: Vec<Pid>,
    said_crashed: bool,
    recorder: Option<Recorder>,
    publisher: Option<Publisher>,
    run_report: Option<RunReport>,
}

impl Run {
    /// Watches the program to its end, and reports. Returns the exit code.
    fn finish(mut self, settings: &Settings, stats: Option<StatsFile>) -> Result<u8, CliError> {
        let code = self.watch()?;
        self.stall_watch.end(self.control);
        self.control.end_run();
        self.wait_for_companions();
        // Its companion does this, too, but before Linux 6.15 it may not learn of the dump.
        if self.child.has_dumped_core() && self.control.sum().vm.pswpout.get() > 0 {
            self.control.announce_core_dump(self.child.pid());
        }
        self.look()?;
        self.publisher.take().into_iter().for_each(Publisher::finish);
        let report = Report::of(self.control);
        if let Some(failure) = report.failure() {
            eprintln!("{failure}");
        }
        if let Some(cause) = self.end(code).explain() {
            eprintln!("{cause}");
        }
        if !settings.quiet() {
            eprintln!("{}", report.summary());
            report.why().into_iter().for_each(|line| eprintln!("foliomem: {line}"));
            self.census.summary().into_iter().for_each(|line| eprintln!("{line}"));
        }
        // Once: processes that outlive the run go on counting.
        let figures = report.json();
        if let Some(run_report) = self.run_report
            // A failure to write is only printed: the exit code stays the program's.
            && let Err(error) = run_report.finish(&report, &figures, code)
        {
            eprintln!("foliomem: {error}");
        }
        if let Some(recorder) = self.recorder {
            let line = recorder.finish(self.control, self.child.cpu_time())?;
            if !settings.quiet() {
                eprintln!("foliomem: {line}");
            }
        }
        if let Some(mut stats) = stats {
            // A failure to write is only printed: the exit code stays the program's.
            if let Err(error) = stats.write(&format!("{figures:#}\n")) {
                eprintln!("foliomem: {error}");
            }
        }
        Ok(code)
    }

    /// Watches the program to its end.
    fn watch(&mut self) -> Result<u8, CliError> {
        let failed = |errno| CliError::System("watch the program", std::io::Error::from(errno));
        loop {
            match self.child.wait(self.sample_interval()).map_err(failed)? {
                ProgramEvent::Ended(code) => {
                    return Ok(self.failure_code().unwrap_or(code));
                }
                ProgramEvent::Stopped => supervised_program::stop_self(),
                ProgramEvent::Signalled(signal) => self.child.signal(signal),
                ProgramEvent::Nothing => {}
            }
            self.look()?;
            // The report shows what the program held at its end, which is before its exit.
            self.control.reap_except(self.child.pid());
            if let Some(process) = self.control.unattended() {
                self.control.fail(format_args!(
                    "the companion process of process {} was killed: stopped, because nothing keeps its limit any more",
                    process.as_raw_nonzero()
                ));
            }
            if self.failure_code().is_some() {
                self.kill_all();
            }
        }
    }

    /// Reaps ended companions. A companion crashes if its process has unmapped or discarded the
    /// agent's memory, as a program does that unmaps every mapping. That process is killed, but not
    /// the run.
    fn reap_companions(&mut self) {
        for process in self.crashing.drain(..) {
            // A handler of the program's may have caught the first signal.
            supervised_program::signal_process(process, Signal::KILL.as_raw());
        }
        let (control, crashing) = (self.control, &mut self.crashing);
        self.child.reap_adopted(|companion| crashing.extend(control.companion_crashed(companion)));
        for &process in &self.crashing {
            supervised_program::signal_process(process, Signal::SEGV.as_raw());
            if !self.said_crashed {
                self.said_crashed = true;
                let process = process.as_raw_nonzero();
                eprintln!(
                    "foliomem: process {process} has unmapped or discarded the agent's memory: stopped by SIGSEGV"
                );
            }
        }
    }

    /// Waits until the companions of all ended processes have ended.
    fn wait_for_companions(&self) {
        let until = Instant::now() + COMPANIONS_TIMEOUT;
        while self.control.has_companion_left() && Instant::now() < until {
            std::thread::sleep(COMPANIONS_PAUSE);
            self.child.reap_adopted(|_| ());
        }
    }

    /// Returns whether all processes of the run are idle, of which those without the agent never
    /// are.
    fn are_all_idle(&self) -> bool {
        self.census.sizes().next().is_none() && self.idle.as_ref().is_some_and(IdleWatcher::are_all_idle)
    }

    /// Returns the time between two samples.
    fn sample_interval(&self) -> Duration {
        let depends_on_others = self.stall_watch.holds_any() || self.limit_updater.follows_groups();
        if self.recorder.is_some() {
            SAMPLE_INTERVAL
        } else if self.are_all_idle() {
            IDLE_SAMPLE_INTERVAL
        } else if depends_on_others {
            SAMPLE_INTERVAL
        } else {
            self.stillness.interval(Instant::now()).unwrap_or(SAMPLE_INTERVAL)
        }
    }

    /// Samples sizes, and prints the messages of the agents.
    fn look(&mut self) -> Result<(), CliError> {
        if !self.are_all_idle() {
            // Idle processes start no others.
            self.census.look(self.child.pid(), self.control);
        }
        self.control.note_ended();
        if let Some(shared) = self.swap_file.as_ref().filter(|created| created.medium == Medium::Memory) {
            let taken_bytes = swap_file::taken_bytes(&shared.file);
            self.control.set_shared_store_bytes(taken_bytes.unwrap_or(shared.bytes));
        }
        self.relatives.look(self.control);
        self.control.sample_peaks();
        self.idle.iter_mut().for_each(|idle| idle.look(self.control));
        let managed = self.control.process_sizes();
        self.largest.note(managed.into_iter().chain(self.census.sizes()).collect());
        self.limit_updater.update(self.control);
        self.stillness.look(Instant::now(), self.control, self.census.sizes().map(|(_, bytes)| bytes).sum());
        self.reap_companions();
        if let Some(recorder) = &mut self.recorder {
            recorder.fetch(self.control)?;
        }
        if let Some(created) = self.swap_file.as_ref().filter(|_| self.discarded.elapsed() > DISCARD_INTERVAL) {
            self.control.swap().discard_left(&created.file);
            self.discarded = Instant::now();
        }
        self.publisher.iter_mut().for_each(Publisher::publish_if_due);
        for notice in self.control.take_notices() {
            self.say(&notice);
        }
        let pressure = self.balance.as_mut().map_or(Pressure::Settled, |balance| balance.look(self.control));
        if let Some(line) = self.stall_watch.look(self.control, pressure) {
            self.say(&format!("foliomem: {line}\n"));
        }
        self.run_report.iter_mut().for_each(|run_report| run_report.look(self.control));
        if self.control.hellos() == 0 && self.started.elapsed() > HELLO_TIMEOUT && !self.said_unmanaged {
            self.said_unmanaged = true;
            eprintln!("foliomem: the program did not load the agent: it runs without a limit");
        }
        Ok(())
    }

    /// Prints a line.
    fn say(&mut self, line: &str) {
        eprint!("{line}");
        self.run_report.iter_mut().for_each(|run_report| run_report.note_said(self.control, line));
    }

    /// Returns the possible causes of the end of the run, which has ended with `code`.
    fn end(&self, code: u8) -> End<'_> {
        let Run { control, oom_kills, largest, .. } = self;
        End { code, control, oom_kills, largest }
    }

    /// Returns the exit code if an agent has asked for the end of the run. If the kernel has killed
    /// processes, their end made the agent ask.
    fn failure_code(&self) -> Option<u8> {
        self.control.failure()?;
        let is_hard = self.control.was_limit_exceeded() && self.control.configuration().hard;
        Some(if is_hard || self.oom_kills.get() > 0 { EXIT_KILLED } else { EXIT_FAILED })
    }

    fn kill_all(&self) {
        for pid in self.control.pids().into_iter().filter_map(|pid| Pid::from_raw(pid as i32)) {
            supervised_program::signal_process(pid, Signal::KILL.as_raw());
        }
        for pid in self.census.sizes().filter_map(|(pid, _)| Pid::from_raw(pid as i32)) {
            supervised_program::signal_process(pid, Signal::KILL.as_raw());
        }
        self.child.signal(Signal::KILL.as_raw());
    }
}
