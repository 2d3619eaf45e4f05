//! Reclaim queues: folios in the order they came, oldest first.
//!
//! User space sees no accessed bit, so a queue is a plain FIFO and what is still in use shows by being
//! touched while staged at home. An element names a folio by its head page and order; it is only a
//! claim: the page table decides whether the folio is still there (its entry has the *queued* bit, and
//! the state that the queue is for). Elements of folios that are gone are dropped when they come up.
//!
//! Lock: one leaf lock a queue.

use crate::sync::Mutex;
use crate::units::{Order, PageNumber};
use std::collections::VecDeque;

/// A folio, by its first page and order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FolioName {
    /// Its first page.
    pub head: PageNumber,
    /// Its order when it was queued.
    pub order: Order,
}

/// A FIFO of folios; 8 bytes an element: the page number shifted left by 4, and the order.
#[derive(Default)]
pub struct Queue(Mutex<VecDeque<u64>>);

impl Queue {
    fn pack(folio: FolioName) -> u64 {
        folio.head.0 << 4 | u64::from(folio.order.get())
    }

    fn unpack(word: u64) -> FolioName {
        let Some(order) = Order::new((word & 0xf) as u8) else { unreachable!("queued order {}", word & 0xf) };
        FolioName { head: PageNumber(word >> 4), order }
    }

    /// Appends a folio as the youngest.
    pub fn push(&self, folio: FolioName) {
        self.0.lock().push_back(Self::pack(folio));
    }

    /// Takes the oldest.
    pub fn pop(&self) -> Option<FolioName> {
        self.0.lock().pop_front().map(Self::unpack)
    }

    /// Elements, stale ones included.
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops the elements for which `keep` is false. Elements pushed meanwhile go behind the rest; the
    /// lock is not held while `keep` runs.
    pub fn retain(&self, mut keep: impl FnMut(FolioName) -> bool) {
        let mut kept = std::mem::take(&mut *self.0.lock());
        kept.retain(|&word| keep(Self::unpack(word)));
        let mut now = self.0.lock();
        kept.append(&mut now);
        *now = kept;
    }
}
