//! Zspages and extents: the frames that the store holds, and their taken slots.
//!
//! Both have a descriptor of eight words in one table. A zspage's descriptor belongs to one size
//! class forever: when the zspage is empty, its frames are freed, and the descriptor with its
//! slots' elements waits for the next zspage of that class. Extents belong to pieces that own their
//! frames; they are chained by `next`.
//!
//! Each slot has an element: the id of the piece in it, or [`FREE`] with the next free slot.
//!
//! # Lists
//! A zspage with free slots is on its class's list for its *fullness*: the taken eighths of its
//! slots, rounded down. A full zspage is on no list. A zspage that compaction has *isolated* is on
//! no list either, and gets no new pieces. Allocation takes slots of the fullest zspage, so that
//! the emptiest zspages become empty by themselves.
//!
//! # Locks
//! A zspage changes only under the lock of its class; an extent belongs to the piece that owns it.
//! So all accesses are relaxed: the lock, or the word of the piece, orders them. The fields that a
//! reader with a pin needs (heads, frames, class, next) are constant while the piece is there.

use super::PieceId;
use super::classes::{CLASSES, ClassId, FEW_ZSPAGES};
use super::extent::{Extent, MAX_RUNS};
use super::word::{Location, ZspageId};
use crate::sparse::SparseTable;
use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard, ranks::StoreClass};
use foliomem_types::units::{Frame, PAGE_BYTES};

/// No zspage.
const NIL: u32 = u32::MAX;
/// The bit of an element whose slot is free; its low byte names the next free slot.
const FREE: u32 = 1 << 31;
/// The end of the list of free slots.
const NO_SLOT: u8 = u8::MAX;
/// Number of lists of a class.
pub(super) const FULLNESSES: usize = 8;
/// The class index of extents.
const EXTENTS: usize = CLASSES;

const _: () = assert!(EXTENTS < u8::MAX as usize);

#[derive(Debug, Default)]
struct Descriptor {
    /// The heads of the runs. The remaining elements have no meaning.
    heads: [AtomicU32; MAX_RUNS],
    /// A [`State`].
    state: AtomicU32,
    /// The index of the zspage's first element.
    elements: AtomicU32,
    /// The neighbours on the list. `next` also links extents of a piece and spare descriptors.
    /// `prev` of an extent is its piece.
    prev: AtomicU32,
    next: AtomicU32,
}

const _: () = assert!(cfg!(feature = "shuttle") || size_of::<Descriptor>() == 32);

impl Descriptor {
    fn state(&self) -> State {
        State(self.state.load(Relaxed))
    }

    fn set_state(&self, state: State) {
        self.state.store(state.0, Relaxed);
    }

    fn set_heads(&self, extent: Extent) {
        for (to, head) in self.heads.iter().zip(extent.heads) {
            to.store(head.0, Relaxed);
        }
    }

    fn extent(&self) -> Extent {
        let heads = self.heads.each_ref().map(|head| Frame(head.load(Relaxed)));
        Extent { heads, frames: self.state().frames() }
    }
}

/// The state of a zspage in one word, which changes with every piece that comes or goes.
///
/// | bits | field | values |
/// |---|---|---|
/// | 0..8 | class | or [`EXTENTS`] |
/// | 8..16 | taken | slots taken |
/// | 16..24 | first free | slot, or [`NO_SLOT`] |
/// | 24..29 | frames | 0 while the descriptor is spare |
/// | 29 | isolated | |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct State(u32);

const TAKEN_AT: u32 = 8;
const FIRST_FREE_AT: u32 = 16;
const FRAMES_AT: u32 = 24;
const FRAMES: u32 = 31 << FRAMES_AT;
const ISOLATED: u32 = 1 << 29;

impl State {
    /// Returns the state of a zspage with `frames` frames and no taken slot, on no list.
    const fn new(class: usize, frames: u32, first_free: u8) -> State {
        State(class as u32 | (first_free as u32) << FIRST_FREE_AT | frames << FRAMES_AT | ISOLATED)
    }

    const fn class(self) -> usize {
        self.0 as u8 as usize
    }

    const fn taken(self) -> u32 {
        (self.0 >> TAKEN_AT) as u8 as u32
    }

