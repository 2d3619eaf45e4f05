//! Reclaim queues: folios in order of arrival, oldest first.
//!
//! User space sees no accessed bit, so a queue is a plain FIFO. A folio in use is found when the
//! program touches it while it is staged. An element names a folio by its head page and order and
//! carries the ticket that the page table issued when the folio was queued. The element is only a
//! claim: it holds as long as the page table has that ticket. Reclaim drops stale claims when it
//! pops them. While the program fits into its limit, reclaim pops nothing; then
//! [`look_through`](Queue::look_through) finds and removes stale claims when there are many.
//!
//! Claims may be told apart by the *epoch* in which they were queued. Reclaim does not need that,
//! the search for cold memory does.
//!
//! Invariants: no chunk is empty; chunk numbers ascend, and epochs do not descend; all claims of a
//! chunk are of one epoch; `claims` and `pages` are the sums over all chunks.
//!
//! Lock: one leaf lock for each queue.

use crate::sync::Mutex;
use foliomem_types::units::{Order, PageNumber};
use std::collections::VecDeque;

/// A folio, named by its first page and order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FolioName {
    /// The first page of the folio.
    pub head: PageNumber,
    /// The order of the folio when it was queued.
    pub order: Order,
}

/// A sequence number of a folio's queueing, modulo 64.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ticket(u8);

impl Ticket {
    /// Number of bits of a ticket.
    pub const BITS: u32 = 6;

    /// Returns the ticket with these bits; bits above [`BITS`](Self::BITS) are ignored.
    pub fn from_bits(bits: u64) -> Ticket {
        Ticket((bits & ((1 << Self::BITS) - 1)) as u8)
    }

    /// Returns the bits of the ticket.
    pub fn bits(self) -> u64 {
        u64::from(self.0)
    }

    /// Returns the next ticket.
    #[must_use]
    pub fn next(self) -> Ticket {
        Ticket::from_bits(self.bits() + 1)
    }
}

/// A claim that `folio` is in the queue since it got `ticket`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// The claimed folio.
    pub folio: FolioName,
    /// The ticket. The claim holds while the entry of the folio's head in the page table has this
    /// ticket.
    pub ticket: Ticket,
}

impl Claim {
    const ORDER_BITS: u32 = 4;
    const HEAD_SHIFT: u32 = Ticket::BITS + Self::ORDER_BITS;
    /// The bits of the ticket in a packed claim.
    const TICKET: u64 = (1 << Self::HEAD_SHIFT) - (1 << Self::ORDER_BITS);

    /// Packs the claim into one word. An address of 47 bits leaves 35 for the head.
    fn pack(self) -> u64 {
        let FolioName { head, order } = self.folio;
        head.0 << Self::HEAD_SHIFT | self.ticket.bits() << Self::ORDER_BITS | u64::from(order.get())
    }

    fn unpack(word: u64) -> Claim {
        let order = word & ((1 << Self::ORDER_BITS) - 1);
        let Some(order) = Order::new(order as u8) else { unreachable!("queued order {order}") };
        let head = PageNumber(word >> Self::HEAD_SHIFT);
        Claim { folio: FolioName { head, order }, ticket: Ticket::from_bits(word >> Self::ORDER_BITS) }
    }
}

/// Number of claims in a chunk: 4 KiB of them.
const CHUNK_CLAIMS: usize = 512;

/// A part of a queue. Its claims are `words[start..end]`.
struct Chunk {
    number: u64,
    epoch: u64,
    start: usize,
    end: usize,
    words: Box<[u64; CHUNK_CLAIMS]>,
}

impl Chunk {
    fn words(&self) -> &[u64] {
        &self.words[self.start..self.end]
    }

    /// Moves the claims to the front of `words`.
    fn close_up(&mut self) {
        self.words.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }
}

/// A FIFO of claims, 8 bytes each.
#[derive(Default)]
pub struct Queue(Mutex<Elements>);

