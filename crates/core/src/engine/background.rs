//! Background work of an engine, step by step, as its [`Pacing`] demands.

use super::Engine;
use super::reclaim::Attempt;
use super::recompress::Recompression;
use crate::pacing::{
    Activity, BATCH_PAGES, BackgroundReclaim, Pacing, Protection, Room, TORTURE_STAGE_PAGES, Watermarks,
};
use crate::ports::{Budget, Ports};
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::MAX_ORDER;

impl<P: Ports> Engine<P> {
    /// Returns the room now.
    pub fn room(&self) -> Room {
        let pages = self.ports.budget().room_pages() + i64::from(self.free_frames());
        Room { pages, watermarks: self.watermarks() }
    }

    fn watermarks(&self) -> Watermarks {
        Watermarks::of(self.ports.budget().limit_pages())
    }

    /// Sets the protected minimum and the store's maximum after a change of the limit.
    pub fn follow_limit(&self, protection: Protection) {
        let watermarks = self.watermarks();
        let protected_pages = match protection {
            Protection::Minimum => watermarks.protected_pages(),
            Protection::Off => 0,
        };
        self.protected_pages.store(protected_pages, Relaxed);
        self.store_pages.store(watermarks.store_pages(), Relaxed);
    }

    /// Returns whether background reclaim should start after a fault that left `room`.
    pub fn should_reclaim(&self, room: &Room) -> bool {
        room.is_low() && !self.reclaim_is_futile()
    }

    /// Returns whether there is background work however much room there is.
    pub fn always_has_work(&self) -> bool {
        self.config.pacing == Pacing::Torture || self.awaits_discard()
    }

    /// Does one step of background reclaim, up to the high watermark. Under torture one step stages
    /// and writes back whatever there is.
    pub fn reclaim_in_background(&self, worker: &mut P::Worker) -> BackgroundReclaim {
        match self.config.pacing {
            Pacing::Torture => {
                self.stage_oldest(TORTURE_STAGE_PAGES);
            }
            Pacing::Watermarks if self.room().is_high() => return BackgroundReclaim::Done(0),
            Pacing::Watermarks => {}
        }
        // Frames that the store wastes cost only a copy.
        if self.compact_wasteful_store() > 0 {
            return BackgroundReclaim::StoreCompacted;
        }
        match self.config.pacing {
            Pacing::Torture => BackgroundReclaim::Done(self.reclaim(worker, BATCH_PAGES)),
            Pacing::Watermarks => match self.try_reclaim(worker, BATCH_PAGES) {
                Attempt::Freed(pages @ 1..) => BackgroundReclaim::Freed(pages),
                Attempt::Freed(_) | Attempt::Nothing | Attempt::Deferred => BackgroundReclaim::Done(0),
            },
        }
    }

    /// Makes a free run of frames, for threads that have nothing to reclaim. Returns whether there
    /// may be more to do.
    pub fn compact_in_background(&self) -> bool {
        match self.config.pacing {
            Pacing::Torture => {
                self.churn(MAX_ORDER);
                false
            }
            Pacing::Watermarks => self.compact_proactively(),
        }
    }

    /// Does one step of recompression unless other threads wait for a CPU.
    pub fn recompress_in_background(
        &self,
        worker: &mut P::Worker,
        is_contended: impl FnOnce() -> bool,
    ) -> Recompression {
        let may_run = self.config.pacing == Pacing::Torture || !is_contended();
        if may_run { self.recompress(worker) } else { Recompression::Contended }
    }

    /// Returns free frames to the system: those beyond the low watermark if the tree is over its
    /// limit, and large runs beyond the high one while the program is quiet.
    pub fn release_surplus(&self, activity: Activity) {
        let (room_pages, watermarks) = (self.ports.budget().room_pages(), self.watermarks());
        if room_pages < 0 && i64::from(self.free_frames()) > watermarks.low_pages() {
            self.shrink(watermarks.low_pages() as u32, (-room_pages) as u32);
        }
        if activity == Activity::Quiet {
            // Reclaim keeps this much free by itself.
            self.give_back_runs(watermarks.high_pages() as u32);
        }
    }
}
