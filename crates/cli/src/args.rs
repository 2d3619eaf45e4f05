//! The command line. The doc comments here are the help texts.

use crate::knob::Options;
use crate::remedy::Place;
use clap::builder::styling::Styles;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The shortest time between two looks at a run: its supervisor samples no more often.
const MIN_INTERVAL: Duration = Duration::from_millis(10);

/// Runs programs inside a memory limit: memory that a program has not used for a while is
/// compressed.
#[derive(Debug, clap::Parser)]
#[command(name = "foliomem", version, styles = Styles::plain(), subcommand_required = true)]
pub struct Args {
    /// With --version: also print the commit and how foliomem was built.
    #[arg(long, requires = "version")]
    pub verbose: bool,
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Run a program inside a memory limit.
    Run(RunArgs),
    /// Run a program as `run` does, and record its memory use for `lab replay`.
    Record(RecordArgs),
    /// Predict how much slower a program would be within other limits: records one run, or takes a
    /// trace that `record` has written.
    Advise(AdviseArgs),
    /// List the runs of this user, of all users for root.
    Ps(PsArgs),
    /// Show the runs and their processes, live, and change limits.
    Top(TopArgs),
    /// Look at a run, and change it, while it goes on.
    Ctl(CtlArgs),
    /// Check what this machine allows, and print how to mend what is missing.
    Doctor(DoctorArgs),
    /// Let ordinary users, containers and services use foliomem; as root.
    Setup(SetupArgs),
    /// Measure foliomem: its swap, its parts, real programs. Starts foliomem-bench.
    #[command(disable_help_flag = true)]
    Bench(OtherArgs),
    /// Try policies on a simulated machine of any size. Starts foliomem-lab.
    #[command(disable_help_flag = true)]
    Lab(OtherArgs),
    /// Add kernels to Jupyter that run inside a limit. Starts python3 -m foliomem.
    #[command(disable_help_flag = true)]
    Jupyter(OtherArgs),
}

/// Arguments that another program parses.
#[derive(Debug, clap::Args)]
pub struct OtherArgs {
    /// The command and its options; --help lists them.
    #[arg(value_name = "ARGUMENTS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<OsString>,
}

/// Options of `doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print how to mend things there, not where foliomem runs.
    #[arg(long, value_name = "PLACE")]
    pub on: Option<Place>,
}

/// Options of `setup`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct SetupArgs {
    #[command(flatten)]
    pub how: SetupHow,
    #[command(subcommand)]
    pub what: Option<SetupCommand>,
}

/// Options that all kinds of `setup` have.
#[derive(Debug, clap::Args)]
pub struct SetupHow {
    /// Remove what it has written, and nothing else.
    #[arg(long)]
    pub undo: bool,
    /// Write below this directory instead of /, and leave the running system alone.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
}

/// What to set up.
#[derive(Debug, clap::Subcommand)]
pub enum SetupCommand {
    /// Run a service of systemd inside a limit, by a drop-in for its unit.
    Unit {
        /// The unit, such as nginx or nginx.service.
        #[arg(value_name = "NAME")]
        name: String,
        /// The limit of the service, as --limit of `run`.
        #[arg(long, value_name = "SIZE", required_unless_present = "undo")]
        limit: Option<String>,
        #[command(flatten)]
        how: SetupHow,
    },
}

