//! Recompression of idle pieces with a slower codec, by threads that have nothing else to do.
//!
//! A piece stays pinned while it is decompressed and compressed anew, and no lock is held. What comes of it is kept if it
//! takes less room by a size class at least; see [`crate::store`] for how the one takes the place of the other.

use super::{Engine, StoreRuns};
use crate::homes::Urgency;
use crate::machine::Machine;
use crate::store::Pinned;

/// Below this the store has too little to save: 1 MiB.
const LITTLE_FRAMES: u32 = 256;
/// Pieces that are looked at in a step, most of them in vain: some ten microseconds.
const LOOKS: u32 = 1024;
/// Content that is recompressed in a step: some milliseconds.
const STEP_BYTES: usize = 64 << 10;

impl<M: Machine> Engine<M> {
    /// Does a step of it; returns whether there is more to do now.
    pub fn recompress(&self, worker: &mut M::Worker) -> bool {
        let Some(idle_ns) = self.config.recompress_idle_ns else { return false };
        if self.store.held_frames() < LITTLE_FRAMES {
            return false;
        }
        let runs = self.spare_runs();
        let (now_ns, mut done_bytes) = (self.machine.now_ns(), 0);
        for _ in 0..LOOKS {
            match self.store.next_idle(&runs, now_ns, idle_ns) {
                Err(_) => return false,
                Ok(None) => {}
                Ok(Some(pinned)) => {
                    done_bytes += pinned.piece().granule.bytes();
                    self.recompress_piece(worker, pinned);
                }
            }
            if done_bytes >= STEP_BYTES {
                break;
            }
        }
        true
    }

    /// Frames for what saves some: nothing that others need.
    fn spare_runs(&self) -> StoreRuns<'_, M> {
        StoreRuns(self, Urgency::Normal)
    }

    fn recompress_piece(&self, worker: &mut M::Worker, pinned: Pinned<'_>) {
        let (runs, counters) = (self.spare_runs(), &self.counters().store);
        counters.recompress_tried.inc();
        let smaller = self.machine.recompress(worker, pinned.piece());
        let Some(made) = smaller.filter(|made| self.store.is_smaller(&pinned, made.len_bytes)) else {
            return self.store.settle(&runs, pinned);
        };
        let Some(mut to) = self.store.new_place(&runs, &pinned, made.len_bytes) else {
            return self.store.unpin(&runs, pinned);
        };
        self.machine.write_recompressed(worker, to.as_mut());
        let saved_bytes = self.store.replace(&runs, pinned, to, made.checksum);
        if saved_bytes > 0 {
            counters.recompressed.inc();
            counters.recompress_saved.add(saved_bytes);
        }
    }
}
