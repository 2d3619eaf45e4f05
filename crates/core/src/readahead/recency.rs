//! Recency: which of a few items was used longest ago.
//!
//! There is no lock: this is a part of [`Readahead`](super::Readahead).

/// The numbers below `N` (at most 16) by last use, in one word, because every fault needs the
/// oldest.
#[derive(Debug)]
pub(super) struct Recency<const N: usize> {
    /// Four bits for each number, the oldest in the lowest bits.
    order: u64,
}

const BITS: usize = 4;
/// The lowest bit of each group of four.
const ONES: u64 = u64::MAX / ((1 << BITS) - 1);

impl<const N: usize> Recency<N> {
    /// The position of the most recently used number.
    const LAST: usize = {
        assert!(N > 1 && N * BITS <= u64::BITS as usize);
        (N - 1) * BITS
    };

    /// The initial order: number 0 is the oldest.
    pub const NONE: Recency<N> = {
        let (mut order, mut index) = (0, 0);
        while index < N {
            order |= (index as u64) << (index * BITS);
            index += 1;
        }
        Recency { order }
    };

    /// Marks `index` as used now.
    pub fn used(&mut self, index: usize) {
        debug_assert!(index < N);
        // Finds the group where four bits of `differs` are all 0. Subtracting 1 borrows only there,
        // for the lowest such group.
        let differs = self.order ^ (ONES * index as u64);
        let zeros = differs.wrapping_sub(ONES) & !differs & (ONES << (BITS - 1));
        let at = zeros.trailing_zeros() as usize / BITS * BITS;
        let before = (1 << at) - 1;
        let behind = self.order >> BITS & !before & ((1 << Self::LAST) - 1);
        self.order = self.order & before | behind | (index as u64) << Self::LAST;
    }

    /// Iterates over all numbers, the most recently used first.
    pub fn latest_first(&self) -> impl Iterator<Item = usize> {
        (0..N).rev().map(|at| (self.order >> (at * BITS)) as usize % (1 << BITS))
    }

    /// Marks the oldest number as used now and returns it.
    pub fn use_oldest(&mut self) -> usize {
        let oldest = self.order % (1 << BITS);
        self.order = self.order >> BITS | oldest << Self::LAST;
        oldest as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_as_a_list<const N: usize>(uses: &[Option<usize>]) {
        let (mut recency, mut list) = (Recency::<N>::NONE, (0..N).collect::<Vec<_>>());
        for used in uses {
            match used {
                Some(used) => {
                    recency.used(used % N);
                    list.retain(|&other| other != used % N);
                    list.push(used % N);
                }
                None => {
                    assert_eq!(recency.use_oldest(), list[0]);
                    list.rotate_left(1);
                }
            }
            assert!(recency.latest_first().eq(list.iter().rev().copied()));
        }
    }

    proptest! {
        #[test]
        fn recency_matches_a_list(uses in prop::collection::vec(prop::option::of(0..16usize), 0..60)) {
            is_as_a_list::<2>(&uses);
            is_as_a_list::<8>(&uses);
            is_as_a_list::<16>(&uses);
        }
    }

    #[test]
    fn the_oldest_is_used_next() {
        let mut recency = Recency::<4>::NONE;
        assert_eq!([(); 4].map(|()| recency.use_oldest()), [0, 1, 2, 3]);
        recency.used(0);
        recency.used(2);
        assert_eq!([(); 5].map(|()| recency.use_oldest()), [1, 3, 0, 2, 1]);
    }
}
