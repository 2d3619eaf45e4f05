//! The place of a piece's bytes: a short list of contiguous fragments of frames.
//!
//! A place looks up its fragments only on request: most operations on a piece do not need them.
//!
//! There is no lock: the fragments are constant while the piece is pinned or only its maker knows
//! it.

use super::extent::{Extent, MAX_RUNS};
use super::word::Location;
use super::{FilePlace, PieceId, Store};
use foliomem_types::units::{Frame, PAGE_BYTES};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

/// Contiguous bytes in contiguous frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fragment {
    /// The frame from which the offset counts.
    pub head: Frame,
    /// The start of the bytes; it may lie beyond the first frame.
    pub offset_bytes: u32,
    /// The number of bytes.
    pub len_bytes: u32,
}

impl Fragment {
    const NONE: Fragment = Fragment { head: Frame(0), offset_bytes: 0, len_bytes: 0 };

    /// Makes a fragment of `len_bytes` bytes, `offset_bytes` after the start of `head`.
    pub const fn new(head: Frame, offset_bytes: u32, len_bytes: u32) -> Fragment {
        Fragment { head, offset_bytes, len_bytes }
    }

    /// Returns the offset of the first byte from the start of the arena.
    pub const fn start_bytes(&self) -> u64 {
        self.head.0 as u64 * PAGE_BYTES as u64 + self.offset_bytes as u64
    }

    /// Returns the offset of the byte after the fragment from the start of the arena.
    pub const fn end_bytes(&self) -> u64 {
        self.start_bytes() + self.len_bytes as u64
    }
}

/// The right to read one fragment for a while.
#[derive(Clone, Copy, Debug)]
pub struct FragmentRef<'a>(Fragment, PhantomData<&'a [u8]>);

/// The right to write one fragment for a while.
#[derive(Debug)]
pub struct FragmentMut<'a>(Fragment, PhantomData<&'a mut [u8]>);

impl FragmentRef<'_> {
    /// Returns the right to read `fragment` of `_place`, the place of a pinned piece: nobody writes
    /// its bytes while the place is borrowed.
    pub(super) fn of<'a>(fragment: Fragment, _place: &'a Place<'_>) -> FragmentRef<'a> {
        FragmentRef(fragment, PhantomData)
    }
}

impl FragmentMut<'_> {
    /// Returns the right to write `fragment` of `_place`. The caller asks for one fragment at a
    /// time, or for fragments that do not overlap.
    pub(super) fn of<'a>(fragment: Fragment, _place: &'a mut PlaceMut<'_>) -> FragmentMut<'a> {
        FragmentMut(fragment, PhantomData)
    }
}

impl Deref for FragmentRef<'_> {
    type Target = Fragment;

    fn deref(&self) -> &Fragment {
        &self.0
    }
}

impl Deref for FragmentMut<'_> {
    type Target = Fragment;

    fn deref(&self) -> &Fragment {
        &self.0
    }
}

/// The place of a piece that is being written. No other thread knows the piece before it is sealed.
#[must_use = "the piece is never moved nor written back unless it is sealed"]
pub struct UniquePlace<'a> {
    pub(super) place: Place<'a>,
    pub(super) id: PieceId,
}

impl UniquePlace<'_> {
    /// Returns the right to write the place.
    pub fn as_mut(&mut self) -> PlaceMut<'_> {
        PlaceMut::of(self.place)
    }
}

impl<'a> Deref for UniquePlace<'a> {
    type Target = Place<'a>;

    fn deref(&self) -> &Place<'a> {
        &self.place
    }
}

impl fmt::Debug for UniquePlace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:?}", self.id, self.place)
    }
}

/// The right to write a place for a while.
#[derive(Debug)]
pub struct PlaceMut<'a>(Place<'a>);

impl<'a> PlaceMut<'a> {
    /// Returns the right to write `place`. Only the caller may use the place during the loan.
    pub(super) fn of(place: Place<'a>) -> PlaceMut<'a> {
        PlaceMut(place)
    }

    /// Calls `act` with each fragment, in the order of the bytes.
    pub fn for_each_fragment(&mut self, mut act: impl FnMut(FragmentMut<'_>)) {
        for &fragment in &*self.0.fragments() {
            act(FragmentMut::of(fragment, self));
        }
    }
}

impl<'a> Deref for PlaceMut<'a> {
    type Target = Place<'a>;

    fn deref(&self) -> &Place<'a> {
        &self.0
    }
}

/// The place of a piece's bytes, in memory or in the swap file.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    store: &'a Store,
    location: Location,
}

