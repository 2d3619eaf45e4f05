//! The lab: foliomem's engine on a simulated machine.
//!
//! All decisions are those of `foliomem-core`, the code that manages real programs. The lab adds a
//! [`machine`] of any size with its own clock, a [`workload`], and a [`scenario`] file that
//! describes both. A run depends only on its scenario: one seed gives one [`outcome`], to the bit,
//! on every machine and with any number of threads ([`sweep`]). Counts and ratios are the engine's
//! own. Times are modelled, from a table of [`costs`].
#![forbid(unsafe_code)]

pub mod advice;
mod bits;
pub mod columns;
pub mod costs;
pub mod density;
pub mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
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
pub mod trace_table;
pub mod workload;
