//! Rights to the memory of frames, as types: who may read a run, and who may write it.
//!
//! A [`FrameRun`] is a pair of numbers. It says nothing about who uses the memory, so no function
//! of a [`Machine`](crate::machine::Machine) reads or writes memory for a `FrameRun`: it asks for a
//! token.
//!
//! | token | grants | exists |
//! |---|---|---|
//! | [`UniqueRun`] | writing, reading, freeing | once for a run, while no other token of it exists |
//! | [`SharedRun`] | reading; freeing at the end | for a folio under writeback: its worker has it |
//! | [`RunMut`] | writing and reading | as a loan of a `UniqueRun`, or of a locked block |
//! | [`RunRef`] | reading | as a loan of one of the above, or of a locked block |
//!
//! A `UniqueRun` is to a `RunMut` what a `Box` is to a `&mut`; the borrow checker does the rest.
//!
//! Between two owners a run is data: in the free lists, in an entry of the page table, in an extent
//! of the store. So a few functions have to trust that data. They call [`UniqueRun::mint`] or
//! [`SharedRun::mint`]; a test lists the modules that do, and the engine's fault and reclaim paths
//! are not among them. A run without pages has no memory to protect. It stays a `FrameRun`.
//!
//! What the tokens rule out does not compile: a second writer, or a reader beside a writer.
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
//! And of a piece: its bytes are not read once it is unpinned, and nobody can pin a piece before it
//! is sealed, because only sealing tells its id.
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

use crate::units::{FrameRun, Order};
use std::marker::PhantomData;
use std::ops::Deref;

/// The only right to the memory of a run. Dropping it leaks the run.
#[must_use = "the frames leak unless the token is freed or left to the page table"]
#[derive(PartialEq, Eq, Debug)]
pub struct UniqueRun(FrameRun);

impl UniqueRun {
    /// A token for `run`. The caller's data says that nobody else has one, or the memory of a part
    /// of it.
    pub(crate) const fn mint(run: FrameRun) -> UniqueRun {
        UniqueRun(run)
    }

    /// Gives the right up: the numbers go to the page table, to an extent, or to a list of empty
    /// runs.
    pub fn into_run(self) -> FrameRun {
        self.0
    }

    /// The right to read it.
    pub fn as_ref(&self) -> RunRef<'_> {
        RunRef(self.0, PhantomData)
    }

    /// The right to write it.
    pub fn as_mut(&mut self) -> RunMut<'_> {
        RunMut(self.0, PhantomData)
    }

    /// The right to write the frames of `part`, which is part of it.
    pub fn part_mut(&mut self, part: FrameRun) -> RunMut<'_> {
        assert!(self.0.contains(part), "{part:?} is no part of {:?}", self.0);
        RunMut(part, PhantomData)
    }

    /// Takes it apart from the first frame on.
    pub fn split(self) -> RunSplitter {
        RunSplitter { run: self.0, done: 0 }
    }

    /// All of it in parts of `order`, in ascending order.
    pub fn into_parts(self, order: Order) -> impl Iterator<Item = UniqueRun> {
        parts(self.0, order).map(UniqueRun)
    }
}

/// The parts of `order` of `run`, or `run` itself if it is no larger.
fn parts(run: FrameRun, order: Order) -> impl Iterator<Item = FrameRun> {
    let order = order.min(run.order);
    (0..run.frames()).step_by(order.pages() as usize).map(move |index| run.part(index, order))
}

/// A [`UniqueRun`] that is being taken apart. What is not taken leaks.
#[derive(Debug)]
pub struct RunSplitter {
    run: FrameRun,
    /// Frames that were taken: the first ones.
    done: u32,
}

impl RunSplitter {
    /// The next 2^order frames.
    ///
    /// # Panics
    /// If they are not naturally aligned, or fewer are left.
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

/// The right of a worker that writes a folio back: it reads the content, and frees the frames in
/// the end.
#[must_use = "the frames leak unless writeback is ended"]
#[derive(PartialEq, Eq, Debug)]
pub struct SharedRun(FrameRun);

impl SharedRun {
    /// A token for `run`. The caller's data says that everybody else only reads it.
    pub(crate) const fn mint(run: FrameRun) -> SharedRun {
        SharedRun(run)
    }

    /// The right to read it.
    pub fn as_ref(&self) -> RunRef<'_> {
        RunRef(self.0, PhantomData)
    }

    /// Each page of it by itself, in ascending order.
    pub fn into_pages(self) -> impl Iterator<Item = SharedRun> {
        parts(self.0, Order::ZERO).map(SharedRun)
    }

    /// Gives the right up.
    pub(crate) fn into_run(self) -> FrameRun {
        self.0
    }
}

/// The right to read a run for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunRef<'a>(FrameRun, PhantomData<&'a [u8]>);

impl<'a> RunRef<'a> {
    /// The right to read `run` as long as `_guard` is borrowed, for a module that mints.
    pub(crate) const fn mint<G>(run: FrameRun, _guard: &'a G) -> RunRef<'a> {
        RunRef(run, PhantomData)
    }

    /// The 2^order frames that frame `index` of it is in.
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
    /// The right to write `run` as long as `_guard` is borrowed, for a module that mints.
    pub(crate) const fn mint<G>(run: FrameRun, _guard: &'a mut G) -> RunMut<'a> {
        RunMut(run, PhantomData)
    }

    /// The same for a shorter while.
    pub fn reborrow(&mut self) -> RunMut<'_> {
        RunMut(self.0, PhantomData)
    }

    /// The right to read it meanwhile.
    pub fn as_ref(&self) -> RunRef<'_> {
        RunRef(self.0, PhantomData)
    }

    /// The 2^order frames that frame `index` of it is in.
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
    use crate::units::Frame;
    use std::path::Path;

    fn order(order: u8) -> Order {
        Order::new(order).unwrap()
    }

    #[test]
    fn a_run_is_taken_apart_without_gap_or_overlap() {
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
    fn more_than_a_run_has_cannot_be_taken() {
        let mut splitter = UniqueRun::mint(FrameRun::new(Frame(64), order(3))).split();
        let _ = splitter.take(order(3));
        let _ = splitter.take(Order::ZERO);
    }

    #[test]
    #[should_panic(expected = "is no part of")]
    fn a_loan_stays_within_its_run() {
        let _ = UniqueRun::mint(FrameRun::new(Frame(64), order(3))).part_mut(FrameRun::new(Frame(72), Order::ZERO));
    }

    #[test]
    fn tokens_cost_nothing() {
        assert_eq!(size_of::<UniqueRun>(), size_of::<FrameRun>());
        assert_eq!(size_of::<RunMut<'_>>(), size_of::<FrameRun>());
        assert!(!std::mem::needs_drop::<UniqueRun>());
    }

    /// Modules that mint tokens of runs: the free lists, the page table, and the engine's two seams
    /// (the store, the spare frame).
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
