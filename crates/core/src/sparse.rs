//! A sparse table over 32-bit indices. It allocates elements at first use, 256 at a time, at any
//! index.
//!
//! The table is a radix tree: each byte of an index selects at one level. A node holds 256
//! elements, or 256 links to nodes of the next level; it never moves and is never freed. So a table
//! takes memory only for used nodes, 8 KiB for the first element; the upper levels take 16 bytes
//! for every 256 elements.
//!
//! Most tables stay below 2^16 elements, and each load of a lookup waits for the previous one, so
//! the table also links the node above those elements directly.
//!
//! There is no lock: a lookup is one load a level. A thread that needs a node that another thread
//! allocates waits for it.

// Not under the schedule explorer: it must not interrupt the code that allocates a node, and the
// byte count orders nothing.
use crate::sync::OnceLock;
use crate::sync::unordered::{AtomicUsize, Ordering::Relaxed};
use std::ops::{Deref, Range};
use std::sync::Arc;

const FAN_OUT: usize = 1 << u8::BITS;
/// Bound of the indices that one node of the third level covers.
const LOW: u32 = 1 << u16::BITS;

/// A link to a node.
type Link<T> = OnceLock<Box<[T; FAN_OUT]>>;

/// A link to a node of the third level.
type Third<T> = OnceLock<Arc<[Link<T>; FAN_OUT]>>;

/// Bytes of a link as in a real program, also where it is a cell, so that the lab's figures match.
const LINK_BYTES: usize = size_of::<std::sync::OnceLock<Box<()>>>();

/// A table of `T` by 32-bit index.
#[derive(Debug)]
pub struct SparseTable<T> {
    root: Box<[Link<Third<T>>]>,
    /// The first node of the third level, once an element below [`LOW`] exists.
    low: Third<T>,
    made_bytes: AtomicUsize,
}

impl<T: Default> SparseTable<T> {
    /// Makes a table for indices below `len`, rounded up to 2^24.
    pub fn new(len: u32) -> SparseTable<T> {
        let root = (0..len.div_ceil(1 << 24)).map(|_| OnceLock::new()).collect();
        SparseTable { root, low: OnceLock::new(), made_bytes: AtomicUsize::new(0) }
    }

