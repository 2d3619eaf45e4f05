//! The command line of the benchmarks. The doc comments here are the help texts.

use super::table::Form;
use clap::builder::styling::Styles;
use std::path::PathBuf;

/// Measures foliomem: its swap, its parts, real programs; as root also the kernel's zram swap (all
/// changes of the machine are restored).
#[derive(Debug, clap::Parser)]
#[command(name = "foliomem-bench", bin_name = "foliomem bench", version, styles = Styles::plain(), subcommand_required = true)]
pub struct Args {
    #[command(subcommand)]
    pub command: BenchCommand,
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
    /// Small programs in many languages, most with a garbage collector, in the same settings.
    Languages(BenchLanguagesArgs),
    /// Access patterns at limits of 75, 50 and 25% of need, by folio size, next to the kernel at an
    /// equal total.
    Access(BenchAccessArgs),
    /// Growing programs in memory cgroups: how far they exceed a fixed limit, and how many the
    /// kernel kills. Needs root and a C compiler.
    Limit(BenchLimitArgs),
    /// Compare the slowdown that `foliomem advise` predicts with that of real programs.
    Advise(BenchAdviseArgs),
    /// The shortest program, plain and in a run, in turns: what the start of a run takes.
    Start(BenchStartArgs),
    /// Idle sandboxes in a fixed amount of memory, plain, swapped out to zram by the kernel, and
    /// under --idle: how many fit, how long one takes to be ready, and to answer a query over all
    /// its data. Needs Python with pandas.
    Density(BenchDensityArgs),
    /// Speed of the lab's simulations, and its memory for each simulated page.
    Lab(BenchLabArgs),
    /// Costs of this machine, for `foliomem lab calibrate`.
    #[command(hide = true)]
    Calibrate(CalibrateArgs),
}

/// The way to print a table.
#[derive(Debug, clap::Args)]
pub struct Printing {
    /// Print rows as a JSON array.
    #[arg(long)]
    json: bool,
}

impl Printing {
    pub fn form(&self) -> Form {
        if self.json { Form::Json } else { Form::Text }
    }
}

/// The turns of a program: which settings are run, and how often.
#[derive(Debug, clap::Args)]
pub struct Turns {
    /// Runs of each setting, of which the median counts; a setting that takes longer than 45 s runs
    /// once.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
    /// Do not measure the kernel.
    #[arg(long)]
    pub no_kernel: bool,
}

/// Options of `bench swap`.
#[derive(Debug, clap::Args)]
pub struct BenchSwapArgs {
    #[command(flatten)]
    pub printing: Printing,
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
    #[command(flatten)]
    pub printing: Printing,
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
    #[command(flatten)]
    pub printing: Printing,
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
    #[command(flatten)]
    pub printing: Printing,
    /// Only these: numpy, redis, compile, make.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    #[command(flatten)]
    pub turns: Turns,
}

/// Options of `bench languages`.
#[derive(Debug, clap::Args)]
pub struct BenchLanguagesArgs {
    #[command(flatten)]
    pub printing: Printing,
    /// Only these: lua, luajit, perl, guile, ruby, ocaml, erlang, pandas, node, java-g1, java-zgc.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    #[command(flatten)]
    pub turns: Turns,
    /// The kernel's limit in per cent of the need, 10 to 100.
    #[arg(long, value_name = "N", default_value_t = foliomem_bench::languages::PERCENT,
          value_parser = clap::value_parser!(u64).range(10..=100))]
    pub percent: u64,
    /// The data of the programs in per cent of their usual data, 1 to 1000.
    #[arg(long, value_name = "PERCENT", default_value_t = foliomem_bench::languages::SCALE,
          value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub scale: u64,
}

/// Options of `bench access`.
#[derive(Debug, clap::Args)]
pub struct BenchAccessArgs {
    #[command(flatten)]
    pub printing: Printing,
    /// Only these: sequential, strided, zipf, random.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Only these of foliomem's settings: default, 4K, 16K, 64K, 256K, 2M.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub settings: Vec<String>,
    /// The memory that the program touches in MiB, 16 to 1048576.
    #[arg(long, value_name = "MIB", default_value_t = foliomem_bench::access::NEED_MIB,
          value_parser = clap::value_parser!(u64).range(16..=1 << 20))]
    pub need: u64,
    /// Timed touches for each page of that memory.
    #[arg(long, value_name = "N", default_value_t = foliomem_bench::access::TOUCHES_PER_PAGE,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub touches: u64,
    /// Numbers of threads, each of which touches a part of the memory, such as 1,2,4.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u64).range(1..=64))]
    pub threads: Vec<u64>,
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

/// Options of `bench limit`.
#[derive(Debug, clap::Args)]
pub struct BenchLimitArgs {
    #[command(flatten)]
    pub printing: Printing,
    /// Only these: small-blocks, large-blocks, array, forks, inline, lazy, numpy, java.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Runs of each program. Every cgroup has its turn, first idle, then with all CPUs busy.
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub runs: usize,
    /// How far foliomem's limit is below the cgroup's, in per cent, or "container": as far as
    /// foliomem finds necessary (`--limit container`).
    #[arg(long, value_name = "PERCENT", default_value = "10")]
    pub margin: foliomem_bench::limit::Margin,
    /// Limits of the cgroups in MiB, 64 to 65536.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = foliomem_bench::limit::GROUPS_MIB,
          value_parser = clap::value_parser!(u64).range(64..=65536))]
    pub groups: Vec<u64>,
}

/// Options of `bench advise`.
#[derive(Debug, clap::Args)]
pub struct BenchAdviseArgs {
    #[command(flatten)]
    pub printing: Printing,
    /// Only these: numpy, compile, sqlite, redis, java.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Runs within each limit, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
}

/// Options of `bench start`.
#[derive(Debug, clap::Args)]
pub struct BenchStartArgs {
    #[command(flatten)]
    pub printing: Printing,
    /// Runs of each setting, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub runs: u32,
}

/// Options of `bench density`.
#[derive(Debug, clap::Args)]
pub struct BenchDensityArgs {
    #[command(flatten)]
    pub printing: Printing,
    /// The memory of all sandboxes in MiB, 512 to 1048576.
    #[arg(long, value_name = "MIB", default_value_t = foliomem_bench::density::TOTAL_MIB,
          value_parser = clap::value_parser!(u64).range(512..=1 << 20))]
    pub total: u64,
    /// The ratings in a sandbox's frame.
    #[arg(long, value_name = "N", default_value_t = foliomem_bench::density::RATINGS,
          value_parser = clap::value_parser!(u64).range(1000..=1_000_000_000))]
    pub ratings: u64,
}

/// Options of `bench lab`.
#[derive(Debug, clap::Args)]
pub struct BenchLabArgs {
    #[command(flatten)]
    pub printing: Printing,
    /// Runs of each case, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
}

/// Options of `calibrate`.
#[derive(Debug, clap::Args)]
pub struct CalibrateArgs {
    /// File for the costs. [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::Args;
    use clap::CommandFactory;

    #[test]
    fn the_reference_has_pages_and_completions() {
        foliomem_command::docs::keep_command("foliomem-bench", Args::command(), &[]);
    }
}
