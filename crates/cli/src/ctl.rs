//! `foliomem ctl`: shows and changes a run while it goes on.

use crate::args::{CtlArgs, CtlCommand};
use crate::error::{BadValue, CliError};
use crate::live_limit;
use crate::policy::{change_policy, show_policy};
use crate::report::Report;
use foliomem_session::find_run;
use foliomem_session::memory_request::Wanted;
use foliomem_session::process_table::ProcessSlot;
use foliomem_session::segment::Control;
use foliomem_types::size::parse_bytes;
use foliomem_types::units::PAGE_BYTES;
use std::io::{ErrorKind, Write};
use std::time::Duration;

/// Interval at which `--wait` checks whether the processes are done.
const WAIT_PAUSE: Duration = Duration::from_millis(5);

/// Performs the command on the run that a process belongs to.
pub fn ctl(args: &CtlArgs) -> Result<u8, CliError> {
    let control = find_run::run_of(args.pid)?;
    match &args.what {
        CtlCommand::Sizes { list: None } => print!("{}", show_policy(control.sizes())),
        CtlCommand::Sizes { list: Some(list) } => {
            let bad = |source| CliError::Setting {
                name: "sizes",
                origin: "command line".to_owned(),
                source: Box::new(BadValue::Size(source)),
            };
            // Whether a list is valid does not depend on the policy that it changes.
            change_policy(control.sizes(), list).map_err(bad)?;
            control.change_sizes(|sizes| change_policy(sizes, list).unwrap_or(sizes));
        }
        CtlCommand::Limit { value, timeout } => live_limit::change(control, args.pid, value, *timeout)?,
        CtlCommand::Status { json: false, .. } => print!("{}", Report::of(control).status()),
        CtlCommand::Status { json: true, every: None } => println!("{:#}", Report::of(control).status_json()),
        CtlCommand::Status { json: true, every: Some(every) } => follow(control, *every)?,
        CtlCommand::Reclaim { amount, wait } => reclaim(control, args.pid, amount, *wait)?,
        CtlCommand::Resume { wait } => ask(control, &processes_of(control, args.pid), |_| Wanted::Resume, *wait),
    }
    Ok(0)
}

/// Prints the status again and again, until the run ends or nobody reads it any more.
fn follow(control: &'static Control, every: Duration) -> Result<(), CliError> {
    while !control.has_ended() {
        let written = writeln!(std::io::stdout(), "{}", Report::of(control).status_json());
        match written {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
            other => other.map_err(|error| CliError::System("print the status", error))?,
        }
        std::thread::sleep(every);
    }
    Ok(())
}

/// A process of a run, with its pid.
type Process = (u32, &'static ProcessSlot);

/// Has process `pid` swap out `amount`; all processes of the run in proportion to their sizes if
/// `pid` is the supervisor.
fn reclaim(control: &'static Control, pid: u32, amount: &str, waits: bool) -> Result<(), CliError> {
    let bytes = match amount {
        "all" => u64::MAX,
        size => parse_bytes(size, None).map_err(|source| CliError::Setting {
            name: "reclaim",
            origin: "command line".to_owned(),
            source: Box::new(BadValue::Size(source)),
        })?,
    };
    let processes = processes_of(control, pid);
    let whole_bytes: u64 = processes.iter().map(|(_, slot)| slot.measured_bytes()).sum();
    let share = |of_bytes: u64| (u128::from(bytes) * u128::from(of_bytes) / u128::from(whole_bytes.max(1))) as u64;
    let pages = |slot_bytes| if bytes == u64::MAX { bytes } else { share(slot_bytes) } / PAGE_BYTES as u64;
    ask(control, &processes, |slot| Wanted::Reclaim { pages: pages(slot.measured_bytes()) }, waits);
    Ok(())
}

/// Returns process `pid`, or all processes of the run if it is none of them but the supervisor.
fn processes_of(control: &'static Control, pid: u32) -> Vec<Process> {
    let mut processes = control.living_processes();
    if processes.iter().any(|(other, _)| *other == pid) {
        processes.retain(|(other, _)| *other == pid);
    }
    processes
}

/// Leaves a request in the slot of each of `processes`. If `waits`, waits until the requests are
/// served.
fn ask(control: &Control, processes: &[Process], wanted: impl Fn(&ProcessSlot) -> Wanted, waits: bool) {
    let ask = |&(_, slot): &Process| (slot, slot.request.ask(wanted(slot)));
    let asked: Vec<_> = processes.iter().map(ask).collect();
    while waits && !control.has_ended() && asked.iter().any(|(slot, number)| !slot.request.is_finished(*number)) {
        std::thread::sleep(WAIT_PAUSE);
    }
}
