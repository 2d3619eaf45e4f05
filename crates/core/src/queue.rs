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
pub struct Queue(Mutex<Elements>);

#[derive(Default)]
struct Elements {
    words: VecDeque<u64>,
    /// Of all elements, stale ones included.
    pages: u64,
}

impl Elements {
    /// The folio of a word that was taken out.
    fn taken(&mut self, word: u64) -> FolioName {
        let folio = Queue::unpack(word);
        self.pages -= u64::from(folio.order.pages());
        folio
    }
}

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
        let mut elements = self.0.lock();
        elements.words.push_back(Self::pack(folio));
        elements.pages += u64::from(folio.order.pages());
    }

    /// Takes the oldest.
    pub fn pop(&self) -> Option<FolioName> {
        self.pop_if(|_| true)
    }

    /// Takes the oldest, if it is wanted.
    pub fn pop_if(&self, is_wanted: impl FnOnce(FolioName) -> bool) -> Option<FolioName> {
        let mut elements = self.0.lock();
        elements.words.front().filter(|&&word| is_wanted(Self::unpack(word)))?;
        let word = elements.words.pop_front()?;
        Some(elements.taken(word))
    }

    /// The oldest, which stays.
    pub fn oldest(&self) -> Option<FolioName> {
        self.0.lock().words.front().map(|&word| Self::unpack(word))
    }

    /// Takes the youngest.
    pub fn pop_youngest(&self) -> Option<FolioName> {
        let mut elements = self.0.lock();
        let word = elements.words.pop_back()?;
        Some(elements.taken(word))
    }

    /// Elements, stale ones included.
    pub fn elements(&self) -> usize {
        self.0.lock().words.len()
    }

    /// Pages of the folios in it, stale ones included.
    pub fn pages(&self) -> u64 {
        self.0.lock().pages
    }
}
