//! Size classes: the slot size for a piece, and the number of frames of a class's zspages.
//!
//! A zspage is `frames` frames (any number up to 16, not only powers of two) divided into `slots`
//! slots. A class is useful only at a size that divides some number of frames almost exactly, so
//! classes are chosen among those sizes. Going down from the largest, the next class is the size
//! between [`NEAREST`] and [`FARTHEST`] of the previous one that leaves the least slack. A piece
//! then wastes half the distance between two classes on average, about 2%; the slack of zspages is
//! below that.
//!
//! A zspage has about [`WANTED_SLOTS`] slots if 16 frames have room for them: more would only make
//! half-empty zspages larger, and with fewer no size fits well. The first [`FEW_ZSPAGES`] zspages
//! of a class are smaller, at the price of some slack. A class with fewer zspages than that takes
//! free slots of slightly larger classes. Otherwise most classes of a store of a few MiB would be
//! one half-empty zspage.

use foliomem_types::units::PAGE_BYTES;

/// Maximum frames of a zspage and of a link of a chain: a run of order 4.
pub(super) const EXTENT_FRAMES: u32 = 16;
/// The largest slot in bytes: two of them fill the largest zspage. A larger piece has nothing to
/// share and gets its own frames.
pub(super) const LARGEST_SLOT_BYTES: u32 = EXTENT_FRAMES * PAGE_BYTES as u32 / 2;
/// The smallest slot in bytes.
const SMALLEST_SLOT_BYTES: u32 = 32;
/// Unit of slot sizes in bytes: pieces begin at addresses that are cheap to copy to.
const GRAIN_BYTES: u32 = 16;
/// Wanted number of slots of a zspage.
const WANTED_SLOTS: u32 = 16;
/// Number of zspages below which a class makes small ones, and first borrows slots of its
/// neighbours.
pub(super) const FEW_ZSPAGES: u32 = 2;
/// Number of larger classes that may lend a slot: the slots of the second are about 8% larger.
const NEIGHBOURS: u8 = 2;
/// Maximum size of the next class, in 1000ths of the class above: more classes would waste more in
/// zspages that are not full than they save.
const NEAREST: u32 = 978;
/// Minimum size of the next class, in 1000ths of the class above, if a size in between saves
/// anything.
const FARTHEST: u32 = 952;
/// Upper bound of the number of classes.
const MAX_CLASSES: usize = 250;

/// The layout of a class's zspages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    /// Bytes of a slot.
    pub(super) size_bytes: u32,
    /// Frames of a zspage.
    pub(super) frames: u8,
    /// Slots of a zspage.
    pub(super) slots: u8,
    /// Frames of the first few zspages of the class.
    pub(super) first_frames: u8,
}

impl Shape {
    /// Returns the bytes of a zspage that no slot covers.
    const fn slack_bytes(self) -> u32 {
        self.frames as u32 * PAGE_BYTES as u32 - self.slots as u32 * self.size_bytes
    }

    /// Returns whether a zspage of this shape has less slack, relative to its size, than one of
    /// `other`.
    const fn is_tighter(self, other: Shape) -> bool {
        self.slack_bytes() * (other.frames as u32) < other.slack_bytes() * self.frames as u32
    }

    /// Returns whether a slot of this shape takes enough less of its frames than one of `above` to
    /// justify a class.
    const fn saves_over(self, above: Shape) -> bool {
        let (own, other) = (self.frames as u32 * above.slots as u32, above.frames as u32 * self.slots as u32);
        own * 1000 <= other * NEAREST
    }

    /// Returns the tightest zspage for slots of `size_bytes`; the smallest if several are.
    const fn best(size_bytes: u32) -> Shape {
        let wanted = (WANTED_SLOTS * size_bytes).div_ceil(PAGE_BYTES as u32);
        let most = if wanted < EXTENT_FRAMES { wanted } else { EXTENT_FRAMES };
        let mut frames = size_bytes.div_ceil(PAGE_BYTES as u32);
        let mut best = Shape::of(size_bytes, frames);
        while frames < most {
            frames += 1;
            let shape = Shape::of(size_bytes, frames);
            if shape.is_tighter(best) {
                best = shape;
            }
        }
        best
    }

    const fn of(size_bytes: u32, frames: u32) -> Shape {
        let slots = frames * PAGE_BYTES as u32 / size_bytes;
        let first_frames = Shape::first_frames(size_bytes, frames);
        Shape { size_bytes, frames: frames as u8, slots: slots as u8, first_frames }
    }

    /// Returns the smallest number of frames, at most `frames`, of which slots of `size_bytes`
    /// leave at most an eighth over.
    const fn first_frames(size_bytes: u32, frames: u32) -> u8 {
        let mut first = size_bytes.div_ceil(PAGE_BYTES as u32);
        while first < frames && first * PAGE_BYTES as u32 % size_bytes * 8 > first * PAGE_BYTES as u32 {
            first += 1;
        }
        first as u8
    }
}

const _: () = assert!(PAGE_BYTES as u32 / SMALLEST_SLOT_BYTES < u8::MAX as u32);