#[derive(Default)]
struct Elements {
    chunks: VecDeque<Chunk>,
    /// The words of an emptied chunk, for the next new one.
    spare: Option<Box<[u64; CHUNK_CLAIMS]>>,
    next_number: u64,
    epoch: u64,
    /// The lowest chunk number that `look_through` may visit next.
    look_at: u64,
    claims: usize,
    /// Number of pages of all claims.
    pages: u64,
}

impl Elements {
    #[inline]
    fn push(&mut self, claim: Claim) {
        match self.chunks.back_mut() {
            Some(chunk) if chunk.end < CHUNK_CLAIMS && chunk.epoch == self.epoch => {
                chunk.words[chunk.end] = claim.pack();
                chunk.end += 1;
            }
            _ => self.begin_chunk(claim),
        }
        self.claims += 1;
        self.pages += u64::from(claim.folio.order.pages());
    }

    #[cold]
    fn begin_chunk(&mut self, first: Claim) {
        let mut words = self.spare.take().unwrap_or_else(|| Box::new([0; CHUNK_CLAIMS]));
        words[0] = first.pack();
        self.chunks.push_back(Chunk { number: self.next_number, epoch: self.epoch, start: 0, end: 1, words });
        self.next_number += 1;
    }

    #[inline]
    fn pop(&mut self) -> Option<Claim> {
        let chunk = self.chunks.front_mut()?;
        let claim = Claim::unpack(chunk.words[chunk.start]);
        chunk.start += 1;
        if chunk.start == chunk.end {
            self.remove_chunk(0);
        }
        Some(self.taken(claim))
    }

    fn pop_youngest(&mut self) -> Option<Claim> {
        let last = self.chunks.len().checked_sub(1)?;
        let chunk = &mut self.chunks[last];
        chunk.end -= 1;
        let claim = Claim::unpack(chunk.words[chunk.end]);
        if chunk.start == chunk.end {
            self.remove_chunk(last);
        }
        Some(self.taken(claim))
    }

    fn taken(&mut self, claim: Claim) -> Claim {
        self.claims -= 1;
        self.pages -= u64::from(claim.folio.order.pages());
        claim
    }

    #[cold]
    fn remove_chunk(&mut self, index: usize) {
        self.spare = self.chunks.remove(index).map(|chunk| chunk.words);
    }

    /// Returns the index of the first chunk whose number is at least `number`.
    fn index_from(&self, number: u64) -> usize {
        self.chunks.partition_point(|chunk| chunk.number < number)
    }

    /// Removes the stale claims of the chunk at `index`. `is_stale` gets the index of a claim in
    /// `words` and its word. Then merges the chunk into the previous one if both are of one epoch
    /// and fit into one.
    fn remove_stale(&mut self, index: usize, is_stale: impl Fn(usize, u64) -> bool) {
        let chunk = &mut self.chunks[index];
        let (mut kept, mut removed_pages) = (chunk.start, 0);
        for at in chunk.start..chunk.end {
            let word = chunk.words[at];
            if is_stale(at, word) {
                removed_pages += u64::from(Claim::unpack(word).folio.order.pages());
            } else {
                chunk.words[kept] = word;
                kept += 1;
            }
        }
        self.claims -= chunk.end - kept;
        self.pages -= removed_pages;
        chunk.end = kept;
        if chunk.words().is_empty() {
            return self.remove_chunk(index);
        }
        let Some(before) = index.checked_sub(1) else { return };
        let (len, epoch) = (self.chunks[index].words().len(), self.chunks[index].epoch);
        if self.chunks[before].words().len() + len <= CHUNK_CLAIMS
            && self.chunks[before].epoch == epoch
            && let Some(chunk) = self.chunks.remove(index)
        {
            let before = &mut self.chunks[before];
            before.close_up();
            before.words[before.end..before.end + len].copy_from_slice(chunk.words());
            before.end += len;
            self.spare = Some(chunk.words);
        }
    }
}

