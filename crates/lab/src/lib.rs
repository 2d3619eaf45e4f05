//! The lab: foliomem's engine on a machine that is made of numbers.
//!
//! What decides anything is `foliomem-core`, the same code that manages real programs; the lab brings a [`machine`] of any
//! size with a clock of its own, a [`workload`], and a [`scenario`] file that says how both are to be. A run
//! follows from its scenario alone: same seed, same [`outcome`], to the bit, on every machine and by any number of threads
//! ([`sweep`]). Counts and ratios are the engine's own. Times are modelled, from a table of [`costs`].
#![forbid(unsafe_code)]

mod bits;
pub mod columns;
pub mod costs;
pub mod density;
pub mod error;
pub mod lab;
pub mod machine;
pub mod outcome;
pub mod page_cache;
pub mod parquet_file;
pub mod random;
pub mod report;
pub mod scenario;
pub mod schedule;
pub mod seeds;
pub mod shipped;
pub mod sweep;
pub mod trace;
pub mod trace_table;
pub mod workload;
