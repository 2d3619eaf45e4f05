//! Tokens for the memory of frames: a type says who may read a run and who may write it.
//!
//! A [`FrameRun`] is a pair of numbers and says nothing about the users of the memory. So no method
//! of a [port](crate::ports) reads or writes memory for a `FrameRun`: it takes a token.
//!
//! | token | grants | exists |
//! |---|---|---|
//! | [`UniqueRun`] | writing, reading, freeing | once for a run, without any other token |
//! | [`SharedRun`] | reading; freeing at the end | for a folio under writeback, at its worker |
//! | [`RunMut`] | writing and reading | as a loan of a `UniqueRun`, or of a locked block |
//! | [`RunRef`] | reading | as a loan of any other token, or of a locked block |
//!
//! A `UniqueRun` relates to a `RunMut` as a `Box` to a `&mut`; the borrow checker does the rest.
//!
//! Between two owners a run is data: in the free lists, in a page table entry, in an extent of the
//! store. A few functions must trust that data. They call [`UniqueRun::mint`] or
//! [`SharedRun::mint`]. A test lists the modules that mint; the engine's fault and reclaim paths
//! are not among them. An unpopulated run has no memory to protect, so it stays a `FrameRun`.
//!
//! Code that breaks the rules does not compile. Here are a second writer, a reader beside a writer,
//! and a writer after the run was freed:
//! ```compile_fail,E0499
//! # use foliomem_core::{homes::Homes, units::Order};
//! let mut run = Homes::populated(256).alloc_ready(Order::ZERO).unwrap();
//! let first = run.as_mut();
//! let second = run.as_mut();
//! drop((first, second));
//! ```
//! ```compile_fail,E0502
//! # use foliomem_core::{homes::Homes, units::Order};
//! let mut run = Homes::populated(256).alloc_ready(Order::ZERO).unwrap();
//! let reader = run.as_ref();
//! let writer = run.as_mut();
//! drop((reader, writer));
//! ```
//! ```compile_fail,E0382
//! # use foliomem_core::{homes::Homes, units::Order};
//! let homes = Homes::populated(256);
//! let mut run = homes.alloc_ready(Order::ZERO).unwrap();
//! homes.free_full(run);
//! let writer = run.as_mut();
//! ```
//! The bytes of a piece cannot be read after it is unpinned. No thread can pin a piece before it is
//! sealed, because only sealing returns its id.
//! ```compile_fail,E0505
//! # use foliomem_core::{store::{RunSource, Store}, units::{FrameRun, Order}};
//! # fn read(store: &Store, runs: &dyn RunSource) {
//! let id = store.insert_filled(7, Order::ZERO, 1).unwrap();
//! let pinned = store.pin(id);
//! let bytes = pinned.piece().only_fragment();
//! store.unpin(runs, pinned);
//! drop(bytes);
//! # }
//! ```

use foliomem_types::units::{FrameRun, Order};
use std::marker::PhantomData;
use std::ops::Deref;

/// The exclusive token of a run. Dropping it leaks the run.
#[must_use = "the frames leak unless the token is freed or left to the page table"]
#[derive(PartialEq, Eq, Debug)]
pub struct UniqueRun(FrameRun);

impl UniqueRun {
    /// Makes the token of `run`. The caller's data must say that no other token of `run`, or of a
    /// part of it, exists.
    pub(crate) const fn mint(run: FrameRun) -> UniqueRun {
        UniqueRun(run)
    }

    /// Gives up the token. The caller stores the run in the page table, in an extent, or in a list
    /// of unpopulated runs.
    pub fn into_run(self) -> FrameRun {
        self.0
    }

    /// Lends the right to read the run.
    pub fn as_ref(&self) -> RunRef<'_> {
        RunRef(self.0, PhantomData)
    }

    /// Lends the right to write the run.
    pub fn as_mut(&mut self) -> RunMut<'_> {
        RunMut(self.0, PhantomData)
    }

    /// Lends the right to write `part`, which must be a part of the run.
    pub fn part_mut(&mut self, part: FrameRun) -> RunMut<'_> {
        assert!(self.0.contains(part), "{part:?} is no part of {:?}", self.0);
        RunMut(part, PhantomData)
    }

    /// Splits the run from the first frame on.
    pub fn split(self) -> RunSplitter {
        RunSplitter { run: self.0, done: 0 }
    }

    /// Splits the run into parts of `order`, in ascending order.
    pub fn into_parts(self, order: Order) -> impl Iterator<Item = UniqueRun> {
        parts(self.0, order).map(UniqueRun)
    }
}

/// Returns the parts of `order` of `run`, or `run` itself if it is no larger.
fn parts(run: FrameRun, order: Order) -> impl Iterator<Item = FrameRun> {
    let order = order.min(run.order);
    (0..run.frames()).step_by(order.pages() as usize).map(move |index| run.part(index, order))
}

/// A [`UniqueRun`] that is being split. Frames that are not taken leak.
#[derive(Debug)]
pub struct RunSplitter {
    run: FrameRun,
    /// Number of frames taken so far, from the first one on.
    done: u32,
}

impl RunSplitter {
    /// Takes the next 2^order frames.
    ///
    /// # Panics
    /// Panics if the frames are not naturally aligned, or if fewer are left.
    pub fn take(&mut self, order: Order) -> UniqueRun {
        assert!(
            self.done.is_multiple_of(order.pages()) && self.done + order.pages() <= self.run.frames(),
            "{order:?} after {} frames of {:?}",
            self.done,
            self.run
        );
        let part = self.run.part(self.done, order);
        self.done += order.pages();
        UniqueRun(part)
    }
}