impl Queue {
    /// Appends a claim as the youngest.
    #[inline]
    pub fn push(&self, claim: Claim) {
        self.0.lock().push(claim);
    }

    /// Removes and returns the oldest claim.
    #[inline]
    pub fn pop(&self) -> Option<Claim> {
        self.0.lock().pop()
    }

    /// Begins a new epoch; returns its number. The first epoch is 0.
    pub fn begin_epoch(&self) -> u64 {
        let mut elements = self.0.lock();
        elements.epoch += 1;
        elements.epoch
    }

    /// Returns the epoch.
    pub fn epoch(&self) -> u64 {
        self.0.lock().epoch
    }

    /// Removes and returns the oldest claim if it was queued before `epoch`.
    pub fn pop_before(&self, epoch: u64) -> Option<Claim> {
        let mut elements = self.0.lock();
        let is_before = elements.chunks.front()?.epoch < epoch;
        if is_before { elements.pop() } else { None }
    }

    /// Returns whether one of the oldest `claims` claims names `folio`.
    pub fn has_among_oldest(&self, folio: FolioName, claims: usize) -> bool {
        let wanted = Claim { folio, ticket: Ticket::default() }.pack();
        let is_wanted = |word: u64| word & !Claim::TICKET == wanted;
        let elements = self.0.lock();
        let mut left = claims;
        elements.chunks.iter().any(|chunk| {
            let words = &chunk.words()[..chunk.words().len().min(left)];
            left -= words.len();
            // Compares all words: that is faster than an early exit, because the folio is seldom
            // there.
            words.iter().fold(false, |found, &word| found | is_wanted(word))
        })
    }

    /// Copies the oldest claims into `oldest`, as many as there are; they stay in the queue.
    pub fn copy_oldest(&self, oldest: &mut [Option<Claim>]) {
        let elements = self.0.lock();
        let words = elements.chunks.iter().flat_map(Chunk::words);
        words.zip(oldest).for_each(|(&word, to)| *to = Some(Claim::unpack(word)));
    }

    /// Removes and returns the youngest claim.
    pub fn pop_youngest(&self) -> Option<Claim> {
        self.0.lock().pop_youngest()
    }

    /// Returns the number of claims, including stale ones.
    pub fn claims(&self) -> usize {
        self.0.lock().claims
    }

    /// Returns the number of pages of all claims, including stale ones.
    pub fn pages(&self) -> u64 {
        self.0.lock().pages
    }

    /// Removes the stale claims of one chunk and returns the number of claims that the chunk had.
    /// Each call visits the next chunk; the first follows the last. The claims stay in the queue
    /// meanwhile. The queue is not locked while `holds` runs: a claim that once was stale stays
    /// stale.
    pub fn look_through(&self, mut holds: impl FnMut(Claim) -> bool) -> usize {
        let mut words = [0; CHUNK_CLAIMS];
        let (number, looked_at) = {
            let mut elements = self.0.lock();
            let from = elements.index_from(elements.look_at);
            let index = if from < elements.chunks.len() { from } else { 0 };
            let Some(chunk) = elements.chunks.get(index) else { return 0 };
            let looked_at = chunk.start..chunk.end;
            words[looked_at.clone()].copy_from_slice(chunk.words());
            let number = chunk.number;
            elements.look_at = number + 1;
            (number, looked_at)
        };
        let mut stale = [false; CHUNK_CLAIMS];
        for at in looked_at.clone() {
            stale[at] = !holds(Claim::unpack(words[at]));
        }
        if stale.contains(&true) {
            let mut elements = self.0.lock();
            let index = elements.index_from(number);
            // If the chunk was merged or emptied meanwhile, a later call finds the rest.
            if elements.chunks.get(index).is_some_and(|chunk| chunk.number == number) {
                elements.remove_stale(index, |at, word| stale[at] && words[at] == word);
            }
        }
        looked_at.len()
    }