/// Returns the shape of the class below `above`: the tightest size near enough that saves
/// something, if there is one.
const fn next_below(above: Shape) -> Shape {
    let lowest = above.size_bytes * FARTHEST / 1000;
    let mut size_bytes = above.size_bytes / GRAIN_BYTES * GRAIN_BYTES;
    let mut best = None;
    while size_bytes > SMALLEST_SLOT_BYTES {
        size_bytes -= GRAIN_BYTES;
        let shape = Shape::best(size_bytes);
        if shape.saves_over(above) {
            match best {
                Some(found) if !shape.is_tighter(found) => {}
                _ => best = Some(shape),
            }
        }
        if size_bytes < lowest + GRAIN_BYTES && best.is_some() {
            break;
        }
    }
    match best {
        Some(shape) => shape,
        None => Shape::best(SMALLEST_SLOT_BYTES),
    }
}

const CHOSEN: ([Shape; MAX_CLASSES], usize) = {
    let mut chosen = [Shape::best(LARGEST_SLOT_BYTES); MAX_CLASSES];
    let mut count = 1;
    while chosen[count - 1].size_bytes > SMALLEST_SLOT_BYTES {
        chosen[count] = next_below(chosen[count - 1]);
        count += 1;
    }
    (chosen, count)
};

/// Number of classes.
pub(super) const CLASSES: usize = CHOSEN.1;

/// The shapes of all classes, largest slots first.
static SHAPES: [Shape; CLASSES] = {
    let mut shapes = [CHOSEN.0[0]; CLASSES];
    let mut index = 0;
    while index < CLASSES {
        shapes[index] = CHOSEN.0[index];
        index += 1;
    }
    shapes
};

/// A size class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ClassId(u8);

impl ClassId {
    /// Returns the class number `index`, below [`CLASSES`].
    pub(super) const fn new(index: usize) -> ClassId {
        debug_assert!(index < CLASSES);
        ClassId(index as u8)
    }

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }

    pub(super) fn shape(self) -> Shape {
        SHAPES[self.index()]
    }

    /// Iterates over the classes whose slots are only a little larger, nearest first. Borrowing
    /// such a slot is better than opening a zspage for a class that hardly has any.
    pub(super) fn larger_neighbours(self) -> impl Iterator<Item = ClassId> {
        (self.0.saturating_sub(NEIGHBOURS)..self.0).rev().map(ClassId)
    }
}

/// Returns the class for a piece of `len_bytes`; `None` if the piece is too large for a slot.
pub(super) fn class_of(len_bytes: u32) -> Option<ClassId> {
    if len_bytes > LARGEST_SLOT_BYTES {
        return None;
    }
    Some(ClassId(CLASS_OF_GRAINS[len_bytes.div_ceil(GRAIN_BYTES) as usize]))
}

/// The class with the smallest slots of at least this many grains; slot sizes are multiples of a
/// grain.
static CLASS_OF_GRAINS: [u8; (LARGEST_SLOT_BYTES / GRAIN_BYTES) as usize + 1] = {
    let mut classes = [0; (LARGEST_SLOT_BYTES / GRAIN_BYTES) as usize + 1];
    let (mut grains, mut class) = (classes.len(), 0);
    while grains > 0 {
        grains -= 1;
        while class + 1 < CLASSES && SHAPES[class + 1].size_bytes >= grains as u32 * GRAIN_BYTES {
            class += 1;
        }
        classes[grains] = class as u8;
    }
    classes
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_gets_the_smallest_slot_it_fits_into() {
        assert_eq!(SHAPES[0].size_bytes, LARGEST_SLOT_BYTES);
        assert_eq!(SHAPES[CLASSES - 1].size_bytes, SMALLEST_SLOT_BYTES);
        for len_bytes in 1..=LARGEST_SLOT_BYTES {
            let class = class_of(len_bytes).unwrap();
            assert!(class.shape().size_bytes >= len_bytes);
            if let Some(smaller) = SHAPES.get(class.index() + 1) {
                assert!(smaller.size_bytes < len_bytes);
            }
        }
        assert_eq!(class_of(LARGEST_SLOT_BYTES + 1), None);
    }

    #[test]
    fn shapes_fit_their_frames_and_waste_little() {
        for pair in SHAPES.windows(2) {
            assert!(pair[1].size_bytes < pair[0].size_bytes && pair[1].saves_over(pair[0]));
            assert!(pair[0].size_bytes - pair[1].size_bytes <= GRAIN_BYTES.max(pair[0].size_bytes / 12));
        }
        for shape in SHAPES {
            let bytes = u32::from(shape.frames) * PAGE_BYTES as u32;
            assert!((1..=EXTENT_FRAMES).contains(&u32::from(shape.frames)) && shape.slots >= 1);
            assert_eq!(u32::from(shape.slots), bytes / shape.size_bytes);
            assert!(shape.slack_bytes() * 25 <= bytes, "{shape:?} leaves {} bytes", shape.slack_bytes());
        }
    }
}
