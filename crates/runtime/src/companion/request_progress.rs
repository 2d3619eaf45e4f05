//! The progress of the control request that the reclaimers serve, step by step. `foliomem ctl` or
//! the supervisor made the request ([`foliomem_session::memory_request`]).
//!
//! All reclaimers work on the one request. The lock around [`RequestProgress`] is a leaf.

use foliomem_core::engine::Resumed;
use foliomem_session::memory_request::{Pending, Wanted};
use foliomem_types::units::PageNumber;
use std::ops::Range;

/// Number of batches in a row that free nothing after which a request counts as served: the rest is
/// pinned, in use, or does not compress.
const MAX_FRUITLESS_BATCHES: u32 = 8;

/// A request that the reclaimers serve, and what is left of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RequestProgress {
    /// The number of the request in the process's slot.
    number: u32,
    left: Left,
}

/// The part of a request that is not done yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    Reclaim {
        /// Pages that are still wanted.
        pages: u64,
        /// Number of batches in a row that freed nothing.
        fruitless: u32,
    },
    Resume {
        /// The first page that no reclaimer has taken yet.
        from: PageNumber,
        /// Number of blocks that are taken and not finished.
        unfinished: u32,
        /// Whether there is no room, or no block any more.
        is_over: bool,
    },
    /// One reclaimer serves it: the search is no hurry.
    FindCold {
        next: ColdStep,
        /// Whether a reclaimer does a step.
        is_taken: bool,
        /// Pages that are still to be staged.
        pages: u64,
    },
}

/// A step of a round of the search for cold memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ColdStep {
    /// Begin the round.
    Begin,
    /// Write back a batch of what is cold.
    WriteBack,
    /// Stage a batch.
    Stage,
}

/// The result of a [`ColdStep`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ColdResult {
    /// Doing this step again may do more.
    More,
    /// This many pages were staged.
    Staged(u64),
    /// The step is over.
    Over,
}

/// A step of a request, for one reclaimer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Free a batch, and then call [`RequestProgress::note_freed`].
    Reclaim,
    /// Resume the block, if there is one, and then call [`RequestProgress::note_resumed`].
    Resume(Option<Range<PageNumber>>),
    /// Do this, and then call [`RequestProgress::note_cold`].
    FindCold {
        /// What to do.
        step: ColdStep,
        /// Pages that are still to be staged.
        pages: u64,
    },
}

/// Whether a request is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// There may be more to do.
    Unfinished,
    /// It is done, or nothing more can be done.
    Served,
}

impl RequestProgress {
    /// Creates the state of a request of which nothing is done.
    pub fn new(request: Pending) -> RequestProgress {
        let left = match request.wanted {
            Wanted::Reclaim { pages } => Left::Reclaim { pages, fruitless: 0 },
            Wanted::Resume => Left::Resume { from: PageNumber(0), unfinished: 0, is_over: false },
            Wanted::FindCold { pages } => Left::FindCold { next: ColdStep::Begin, is_taken: false, pages },
        };
        RequestProgress { number: request.number, left }
    }

    /// Returns the number of the request.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Takes the next step. Returns `None` if other reclaimers do the last ones. `block_from` finds
    /// the first block that ends after a page.
    pub fn take(&mut self, block_from: impl FnOnce(PageNumber) -> Option<Range<PageNumber>>) -> Option<Step> {
        match &mut self.left {
            Left::Reclaim { .. } => Some(Step::Reclaim),
            Left::Resume { is_over: true, .. } => None,
            Left::Resume { from, unfinished, .. } => {
                *unfinished += 1;
                let block = block_from(*from);
                *from = block.as_ref().map_or(*from, |block| block.end);
                Some(Step::Resume(block))
            }
            Left::FindCold { is_taken: true, .. } => None,
            Left::FindCold { next, is_taken, pages } => {
                *is_taken = true;
                Some(Step::FindCold { step: *next, pages: *pages })
            }
        }
    }

    /// Notes what a batch has freed.
    pub fn note_freed(&mut self, freed_pages: u64) -> Progress {
        let Left::Reclaim { pages, fruitless } = &mut self.left else { return Progress::Unfinished };
        *pages = pages.saturating_sub(freed_pages);
        *fruitless = if freed_pages > 0 { 0 } else { *fruitless + 1 };
        let is_served = *pages == 0 || *fruitless >= MAX_FRUITLESS_BATCHES;
        if is_served { Progress::Served } else { Progress::Unfinished }
    }

    /// Notes the result of a block; [`Resumed::NoRoom`] if there was none.
    pub fn note_resumed(&mut self, resumed: Resumed) -> Progress {
        let Left::Resume { unfinished, is_over, .. } = &mut self.left else { return Progress::Unfinished };
        *unfinished -= 1;
        *is_over |= resumed == Resumed::NoRoom;
        if *is_over && *unfinished == 0 { Progress::Served } else { Progress::Unfinished }
    }