    /// Returns every claim, oldest first.
    pub fn all(&self) -> Vec<Claim> {
        let elements = self.0.lock();
        elements.chunks.iter().flat_map(Chunk::words).copied().map(Claim::unpack).collect()
    }

    /// Panics unless all invariants hold.
    pub fn check(&self) {
        let elements = self.0.lock();
        let mut claims = 0;
        let mut pages = 0;
        let (mut last, mut epoch) = (None, 0);
        for chunk in &elements.chunks {
            assert!(epoch <= chunk.epoch && chunk.epoch <= elements.epoch, "the epoch of chunk {}", chunk.number);
            epoch = chunk.epoch;
            assert!(chunk.start < chunk.end && chunk.end <= CHUNK_CLAIMS, "chunk {} is empty", chunk.number);
            assert!(
                last < Some(chunk.number) && chunk.number < elements.next_number,
                "chunk {} is misplaced",
                chunk.number
            );
            last = Some(chunk.number);
            claims += chunk.words().len();
            pages += chunk.words().iter().map(|&word| u64::from(Claim::unpack(word).folio.order.pages())).sum::<u64>();
        }
        assert_eq!((claims, pages), (elements.claims, elements.pages), "claims and pages");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Push(usize),
        Pop(usize),
        PopYoungest(usize),
        /// Begins an epoch, and pops claims that were queued this many epochs ago.
        Epoch(u64),
        /// Makes the claims with this remainder modulo seven stale, and looks through one chunk.
        Look(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (1..1500usize).prop_map(Step::Push),
            2 => (1..1200usize).prop_map(Step::Pop),
            1 => (1..700usize).prop_map(Step::PopYoungest),
            2 => (0..3u64).prop_map(Step::Epoch),
            6 => (0..7u64).prop_map(Step::Look),
        ];
        prop::collection::vec(step, 1..40)
    }

    fn claim(number: u64) -> Claim {
        let order = Order::new((number % 10) as u8).unwrap();
        Claim {
            folio: FolioName { head: PageNumber((1 << 35) - 1 - number), order },
            ticket: Ticket::from_bits(number / 3),
        }
    }

    proptest! {
        #[test]
        fn a_packed_claim_unpacks_to_itself(number in 0..1u64 << 35) {
            prop_assert_eq!(Claim::unpack(claim(number).pack()), claim(number));
        }

        #[test]
        fn a_queue_is_a_fifo_that_drops_only_stale_claims(steps in steps()) {
            let queue = Queue::default();
            // The valid claims, in order. A stale claim may be in the queue or not.
            let mut model: VecDeque<Claim> = VecDeque::new();
            // The number of the first claim of each epoch.
            let mut epochs = vec![0];
            let mut forgotten = std::collections::HashSet::new();
            let mut next = 0;
            for step in steps {
                match step {
                    Step::Push(times) => for _ in 0..times {
                        queue.push(claim(next));
                        model.push_back(claim(next));
                        next += 1;
                    },
                    Step::Pop(times) => for _ in 0..times {
                        let Some(popped) = queue.pop() else { break };
                        if !forgotten.contains(&popped.pack()) {
                            prop_assert_eq!(Some(popped), model.pop_front());
                        }
                    },
                    Step::PopYoungest(times) => for _ in 0..times {
                        let Some(popped) = queue.pop_youngest() else { break };
                        if !forgotten.contains(&popped.pack()) {
                            prop_assert_eq!(Some(popped), model.pop_back());
                        }
                    },
                    Step::Epoch(back) => {
                        epochs.push(next);
                        let epoch = queue.begin_epoch();
                        prop_assert_eq!(epoch as usize, epochs.len() - 1);
                        let before = epoch.saturating_sub(back);
                        let is_old = |claim: &Claim| (1 << 35) - 1 - claim.folio.head.0 < epochs[before as usize];
                        while let Some(popped) = queue.pop_before(before) {
                            prop_assert!(is_old(&popped));
                            if !forgotten.contains(&popped.pack()) {
                                prop_assert_eq!(Some(popped), model.pop_front());
                            }
                        }
                        prop_assert!(model.front().is_none_or(|claim| !is_old(claim)));
                    }
                    Step::Look(remainder) => {
                        let forget = |claim: &Claim| claim.pack() % 7 == remainder;
                        forgotten.extend(model.iter().filter(|claim| forget(claim)).map(|claim| claim.pack()));
                        model.retain(|claim| !forget(claim));
                        queue.look_through(|claim| !forgotten.contains(&claim.pack()));
                    }
                }
                queue.check();
            }
            let held: Vec<Claim> = queue.all().into_iter().filter(|claim| !forgotten.contains(&claim.pack())).collect();
            prop_assert_eq!(held, Vec::from(model));
        }
    }

