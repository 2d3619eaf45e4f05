//! Measurements of foliomem and of its peers: real data, the kernel's own zram swap, and real programs.
//!
//! - [`swap`] measures foliomem's own swap;
//! - [`slots`] measures how swap slots are found, in this process alone;
//! - [`compact`] measures how runs of frames are made, in this process alone;
//! - [`corpus`] builds the data that is swapped;
//! - [`kernel_peer`] measures the kernel's zram swap with folios of one size, in the same run as foliomem;
//! - [`access`] times one program by access pattern, limit and folio size, next to the kernel;
//! - [`calibrate`] measures what the lab reckons with;
//! - [`lab`] measures how fast the lab simulates;
//! - [`programs`] times real programs without a limit, under the kernel's limit, and under foliomem's;
//! - [`kernel`] changes the machine for the kernel's turn, [`undo`] changes it back whatever happens.
//!
//! A binary that uses [`kernel_peer`] must give way to its child first thing in `main`:
//! see [`enter_if_asked`].
#![deny(unsafe_code)]

pub mod access;
mod access_child;
pub mod calibrate;
pub mod compact;
pub mod corpus;
mod cpu_time;
mod error;
pub mod kernel;
#[allow(unsafe_code)]
pub mod kernel_child;
pub mod kernel_peer;
pub mod lab;
pub mod programs;
mod raw_codec;
mod redis;
mod rounds;
pub mod slots;
pub mod swap;
mod tree;
pub mod undo;

pub use error::Error;

/// To be called first thing in `main`: where this process was started by a measurement as its child, does the
/// child's work and ends the process.
pub fn enter_if_asked() {
    kernel_child::enter_if_asked();
    access_child::enter_if_asked();
    lab::enter_if_asked();
    swap::enter_if_asked();
}

/// Bytes in a mebibyte, the unit of every limit and peak here.
pub const MIB: u64 = 1 << 20;

/// The middle value of `values` (the mean of the two middle ones for an even number); 0 for none.
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
    fn median_of_odd_even_and_none() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