/// The token of a worker that writes a folio back. The worker reads the content, and frees the
/// frames at the end.
#[must_use = "the frames leak unless writeback is ended"]
#[derive(PartialEq, Eq, Debug)]
pub struct SharedRun(FrameRun);

impl SharedRun {
    /// Makes the token of `run`. The caller's data must say that all other threads only read the
    /// run.
    pub(crate) const fn mint(run: FrameRun) -> SharedRun {
        SharedRun(run)
    }

    /// Lends the right to read the run.
    pub fn as_ref(&self) -> RunRef<'_> {
        RunRef(self.0, PhantomData)
    }

    /// Splits the run into single pages, in ascending order.
    pub fn into_pages(self) -> impl Iterator<Item = SharedRun> {
        parts(self.0, Order::ZERO).map(SharedRun)
    }

    /// Gives up the token.
    pub(crate) fn into_run(self) -> FrameRun {
        self.0
    }
}

/// The right to read a run for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunRef<'a>(FrameRun, PhantomData<&'a [u8]>);

impl<'a> RunRef<'a> {
    /// Makes the right to read `run` while `_guard` is borrowed, for a module that mints.
    pub(crate) const fn mint<G>(run: FrameRun, _guard: &'a G) -> RunRef<'a> {
        RunRef(run, PhantomData)
    }

    /// Returns the right to the aligned 2^order frames that contain frame `index` of the run.
    #[must_use]
    pub fn part(self, index: u32, order: Order) -> RunRef<'a> {
        assert!(index < self.0.frames() && order <= self.0.order, "{order:?} at {index} of {:?}", self.0);
        RunRef(self.0.part(index, order), PhantomData)
    }
}

/// The right to write a run for a while.
#[derive(PartialEq, Eq, Debug)]
pub struct RunMut<'a>(FrameRun, PhantomData<&'a mut [u8]>);

impl<'a> RunMut<'a> {
    /// Makes the right to write `run` while `_guard` is borrowed, for a module that mints.
    pub(crate) const fn mint<G>(run: FrameRun, _guard: &'a mut G) -> RunMut<'a> {
        RunMut(run, PhantomData)
    }

    /// Lends the right to read the run.
    pub fn as_ref(&self) -> RunRef<'_> {
        RunRef(self.0, PhantomData)
    }

    /// Returns the right to the aligned 2^order frames that contain frame `index` of the run.
    pub fn part(&mut self, index: u32, order: Order) -> RunMut<'_> {
        assert!(index < self.0.frames() && order <= self.0.order, "{order:?} at {index} of {:?}", self.0);
        RunMut(self.0.part(index, order), PhantomData)
    }
}

macro_rules! numbers_of {
    ($($token:ty),*) => {$(
        impl Deref for $token {
            type Target = FrameRun;

            fn deref(&self) -> &FrameRun {
                &self.0
            }
        }
    )*};
}

numbers_of!(UniqueRun, SharedRun, RunRef<'_>, RunMut<'_>);

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::units::Frame;
    use std::path::Path;

    fn order(order: u8) -> Order {
        Order::new(order).unwrap()
    }

    #[test]
    fn splitting_a_run_leaves_no_gap_or_overlap() {
        let run = FrameRun::new(Frame(64), order(3));
        let mut splitter = UniqueRun::mint(run).split();
        let taken = [1, 0, 0, 2].map(|part| splitter.take(order(part)).into_run());
        assert_eq!(taken.map(|part| part.head.0), [64, 66, 67, 68]);
        let pages: Vec<u32> = UniqueRun::mint(run).into_parts(Order::ZERO).map(|part| part.head.0).collect();
        assert_eq!(pages, (64..72).collect::<Vec<_>>());
        assert_eq!(UniqueRun::mint(run).into_parts(order(9)).collect::<Vec<_>>(), [UniqueRun::mint(run)]);
    }

    #[test]
    #[should_panic(expected = "after 8 frames")]
    fn taking_more_frames_than_a_run_has_panics() {
        let mut splitter = UniqueRun::mint(FrameRun::new(Frame(64), order(3))).split();
        let _ = splitter.take(order(3));
        let _ = splitter.take(Order::ZERO);
    }

    #[test]
    #[should_panic(expected = "is no part of")]
    fn a_loan_beyond_its_run_panics() {
        let _ = UniqueRun::mint(FrameRun::new(Frame(64), order(3))).part_mut(FrameRun::new(Frame(72), Order::ZERO));
    }

    #[test]
    fn tokens_cost_nothing() {
        assert_eq!(size_of::<UniqueRun>(), size_of::<FrameRun>());
        assert_eq!(size_of::<RunMut<'_>>(), size_of::<FrameRun>());
        assert!(!std::mem::needs_drop::<UniqueRun>());
    }

    /// The modules that mint tokens of runs: this one, the free lists, the page table, and the
    /// engine, for the store's runs and the spare frame.
    const MINTERS: [&str; 4] = ["run_tokens.rs", "homes.rs", "page_table.rs", "engine.rs"];

    #[test]
    #[cfg_attr(miri, ignore = "reads files")]
    fn tokens_are_minted_by_the_listed_modules_only() {
        fn look(directory: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                if path.is_dir() {
                    look(&path, found);
                } else if name != "tests.rs" && std::fs::read_to_string(&path).unwrap().contains("::mint(") {
                    found.push(name);
                }
            }
        }
        let mut found = Vec::new();
        look(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        found.sort_unstable();
        let mut listed = MINTERS;
        listed.sort_unstable();
        assert_eq!(found, listed, "modules that mint tokens");
    }
}
