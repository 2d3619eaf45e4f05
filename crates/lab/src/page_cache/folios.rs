//! Folios: the frames, the file and the list of every folio. Compaction moves them.

use super::files::{File, FolioId};
use crate::costs::PageCacheCosts;
use foliomem_core::buddy::Pick;
use foliomem_core::compaction::{Occupant, Occupants};
use foliomem_core::homes::Homes;
use foliomem_types::units::{Frame, FrameRun, Order};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;

/// The list that a folio is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum List {
    /// No list: the folio cannot be reclaimed.
    #[default]
    Unlisted,
    /// The inactive list, which is reclaimed first.
    Inactive,
    /// The active list: folios used twice.
    Active,
}

/// A folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Folio {
    /// The frames of the folio; `None` for a free entry.
    pub run: Option<FrameRun>,
    /// The number of the file.
    pub file: u16,
    /// The first page of the folio in its file.
    pub index: u32,
    /// Whether a use of the folio starts the next readahead window.
    pub marked: bool,
    /// Whether the folio was used once.
    pub referenced: bool,
    /// Whether the folio must be written back.
    pub dirty: bool,
    /// The list of the folio.
    pub list: List,
    /// The stamp of the folio's current position in the list; entries with other stamps are stale.
    stamp: u64,
    /// The next part of the folio that this one was split from, which follows it in the list unless
    /// its stamp changed.
    next_part: (FolioId, u64),
}

impl Folio {
    /// Returns the folio's pages in its file.
    pub fn range(&self, run: FrameRun) -> Range<u32> {
        self.index..self.index + run.frames()
    }
}

/// The table of folios and the lists.
pub struct Table {
    folios: Vec<Folio>,
    spare: Vec<FolioId>,
    /// The folio of each frame.
    by_frame: Box<[FolioId]>,
    /// All files, by number.
    pub files: Vec<File>,
    lists: [VecDeque<(FolioId, u64)>; 2],
    listed_pages: [u32; 2],
    stamps: u64,
}

const FREE: Folio = Folio {
    run: None,
    file: 0,
    index: 0,
    marked: false,
    referenced: false,
    dirty: false,
    list: List::Unlisted,
    stamp: 0,
    next_part: NO_PART,
};

const NO_PART: (FolioId, u64) = (FolioId::NONE, 0);

/// Returns the index of a list in `lists`.
fn place(list: List) -> Option<usize> {
    match list {
        List::Unlisted => None,
        List::Inactive => Some(0),
        List::Active => Some(1),
    }
}

impl Table {
    fn new(frames: u32) -> Table {
        Table {
            folios: vec![FREE],
            spare: Vec::new(),
            by_frame: vec![FolioId::NONE; frames as usize].into(),
            files: Vec::new(),
            lists: Default::default(),
            listed_pages: [0; 2],
            stamps: 0,
        }
    }

    /// Returns a folio.
    pub fn folio(&self, id: FolioId) -> &Folio {
        &self.folios[id.0 as usize]
    }

    /// Returns a folio for changes.
    pub fn folio_mut(&mut self, id: FolioId) -> &mut Folio {
        &mut self.folios[id.0 as usize]
    }

    /// Returns the frames of a folio in use.
    pub fn run(&self, id: FolioId) -> FrameRun {
        let Some(run) = self.folio(id).run else { unreachable!("{id:?} is free") };
        run
    }

    fn place_in(&mut self, id: FolioId, run: FrameRun) {
        self.folio_mut(id).run = Some(run);
        self.by_frame[run.head.0 as usize..][..run.frames() as usize].fill(id);
    }

    /// Adds a new folio in `run` to `file` at page `index`; it is on no list.
    pub fn add(&mut self, run: FrameRun, file: u16, index: u32) -> FolioId {
        let id = self.spare.pop().unwrap_or_else(|| {
            self.folios.push(FREE);
            FolioId(self.folios.len() as u32 - 1)
        });
        *self.folio_mut(id) = Folio { file, index, ..FREE };
        self.place_in(id, run);
        self.files[usize::from(file)].insert(index..index + run.frames(), id);
        id
    }