    const fn first_free(self) -> u8 {
        (self.0 >> FIRST_FREE_AT) as u8
    }

    const fn frames(self) -> u32 {
        (self.0 & FRAMES) >> FRAMES_AT
    }

    const fn is_isolated(self) -> bool {
        self.0 & ISOLATED != 0
    }

    const fn isolated(self) -> State {
        State(self.0 | ISOLATED)
    }

    const fn listed(self) -> State {
        State(self.0 & !ISOLATED)
    }

    const fn spare(self) -> State {
        State(self.0 & !(FRAMES | ISOLATED))
    }

    const fn with_first_free(self, slot: u8) -> State {
        State(self.0 & !(0xff << FIRST_FREE_AT) | (slot as u32) << FIRST_FREE_AT)
    }

    /// Returns the state with one more slot taken and another first free slot.
    const fn with_taken_slot(self, first_free: u8) -> State {
        State(self.with_first_free(first_free).0 + (1 << TAKEN_AT))
    }

    /// Returns the state with `slot` freed, as the first free one.
    const fn with_freed_slot(self, slot: u8) -> State {
        State(self.with_first_free(slot).0 - (1 << TAKEN_AT))
    }

    /// Returns the number of slots that fit into the frames: fewer than the class's if no longer
    /// run was free.
    fn slots(self) -> u32 {
        let shape = ClassId::new(self.class()).shape();
        // Most zspages have all frames of their class, so the comparison usually avoids the
        // division. This function runs for every piece that comes or goes.
        if self.frames() == u32::from(shape.frames) {
            return shape.slots.into();
        }
        self.frames() * PAGE_BYTES as u32 / shape.size_bytes
    }

    /// Returns the list on which the zspage belongs, if any.
    fn list(self) -> Option<usize> {
        self.list_of(self.slots())
    }

    /// Returns the list for a zspage of `slots` slots, if any.
    fn list_of(self, slots: u32) -> Option<usize> {
        let taken = self.taken();
        if self.is_isolated() || taken == slots { None } else { Some((taken * FULLNESSES as u32 / slots) as usize) }
    }
}

/// Returns the class of a zspage in `state`; `None` for an extent.
fn class_in(state: State) -> Option<ClassId> {
    let class = state.class();
    if class == EXTENTS { None } else { Some(ClassId::new(class)) }
}

/// A piece's slot in its zspage.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakenSlot<'a> {
    zspage: ZspageId,
    descriptor: &'a Descriptor,
    class: ClassId,
    slot: u32,
    /// The length of the piece in the slot.
    pub(super) len_bytes: u32,
}

/// The zspages of one class.
#[derive(Debug)]
pub(super) struct Class {
    /// The first zspage of each list, by fullness.
    partial: [u32; FULLNESSES],
    /// The first spare descriptor.
    spare: u32,
    /// Number of free slots in listed zspages.
    free_slots: u32,
    /// Number of zspages in use.
    zspages: u32,
}

impl Class {
    const fn new() -> Class {
        Class { partial: [NIL; FULLNESSES], spare: NIL, free_slots: 0, zspages: 0 }
    }
}

/// The zspages and extents of a store.
#[derive(Debug)]
pub(super) struct Zspages {
    descriptors: SparseTable<Descriptor>,
    elements: SparseTable<AtomicU32>,
    used_descriptors: AtomicU32,
    used_elements: AtomicU32,
    /// One for each class, and one for extents.
    classes: Box<[Mutex<Class, StoreClass>]>,
}

impl Zspages {
    pub(super) fn new() -> Zspages {
        Zspages {
            descriptors: SparseTable::new(ZspageId::LIMIT),
            elements: SparseTable::new(u32::MAX),
            used_descriptors: AtomicU32::new(0),
            used_elements: AtomicU32::new(0),
            classes: (0..=CLASSES).map(|_| Mutex::new(Class::new())).collect(),
        }
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        // The size of the real locks, also where locks are cells, so that the lab's figures match.
        let classes_bytes = self.classes.len() * size_of::<std::sync::Mutex<Class>>();
        self.descriptors.bytes() + self.elements.bytes() + classes_bytes
    }

