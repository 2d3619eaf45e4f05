//! Measures foliomem and its peers: real data, the kernel's own zram swap, and real programs.
//!
//! - [`swap`] measures foliomem's own swap;
//! - [`slots`] measures the allocation of swap slots, in this process alone;
//! - [`compact`] measures the making of runs of frames, in this process alone;
//! - [`corpus`] builds the data that is swapped;
//! - [`kernel_peer`] measures the kernel's zram swap with folios of one size, in the same run as
//!   foliomem;
//! - [`access`] times one program by access pattern, limit and folio size, next to the kernel;
//! - [`calibrate`] measures the costs that the lab charges;
//! - [`advise`] compares what `foliomem advise` predicts with real runs;
//! - [`limit`] looks how far growing programs exceed a fixed limit;
//! - [`density`] counts the idle sandboxes that fit into a fixed amount of memory;
//! - [`start`] times the shortest program, plain and in a run;
//! - [`lab`] measures the speed of the lab's simulations;
//! - [`equal_total`] compares the kernel's limit with foliomem's at equal total memory;
//! - [`programs`] does so for real programs, and [`languages`] for small ones in many languages;
//! - [`kernel`] changes the machine for the kernel's turn, and [`undo`] restores it in every case.
//!
//! The `main` of a binary that uses [`kernel_peer`] must begin with [`enter_if_asked`].
#![deny(unsafe_code)]

pub mod access;
pub mod access_child;
pub mod advise;
pub mod calibrate;
pub mod compact;
pub mod corpus;
mod cpu_time;
pub mod density;
pub mod equal_total;
mod error;
pub mod kernel;
#[allow(unsafe_code)]
pub mod kernel_child;
pub mod kernel_peer;
pub mod lab;
pub mod languages;
pub mod limit;
pub mod programs;
mod raw_codec;
mod redis;
mod rounds;
mod running;
mod scratch;
pub mod slots;
pub mod start;
pub mod swap;
pub mod swap_child;
mod tree;
pub mod undo;

pub use error::Error;

use std::ffi::OsString;

/// Call this first in `main`: if a measurement started this process as its child, it does the
/// child's work and exits.
pub fn enter_if_asked() {
    kernel_child::enter_if_asked();
    lab::enter_if_asked();
}

/// Bytes of a mebibyte, the unit of every limit and peak here.
pub const MIB: u64 = 1 << 20;

/// Returns the Python that benchmarks start: `FOLIOMEM_PYTHON`, or `python3`.
fn python() -> OsString {
    std::env::var_os("FOLIOMEM_PYTHON").unwrap_or_else(|| "python3".into())
}

/// Returns the median of `values` (the mean of the two middle values for an even number); 0 without
/// values.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_of_odd_even_and_no_values() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