    /// Removes a folio from its file and the table; returns its frames.
    pub fn remove(&mut self, id: FolioId) -> FrameRun {
        self.unlist(id);
        let (folio, run) = (*self.folio(id), self.run(id));
        self.files[usize::from(folio.file)].remove(folio.range(run));
        self.by_frame[run.head.0 as usize..][..run.frames() as usize].fill(FolioId::NONE);
        *self.folio_mut(id) = FREE;
        self.spare.push(id);
        run
    }

    /// Appends a folio as the youngest to a list.
    pub fn enlist(&mut self, id: FolioId, list: List) {
        self.unlist(id);
        let (stamp, pages) = (self.stamps, self.run(id).frames());
        self.stamps += 1;
        let folio = self.folio_mut(id);
        (folio.list, folio.stamp) = (list, stamp);
        if let Some(place) = place(list) {
            self.lists[place].push_back((id, stamp));
            self.listed_pages[place] += pages;
        }
    }

    fn unlist(&mut self, id: FolioId) {
        let (list, next, pages) = (self.folio(id).list, self.folio(id).next_part, self.run(id).frames());
        if let Some(place) = place(list) {
            self.listed_pages[place] -= pages;
            if next != NO_PART {
                self.lists[place].push_front(next);
            }
        }
        let folio = self.folio_mut(id);
        (folio.list, folio.next_part) = (List::Unlisted, NO_PART);
    }

    /// Removes and returns the oldest folio of a list.
    pub fn pop(&mut self, list: List) -> Option<FolioId> {
        let place = place(list)?;
        while let Some((id, stamp)) = self.lists[place].pop_front() {
            if self.is_current(list, (id, stamp)) {
                self.unlist(id);
                return Some(id);
            }
        }
        None
    }

    /// Returns whether an entry is the folio's current position in a list.
    fn is_current(&self, list: List, (id, stamp): (FolioId, u64)) -> bool {
        let folio = self.folio(id);
        folio.run.is_some() && folio.list == list && folio.stamp == stamp
    }

    /// Returns the number of pages on a list.
    pub fn listed_pages(&self, list: List) -> u32 {
        place(list).map_or(0, |place| self.listed_pages[place])
    }

    /// Returns the pages of its file that a folio holds.
    pub fn folio_range(&self, id: FolioId) -> Range<u32> {
        self.folio(id).range(self.run(id))
    }

    /// Marks a folio and its pages as clean.
    pub fn clean(&mut self, id: FolioId) {
        let (file, range) = (usize::from(self.folio(id).file), self.folio_range(id));
        self.folio_mut(id).dirty = false;
        range.for_each(|index| self.files[file].cached_mut(index).dirty = false);
    }

    /// Returns the number of pages of all folios.
    pub fn pages(&self) -> u32 {
        self.folios.iter().filter_map(|folio| folio.run).map(FrameRun::frames).sum()
    }

    /// Returns the number of page table entries that map a folio.
    pub fn mappings(&self, id: FolioId) -> u32 {
        let file = &self.files[usize::from(self.folio(id).file)];
        self.folio_range(id).map(|index| file.page(index).mapped.count_ones()).sum()
    }

    /// Splits a folio into folios of order `to`, which take its position in the list; returns their
    /// number.
    fn split(&mut self, id: FolioId, to: Order) -> u32 {
        let (whole, run) = (*self.folio(id), self.run(id));
        let mut last = id;
        self.place_in(id, FrameRun::new(run.head, to));
        for part in (to.pages()..run.frames()).step_by(to.pages() as usize) {
            let new = self.add(run.part(part, to), whole.file, whole.index + part);
            let (stamp, next) = (self.stamps, self.folio(last).next_part);
            self.stamps += 1;
            let Folio { referenced, dirty, list, .. } = whole;
            let folio = self.folio_mut(new);
            (folio.referenced, folio.dirty, folio.list, folio.stamp) = (referenced, dirty, list, stamp);
            folio.next_part = next;
            self.folio_mut(last).next_part = (new, stamp);
            last = new;
        }
        run.frames() / to.pages()
    }

