//! The command line.

use clap::builder::styling::Styles;
use std::ffi::OsString;
use std::path::PathBuf;

/// Runs programs inside a memory budget: compressed swap in user space, by whole folios.
#[derive(Debug, clap::Parser)]
#[command(name = "foliomem", version, styles = Styles::plain(), arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Run a program inside a memory limit.
    Run(RunArgs),
    /// Say what this machine allows, and what to do about what is missing.
    Doctor,
}

/// Options of `run`. Each but --config and --print-config can also come from a variable (FOLIOMEM_LIMIT,
/// FOLIOMEM_SIZES, ...) or from the configuration file, in this order of precedence.
#[derive(Debug, Default, clap::Args)]
pub struct RunArgs {
    /// What the program and its children may take together: 512M, 2G, 25% (of RAM).
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<String>,
    /// Folio sizes beside 4K, from 8K to 2M: 16K,64K,2M. "none" for 4K alone. [default: 16K,32K,64K]
    #[arg(long, value_name = "LIST")]
    pub sizes: Option<String>,
    /// How memory is compressed: lz4, zstd or zstd:LEVEL (1 to 19). [default: lz4]
    #[arg(long, value_name = "CODEC")]
    pub codec: Option<String>,
    /// The most that is compressed as one piece, 4K to 2M. [default: 64K]
    #[arg(long, value_name = "SIZE")]
    pub granule: Option<String>,
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
    #[arg(
        value_name = "PROGRAM",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required_unless_present = "print_config"
    )]
    pub program: Vec<OsString>,
}
