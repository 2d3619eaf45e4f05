//! The command line of the lab. The doc comments here are the help texts.

use crate::command::vary::Varied;
use clap::builder::styling::Styles;
use foliomem_types::size::DEFAULT_SIZES;
use std::path::PathBuf;

/// Tries policies on a simulated machine of any size, with the engine that manages real programs.
#[derive(Debug, clap::Parser)]
#[command(name = "foliomem-lab", bin_name = "foliomem lab", version, styles = Styles::plain(), subcommand_required = true)]
pub struct Args {
    #[command(subcommand)]
    pub command: LabCommand,
}

/// The commands of the lab.
#[derive(Debug, clap::Subcommand)]
pub enum LabCommand {
    /// List the scenarios that come with foliomem.
    List,
    /// Run a scenario, or many that differ in some settings.
    Run(LabRunArgs),
    /// Replay a recorded run at another limit and with other settings.
    Replay(LabReplayArgs),
    /// Run a scenario, as `run` does, on the machines of a Ray cluster: needs `foliomem_lab`, a
    /// Python package.
    Sweep(LabSweepArgs),
    /// Predict how much slower a recorded run would be within other limits.
    Advise(LabAdviseArgs),
    /// Write a recorded run as a table: a Parquet file with a row for each event.
    Export(LabExportArgs),
    /// Compare published results with the lab's; all of them take some 15 minutes of CPU.
    Seeds(LabSeedsArgs),
    /// Measure the costs of this machine: writes a file for --costs of `run`, `replay` and `sweep`.
    Calibrate(LabCalibrateArgs),
}

/// Options of `lab calibrate`.
#[derive(Debug, clap::Args)]
pub struct LabCalibrateArgs {
    /// File for the costs. [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Options of `lab run`.
#[derive(Debug, clap::Args)]
pub struct LabRunArgs {
    #[command(flatten)]
    pub scenario: LabScenarioArgs,
    #[command(flatten)]
    pub runs: LabRunsArgs,
}

/// The scenario to run.
#[derive(Debug, clap::Args)]
pub struct LabScenarioArgs {
    /// A scenario file, or the name of one that `lab list` prints.
    #[arg(value_name = "SCENARIO")]
    pub scenario: PathBuf,
    #[command(flatten)]
    pub varied: LabVaryArgs,
}

/// Settings to vary, and the costs.
#[derive(Debug, clap::Args)]
pub struct LabVaryArgs {
    /// Replace a setting of the scenario (docs/lab/guide.md has the keys):
    /// swap.strategy=one-fragment,nonfull-first runs both; several of these options run every
    /// combination. Settings that are lists take values joined by +, or nothing:
    /// machine.sizes_kib=,64,64+2048 runs three. codec, granule or strategy without a value runs
    /// all values.
    #[arg(long, visible_alias = "set", value_name = "KEY=VALUE,...")]
    pub vary: Vec<Varied>,
    /// Cost table that `lab calibrate` has written. [default: that of the reference machine]
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
}

impl LabVaryArgs {
    /// Returns the settings and values of all `--vary` options.
    pub fn settings(&self) -> Vec<(String, Vec<String>)> {
        Varied::all(&self.vary)
    }
}

/// Options that `lab run` and `lab replay` share.
#[derive(Debug, clap::Args)]
pub struct LabRunsArgs {
    #[command(flatten)]
    pub files: LabFilesArgs,
    /// Threads for the runs. [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
}

/// Files for the results, beside the terminal.
#[derive(Debug, clap::Args)]
pub struct LabFilesArgs {
    /// Write the runs as a JSON array to FILE; "-" for stdout, without the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the runs as a self-contained page with tables and plots.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the runs as a Parquet file: a row for each run, a column for each setting and result.
    #[arg(long, value_name = "FILE")]
    pub parquet: Option<PathBuf>,
}

/// Options of `lab sweep`.
#[derive(Debug, clap::Args)]
pub struct LabSweepArgs {
    /// The cluster, as ray.init takes it: HOST:PORT of its head, ray://HOST:PORT, or auto for this
    /// machine's cluster.
    #[arg(long, value_name = "ADDRESS")]
    pub ray: String,
    #[command(flatten)]
    pub scenario: LabScenarioArgs,
    #[command(flatten)]
    pub files: LabFilesArgs,
}

/// Options of `lab export`.
#[derive(Debug, clap::Args)]
pub struct LabExportArgs {
    /// The trace that `record` has written.
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// File for the table.
    #[arg(short, long, value_name = "FILE.parquet")]
    pub output: PathBuf,
}

/// Options of `lab replay`.
#[derive(Debug, clap::Args)]
pub struct LabReplayArgs {
    /// The trace that `record` has written.
    #[arg(value_name = "FILE")]
    pub trace: PathBuf,
    /// Memory limits: sizes, or shares of the peak of the recorded run: 75%,50%,300M.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "50%")]
    pub limit: Vec<String>,
    /// Folio sizes beside 4K: 64K, or 16K,64K,2M; "none" for 4K alone.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = DEFAULT_SIZES)]
    pub sizes: Vec<String>,
    #[command(flatten)]
    pub varied: LabVaryArgs,
    #[command(flatten)]
    pub runs: LabRunsArgs,
}

/// Options of `lab advise`.
#[derive(Debug, clap::Args)]
pub struct LabAdviseArgs {
    /// The trace that `record` has written.
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Limits of the table: sizes, or shares of what the run needed: 75%,50%,300M. [default: from
    /// all of the need down to an eighth]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub at: Vec<String>,
    /// Write the advice as JSON to FILE; "-" for stdout, without the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Threads for the replays. [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
}

/// Options of `lab seeds`.
#[derive(Debug, clap::Args)]
pub struct LabSeedsArgs {
    /// Only rows whose series, table, workload, configuration or metric contains TEXT: "patch 2",
    /// usemem, "sys time".
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub only: String,
    /// Print rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Threads for the runs. [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
}

#[cfg(test)]
mod tests {
    use super::Args;
    use clap::CommandFactory;

    #[test]
    fn the_reference_has_pages_and_completions() {
        foliomem_command::docs::keep_command("foliomem-lab", Args::command(), &[]);
    }
}
