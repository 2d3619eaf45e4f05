//! A table that grows without moving: elements are made when first used, a chunk at a time.
//!
//! The first eight chunks have [`FIRST_ELEMENTS`] elements each; after that every doubling of the table
//! is split into eight chunks. So a table is at most an eighth larger than what is used of it, and its
//! directory has a fixed, small size for any number of elements.

// Always the real ones: a chunk is made once, by code in which a schedule explorer must not interrupt it, and their
// number orders nothing.
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Elements in each of the first eight chunks: small, for stores of a few MiB.
const FIRST_ELEMENTS: u64 = 256;
const PER_DOUBLING_BITS: u32 = 3;
const PER_DOUBLING: u64 = 1 << PER_DOUBLING_BITS;
/// Chunks for any 32-bit index.
const CHUNKS: usize = chunk_of(u32::MAX).0 + 1;

/// The chunk that holds element `index`, and its place there.
const fn chunk_of(index: u32) -> (usize, usize) {
    let first_span = FIRST_ELEMENTS * PER_DOUBLING;
    if (index as u64) < first_span {
        return ((index as u64 / FIRST_ELEMENTS) as usize, (index as u64 % FIRST_ELEMENTS) as usize);
    }
    let doubling = index.ilog2() - first_span.ilog2();
    let rest = index as u64 - (first_span << doubling);
    let elements = FIRST_ELEMENTS << doubling;
    ((PER_DOUBLING + doubling as u64 * PER_DOUBLING + rest / elements) as usize, (rest % elements) as usize)
}

const fn elements_of(chunk: usize) -> usize {
    let doubling = (chunk as u64 / PER_DOUBLING).saturating_sub(1);
    (FIRST_ELEMENTS << doubling) as usize
}

/// See the module.
#[derive(Debug)]
pub(super) struct LazyTable<T> {
    chunks: Box<[OnceLock<Box<[T]>>]>,
    made: AtomicUsize,
}

impl<T: Default> LazyTable<T> {
    pub(super) fn new() -> LazyTable<T> {
        LazyTable { chunks: (0..CHUNKS).map(|_| OnceLock::new()).collect(), made: AtomicUsize::new(0) }
    }

    /// Element `index`, made with its whole chunk if it is not there yet.
    pub(super) fn get(&self, index: u32) -> &T {
        let (chunk, place) = chunk_of(index);
        let elements = self.chunks[chunk].get_or_init(|| {
            self.made.fetch_add(elements_of(chunk), Relaxed);
            (0..elements_of(chunk)).map(|_| T::default()).collect()
        });
        &elements[place]
    }

    /// Bytes it takes.
    pub(super) fn bytes(&self) -> usize {
        self.made.load(Relaxed) * size_of::<T>() + size_of_val(&*self.chunks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_has_a_place_of_its_own() {
        let mut expected = (0, 0);
        for index in 0..1_000_000 {
            assert_eq!(chunk_of(index), expected, "index {index}");
            expected.1 += 1;
            if expected.1 == elements_of(expected.0) {
                expected = (expected.0 + 1, 0);
            }
        }
        let (chunk, place) = chunk_of(u32::MAX);
        assert_eq!((chunk, place), (CHUNKS - 1, elements_of(CHUNKS - 1) - 1));
    }

    #[test]
    fn a_table_is_little_larger_than_what_is_used_of_it() {
        let table: LazyTable<u64> = LazyTable::new();
        assert!(table.bytes() < 8192);
        for index in 0..100_000 {
            table.get(index);
        }
        assert!(table.bytes() < 8192 + 100_000 * 8 * 9 / 8);
    }
}
