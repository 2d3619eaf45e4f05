//! The command line.

use crate::settings::DEFAULT_SIZES;
use crate::vary::Varied;
use clap::builder::styling::Styles;
use std::ffi::OsString;
use std::path::PathBuf;

/// Runs programs inside a memory budget: what they have not used for a while is compressed.
#[derive(Debug, clap::Parser)]
#[command(name = "foliomem", version, styles = Styles::plain(), subcommand_required = true)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Run a program inside a memory limit.
    Run(RunArgs),
    /// Run a program as `run` does, and record which memory it uses, for `lab replay`.
    Record(RecordArgs),
    /// Look at a run, and change it, while it goes on.
    Ctl(CtlArgs),
    /// Say what this machine allows, and what to do about what is missing.
    Doctor,
    /// Measure foliomem: its swap, its parts, real programs; as root also the kernel's zram swap (what that changes in the machine is
    /// restored).
    Bench {
        #[command(subcommand)]
        what: BenchCommand,
    },
    /// Try policies on a simulated machine of any size, with the engine that manages real programs.
    Lab {
        /// What to do.
        #[command(subcommand)]
        what: LabCommand,
    },
}

/// What the lab is to do.
#[derive(Debug, clap::Subcommand)]
pub enum LabCommand {
    /// The scenarios that come with foliomem.
    List,
    /// Run a scenario, or many that differ in some settings.
    Run(LabRunArgs),
    /// Run what `record` has recorded once more, at another limit and with other settings.
    Replay(LabReplayArgs),
    /// As `run`, on the machines of a Ray cluster: needs `foliomem_lab`, a Python package.
    Sweep(LabSweepArgs),
    /// Write what `record` has recorded as a table: a Parquet file with a row for each event.
    Export(LabExportArgs),
    /// Published results beside the lab's; all of them take some 15 minutes of CPU.
    Seeds(LabSeedsArgs),
    /// Measure what things cost on this machine: a file for --costs of `run`, `replay` and `sweep`.
    Calibrate(LabCalibrateArgs),
}

/// Options of `lab calibrate`.
#[derive(Debug, clap::Args)]
pub struct LabCalibrateArgs {
    /// Where the costs go. [default: stdout]
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

/// What is to be run.
#[derive(Debug, clap::Args)]
pub struct LabScenarioArgs {
    /// A scenario file, or the name of one that `lab list` prints.
    #[arg(value_name = "SCENARIO")]
    pub scenario: PathBuf,
    #[command(flatten)]
    pub varied: LabVaryArgs,
}

/// What is set, and what things cost.
#[derive(Debug, clap::Args)]
pub struct LabVaryArgs {
    /// Replace a setting of the scenario (docs/lab/guide.md has the keys): swap.strategy=one-fragment,nonfull-first runs both; several of
    /// these run every combination. Settings that are lists take values joined by +, or nothing: machine.sizes_kib=,64,64+2048 runs
    /// three. codec, granule or strategy without a value: all there are.
    #[arg(long, visible_alias = "set", value_name = "KEY=VALUE,...")]
    pub vary: Vec<Varied>,
    /// What things cost, as `lab calibrate` has written it. [default: those of the reference machine]
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
}

impl LabVaryArgs {
    /// Settings and values, of all of these options.
    pub fn settings(&self) -> Vec<(String, Vec<String>)> {
        Varied::all(&self.vary)
    }
}

/// What `lab run` and `lab replay` have in common.
#[derive(Debug, clap::Args)]
pub struct LabRunsArgs {
    #[command(flatten)]
    pub files: LabFilesArgs,
    /// Threads that run them. [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
}

/// Where runs are written to beside the terminal.
#[derive(Debug, clap::Args)]
pub struct LabFilesArgs {
    /// Write the runs as a JSON array to FILE; "-" for stdout, without the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the runs as a page with tables and plots, which needs nothing else.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the runs as a Parquet file: a row for each, a column for each setting and result.
    #[arg(long, value_name = "FILE")]
    pub parquet: Option<PathBuf>,
}

/// Options of `lab sweep`.
#[derive(Debug, clap::Args)]
pub struct LabSweepArgs {
    /// The cluster, as ray.init has it: HOST:PORT of its head, ray://HOST:PORT, or auto for the one this machine belongs to.
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
    /// What `record` has written.
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Where the table goes.
    #[arg(short, long, value_name = "FILE.parquet")]
    pub output: PathBuf,
}

/// Options of `lab replay`.
#[derive(Debug, clap::Args)]
pub struct LabReplayArgs {
    /// What `record` has written.
    #[arg(value_name = "FILE")]
    pub trace: PathBuf,
    /// What the program may take: sizes, or shares of the most it had: 75%,50%,300M.
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
    /// Only rows whose series, table, workload, configuration or metric has TEXT in it: "patch 2", usemem, "sys time".
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub only: String,
    /// Rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Threads that run them. [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
}

/// Options of `ctl`.
#[derive(Debug, clap::Args)]
pub struct CtlArgs {
    /// Any process of the run, or the foliomem that runs it. What is changed goes for the whole run.
    #[arg(value_name = "PID")]
    pub pid: u32,
    #[command(subcommand)]
    pub what: CtlCommand,
}

/// What to look at, or change.
#[derive(Debug, clap::Subcommand)]
pub enum CtlCommand {
    /// The folio sizes that are used from now on; without LIST, print which are.
    Sizes {
        /// As --sizes of `run`, but sizes that are not named stay as they are: 64K=never,2M=madvise. "none" for none but
        /// those named behind it.
        #[arg(value_name = "LIST")]
        list: Option<String>,
    },
}

/// What to measure.
#[derive(Debug, clap::Subcommand)]
pub enum BenchCommand {
    /// Swap-out and swap-in speed and compression ratio by folio size, codec, granule and threads.
    Swap(BenchSwapArgs),
    /// How swap slots are found: time, clusters looked through and fallbacks by strategy, order, threads and fill.
    Slots(BenchSlotsArgs),
    /// How runs of frames are made where none is free: success, pages moved and time by variant of compaction and order.
    Compact(BenchCompactArgs),
    /// Real programs: without a limit, under the kernel's, and under foliomem's with the same total.
    Programs(BenchProgramsArgs),
    /// Access patterns at limits of 75, 50 and 25% of need, by folio size, next to the kernel at the same total.
    Access(BenchAccessArgs),
    /// How fast the lab simulates, and how much memory it takes for each simulated page.
    Lab(BenchLabArgs),
}

/// Options of `bench swap`.
#[derive(Debug, clap::Args)]
pub struct BenchSwapArgs {
    /// Rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Folio sizes. [default: 4K,16K,64K,256K,2M]
    #[arg(long, value_name = "LIST")]
    pub sizes: Option<String>,
    /// How memory is compressed, as of `run`, such as lz4,zstd:5,zstd+dict.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "lz4")]
    pub codec: Vec<String>,
    /// The most that is compressed as one piece, 4K to 2M, such as 4K,16K,64K.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "64K")]
    pub granule: Vec<String>,
    /// Threads that compress, and as many that touch, such as 1,2.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: Vec<u32>,
    /// Leave the kernel out.
    #[arg(long)]
    pub no_kernel: bool,
}

/// Options of `bench slots`.
#[derive(Debug, clap::Args)]
pub struct BenchSlotsArgs {
    /// Rows as a JSON array.
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
    /// Rows as a JSON array.
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
    /// Rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Only these: numpy, redis, compile.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Runs of each, of which the median counts; what takes longer than 45 s runs once.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
    /// Leave the kernel out.
    #[arg(long)]
    pub no_kernel: bool,
}

/// Options of `bench access`.
#[derive(Debug, clap::Args)]
pub struct BenchAccessArgs {
    /// Rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Only these: sequential, strided, zipf, random.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Limits, 10 to 100 per cent of the need, joined by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = foliomem_bench::access::LIMITS,
          value_parser = clap::value_parser!(u64).range(10..=100))]
    pub limits: Vec<u64>,
    /// Runs of each, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
    /// Leave the kernel out.
    #[arg(long)]
    pub no_kernel: bool,
}

