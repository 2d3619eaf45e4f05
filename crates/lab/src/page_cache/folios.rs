//! All folios of the machine: which frames they are in, of which file, and in what order they are to go. Compaction moves them.

use super::files::{File, FolioId};
use crate::costs::PageCacheCosts;
use foliomem_core::buddy::Pick;
use foliomem_core::compaction::{Occupant, Occupants};
use foliomem_core::homes::Homes;
use foliomem_core::units::{Frame, FrameRun, Order};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;

/// Which of the lists a folio is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum List {
    /// None: it cannot be reclaimed.
    #[default]
    Unlisted,
    /// What goes first.
    Inactive,
    /// What was used twice.
    Active,
}

/// A folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Folio {
    /// Where it is; `None` for an entry of the table that is free.
    pub run: Option<FrameRun>,
    /// Its file, and its first page of it.
    pub file: u16,
    /// See `file`.
    pub index: u32,
    /// Its use is to start the next window of readahead.
    pub marked: bool,
    /// It was used once.
    pub referenced: bool,
    /// It is to be written back.
    pub dirty: bool,
    /// See [`List`].
    pub list: List,
    /// Its place in the list: other entries of it there are old.
    stamp: u64,
    /// What was a part of it before it was split follows it in the list, unless its stamp is another by now.
    next_part: (FolioId, u64),
}

impl Folio {
    /// Its pages of its file.
    pub fn range(&self, run: FrameRun) -> Range<u32> {
        self.index..self.index + run.frames()
    }
}

/// The table and the lists.
pub struct Table {
    folios: Vec<Folio>,
    spare: Vec<FolioId>,
    /// Which folio each frame is of.
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

/// The place of a list among the lists.
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

    /// A folio of the table.
    pub fn folio(&self, id: FolioId) -> &Folio {
        &self.folios[id.0 as usize]
    }

    /// The same, to be changed.
    pub fn folio_mut(&mut self, id: FolioId) -> &mut Folio {
        &mut self.folios[id.0 as usize]
    }

    /// Where a folio is that is there.
    pub fn run(&self, id: FolioId) -> FrameRun {
        let Some(run) = self.folio(id).run else { unreachable!("{id:?} is free") };
        run
    }

    fn place_in(&mut self, id: FolioId, run: FrameRun) {
        self.folio_mut(id).run = Some(run);
        self.by_frame[run.head.0 as usize..][..run.frames() as usize].fill(id);
    }

    /// Puts a new folio in `run` into `file`, at page `index`; on no list.
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

    /// Takes a folio out of its file and of the table; returns where it was.
    pub fn remove(&mut self, id: FolioId) -> FrameRun {
        self.unlist(id);
        let (folio, run) = (*self.folio(id), self.run(id));
        self.files[usize::from(folio.file)].remove(folio.range(run));
        self.by_frame[run.head.0 as usize..][..run.frames() as usize].fill(FolioId::NONE);
        *self.folio_mut(id) = FREE;
        self.spare.push(id);
        run
    }

    /// Puts a folio to the young end of a list.
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

    /// Takes the oldest folio off a list.
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

    /// Whether that is a folio's place in a list, not one it has had.
    fn is_current(&self, list: List, (id, stamp): (FolioId, u64)) -> bool {
        let folio = self.folio(id);
        folio.run.is_some() && folio.list == list && folio.stamp == stamp
    }

    /// Pages on a list.
    pub fn listed_pages(&self, list: List) -> u32 {
        place(list).map_or(0, |place| self.listed_pages[place])
    }

    /// The pages of its file that a folio holds.
    pub fn folio_range(&self, id: FolioId) -> Range<u32> {
        self.folio(id).range(self.run(id))
    }

    /// A folio's pages are written back.
    pub fn clean(&mut self, id: FolioId) {
        let (file, range) = (usize::from(self.folio(id).file), self.folio_range(id));
        self.folio_mut(id).dirty = false;
        range.for_each(|index| self.files[file].cached_mut(index).dirty = false);
    }

    /// Pages of all folios.
    pub fn pages(&self) -> u32 {
        self.folios.iter().filter_map(|folio| folio.run).map(FrameRun::frames).sum()
    }

    /// How many page-table entries map a folio.
    pub fn mappings(&self, id: FolioId) -> u32 {
        let file = &self.files[usize::from(self.folio(id).file)];
        self.folio_range(id).map(|index| file.page(index).mapped.count_ones()).sum()
    }

    /// Splits a folio into others of `to`, which take its place in its list; returns how many there are.
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

    /// Walks everything: files, folios and frames know each other, lists hold what is counted.
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

/// All memory of the machine.
pub struct Folios {
    /// The buddy allocator of the engine. A frame of this machine has no other home: all that are free are empty.
    pub homes: Homes,
    /// Who is where.
    pub table: RefCell<Table>,
    /// Whether compaction moves folios of more than a page.
    pub moves_large: bool,
    /// What was done has cost so much so far.
    pub spent_ns: Cell<u64>,
    costs: PageCacheCosts,
}

impl Folios {
    /// `frames` free frames.
    pub fn new(frames: u32, moves_large: bool, pick: Pick, costs: PageCacheCosts) -> Folios {
        let table = RefCell::new(Table::new(frames));
        Folios { homes: Homes::with_pick(frames, pick), table, moves_large, spent_ns: Cell::new(0), costs }
    }

    fn spend(&self, times: u32, ns: u32) {
        self.spent_ns.set(self.spent_ns.get() + u64::from(times) * u64::from(ns));
    }
}

impl Occupants for Folios {
    /// What is in nobody's file is on a CPU's own list of free runs: it cannot be moved.
    fn occupant(&self, frame: Frame) -> Option<Occupant> {
        self.spend(1, self.costs.scan_ns);
        let table = self.table.borrow();
        let run = table.folio(table.by_frame[frame.0 as usize]).run?;
        (self.moves_large || run.order == Order::ZERO).then_some(Occupant::Folio(run))
    }

    fn migrate(&self, from: FrameRun, to: FrameRun) -> bool {
        let mut table = self.table.borrow_mut();
        let id = table.by_frame[from.head.0 as usize];
        table.by_frame[from.head.0 as usize..][..from.frames() as usize].fill(FolioId::NONE);
        table.place_in(id, to);
        // Every page table is changed twice: that it is being moved, and where to.
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