    /// Notes the result of a step of the search for cold memory.
    pub fn note_cold(&mut self, result: ColdResult) -> Progress {
        let Left::FindCold { next, is_taken, pages } = &mut self.left else { return Progress::Unfinished };
        *is_taken = false;
        let staged_pages = if let ColdResult::Staged(pages) = result { pages } else { 0 };
        *pages = pages.saturating_sub(staged_pages);
        *next = match (*next, result) {
            (ColdStep::Begin, _) | (ColdStep::WriteBack, ColdResult::More) => ColdStep::WriteBack,
            (ColdStep::Stage, ColdResult::Over) => return Progress::Served,
            (ColdStep::WriteBack | ColdStep::Stage, _) if *pages == 0 => return Progress::Served,
            (ColdStep::WriteBack | ColdStep::Stage, _) => ColdStep::Stage,
        };
        Progress::Unfinished
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reclaim(pages: u64) -> RequestProgress {
        RequestProgress::new(Pending { number: 1, wanted: Wanted::Reclaim { pages } })
    }

    #[test]
    fn a_reclaim_is_served_when_enough_is_freed_or_nothing_more_can_be() {
        let is_served =
            |request: &mut RequestProgress, freed_pages| request.note_freed(freed_pages) == Progress::Served;
        let mut request = reclaim(300);
        assert_eq!(request.take(|_| None), Some(Step::Reclaim));
        assert!(!is_served(&mut request, 256));
        assert!((1..MAX_FRUITLESS_BATCHES).all(|_| !is_served(&mut request, 0)), "a batch may fail by chance");
        assert!(!is_served(&mut request, 1));
        assert!((1..MAX_FRUITLESS_BATCHES).all(|_| !is_served(&mut request, 0)) && is_served(&mut request, 0));
        let mut request = reclaim(300);
        assert!(!is_served(&mut request, 256) && is_served(&mut request, 44));
    }

    #[test]
    fn a_resume_is_served_when_its_last_block_is() {
        let mut request = RequestProgress::new(Pending { number: 1, wanted: Wanted::Resume });
        let block = |number: u64| Some(PageNumber(512 * number)..PageNumber(512 * number + 512));
        let take = |request: &mut RequestProgress| {
            request.take(|from| if from.0 < 512 * 9 { block(from.0.div_ceil(512).max(7)) } else { None })
        };
        let taken: Vec<_> = (0..3).map(|_| take(&mut request)).collect();
        assert_eq!(taken, [Some(Step::Resume(block(7))), Some(Step::Resume(block(8))), Some(Step::Resume(None))]);
        assert_eq!(request.note_resumed(Resumed::NoRoom), Progress::Unfinished, "others still work");
        assert_eq!(take(&mut request), None);
        assert_eq!(request.note_resumed(Resumed::Block), Progress::Unfinished);
        assert_eq!(request.note_resumed(Resumed::Block), Progress::Served);
    }

    #[test]
    fn a_round_of_the_search_for_cold_memory_writes_back_and_then_stages() {
        let mut request = RequestProgress::new(Pending { number: 1, wanted: Wanted::FindCold { pages: 300 } });
        let take = |request: &mut RequestProgress| request.take(|_| None);
        let mut step = |step, pages, result| {
            assert_eq!(take(&mut request), Some(Step::FindCold { step, pages }));
            assert_eq!(take(&mut request), None, "one reclaimer at a time");
            request.note_cold(result)
        };
        assert_eq!(step(ColdStep::Begin, 300, ColdResult::Over), Progress::Unfinished);
        assert_eq!(step(ColdStep::WriteBack, 300, ColdResult::More), Progress::Unfinished);
        assert_eq!(step(ColdStep::WriteBack, 300, ColdResult::Over), Progress::Unfinished);
        assert_eq!(step(ColdStep::Stage, 300, ColdResult::Staged(256)), Progress::Unfinished);
        assert_eq!(step(ColdStep::Stage, 44, ColdResult::Staged(64)), Progress::Served);
        let all = |pages, results: &[ColdResult]| {
            let mut request = RequestProgress::new(Pending { number: 1, wanted: Wanted::FindCold { pages } });
            results.iter().map(|&result| request.note_cold(result)).collect::<Vec<_>>()
        };
        let [more, served] = [Progress::Unfinished, Progress::Served];
        assert_eq!(all(0, &[ColdResult::Over; 2]), [more, served], "nothing is to be staged");
        assert_eq!(all(9, &[ColdResult::Over; 3]), [more, more, served], "nothing can be staged");
    }
}