/// Options of `ps`.
#[derive(Debug, clap::Args)]
pub struct PsArgs {
    /// Print the list as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of `top`.
#[derive(Debug, clap::Args)]
pub struct TopArgs {
    /// Show only the run of this process: any process of it, or the foliomem that runs it.
    #[arg(value_name = "PID")]
    pub pid: Option<u32>,
    /// Print one picture as text, and end; also if the output is no terminal.
    #[arg(long)]
    pub once: bool,
    /// Print the list of `ps --json` with the processes of each run, and end.
    #[arg(long)]
    pub json: bool,
}

/// Options of `ctl`.
#[derive(Debug, clap::Args)]
pub struct CtlArgs {
    /// Any process of the run, or the foliomem that runs it. Changes apply to the whole run, but
    /// `reclaim` and `resume` to this one process, unless it is the foliomem.
    #[arg(value_name = "PID")]
    pub pid: u32,
    #[command(subcommand)]
    pub what: CtlCommand,
}

/// The settings of a run.
#[derive(Debug, clap::Subcommand)]
pub enum CtlCommand {
    /// Set the folio sizes that are used from now on; without LIST, print them.
    Sizes {
        /// As --sizes of `run`, but sizes that are not named stay as they are:
        /// 64K=never,2M=madvise. "none" disables all sizes but those named after it.
        #[arg(value_name = "LIST")]
        list: Option<String>,
    },
    /// Change the limit. A lower one is reached in the background; this returns when it holds.
    Limit {
        /// A size as --limit of `run` (512M, 25%), a change of the present limit (+256M, -256M), or
        /// a share of what the program needs (need/2).
        #[arg(value_name = "SIZE|+SIZE|-SIZE|need/N", allow_hyphen_values = true)]
        value: String,
        /// Wait no longer than this for a lower limit to hold; 0 to return at once.
        #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
        timeout: Duration,
    },
    /// Print what the run takes now.
    Status {
        /// Print all that `run --stats` writes, and what is true at the moment, as JSON.
        #[arg(long)]
        json: bool,
        /// Print it again every SECONDS seconds, one line of JSON each, until the run ends.
        #[arg(long, value_name = "SECONDS", requires = "json", value_parser = interval)]
        every: Option<Duration>,
    },
    /// Swap out now what has been unused for longest, without waiting for memory pressure.
    Reclaim {
        /// How much: a size such as 256M, or all.
        #[arg(value_name = "SIZE|all")]
        amount: String,
        /// Return when it is done.
        #[arg(long)]
        wait: bool,
    },
    /// Swap in now what is swapped out, ahead of its use, as far as there is room below the limit.
    Resume {
        /// Return when it is done.
        #[arg(long)]
        wait: bool,
    },
}

/// Parses seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "give seconds, such as 0.5".to_owned())
}

/// Parses the seconds between two looks.
fn interval(text: &str) -> Result<Duration, String> {
    let interval = seconds(text)?;
    if interval >= MIN_INTERVAL { Ok(interval) } else { Err("give at least 0.01 seconds".to_owned()) }
}

/// Options of `record`.
#[derive(Debug, clap::Args)]
pub struct RecordArgs {
    /// File for the trace.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    #[command(flatten)]
    pub run: RunArgs,
}

/// Options of `advise`. Settings of the recorded run are those of `run`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "foliomem advise [OPTIONS] -- PROGRAM [ARGUMENTS]\n       foliomem advise [OPTIONS] TRACE")]
pub struct AdviseArgs {
    /// The trace that `record` has written.
    #[arg(value_name = "TRACE", required_unless_present_any = ["program"], conflicts_with_all = ["program", "output"])]
    pub trace: Option<PathBuf>,
    /// Limits of the table: sizes, or shares of what the run needed: 75%,50%,300M. [default: from
    /// all of the need down to an eighth]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub at: Vec<String>,
    /// Write the advice as JSON to FILE; "-" for stdout, without the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Keep the trace of the run in this file.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub options: Options,
    /// Read settings of the run from this TOML file, as `run` does.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The program and its arguments, to run once.
    #[arg(value_name = "PROGRAM", last = true)]
    pub program: Vec<OsString>,
}

/// Options of `run`. Each but --config and --print-config can also come from a variable
/// (FOLIOMEM_LIMIT, FOLIOMEM_SIZES, ...) or from the configuration file, in this order of
/// precedence.
#[derive(Debug, Default, clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub options: Options,
    /// Read settings from this TOML file. [default: $FOLIOMEM_CONFIG, then foliomem/config.toml in
    /// $XDG_CONFIG_HOME or ~/.config]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the settings and their origins, and run nothing.
    #[arg(long)]
    pub print_config: bool,
    /// The program and its arguments.
    #[arg(value_name = "PROGRAM", trailing_var_arg = true, required_unless_present = "print_config")]
    pub program: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use super::Args;
    use clap::CommandFactory;

    #[test]
    fn the_reference_has_pages_and_completions() {
        foliomem_command::docs::keep_command("foliomem", Args::command(), &["bench", "lab", "jupyter"]);
    }
}