    #[inline]
    fn descriptor(&self, zspage: ZspageId) -> &Descriptor {
        self.descriptors.get(zspage.index())
    }

    pub(super) fn state(&self, zspage: ZspageId) -> State {
        self.descriptor(zspage).state()
    }

    /// Returns the class of a zspage; `None` for an extent.
    pub(super) fn class(&self, zspage: ZspageId) -> Option<ClassId> {
        class_in(self.state(zspage))
    }

    /// Returns the frames of a zspage or extent.
    pub(super) fn extent(&self, zspage: ZspageId) -> Extent {
        self.descriptor(zspage).extent()
    }

    /// Returns the slot that ends at `location`, which must be in memory; `None` for a chain.
    #[inline]
    pub(super) fn slot_at(&self, location: Location) -> Option<TakenSlot<'_>> {
        let zspage = location.zspage();
        let descriptor = self.descriptor(zspage);
        let class = class_in(descriptor.state())?;
        let (last_byte, size_bytes) = (u32::from(location.last_byte()), class.shape().size_bytes);
        let (slot, len_bytes) = (last_byte / size_bytes, last_byte % size_bytes + 1);
        Some(TakenSlot { zspage, descriptor, class, slot, len_bytes })
    }

    /// Returns the class and the frames of a zspage.
    pub(super) fn class_and_extent(&self, zspage: ZspageId) -> (Option<ClassId>, Extent) {
        let descriptor = self.descriptor(zspage);
        (class_in(descriptor.state()), descriptor.extent())
    }

    fn element(&self, zspage: ZspageId, slot: u32) -> &AtomicU32 {
        self.element_of(self.descriptor(zspage), slot)
    }

    #[inline]
    fn element_of(&self, descriptor: &Descriptor, slot: u32) -> &AtomicU32 {
        self.elements.get(descriptor.elements.load(Relaxed) + slot)
    }

    /// Returns the piece in `slot` of a zspage. Called under the lock of its class.
    fn piece_in(&self, zspage: ZspageId, slot: u32) -> Option<PieceId> {
        let element = self.element(zspage, slot).load(Relaxed);
        if element & FREE != 0 { None } else { PieceId::new(element) }
    }

    /// Allocates a descriptor for a class: a spare one, or a new one with elements for `slots`
    /// slots.
    fn new_descriptor(&self, guard: &mut MutexGuard<'_, Class, StoreClass>, slots: u32) -> Option<ZspageId> {
        if guard.spare != NIL {
            let zspage = ZspageId::new(guard.spare);
            guard.spare = self.descriptor(zspage).next.load(Relaxed);
            return Some(zspage);
        }
        let increment = |most: u32, by: u32| move |used: u32| used.checked_add(by).filter(|&now| now <= most);
        let elements = self.used_elements.fetch_update(Relaxed, Relaxed, increment(u32::MAX, slots)).ok()?;
        let index = self.used_descriptors.fetch_update(Relaxed, Relaxed, increment(ZspageId::LIMIT, 1)).ok()?;
        let zspage = ZspageId::new(index);
        self.descriptor(zspage).elements.store(elements, Relaxed);
        Some(zspage)
    }

    fn retire_descriptor(&self, guard: &mut MutexGuard<'_, Class, StoreClass>, zspage: ZspageId, state: State) {
        let descriptor = self.descriptor(zspage);
        descriptor.set_state(state.spare());
        descriptor.next.store(guard.spare, Relaxed);
        guard.spare = zspage.index();
    }

    /// Puts a zspage on `list`.
    #[inline]
    fn link(&self, class: &mut Class, zspage: ZspageId, descriptor: &Descriptor, list: usize) {
        let head = std::mem::replace(&mut class.partial[list], zspage.index());
        descriptor.prev.store(NIL, Relaxed);
        descriptor.next.store(head, Relaxed);
        if head != NIL {
            self.descriptor(ZspageId::new(head)).prev.store(zspage.index(), Relaxed);
        }
    }

    /// Removes a zspage from `list`.
    #[inline]
    fn unlink(&self, class: &mut Class, descriptor: &Descriptor, list: usize) {
        let (prev, next) = (descriptor.prev.load(Relaxed), descriptor.next.load(Relaxed));
        match prev {
            NIL => class.partial[list] = next,
            prev => self.descriptor(ZspageId::new(prev)).next.store(next, Relaxed),
        }
        if next != NIL {
            self.descriptor(ZspageId::new(next)).prev.store(prev, Relaxed);
        }
    }

    /// Changes the state of a zspage and moves it to the list where it then belongs.
    // Inlined: each caller knows most of the difference between the two states.
    #[inline(always)]
    fn change(&self, class: &mut Class, zspage: ZspageId, descriptor: &Descriptor, before: State, after: State) {
        let slots = before.slots();
        let (from, to) = (before.list_of(slots), after.list_of(slots));
        if from != to {
            from.into_iter().for_each(|list| self.unlink(class, descriptor, list));
            to.into_iter().for_each(|list| self.link(class, zspage, descriptor, list));
        }
        // A full zspage is on no list and has no free slots.
        let free_in = |state: State| if state.is_isolated() { 0 } else { slots - state.taken() };
        class.free_slots = class.free_slots + free_in(after) - free_in(before);
        descriptor.set_state(after);
    }

    /// Takes a slot of the fullest zspage of `class` with a free slot, for `piece`.
    #[inline]
    pub(super) fn take_slot(&self, class: ClassId, piece: PieceId) -> Option<(ZspageId, u32)> {
        self.take_slot_locked(&mut self.classes[class.index()].lock(), piece)
    }

    #[inline]
    fn take_slot_locked(&self, class: &mut Class, piece: PieceId) -> Option<(ZspageId, u32)> {
        // Takes the last nonempty list. The loop reads the heads of all lists, because a branch
        // that ends it early would be unpredictable.
        let fullest = class.partial.iter().fold(NIL, |fullest, &head| if head == NIL { fullest } else { head });
        if fullest == NIL {
            return None;
        }
        let zspage = ZspageId::new(fullest);
        Some((zspage, self.take_slot_of(class, zspage, piece)))
    }

    /// Takes a slot of `zspage`, which must have one and be on its list.
    #[inline]
    fn take_slot_of(&self, class: &mut Class, zspage: ZspageId, piece: PieceId) -> u32 {
        let descriptor = self.descriptor(zspage);
        let before = descriptor.state();
        let slot = u32::from(before.first_free());
        let element = self.element_of(descriptor, slot);
        let first_free = element.load(Relaxed) as u8;
        element.store(piece.get(), Relaxed);
        let after = before.with_taken_slot(first_free);
        self.change(class, zspage, descriptor, before, after);
        slot
    }

    /// Returns whether `class` has so few zspages that another half-empty one would weigh much.
    pub(super) fn has_few(&self, class: ClassId) -> bool {
        self.classes[class.index()].lock().zspages < FEW_ZSPAGES
    }

    /// Makes a zspage of `extent` and takes a slot of it for `piece`. Returns `None` if descriptors
    /// run out.
    pub(super) fn open(&self, class: ClassId, extent: Extent, piece: PieceId) -> Option<(ZspageId, u32)> {
        let mut guard = self.classes[class.index()].lock();
        let zspage = self.new_descriptor(&mut guard, u32::from(class.shape().slots))?;
        // It is on no list yet, like an isolated one.
        let state = State::new(class.index(), extent.frames, 0);
        let descriptor = self.descriptor(zspage);
        descriptor.set_heads(extent);
        let slots = state.slots();
        for slot in 0..slots {
            let next = if slot + 1 < slots { slot + 1 } else { u32::from(NO_SLOT) };
            self.element_of(descriptor, slot).store(FREE | next, Relaxed);
        }
        guard.zspages += 1;
        self.change(&mut guard, zspage, descriptor, state, state.listed());
        // Takes a slot of this zspage even if other zspages have free slots now: nothing would
        // close a new zspage that never gets a piece.
        Some((zspage, self.take_slot_of(&mut guard, zspage, piece)))
    }

    /// Frees a slot. Returns the frames of its zspage if that held its last piece.
    #[inline]
    pub(super) fn free_slot(&self, taken: TakenSlot<'_>) -> Option<Extent> {
        let TakenSlot { zspage, descriptor, class, slot, .. } = taken;
        let mut guard = self.classes[class.index()].lock();
        let before = descriptor.state();
        debug_assert!(self.piece_in(zspage, slot).is_some(), "slot {slot} of {zspage:?} is free");
        self.element_of(descriptor, slot).store(FREE | u32::from(before.first_free()), Relaxed);
        let after = before.with_freed_slot(slot as u8);
        self.change(&mut guard, zspage, descriptor, before, after);
        // The thread that isolated a zspage checks whether it is empty.
        if after.taken() == 0 && !after.is_isolated() {
            Some(self.close(&mut guard, zspage, descriptor, after))
        } else {
            None
        }
    }

    /// Takes an empty zspage out of use and returns its frames.
    fn close(
        &self,
        guard: &mut MutexGuard<'_, Class, StoreClass>,
        zspage: ZspageId,
        descriptor: &Descriptor,
        state: State,
    ) -> Extent {
        self.change(guard, zspage, descriptor, state, state.isolated());
        guard.zspages -= 1;
        let extent = descriptor.extent();
        self.retire_descriptor(guard, zspage, state);
        extent
    }

    /// Isolates the emptiest zspage of `class`, if its pieces fit into the free slots of the
    /// others.
    pub(super) fn isolate_emptiest(&self, class: ClassId) -> Option<ZspageId> {
        let mut guard = self.classes[class.index()].lock();
        let &emptiest = guard.partial.iter().find(|&&head| head != NIL)?;
        let zspage = ZspageId::new(emptiest);
        let descriptor = self.descriptor(zspage);
        let before = descriptor.state();
        if guard.free_slots < before.slots() {
            return None;
        }
        self.change(&mut guard, zspage, descriptor, before, before.isolated());
        Some(zspage)
    }

    /// Isolates `zspage`, whatever pieces it holds, if it is in use and not isolated yet, and one
    /// of its runs starts at `head`.
    pub(super) fn isolate(&self, class: ClassId, zspage: ZspageId, head: Frame) -> bool {
        let mut guard = self.classes[class.index()].lock();
        let descriptor = self.descriptor(zspage);
        let before = descriptor.state();
        if before.frames() == 0 || before.is_isolated() || descriptor.extent().runs().all(|run| run.head != head) {
            return false;
        }
        self.change(&mut guard, zspage, descriptor, before, before.isolated());
        true
    }

    /// Returns the last known owner of the extent. The caller pins the returned piece and then
    /// checks whether that piece still owns the extent.
    pub(super) fn piece_of_extent(&self, extent: ZspageId) -> Option<PieceId> {
        PieceId::new(self.descriptor(extent).prev.load(Relaxed))
    }

    /// Returns the number of slots of an isolated zspage.
    pub(super) fn slots(&self, zspage: ZspageId) -> u32 {
        self.state(zspage).slots()
    }

    /// Returns the piece in `slot` of an isolated zspage, if any.
    pub(super) fn piece_of_isolated(&self, class: ClassId, zspage: ZspageId, slot: u32) -> Option<PieceId> {
        let _guard = self.classes[class.index()].lock();
        self.piece_in(zspage, slot)
    }

    /// Puts an isolated zspage back on its list. If it is empty now, closes it and returns its
    /// frames.
    pub(super) fn put_back(&self, class: ClassId, zspage: ZspageId) -> Option<Extent> {
        let mut guard = self.classes[class.index()].lock();
        let descriptor = self.descriptor(zspage);
        let before = descriptor.state();
        if before.taken() == 0 {
            return Some(self.close(&mut guard, zspage, descriptor, before));
        }
        self.change(&mut guard, zspage, descriptor, before, before.listed());
        None
    }

    /// Allocates a descriptor for frames that a piece owns. Returns `None` if descriptors run out.
    pub(super) fn add_extent(&self, extent: Extent, piece: PieceId) -> Option<ZspageId> {
        let zspage = self.new_descriptor(&mut self.classes[EXTENTS].lock(), 0)?;
        let descriptor = self.descriptor(zspage);
        descriptor.set_heads(extent);
        descriptor.next.store(NIL, Relaxed);
        descriptor.prev.store(piece.get(), Relaxed);
        descriptor.set_state(State::new(EXTENTS, extent.frames, NO_SLOT).listed());
        Some(zspage)
    }

    /// Makes `next` the extent after `extent`.
    pub(super) fn link_extents(&self, extent: ZspageId, next: ZspageId) {
        self.descriptor(extent).next.store(next.index(), Relaxed);
    }

    /// Returns the extent after `extent` in its chain.
    pub(super) fn next_extent(&self, extent: ZspageId) -> Option<ZspageId> {
        match self.descriptor(extent).next.load(Relaxed) {
            NIL => None,
            next => Some(ZspageId::new(next)),
        }
    }

    /// Retires an extent; returns its frames and the extent after it.
    pub(super) fn remove_extent(&self, zspage: ZspageId) -> (Extent, Option<ZspageId>) {
        let found = (self.extent(zspage), self.next_extent(zspage));
        let state = self.state(zspage);
        self.retire_descriptor(&mut self.classes[EXTENTS].lock(), zspage, state);
        found
    }
}