    /// Checks that files, folios and frames agree and that the lists hold the counted pages.
    pub fn check(&self, homes: &Homes) {
        let mut listed = [0; 2];
        for id in (1..self.folios.len() as u32).map(FolioId) {
            let folio = self.folio(id);
            let Some(run) = folio.run else { continue };
            assert!((0..run.frames()).all(|frame| self.by_frame[(run.head.0 + frame) as usize] == id), "{folio:?}");
            let file = &self.files[usize::from(folio.file)];
            assert!(folio.range(run).all(|index| file.page(index).folio == id), "{folio:?}");
            if let Some(place) = place(folio.list) {
                listed[place] += run.frames();
            }
        }
        assert_eq!(listed, self.listed_pages);
        for (frame, &id) in (0..).zip(&self.by_frame) {
            assert!(id == FolioId::NONE || !homes.is_free(Frame(frame)), "frame {frame:x} is free, and {id:?}'s");
            assert!(id == FolioId::NONE || self.folio(id).run.is_some(), "frame {frame:x} is of nothing");
        }
        let cached: usize = self.files.iter().flat_map(File::folios).count();
        assert_eq!(cached, self.folios.iter().filter(|folio| folio.run.is_some()).count());
        for (list, entries) in [(List::Inactive, &self.lists[0]), (List::Active, &self.lists[1])] {
            let mut pages = 0;
            for &entry in entries {
                let mut at = entry;
                while self.is_current(list, at) {
                    pages += self.run(at.0).frames();
                    at = self.folio(at.0).next_part;
                }
            }
            assert_eq!(pages, self.listed_pages(list), "{list:?}");
        }
    }
}

/// The folios that compaction may move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Movable {
    /// Folios of one page.
    SinglePages,
    /// Folios of any size.
    AllFolios,
}

/// All folios and free frames of the machine.
pub struct Folios {
    /// The engine's allocator. Frames of this machine are never populated, so all free ones are
    /// unpopulated.
    pub homes: Homes,
    /// The table of folios.
    pub table: RefCell<Table>,
    /// The folios that compaction may move.
    pub movable: Movable,
    /// Time spent so far.
    pub spent_ns: Cell<u64>,
    costs: PageCacheCosts,
}

impl Folios {
    /// Makes a machine with `frames` free frames.
    pub fn new(frames: u32, movable: Movable, pick: Pick, costs: PageCacheCosts) -> Folios {
        let table = RefCell::new(Table::new(frames));
        Folios { homes: Homes::with_pick(frames, pick), table, movable, spent_ns: Cell::new(0), costs }
    }

    fn spend(&self, times: u32, ns: u32) {
        self.spent_ns.set(self.spent_ns.get() + u64::from(times) * u64::from(ns));
    }
}

impl Occupants for Folios {
    /// A frame without a folio, such as one on a per-CPU list, cannot be moved.
    fn occupant(&self, frame: Frame) -> Option<Occupant> {
        self.spend(1, self.costs.scan_ns);
        let table = self.table.borrow();
        let run = table.folio(table.by_frame[frame.0 as usize]).run?;
        (self.movable == Movable::AllFolios || run.order == Order::ZERO).then_some(Occupant::Folio(run))
    }

    fn migrate(&self, from: FrameRun, to: FrameRun) -> bool {
        let mut table = self.table.borrow_mut();
        let id = table.by_frame[from.head.0 as usize];
        table.by_frame[from.head.0 as usize..][..from.frames() as usize].fill(FolioId::NONE);
        table.place_in(id, to);
        // Every page table entry changes twice: to a migration entry, and to the new frame.
        self.spend(1, self.costs.migrate_folio_ns);
        self.spend(from.frames(), self.costs.migrate_page_ns);
        self.spend(2 * table.mappings(id), self.costs.rmap_page_ns);
        self.homes.free_empty(from);
        true
    }

    fn split(&self, run: FrameRun, to: Order) -> bool {
        let mut table = self.table.borrow_mut();
        let id = table.by_frame[run.head.0 as usize];
        self.spend(2 * table.mappings(id), self.costs.rmap_page_ns);
        self.spend(table.split(id, to), self.costs.insert_folio_ns);
        true
    }

    fn evacuate(&self, _head: Frame) -> bool {
        false
    }

    fn move_free_page(&self, _from: Frame, _to: Frame) -> bool {
        false
    }
}
