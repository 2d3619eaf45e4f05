//! Extents: the frames of a zspage or of a link of a piece's chain, up to 16, as one run for each
//! set bit of their number.
//!
//! Ten frames are a run of eight and a run of two, anywhere. If they were contiguous, they would be
//! the front of a run of 16 and leave six frames that nothing can use while the ten are there. A
//! third of the store's memory would then be scattered in small runs, and a returning folio would
//! have to be gathered from them with one move for each. (numpy at half its need: 575,000 such
//! moves beside 835,000 of folios.) A piece that spans two runs costs its reader a copy of it.

use super::classes::EXTENT_FRAMES;
use super::place::{Fragment, Fragments};
use foliomem_types::units::{Frame, FrameRun, Order, PAGE_BYTES};

/// Maximum number of runs: 15 frames are runs of 8, 4, 2 and 1.
pub(super) const MAX_RUNS: usize = EXTENT_FRAMES.ilog2() as usize;

/// The frames of a zspage or of a chain link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    /// The heads of the runs, largest run first. The remaining elements have no meaning.
    pub(super) heads: [Frame; MAX_RUNS],
    /// Number of frames: 1 to [`EXTENT_FRAMES`].
    pub(super) frames: u32,
}

impl Extent {
    /// Makes an extent of `frames` frames from runs of `alloc`. If one fails, the others go to
    /// `free`.
    pub(super) fn obtain(
        frames: u32,
        alloc: impl Fn(Order) -> Option<FrameRun>,
        free: impl Fn(FrameRun),
    ) -> Option<Extent> {
        let mut extent = Extent { heads: [Frame(0); MAX_RUNS], frames: 0 };
        for (index, order) in orders(frames).enumerate() {
            let Some(run) = alloc(order) else {
                extent.runs().for_each(free);
                return None;
            };
            debug_assert_eq!(run.order, order);
            extent.heads[index] = run.head;
            extent.frames += order.pages();
        }
        Some(extent)
    }

    /// Iterates over the runs, in the order of the bytes.
    pub(super) fn runs(self) -> impl Iterator<Item = FrameRun> {
        orders(self.frames).zip(self.heads).map(|(order, head)| FrameRun::new(head, order))
    }

    /// Returns the run that contains `frame`. On a concurrently changing extent the answer is
    /// arbitrary.
    pub(super) fn run_of(self, frame: Frame) -> Option<FrameRun> {
        let mut runs = orders(self.frames).zip(self.heads);
        let (order, head) = runs.find(|&(order, head)| head.0 == frame.0 & !(order.pages() - 1))?;
        Some(FrameRun::new(head, order))
    }

    /// Returns the place of the bytes `start_bytes..end_bytes` if they lie in the first run.
    #[inline]
    pub(super) fn in_first_run(self, start_bytes: u32, end_bytes: u32) -> Option<Fragment> {
        let run_bytes = PAGE_BYTES as u32 * (1 << self.frames.checked_ilog2()?);
        (end_bytes <= run_bytes).then(|| Fragment::new(self.heads[0], start_bytes, end_bytes - start_bytes))
    }

    /// Appends the places of the bytes `start_bytes..end_bytes` to `fragments`.
    pub(super) fn locate(self, start_bytes: u32, end_bytes: u32, fragments: &mut Fragments) {
        let mut run_start = 0;
        for run in self.runs() {
            let run_end = run_start + run.frames() * PAGE_BYTES as u32;
            let (start, end) = (start_bytes.max(run_start), end_bytes.min(run_end));
            if start < end {
                fragments.push(Fragment::new(run.head, start - run_start, end - start));
            }
            run_start = run_end;
        }
        debug_assert!(end_bytes <= run_start, "{end_bytes} bytes of {self:?}");
    }
}

/// Iterates over the orders of the runs of `frames` frames.
fn orders(frames: u32) -> impl Iterator<Item = Order> {
    let mut left = frames;
    std::iter::from_fn(move || {
        let order = left.checked_ilog2()?;
        left &= !(1 << order);
        Order::new(order as u8)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn runs_are_the_set_bits_of_the_frame_count() {
        for frames in 1..=EXTENT_FRAMES {
            let extent = Extent { heads: [Frame(64), Frame(32), Frame(16), Frame(8)], frames };
            assert_eq!(extent.runs().map(FrameRun::frames).sum::<u32>(), frames);
            assert!(extent.runs().count() <= MAX_RUNS);
            assert!(extent.runs().map(FrameRun::frames).is_sorted_by(|a, b| a > b));
            for run in extent.runs() {
                let last = run.head.offset(run.frames() - 1);
                assert_eq!([run.head, last].map(|frame| extent.run_of(frame)), [Some(run); 2]);
                assert_eq!(extent.run_of(Frame(100)), None);
            }
        }
    }

    #[test]
    fn a_half_written_extent_has_no_misaligned_runs() {
        let extent = Extent { heads: [Frame(65), Frame(33), Frame(2), Frame(2)], frames: 15 };
        assert_eq!([64, 65, 32, 33].map(|frame| extent.run_of(Frame(frame))), [None; 4]);
        assert_eq!(extent.run_of(Frame(3)), Some(FrameRun::new(Frame(2), Order::new(1).unwrap())));
    }

    #[test]
    fn bytes_across_runs_have_several_fragments() {
        let extent = Extent { heads: [Frame(64), Frame(10), Frame(0), Frame(0)], frames: 10 };
        let fragments = |start, end| {
            let mut fragments = Fragments::NONE;
            extent.locate(start, end, &mut fragments);
            let in_first_run = extent.in_first_run(start, end);
            assert_eq!(in_first_run, (end <= 32 << 10).then(|| fragments[0]));
            fragments.to_vec()
        };
        assert_eq!(fragments(0, 20 << 10), [Fragment::new(Frame(64), 0, 20 << 10)]);
        assert_eq!(
            fragments(20 << 10, 40 << 10),
            [Fragment::new(Frame(64), 20 << 10, 12 << 10), Fragment::new(Frame(10), 0, 8 << 10)]
        );
        assert_eq!(fragments(33 << 10, 34 << 10), [Fragment::new(Frame(10), 1 << 10, 1 << 10)]);
    }

    #[test]
    fn a_failed_extent_frees_its_runs() {
        let freed = RefCell::new(Vec::new());
        let alloc = |order: Order| (order > Order::ZERO).then(|| FrameRun::new(Frame(order.pages() * 3), order));
        let extent = Extent::obtain(13, alloc, |run| freed.borrow_mut().push(run));
        assert_eq!(extent, None);
        let sizes: Vec<u32> = freed.borrow().iter().map(|run| run.frames()).collect();
        assert_eq!(sizes, [8, 4]);
        assert_eq!(Extent::obtain(12, alloc, |_| unreachable!()).map(|extent| extent.runs().count()), Some(2));
    }
}