/// Parts of [`Store::check`](super::Store::check). Nothing else may run meanwhile.
impl Zspages {
    /// Iterates over every zspage and extent in use.
    pub(super) fn in_use(&self) -> impl Iterator<Item = ZspageId> {
        (0..self.used_descriptors.load(Relaxed)).map(ZspageId::new).filter(|&zspage| self.state(zspage).frames() != 0)
    }

    /// Checks a zspage by itself and returns its pieces by slot.
    pub(super) fn check_zspage(&self, zspage: ZspageId) -> Vec<(u32, PieceId)> {
        let state = self.state(zspage);
        assert!(!state.is_isolated(), "{zspage:?} was left isolated");
        assert!(state.taken() > 0, "{zspage:?} is empty");
        let taken: Vec<_> =
            (0..state.slots()).filter_map(|slot| self.piece_in(zspage, slot).map(|piece| (slot, piece))).collect();
        assert_eq!(taken.len(), state.taken() as usize, "taken slots of {zspage:?}");
        let (mut free, mut next) = (0, state.first_free());
        while next != NO_SLOT {
            let element = self.element(zspage, u32::from(next)).load(Relaxed);
            assert!(element & FREE != 0, "slot {next} of {zspage:?} is on the free list and taken");
            free += 1;
            assert!(taken.len() + free <= state.slots() as usize, "the free list of {zspage:?} is a ring");
            next = element as u8;
        }
        assert_eq!(taken.len() + free, state.slots() as usize, "slots of {zspage:?}");
        taken
    }

