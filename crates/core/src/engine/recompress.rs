//! Recompression of idle pieces with a slower codec, by threads that have nothing else to do.
//!
//! A piece stays pinned while it is decompressed and recompressed; no lock is held. The result is
//! kept if it is smaller by at least a size class. [`crate::store`] describes how it replaces the
//! piece.

use super::{Engine, StoreRuns};
use crate::homes::Urgency;
use crate::ports::{Clock, Ports, Recompressor};
use crate::store::Pinned;
use crate::sync::atomic::Ordering::Relaxed;

/// Minimum frames of the store for recompression: below 1 MiB there is too little to save.
const LITTLE_FRAMES: u32 = 256;
/// Maximum number of pieces visited in a step, most of them in vain: some ten microseconds.
const LOOKS: u32 = 1024;
/// Bytes of content recompressed in a step: some milliseconds.
const STEP_BYTES: usize = 64 << 10;

/// The result of one step of recompression.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recompression {
    /// There is more to do now.
    More,
    /// Other threads wait for a CPU.
    Contended,
    /// Nothing is due for now.
    PassOver,
}

impl<P: Ports> Engine<P> {
    /// Does one step of recompression.
    pub fn recompress(&self, worker: &mut P::Worker) -> Recompression {
        let Some(recompressor) = self.ports.recompressor() else { return Recompression::PassOver };
        let Some(idle_ns) = self.config.recompress_idle_ns else { return Recompression::PassOver };
        if self.store.held_frames() < LITTLE_FRAMES {
            return Recompression::PassOver;
        }
        let runs = self.spare_runs();
        let (now_ns, mut done_bytes) = (self.ports.clock().now_ns(), 0);
        for _ in 0..LOOKS {
            match self.store.next_idle(&runs, now_ns, idle_ns) {
                Err(_) => {
                    self.release_saved();
                    return Recompression::PassOver;
                }
                Ok(None) => {}
                Ok(Some(pinned)) => {
                    done_bytes += pinned.piece().granule.bytes();
                    self.recompress_piece(recompressor, worker, pinned);
                }
            }
            if done_bytes >= STEP_BYTES {
                break;
            }
        }
        Recompression::More
    }

    /// Returns what this pass has saved to the system, unless the program may soon need room.
    pub(super) fn release_saved(&self) {
        if self.room().is_high() && self.saved_in_pass_bytes.swap(0, Relaxed) > 0 {
            self.compact_store(u32::MAX);
            self.shrink(0, u32::MAX);
        }
    }

    /// Returns a source of frames for an optional saving: it must not take what others need.
    fn spare_runs(&self) -> StoreRuns<'_, P> {
        StoreRuns(self, Urgency::Normal)
    }

    fn recompress_piece(&self, recompressor: &P::Recompressor, worker: &mut P::Worker, pinned: Pinned<'_>) {
        let (runs, counters) = (self.spare_runs(), &self.counters().store);
        counters.recompress_tried.inc();
        let smaller = recompressor.recompress(worker, pinned.piece());
        let Some(made) = smaller.filter(|made| self.store.is_smaller(&pinned, made.len_bytes)) else {
            return self.store.settle(&runs, pinned);
        };
        let Some(mut to) = self.store.new_place(&runs, &pinned, made.len_bytes) else {
            return self.store.unpin(&runs, pinned);
        };
        recompressor.write(worker, to.as_mut());
        let saved_bytes = self.store.replace(&runs, pinned, to, made.checksum);
        if saved_bytes > 0 {
            self.saved_in_pass_bytes.fetch_add(saved_bytes, Relaxed);
            counters.recompressed.inc();
            counters.recompress_saved.add(saved_bytes);
        }
    }
}
