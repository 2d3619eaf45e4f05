//! Sharing: the pieces of an idle process move to the shared store, where the processes of a fork
//! tree store equal pieces once.
//!
//! Each piece is looked up by its checksum. If a relative has published equal bytes, the piece
//! joins them, after both were compared; otherwise it is written and published. So the caller makes
//! sure that only one process of a run shares at a time. Pieces that may be recompressed wait for
//! that: relatives recompress to equal bytes, but at different times.
//!
//! A piece stays pinned meanwhile, as during writeback.

use super::Engine;
use super::write_back::Writing;
use crate::ports::{Clock, Offer, Ports, SharedStore};
use crate::store::{BatchPieces, Piece, Pinned, Which};
use crate::sync::atomic::Ordering::Relaxed;

/// Maximum number of pieces that one step looks up.
const STEP_PIECES: usize = 64;

/// The result of one step of sharing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// There may be more to share now.
    More,
    /// Nothing is to be shared for now.
    Done,
}

impl<P: Ports> Engine<P> {
    /// Moves some pieces to the shared store. The caller is the only one in the run.
    pub fn share(&self, worker: &mut P::Worker) -> Sharing {
        let (Some(shared), Some(device)) = (self.ports.shared_store(), self.ports.swap_device()) else {
            return Sharing::Done;
        };
        let is_recompressing = self.config.recompress_idle_ns.is_some() && self.ports.recompressor().is_some();
        let which = if is_recompressing { Which::Tried } else { Which::All };
        let runs = self.runs();
        let (mut batch, mut freed_bytes) = (BatchPieces::default(), 0);
        let oldest = std::iter::from_fn(|| self.store.take_oldest(&runs, which));
        for pinned in oldest.take(STEP_PIECES) {
            let pushed = match self.join(worker, shared, pinned) {
                Ok(bytes) => {
                    freed_bytes += bytes;
                    continue;
                }
                Err(pinned) => batch.push(pinned),
            };
            if let Err(pinned) = pushed {
                self.store.put_back(&runs, std::iter::once(pinned));
                break;
            }
        }
        if let Ok(batch) = self.store.place_batch(&runs, self.ports.clock().cpu(), batch) {
            let mut writing = Writing::begin(device, worker, batch);
            freed_bytes += self.finish_write_out(worker, &mut writing);
        }
        if freed_bytes > 0 {
            self.saved_in_pass_bytes.fetch_add(freed_bytes, Relaxed);
            return Sharing::More;
        }
        self.release_saved();
        Sharing::Done
    }

    /// Joins the equal piece of another process, if there is one. Returns the bytes that this
    /// frees, or the piece.
    fn join<'a>(
        &'a self,
        worker: &mut P::Worker,
        shared: &P::SharedStore,
        pinned: Pinned<'a>,
    ) -> Result<u64, Pinned<'a>> {
        let Some(Offer { place, generation }) = shared.offer(pinned.piece()) else { return Err(pinned) };
        let is_equal = |piece: &Piece<'_>| shared.is_equal(worker, piece, &place);
        let freed_bytes = self.store.join(&self.runs(), pinned, &place, generation, is_equal)?;
        self.counters().backing.joined.inc();
        Ok(freed_bytes)
    }
}