    /// Checks that the lists hold exactly the zspages that belong on them.
    pub(super) fn check_lists(&self) {
        let (mut listed, mut zspages) = (0, 0);
        for index in 0..CLASSES {
            let guard = self.classes[index].lock();
            let mut free_slots = 0;
            for (list, &head) in guard.partial.iter().enumerate() {
                let (mut prev, mut next) = (NIL, head);
                while next != NIL {
                    let zspage = ZspageId::new(next);
                    let state = self.state(zspage);
                    assert_eq!(state.class(), index, "{zspage:?} is on a list of another class");
                    assert!(state.frames() != 0, "{zspage:?} is on a list and spare");
                    assert_eq!(state.list(), Some(list), "{zspage:?} is on the wrong list");
                    assert_eq!(self.descriptor(zspage).prev.load(Relaxed), prev, "the list of {zspage:?}");
                    free_slots += state.slots() - state.taken();
                    listed += 1;
                    (prev, next) = (next, self.descriptor(zspage).next.load(Relaxed));
                }
            }
            assert_eq!(free_slots, guard.free_slots, "free slots of class {index}");
            zspages += guard.zspages as usize;
        }
        let in_use: Vec<_> = self.in_use().filter(|&zspage| self.class(zspage).is_some()).collect();
        assert_eq!(zspages, in_use.len(), "zspages in use");
        let partial = in_use.iter().filter(|&&zspage| self.state(zspage).list().is_some());
        assert_eq!(listed, partial.count(), "a zspage with free slots is on no list");
    }
}
