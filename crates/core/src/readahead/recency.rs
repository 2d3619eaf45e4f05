//! Which of a few was used longest ago.
//!
//! No lock: part of [`Readahead`](super::Readahead).

/// The numbers below `N`, by when each was used last.
#[derive(Debug)]
pub(super) struct Recency<const N: usize> {
    /// The oldest first.
    order: [u8; N],
}

impl<const N: usize> Recency<N> {
    /// None of them was ever used: the lowest is the oldest.
    pub const NONE: Recency<N> = {
        let mut order = [0; N];
        let mut index = 0;
        while index < N {
            order[index] = index as u8;
            index += 1;
        }
        Recency { order }
    };

    /// That one is used.
    pub fn used(&mut self, index: usize) {
        let Some(at) = self.order.iter().position(|&other| usize::from(other) == index) else {
            unreachable!("{index} is one of {N}")
        };
        self.order[at..].rotate_left(1);
    }

    /// All of them, the one that was used last first.
    pub fn latest_first(&self) -> impl Iterator<Item = usize> {
        self.order.iter().rev().map(|&index| index.into())
    }

    /// The one that was used longest ago is used.
    pub fn use_oldest(&mut self) -> usize {
        let before = self.order;
        // The length is known here, so that it is two loads and stores instead of a call.
        self.order[..N - 1].copy_from_slice(&before[1..]);
        self.order[N - 1] = before[0];
        before[0].into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_used_next() {
        let mut recency = Recency::<4>::NONE;
        assert_eq!([(); 4].map(|()| recency.use_oldest()), [0, 1, 2, 3]);
        recency.used(0);
        recency.used(2);
        assert_eq!([(); 5].map(|()| recency.use_oldest()), [1, 3, 0, 2, 1]);
    }
}