/// Options of `bench lab`.
#[derive(Debug, clap::Args)]
pub struct BenchLabArgs {
    /// Rows as a JSON array.
    #[arg(long)]
    pub json: bool,
    /// Runs of each, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
}

/// Options of `record`.
#[derive(Debug, clap::Args)]
pub struct RecordArgs {
    /// Where the trace goes.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    #[command(flatten)]
    pub run: RunArgs,
}

/// Options of `run`. Each but --config and --print-config can also come from a variable (FOLIOMEM_LIMIT,
/// FOLIOMEM_SIZES, ...) or from the configuration file, in this order of precedence.
#[derive(Debug, Default, clap::Args)]
pub struct RunArgs {
    /// What the program and its children may take together: 512M, 2G, 25% (of RAM, or of the container's memory), at least
    /// 16M; or need/2: half of the most that they have needed so far, compressed or not, and at least 64M. `run` needs it, here, as
    /// FOLIOMEM_LIMIT or in the file. [default of `record`: need/2]
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<String>,
    /// Folio sizes beside 4K, from 8K to 2M: 16K,64K,2M. "none" for 4K alone. A size may have a value, as in the kernel:
    /// 64K=madvise, 2M=inherit; "enabled=" (always, madvise, never) is what inherit refers to. [default: 16K,32K,64K,256K]
    #[arg(long, value_name = "LIST")]
    pub sizes: Option<String>,
    /// How memory is compressed: lz4, zstd or zstd:LEVEL (1 to 19), or one of these with +dict, which compresses small
    /// pieces with a dictionary of the program's own content. [default: lz4]
    #[arg(long, value_name = "CODEC")]
    pub codec: Option<String>,
    /// Compress what has not been touched for some seconds again, as long as CPUs are idle: zstd or zstd:LEVEL. [default: not]
    #[arg(long, value_name = "CODEC")]
    pub recompress: Option<String>,
    /// The most that is compressed as one piece, 4K to 2M. [default: 64K]
    #[arg(long, value_name = "SIZE")]
    pub granule: Option<String>,
    /// Where what does not fit into the limit even compressed goes, encrypted: a file that does not exist yet and vanishes
    /// with the run, or a block device that nothing else uses, whose content is lost. [default size of a file: 8 times
    /// the limit, but at most half of what is free]
    #[arg(long, value_name = "FILE[:SIZE]")]
    pub swap: Option<String>,
    /// Stop the program (exit code 137) when its data does not compress into the limit, instead of going over it.
    #[arg(long)]
    pub hard: bool,
    /// Write counters as JSON to FILE at exit; "-" for stderr.
    #[arg(long, value_name = "FILE")]
    pub stats: Option<String>,
    /// No summary at exit.
    #[arg(long)]
    pub quiet: bool,
    /// Read settings from this TOML file. [default: $FOLIOMEM_CONFIG, then foliomem/config.toml in
    /// $XDG_CONFIG_HOME or ~/.config]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the settings and where each comes from, and run nothing.
    #[arg(long)]
    pub print_config: bool,
    /// The program and its arguments.
    #[arg(value_name = "PROGRAM", trailing_var_arg = true, required_unless_present = "print_config")]
    pub program: Vec<OsString>,
}
