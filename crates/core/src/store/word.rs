//! The piece word: 64 bits with the place, the references, the pins and the kind of a piece.
//!
//! | bits | field | values |
//! |---|---|---|
//! | 0..16 | last byte | of the piece, in its zspage or the last extent of its chain |
//! | 16..40 | zspage | its zspage or first extent |
//! | 40 | elsewhere | bits 0..32 are the record of a piece in the swap file, or all of 16..40 are |
//! | | | ones: [`Location::FILLED`] |
//! | 41..51 | references | 0 (free or dying) to 512 |
//! | 51..55 | granule | order 0..=9 |
//! | 55 | raw | the bytes are the uncompressed content |
//! | 56 | sealed | the bytes are written |
//! | 57..59 | mark | a [`Mark`] |
//! | 59..64 | pins | 0..=31 |
//!
//! Slots of a class have one size, so the last byte encodes both the slot (quotient) and the
//! piece's length (remainder). A free piece is all zeros.

use foliomem_types::units::Order;

/// The index of a zspage or an extent in the table of both.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct ZspageId(u32);

impl ZspageId {
    /// Upper bound of the indices.
    pub(super) const LIMIT: u32 = 1 << (ZSPAGE_BITS - 1);

    pub(super) const fn new(index: u32) -> ZspageId {
        debug_assert!(index < Self::LIMIT);
        ZspageId(index)
    }

    pub(super) const fn index(self) -> u32 {
        self.0
    }
}

const LAST_BITS: u32 = 16;
/// Bits of the zspage field; its highest bit means that there is no zspage.
const ZSPAGE_BITS: u32 = 25;
const REFERENCES_BITS: u32 = 10;
const GRANULE_BITS: u32 = 4;
const MARK_BITS: u32 = 2;
const PINS_BITS: u32 = 5;

const ZSPAGE_AT: u32 = LAST_BITS;
const REFERENCES_AT: u32 = ZSPAGE_AT + ZSPAGE_BITS;
const GRANULE_AT: u32 = REFERENCES_AT + REFERENCES_BITS;
const RAW_AT: u32 = GRANULE_AT + GRANULE_BITS;
const SEALED_AT: u32 = RAW_AT + 1;
const MARK_AT: u32 = SEALED_AT + 1;
const PINS_AT: u32 = MARK_AT + MARK_BITS;

const _: () = assert!(PINS_AT + PINS_BITS == u64::BITS);
const _: () = assert!(1 << REFERENCES_BITS > foliomem_types::units::BLOCK_PAGES);
const _: () = assert!(super::classes::EXTENT_FRAMES as usize * foliomem_types::units::PAGE_BYTES == 1 << LAST_BITS);

const ELSEWHERE: u64 = 1 << (ZSPAGE_AT + ZSPAGE_BITS - 1);

/// The index of the record of a piece in the swap file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct RecordId(pub(super) u32);

const fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// The location of a piece's bytes: the low bits of its word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Location(u64);

impl Location {
    /// No location: the content repeats one word.
    pub(super) const FILLED: Location = Location(mask(ZSPAGE_BITS) << ZSPAGE_AT);

    pub(super) const fn new(zspage: ZspageId, last_byte: u16) -> Location {
        Location((zspage.0 as u64) << ZSPAGE_AT | last_byte as u64)
    }

    /// Returns the location in the swap file that `record` describes.
    pub(super) const fn in_file(record: RecordId) -> Location {
        Location(ELSEWHERE | record.0 as u64)
    }

    /// Returns the record of a piece in the swap file.
    pub(super) fn record(self) -> Option<RecordId> {
        (self.0 & ELSEWHERE != 0 && self != Location::FILLED).then_some(RecordId(self.0 as u32))
    }

    /// Returns whether the bytes are in a zspage or in extents.
    pub(super) const fn is_in_memory(self) -> bool {
        self.0 & ELSEWHERE == 0
    }

    pub(super) const fn zspage(self) -> ZspageId {
        ZspageId::new((self.0 >> ZSPAGE_AT) as u32)
    }

    pub(super) const fn last_byte(self) -> u16 {
        self.0 as u16
    }
}