impl<'a> Place<'a> {
    /// Makes the place of `location`.
    pub(super) fn new(store: &'a Store, location: Location) -> Place<'a> {
        Place { store, location }
    }

    /// Returns the place in the swap file if the bytes are there.
    pub fn in_file(&self) -> Option<FilePlace> {
        self.location.record().map(|record| self.store.file_place(record))
    }

    /// Returns the fragments in the order of the bytes; none for filled content and for pieces in
    /// the swap file.
    pub fn fragments(&self) -> Fragments {
        let (zspages, location) = (&self.store.zspages, self.location);
        let mut fragments = Fragments::NONE;
        if !location.is_in_memory() {
            return fragments;
        }
        let (class, extent) = zspages.class_and_extent(location.zspage());
        if let Some(class) = class {
            let last_byte = u32::from(location.last_byte());
            let start = last_byte - last_byte % class.shape().size_bytes;
            // Most slots lie in the first run, which has at least half of the frames.
            if let Some(fragment) = extent.in_first_run(start, last_byte + 1) {
                return Fragments::of(fragment);
            }
            extent.locate(start, last_byte + 1, &mut fragments);
            return fragments;
        }
        self.each_link(|extent, len_bytes| extent.locate(0, len_bytes, &mut fragments));
        fragments
    }

    /// Returns the total length of the fragments.
    pub fn len_bytes(&self) -> u32 {
        if !self.location.is_in_memory() {
            return 0;
        }
        if let Some(taken) = self.store.zspages.slot_at(self.location) {
            return taken.len_bytes;
        }
        let mut all_bytes = 0;
        self.each_link(|_, len_bytes| all_bytes += len_bytes);
        all_bytes
    }

    /// Calls `act` with each extent of a chain and the number of the piece's bytes in it.
    fn each_link(&self, mut act: impl FnMut(Extent, u32)) {
        let (zspages, location) = (&self.store.zspages, self.location);
        let mut next = Some(location.zspage());
        while let Some(link) = next {
            let extent = zspages.extent(link);
            next = zspages.next_extent(link);
            let is_last = next.is_none();
            act(extent, if is_last { u32::from(location.last_byte()) + 1 } else { extent.frames * PAGE_BYTES as u32 });
        }
    }
}

impl fmt::Debug for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&*self.fragments()).finish()
    }
}

/// The fragments of a piece's bytes.
#[derive(Clone, Debug)]
pub struct Fragments(Stretches);

/// Stored inline for a piece of one extent, as most are.
#[derive(Clone, Debug)]
enum Stretches {
    Few([Fragment; MAX_RUNS], u8),
    /// The fragments of a chain of extents.
    Many(Vec<Fragment>),
}

impl Fragments {
    pub(super) const NONE: Fragments = Fragments(Stretches::Few([Fragment::NONE; MAX_RUNS], 0));

    /// Makes the list of one fragment.
    #[inline]
    fn of(fragment: Fragment) -> Fragments {
        let mut few = [Fragment::NONE; MAX_RUNS];
        few[0] = fragment;
        Fragments(Stretches::Few(few, 1))
    }

    fn last_mut(&mut self) -> Option<&mut Fragment> {
        match &mut self.0 {
            Stretches::Few(few, count) => few[..usize::from(*count)].last_mut(),
            Stretches::Many(many) => many.last_mut(),
        }
    }

    /// Appends a fragment. If it follows the last one in memory, the last one grows instead.
    pub(super) fn push(&mut self, fragment: Fragment) {
        if let Some(last) = self.last_mut()
            && last.end_bytes() == fragment.start_bytes()
        {
            last.len_bytes += fragment.len_bytes;
            return;
        }
        match &mut self.0 {
            Stretches::Few(few, count) if usize::from(*count) < MAX_RUNS => {
                few[usize::from(*count)] = fragment;
                *count += 1;
            }
            Stretches::Few(few, _) => self.0 = Stretches::Many([few.as_slice(), &[fragment]].concat()),
            Stretches::Many(many) => many.push(fragment),
        }
    }
}

impl Deref for Fragments {
    type Target = [Fragment];

    fn deref(&self) -> &[Fragment] {
        match &self.0 {
            Stretches::Few(few, count) => &few[..usize::from(*count)],
            Stretches::Many(many) => many,
        }
    }
}