    #[test]
    fn looking_through_every_chunk_keeps_valid_claims_in_few_chunks() {
        let queue = Queue::default();
        (0..20_000).for_each(|number| queue.push(claim(number)));
        let holds = |claim: Claim| ((1 << 35) - 1 - claim.folio.head.0) % 16 == 5;
        let mut looked_at = 0;
        while looked_at < 20_000 {
            looked_at += queue.look_through(holds);
        }
        queue.check();
        let left = queue.all();
        assert_eq!(left.len(), 1250);
        assert!(
            left.iter().all(|&claim| holds(claim))
                && left.is_sorted_by_key(|claim| std::cmp::Reverse(claim.folio.head))
        );
        assert!(queue.0.lock().chunks.len() <= 4, "{} chunks", queue.0.lock().chunks.len());
    }

    #[test]
    fn look_through_leaves_claims_that_change_meanwhile() {
        let queue = Queue::default();
        (0..1000).for_each(|number| queue.push(claim(number)));
        // All claims of the first chunk are popped meanwhile, so the second becomes the first.
        let mut first = true;
        queue.look_through(|_| {
            if std::mem::take(&mut first) {
                (0..CHUNK_CLAIMS).for_each(|_| assert!(queue.pop().is_some()));
            }
            false
        });
        assert_eq!(queue.claims(), 1000 - CHUNK_CLAIMS);
        // The youngest claims are popped, and others take their places.
        let mut first = true;
        queue.look_through(|_| {
            if std::mem::take(&mut first) {
                (0..100).for_each(|_| assert!(queue.pop_youngest().is_some()));
                (2000..2050).for_each(|number| queue.push(claim(number)));
            }
            false
        });
        queue.check();
        assert_eq!(queue.all(), (2000..2050).map(claim).collect::<Vec<_>>());
    }

    #[test]
    fn the_oldest_are_copied_across_chunks() {
        let queue = Queue::default();
        (0..CHUNK_CLAIMS as u64 + 2).for_each(|number| queue.push(claim(number)));
        (0..CHUNK_CLAIMS - 1).for_each(|_| assert!(queue.pop().is_some()));
        let mut oldest = [None; 4];
        queue.copy_oldest(&mut oldest);
        let number = CHUNK_CLAIMS as u64 - 1;
        assert_eq!(oldest, [Some(claim(number)), Some(claim(number + 1)), Some(claim(number + 2)), None]);
        assert_eq!(queue.claims(), 3);
        let mut two = [None; 2];
        queue.copy_oldest(&mut two);
        assert_eq!(two, oldest[..2]);
        let is_among = |offset, claims| queue.has_among_oldest(claim(number + offset).folio, claims);
        assert!((0..3).all(|offset| is_among(offset, 4)) && !is_among(3, 4));
        assert!(is_among(1, 2) && !is_among(2, 2), "the count of oldest claims bounds the search across chunks");
        let other = claim(number + 1).folio.order;
        assert!(!queue.has_among_oldest(FolioName { order: other, ..claim(number).folio }, 4));
    }
}
