//! Recompression of idle pieces with a slower codec, by threads that have nothing else to do.
//!
//! A piece stays pinned while it is decompressed and recompressed; no lock is held. The result is
//! kept if it is smaller by at least a size class. [`crate::store`] describes how it replaces the
//! piece.

use super::{Engine, StoreRuns};
use crate::homes::Urgency;
use crate::ports::{Clock, Ports, Recompressor};
use crate::store::Pinned;

/// Minimum frames of the store for recompression: below 1 MiB there is too little to save.
const LITTLE_FRAMES: u32 = 256;
/// Maximum number of pieces visited in a step, most of them in vain: some ten microseconds.
const LOOKS: u32 = 1024;
/// Bytes of content recompressed in a step: some milliseconds.
const STEP_BYTES: usize = 64 << 10;

impl<P: Ports> Engine<P> {
    /// Does one step of recompression. Returns whether there is more to do now.
    pub fn recompress(&self, worker: &mut P::Worker) -> bool {
        let Some(recompressor) = self.ports.recompressor() else { return false };
        let Some(idle_ns) = self.config.recompress_idle_ns else { return false };
        if self.store.held_frames() < LITTLE_FRAMES {
            return false;
        }
        let runs = self.spare_runs();
        let (now_ns, mut done_bytes) = (self.ports.clock().now_ns(), 0);
        for _ in 0..LOOKS {
            match self.store.next_idle(&runs, now_ns, idle_ns) {
                Err(_) => return false,
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
        true
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
            counters.recompressed.inc();
            counters.recompress_saved.add(saved_bytes);
        }
    }
}
