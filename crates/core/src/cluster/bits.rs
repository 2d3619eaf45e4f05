//! Slot bitmaps: one bit for every slot of a cluster.

use foliomem_types::units::{CLUSTER_SLOTS, Order, SlotIndex};

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (CLUSTER_SLOTS / WORD_BITS) as usize;
/// The order of runs that fill one word; larger runs are whole words.
const WORD_ORDER: u8 = WORD_BITS.ilog2() as u8;

/// Bit `k` of `ALIGNED[order]` is 1 where a run of `order` may start in a word.
const ALIGNED: [u64; WORD_ORDER as usize + 1] = {
    let mut aligned = [1; WORD_ORDER as usize + 1];
    let mut order = 0;
    while order < WORD_ORDER as usize {
        aligned[order] = u64::MAX / ((1 << (1 << order)) - 1);
        order += 1;
    }
    aligned
};

const _: () = assert!(ALIGNED[0] == u64::MAX && ALIGNED[1] == 0x5555_5555_5555_5555 && ALIGNED[5] == 1 << 32 | 1);

/// A set of slots of one cluster.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Bits([u64; WORDS]);

/// Calls `act` with each word that has bits of the run, and with the mask of these bits.
fn each_word(at: SlotIndex, slots: u32, mut act: impl FnMut(usize, u64)) {
    let (mut at, end) = (at.get(), at.get() + slots);
    debug_assert!(end <= CLUSTER_SLOTS);
    while at < end {
        let here = (WORD_BITS - at % WORD_BITS).min(end - at);
        act((at / WORD_BITS) as usize, (u64::MAX >> (WORD_BITS - here)) << (at % WORD_BITS));
        at += here;
    }
}

/// Returns the aligned runs of `order` in `word` that have no set bit, each by its first bit.
fn clear_runs(word: u64, order: u8) -> u64 {
    // After step k, a set bit means that the 2^(k+1) bits from it on are clear.
    let clear = (0..order).fold(!word, |clear, step| clear & clear >> (1u32 << step));
    clear & ALIGNED[usize::from(order)]
}

impl Bits {
    /// Sets a run of bits.
    ///
    /// # Panics
    /// If one of them is set.
    #[inline]
    pub fn set(&mut self, at: SlotIndex, slots: u32) {
        each_word(at, slots, |word, mask| {
            assert_eq!(self.0[word] & mask, 0, "{slots} slots from {at:?} are not all free");
            self.0[word] |= mask;
        });
    }

    /// Clears a run of bits.
    ///
    /// # Panics
    /// If one of them is clear.
    #[inline]
    pub fn clear(&mut self, at: SlotIndex, slots: u32) {
        each_word(at, slots, |word, mask| {
            assert_eq!(self.0[word] & mask, mask, "{slots} slots from {at:?} are not all set");
            self.0[word] &= !mask;
        });
    }

    /// Clears the set bits of a run and returns their number.
    #[inline]
    pub fn clear_any(&mut self, at: SlotIndex, slots: u32) -> u32 {
        let mut cleared = 0;
        each_word(at, slots, |word, mask| {
            cleared += (self.0[word] & mask).count_ones();
            self.0[word] &= !mask;
        });
        cleared
    }

    /// Returns whether the bit at `at` is set.
    pub fn contains(&self, at: SlotIndex) -> bool {
        self.0[(at.get() / WORD_BITS) as usize] >> (at.get() % WORD_BITS) & 1 != 0
    }

    /// Returns whether all bits of a run are set.
    pub fn contains_all(&self, at: SlotIndex, slots: u32) -> bool {
        let mut all = true;
        each_word(at, slots, |word, mask| all &= self.0[word] & mask == mask);
        all
    }

    /// Returns the number of set bits.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns the bits that are set here and clear in `other`.
    pub fn without(&self, other: &Bits) -> Bits {
        Bits(std::array::from_fn(|word| self.0[word] & !other.0[word]))
    }

    /// Returns the first naturally aligned run of `order` at or after `from` without a set bit.
    #[inline]
    pub fn find_clear(&self, order: Order, from: SlotIndex) -> Option<SlotIndex> {
        if order.get() <= WORD_ORDER {
            let mut not_before = u64::MAX << (from.get() % WORD_BITS);
            let mut word = (from.get() / WORD_BITS) as usize;
            while let Some(&bits) = self.0.get(word) {
                // In a cluster worth a look, most words are full.
                if bits != u64::MAX {
                    let runs = clear_runs(bits, order.get()) & not_before;
                    if runs != 0 {
                        return SlotIndex::new(word as u32 * WORD_BITS + runs.trailing_zeros());
                    }
                }
                not_before = u64::MAX;
                word += 1;
            }
            return None;
        }
        let words = (order.pages() / WORD_BITS) as usize;
        let skipped = from.get().div_ceil(order.pages());
        let mut groups = (0u32..).zip(self.0.chunks_exact(words)).skip(skipped as usize);
        let (group, _) = groups.find(|(_, group)| group.iter().all(|&word| word == 0))?;
        SlotIndex::new(group * order.pages())
    }

    /// Returns whether a clear, naturally aligned run of `order` overlaps this run.
    #[inline]
    pub fn has_clear_around(&self, at: SlotIndex, slots: u32, order: Order) -> bool {
        self.find_clear(order, at.head(order)).is_some_and(|found| found.get() < at.get() + slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, prop, prop_assert_eq, proptest};

    proptest! {
        #[test]
        fn the_first_clear_run_is_found(
            words in prop::array::uniform8(any::<u64>()),
            holes in prop::collection::vec((0u32..512, 0u8..10), 0..4),
            order in 0u8..10,
            from in 0u32..512,
            slots in 1u32..512,
        ) {
            let mut bits = Bits(words);
            for (at, hole) in holes {
                let hole = Order::new(hole).unwrap();
                bits.clear_any(SlotIndex::new(at & !(hole.pages() - 1)).unwrap(), hole.pages());
            }
            let order = Order::new(order).unwrap();
            let is_set = |at: u32| bits.contains(SlotIndex::new(at).unwrap());
            let is_clear = |head: &u32| (*head..head + order.pages()).all(|at| !is_set(at));
            let heads = || (0..CLUSTER_SLOTS).step_by(order.pages() as usize);
            let first = heads().filter(|&head| head >= from).find(is_clear);
            prop_assert_eq!(bits.find_clear(order, SlotIndex::new(from).unwrap()).map(SlotIndex::get), first);
            let slots = slots.min(CLUSTER_SLOTS - from);
            let around = heads().filter(|&head| head + order.pages() > from && head < from + slots).any(|head| is_clear(&head));
            prop_assert_eq!(bits.has_clear_around(SlotIndex::new(from).unwrap(), slots, order), around);
            prop_assert_eq!(bits.count() as usize, (0..CLUSTER_SLOTS).filter(|&at| is_set(at)).count());
        }
    }
}