/// The recompression state of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mark {
    /// The clock hand has not visited the piece.
    Young,
    /// The clock hand has visited the piece once.
    Idle,
    /// The second codec does not make the piece smaller.
    Settled,
    /// The second codec compressed the piece.
    Recompressed,
}

/// The word of a piece. The module describes its bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PieceWord(u64);

impl PieceWord {
    pub(super) const FREE: PieceWord = PieceWord(0);
    pub(super) const MAX_PINS: u32 = mask(PINS_BITS) as u32;

    pub(super) const fn new(location: Location, references: u16, granule: Order, raw: bool) -> PieceWord {
        PieceWord(
            location.0
                | (references as u64) << REFERENCES_AT
                | (granule.get() as u64) << GRANULE_AT
                | (raw as u64) << RAW_AT,
        )
    }

    pub(super) const fn from_bits(bits: u64) -> PieceWord {
        PieceWord(bits)
    }

    pub(super) const fn bits(self) -> u64 {
        self.0
    }

    pub(super) const fn location(self) -> Location {
        Location(self.0 & mask(REFERENCES_AT))
    }

    pub(super) const fn references(self) -> u16 {
        (self.0 >> REFERENCES_AT & mask(REFERENCES_BITS)) as u16
    }

    pub(super) fn granule(self) -> Order {
        match Order::new((self.0 >> GRANULE_AT & mask(GRANULE_BITS)) as u8) {
            Some(granule) => granule,
            None => unreachable!("only `new` writes the granule"),
        }
    }

    pub(super) const fn raw(self) -> bool {
        self.0 >> RAW_AT & 1 == 1
    }

    pub(super) const fn is_sealed(self) -> bool {
        self.0 >> SEALED_AT & 1 == 1
    }

    pub(super) const fn mark(self) -> Mark {
        match self.0 >> MARK_AT & mask(MARK_BITS) {
            0 => Mark::Young,
            1 => Mark::Idle,
            2 => Mark::Settled,
            _ => Mark::Recompressed,
        }
    }

    pub(super) const fn marked(self, mark: Mark) -> PieceWord {
        PieceWord(self.0 & !(mask(MARK_BITS) << MARK_AT) | (mark as u64) << MARK_AT)
    }

    pub(super) const fn pins(self) -> u32 {
        (self.0 >> PINS_AT) as u32
    }

    /// Returns whether the piece has no references and no pins. The thread whose update led to this
    /// state frees the piece.
    pub(super) const fn is_dead(self) -> bool {
        self.references() == 0 && self.pins() == 0
    }

    pub(super) const fn sealed(self) -> PieceWord {
        PieceWord(self.0 | 1 << SEALED_AT)
    }

    /// Returns the word with `pages` references fewer, if it has them.
    pub(super) const fn released(self, pages: u16) -> Option<PieceWord> {
        if pages == 0 || self.references() < pages {
            return None;
        }
        Some(PieceWord(self.0 - ((pages as u64) << REFERENCES_AT)))
    }

    /// Returns the word with `pins` pins.
    const fn with_pins(self, pins: u32) -> PieceWord {
        PieceWord(self.0 & !(mask(PINS_BITS) << PINS_AT) | (pins as u64) << PINS_AT)
    }

    /// Returns the word with all pins taken, so that no thread can pin the piece.
    pub(super) const fn locked(self) -> PieceWord {
        self.with_pins(Self::MAX_PINS)
    }

    /// Returns the word without pins, marked as recompressed, with its location at `to`.
    pub(super) const fn replaced(self, to: Location) -> PieceWord {
        let unpinned = self.moved(to).marked(Mark::Recompressed).with_pins(0);
        PieceWord(unpinned.0 & !(1 << RAW_AT))
    }

    /// Returns the word with one more pin, if there is room for it.
    pub(super) const fn pinned(self) -> Option<PieceWord> {
        if self.pins() == Self::MAX_PINS { None } else { Some(PieceWord(self.0 + (1 << PINS_AT))) }
    }

    /// Returns the word with one pin fewer, if it has one.
    pub(super) const fn unpinned(self) -> Option<PieceWord> {
        if self.pins() == 0 { None } else { Some(PieceWord(self.0 - (1 << PINS_AT))) }
    }

    pub(super) const fn moved(self, to: Location) -> PieceWord {
        PieceWord(self.0 & !mask(REFERENCES_AT) | to.0)
    }
}
