//! The command line. The doc comments here are the help texts.

use crate::settings::DEFAULT_SIZES;
use crate::vary::Varied;
use clap::builder::styling::Styles;
use std::ffi::OsString;
use std::path::PathBuf;

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
    /// Look at a run, and change it, while it goes on.
    Ctl(CtlArgs),
    /// Check what this machine allows, and print how to fix what is missing.
    Doctor,
    /// Measure foliomem: its swap, its parts, real programs; as root also the kernel's zram swap
    /// (all changes of the machine are restored).
    Bench {
        #[command(subcommand)]
        what: BenchCommand,
    },
    /// Try policies on a simulated machine of any size, with the engine that manages real programs.
    Lab {
        /// The command of the lab.
        #[command(subcommand)]
        what: LabCommand,
    },
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

/// Options of `ctl`.
#[derive(Debug, clap::Args)]
pub struct CtlArgs {
    /// Any process of the run, or the foliomem that runs it. Changes apply to the whole run.
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
}

/// The benchmarks.
#[derive(Debug, clap::Subcommand)]
pub enum BenchCommand {
    /// Swap-out and swap-in speed and compression ratio by folio size, codec, granule and threads.
    Swap(BenchSwapArgs),
    /// Allocation of swap slots: time, scanned clusters and fallbacks by strategy, order, threads
    /// and fill level.
    Slots(BenchSlotsArgs),
    /// Compaction: success, pages moved and time of making a run of frames, by compaction variant
    /// and order.
    Compact(BenchCompactArgs),
    /// Real programs: without a limit, under the kernel's, and under foliomem's with equal total.
    Programs(BenchProgramsArgs),
    /// Access patterns at limits of 75, 50 and 25% of need, by folio size, next to the kernel at an
    /// equal total.
    Access(BenchAccessArgs),
    /// Speed of the lab's simulations, and its memory for each simulated page.
    Lab(BenchLabArgs),
}

/// Options of `bench swap`.
#[derive(Debug, clap::Args)]
pub struct BenchSwapArgs {
    /// Print rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Folio sizes. [default: 4K,16K,64K,256K,2M]
    #[arg(long, value_name = "LIST")]
    pub sizes: Option<String>,
    /// Codecs, as --codec of `run`, such as lz4,zstd:5,zstd+dict.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "lz4")]
    pub codec: Vec<String>,
    /// Sizes of the largest piece that is compressed as one, 4K to 2M, such as 4K,16K,64K.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "64K")]
    pub granule: Vec<String>,
    /// Numbers of compressing threads, and of touching threads, such as 1,2.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: Vec<u32>,
    /// Do not measure the kernel.
    #[arg(long)]
    pub no_kernel: bool,
}

/// Options of `bench slots`.
#[derive(Debug, clap::Args)]
pub struct BenchSlotsArgs {
    /// Print rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Only these: per-cpu-linear, cluster-lists, one-fragment, nonfull-first.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub strategies: Vec<String>,
    /// Folio orders, 0 (4K) to 9 (2M). [default: 0,2,4,9]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(0..=9))]
    pub orders: Vec<u8>,
    /// Numbers of threads. [default: 1,2,4,8]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Vec<u16>,
}

/// Options of `bench compact`.
#[derive(Debug, clap::Args)]
pub struct BenchCompactArgs {
    /// Print rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Only these: split-folios, migrate-whole, +free-split, +sort-sources.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub variants: Vec<String>,
    /// Orders, 1 (8K) to 9 (2M). [default: 4,9]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..=9))]
    pub orders: Vec<u8>,
}

/// Options of `bench programs`.
#[derive(Debug, clap::Args)]
pub struct BenchProgramsArgs {
    /// Print rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Only these: numpy, redis, compile.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Runs of each setting, of which the median counts; a setting that takes longer than 45 s runs
    /// once.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
    /// Do not measure the kernel.
    #[arg(long)]
    pub no_kernel: bool,
}

/// Options of `bench access`.
#[derive(Debug, clap::Args)]
pub struct BenchAccessArgs {
    /// Print rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Only these: sequential, strided, zipf, random.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Limits, 10 to 100 per cent of the need, joined by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = foliomem_bench::access::LIMITS,
          value_parser = clap::value_parser!(u64).range(10..=100))]
    pub limits: Vec<u64>,
    /// Runs of each setting, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
    /// Do not measure the kernel.
    #[arg(long)]
    pub no_kernel: bool,
}

/// Options of `bench lab`.
#[derive(Debug, clap::Args)]
pub struct BenchLabArgs {
    /// Print rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Runs of each case, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
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

/// Options of `run`. Each but --config and --print-config can also come from a variable
/// (FOLIOMEM_LIMIT, FOLIOMEM_SIZES, ...) or from the configuration file, in this order of
/// precedence.
#[derive(Debug, Default, clap::Args)]
pub struct RunArgs {
    /// Memory limit for the program and its children together: 512M, 2G, 25% (of RAM, or of the
    /// container's memory), at least 16M; or need/2: half of their peak need so far, as if
    /// uncompressed, and at least 64M. `run` needs a limit, here, as FOLIOMEM_LIMIT or in the file.
    /// [default of `record`: need/2]
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<String>,
    /// Folio sizes beside 4K, from 8K to 2M: 16K,64K,2M. "none" for 4K alone. A size may have a
    /// value, as in the kernel: 64K=madvise, 2M=inherit; "enabled=" (always, madvise, never) sets
    /// the value that sizes inherit. [default: 16K,32K,64K,256K]
    #[arg(long, value_name = "LIST")]
    pub sizes: Option<String>,
    /// Codec of the compressed memory: lz4, zstd or zstd:LEVEL (1 to 19), or one of these with
    /// +dict, which compresses small pieces with a dictionary of the program's own content.
    /// [default: lz4]
    #[arg(long, value_name = "CODEC")]
    pub codec: Option<String>,
    /// While CPUs are idle, compress memory that has not been touched for some seconds again: zstd
    /// or zstd:LEVEL. [default: not]
    #[arg(long, value_name = "CODEC")]
    pub recompress: Option<String>,
    /// Size of the largest piece that is compressed as one, 4K to 2M. [default: 64K]
    #[arg(long, value_name = "SIZE")]
    pub granule: Option<String>,
    /// Encrypted swap for memory that does not fit into the limit even compressed: a file that does
    /// not exist yet and vanishes with the run, or a block device that nothing else uses, whose
    /// content is lost. [default size of a file: 8 times the limit, but at most half of the free
    /// space]
    #[arg(long, value_name = "FILE[:SIZE]")]
    pub swap: Option<String>,
    /// Stop the program (exit code 137) if its data does not compress into the limit, instead of
    /// exceeding the limit.
    #[arg(long)]
    pub hard: bool,
    /// Write counters as JSON to FILE at exit; "-" for stderr.
    #[arg(long, value_name = "FILE")]
    pub stats: Option<String>,
    /// Print no summary at exit.
    #[arg(long)]
    pub quiet: bool,
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