    /// Returns the node at `link`; allocates it if needed. Its elements take `element_bytes` each.
    fn node<'a, U: Default, N>(&self, link: &'a OnceLock<N>, element_bytes: usize) -> &'a [U; FAN_OUT]
    where
        N: From<Box<[U; FAN_OUT]>> + Deref<Target = [U; FAN_OUT]>,
    {
        link.get_or_init(|| {
            self.made_bytes.fetch_add(FAN_OUT * element_bytes, Relaxed);
            // Built on the heap: the stack is small.
            let elements: Box<[U]> = (0..FAN_OUT).map(|_| U::default()).collect();
            let Ok(node) = <Box<[U; FAN_OUT]>>::try_from(elements) else {
                unreachable!("FAN_OUT elements were collected")
            };
            node.into()
        })
    }

    /// Returns element `index`; allocates it if needed.
    #[inline]
    pub fn get(&self, index: u32) -> &T {
        &self.leaf(index)[index as usize % FAN_OUT]
    }

    /// Returns element `index` if it was ever allocated.
    pub fn find(&self, index: u32) -> Option<&T> {
        Some(&self.find_leaf(index)?[index as usize % FAN_OUT])
    }

    /// Calls `act` for each of these elements; allocates them if needed.
    #[inline]
    pub fn for_each(&self, indices: Range<u32>, mut act: impl FnMut(u32, &T)) {
        // Most ranges have one element, and a loop takes longer to set up than to run.
        if indices.end - indices.start == 1 {
            act(indices.start, self.get(indices.start));
        } else {
            self.for_each_of_many(indices, act);
        }
    }

    fn for_each_of_many(&self, indices: Range<u32>, mut act: impl FnMut(u32, &T)) {
        let mut at = indices.start;
        while at < indices.end {
            let elements = &self.leaf(at)[at as usize % FAN_OUT..];
            for element in elements.iter().take((indices.end - at) as usize) {
                act(at, element);
                at += 1;
            }
        }
    }

    /// Returns the leaf node that contains element `index`; allocates it if needed.
    #[inline]
    fn leaf(&self, index: u32) -> &[T; FAN_OUT] {
        self.find_leaf(index).unwrap_or_else(|| self.make_leaf(index))
    }

    #[inline]
    fn find_leaf(&self, index: u32) -> Option<&[T; FAN_OUT]> {
        let [first, second, third, _] = index.to_be_bytes().map(usize::from);
        let node = if index < LOW { self.low.get()? } else { self.root[first].get()?[second].get()? };
        Some(node[third].get()?)
    }

    #[cold]
    fn make_leaf(&self, index: u32) -> &[T; FAN_OUT] {
        let [first, second, third, _] = index.to_be_bytes().map(usize::from);
        let second = &self.node(&self.root[first], LINK_BYTES)[second];
        let leaf = self.node(&self.node(second, LINK_BYTES)[third], size_of::<T>());
        if index < LOW
            && let Some(low) = second.get()
        {
            self.low.get_or_init(|| low.clone());
        }
        leaf
    }

    /// Returns the memory of the table in bytes.
    pub fn bytes(&self) -> usize {
        self.root.len() * LINK_BYTES + self.made_bytes.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeSet, HashMap};
    use std::sync::atomic::AtomicU32;

    /// Indices in groups at both ends and in between.
    fn index() -> impl Strategy<Value = u32> {
        let near = (prop::sample::select(vec![0u32, 255, 256, 65_535, 1 << 24, 3 << 24]), 0u32..600);
        prop_oneof![
            near.prop_map(|(base, offset)| base + offset),
            (0u32..600).prop_map(|offset| u32::MAX - offset),
            any::<u32>(),
        ]
    }

    proptest! {
        #[test]
        fn a_table_stores_elements_and_takes_memory_only_for_used_nodes(
            stores in prop::collection::vec((index(), any::<u32>()), 0..200),
            other in index(),
        ) {
            let table: SparseTable<AtomicU32> = SparseTable::new(u32::MAX);
            let model: HashMap<u32, u32> = stores.iter().copied().collect();
            stores.iter().for_each(|&(index, value)| table.get(index).store(value, Relaxed));
            for (&index, &value) in &model {
                prop_assert_eq!(table.find(index).map(|word| word.load(Relaxed)), Some(value));
                if let Some(next) = index.checked_add(1) {
                    let mut seen = Vec::new();
                    table.for_each(index..next, |index, word| seen.push((index, word.load(Relaxed))));
                    prop_assert_eq!(seen, [(index, value)]);
                }
            }
            let nodes = |bits: u32| model.keys().map(|index| index >> bits).collect::<BTreeSet<_>>().len();
            prop_assert_eq!(table.find(other).is_some(), model.keys().any(|index| index >> 8 == other >> 8));
            if !model.contains_key(&other) {
                prop_assert_eq!(table.find(other).map_or(0, |word| word.load(Relaxed)), 0);
            }
            let directory = table.root.len() * 16 + (nodes(24) + nodes(16)) * 256 * 16;
            prop_assert_eq!(table.bytes(), directory + nodes(8) * 1024);
        }
    }

    #[test]
    fn a_small_table_is_small() {
        let table: SparseTable<AtomicU32> = SparseTable::new(6 << 20);
        assert!(table.bytes() < 64, "{} bytes before its first use", table.bytes());
        (0..1 << 18).for_each(|index| {
            table.get(index);
        });
        assert!(table.bytes() < (1 << 20) * 33 / 32, "{} bytes", table.bytes());
        assert!(table.find(6 << 20).is_none());
    }

    #[test]
    fn a_range_of_elements_may_span_several_nodes() {
        let table: SparseTable<AtomicU32> = SparseTable::new(u32::MAX);
        for range in [0..0, 250..800, 65_500..65_600, u32::MAX - 300..u32::MAX] {
            table.for_each(range.clone(), |index, word| word.store(!index, Relaxed));
            range.for_each(|index| assert_eq!(table.find(index).unwrap().load(Relaxed), !index));
        }
    }

    #[test]
    fn threads_that_need_an_element_at_once_share_it() {
        const STEP: usize = 97;
        for _ in 0..20 {
            let table: SparseTable<AtomicU32> = SparseTable::new(1 << 20);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        (0..1 << 17).step_by(STEP).for_each(|index| {
                            table.get(index).fetch_add(1, Relaxed);
                        })
                    });
                }
            });
            assert!((0..1 << 17).step_by(STEP).all(|index| table.find(index).unwrap().load(Relaxed) == 4));
        }
    }
}
