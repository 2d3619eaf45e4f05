//! Allocation notices: a thread of the program waits until the monitor has seen its new memory.
//!
//! The monitor samples the size of the process often enough to keep the limit, if it gets a CPU. On
//! a busy machine it may get none while the program fills new mappings. So a thread that allocates
//! much, where there may be no room for it, sends a *notice* and waits until the monitor has
//! registered the memory. If the memory is only the last of many small pieces, the monitor looks at
//! all mappings before it receives the next notice.
//!
//! Allocated memory is not always new: the C library gives out freed memory again. After each
//! notice for which the monitor finds nothing new, twice as many pages may pass without a notice,
//! up to a quarter of the limit, until the monitor finds something new. The end of the heap that
//! grows by `brk` is known: an allocation above it is always new. (A mapping that grows into
//! inaccessible address space faults by itself: [`crate::address_space::adopt`].)
//!
//! Allocating threads are *paused* while the agent activates, adopts mappings, or waits for a
//! moment without a pending mapping event. Threads that allocate at memory speed would otherwise
//! keep the kernel's lock of the mappings from the monitor for tens of milliseconds.
//!
//! | slot | meaning | left by |
//! |---|---|---|
//! | free | | a thread: taken |
//! | taken | a thread writes its notice | that thread: posted |
//! | posted | the thread waits | the monitor: received; the thread, too late: free |
//! | received | the thread waits | the monitor: answered; the thread, too late: abandoned |
//! | answered | the monitor has handled the notice | the thread: free |
//! | abandoned | the thread waits no longer | the monitor: free |
//!
//! All words are futexes. There is no lock, because a fork may interrupt another thread anywhere
//! here.
//!
//! Orderings: a slot's `state` carries the rest of the slot. A change of the state releases the
//! earlier writes of its thread, and acquires those of the thread that made the previous change:
//! posted to received (the range), received to answered (the registration), free to taken (the
//! earlier thread's reads of the slot). When `pauses` becomes 0, it releases the work of the
//! pausing threads to `wait_while_paused`.

use foliomem_sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicUsize, Ordering};
use foliomem_sys::word_wait::{self, ALL, now_ns};
use foliomem_types::units::PAGE_BYTES;
use rustix::process::Pid;
use std::ops::Range;
use std::time::Duration;

/// Maximum wait for the monitor, in nanoseconds: the child of a fork may have no monitor yet.
const MAX_WAIT_NS: u64 = 100_000_000;
/// Maximum number of threads that wait at the same time. Any other thread goes on at once.
const SLOTS: usize = if cfg!(feature = "shuttle") { 2 } else { 64 };
/// Minimum size of an allocation that needs a notice, as a shift of the limit (1/2^6), at least 1
/// MiB. The same amount may be allocated without a notice after the monitor has found new memory.
const MUCH_SHIFT: u32 = 6;
const MUCH_MIN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;
/// Part of the heap that may be unmanaged, as a shift of the limit (1/2^8), at least 256 KiB.
const HEAP_SHIFT: u32 = 8;
const HEAP_MIN_PAGES: i64 = (256 << 10) / PAGE_BYTES as i64;
/// Memory that may be allocated without a notice after the first futile notice (1/2^5), and its
/// maximum (1/2^2), as shifts of the limit.
const FIRST_PASS_SHIFT: u32 = 5;
const LAST_PASS_SHIFT: u32 = 2;
/// Maximum distance of a heap address from the heap's known end, in bytes.
const HEAP_REACH_BYTES: usize = 1 << 40;
/// The end of an unmanaged heap: no mapping lies right above this address.
const NO_HEAP: usize = usize::MAX / 2;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const POSTED: u32 = 2;
const RECEIVED: u32 = 3;
const ANSWERED: u32 = 4;
const ABANDONED: u32 = 5;

fn pages(range: &Range<usize>) -> i64 {
    range.len().div_ceil(PAGE_BYTES) as i64
}

/// Why a thread sends a notice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoticeKind {
    /// The thread has allocated the range, and may touch it at once.
    Allocated,
    /// The thread needs the mappings in the range joined, as the program has made them.
    JoinMappings,
    /// The thread of this id has started. The range is its control block, which must stay resident.
    ThreadStarted(Pid),
    /// The loader has loaded or unloaded libraries.
    ObjectsChanged,
}

impl NoticeKind {
    /// Encodes the kind as a word. Thread ids are positive.
    fn word(self) -> i32 {
        match self {
            NoticeKind::Allocated => 0,
            NoticeKind::JoinMappings => -1,
            NoticeKind::ObjectsChanged => -2,
            NoticeKind::ThreadStarted(thread) => thread.as_raw_nonzero().get(),
        }
    }

    fn from_word(word: i32) -> NoticeKind {
        match word {
            0 => NoticeKind::Allocated,
            -2 => NoticeKind::ObjectsChanged,
            _ => Pid::from_raw(word.max(0)).map_or(NoticeKind::JoinMappings, NoticeKind::ThreadStarted),
        }
    }
}

#[derive(Debug, Default)]
struct Slot {
    state: AtomicU32,
    /// The encoded [`NoticeKind`].
    what: AtomicI32,
    start: AtomicUsize,
    end: AtomicUsize,
    /// `AllocationNotices::finds` when the notice was posted.
    finds: AtomicU32,
}

impl Slot {
    fn change(&self, from: u32, to: u32) -> bool {
        // AcqRel pairs with itself, and with the Release stores to `state` in `notify` and
        // `answer`.
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// The notices of one process, and the state that limits their number.
#[derive(Debug)]
pub struct AllocationNotices {
    limit_pages: AtomicI64,
    slots: [Slot; SLOTS],
    /// The slot after that of the last received notice.
    next_slot: AtomicUsize,
    /// Whether a thread has waited in vain for [`MAX_WAIT_NS`] since the monitor last received a
    /// notice.
    is_monitor_late: AtomicBool,
    /// Number of times that the monitor has found something new.
    finds: AtomicU32,
    /// Number of futile notices in a row.
    futile: AtomicU32,
    /// Pages that may still be allocated without a notice.
    pass_pages: AtomicI64,
    /// The end of the managed part of the heap.
    heap_end: AtomicUsize,
    /// An allocation that ends less than `HEAP_REACH_BYTES` above this address needs a notice.
    border: AtomicUsize,
    /// Number of existing guards of [`AllocationNotices::pause`]. Allocating threads wait while it
    /// is not 0.
    pauses: AtomicU32,
}

/// A guard that pauses allocating threads until it is dropped.
#[derive(Debug)]
pub struct Paused<'a>(&'a AllocationNotices);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        // AcqRel: the last guard publishes the work of all pausing threads. It pairs with itself,
        // and with the Acquire in `wait_while_paused`.
        if self.0.pauses.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.release();
        }
    }
}

/// A received notice, whose thread waits for the answer.
#[derive(Debug)]
pub struct Notice<'a> {
    slot: &'a Slot,
    /// Why the thread has sent the notice.
    pub what: NoticeKind,
    /// The memory that the notice is about.
    pub range: Range<usize>,
    /// The value of `AllocationNotices::finds` when the notice was sent.
    pub finds: u32,
}

impl Notice<'_> {
    /// Lets the thread go on. The monitor calls this.
    pub fn answer(self) {
        if self.slot.change(RECEIVED, ANSWERED) {
            word_wait::wake(&self.slot.state, 1);
        } else {
            // Release pairs with the AcqRel in `change` by which another thread takes the slot.
            self.slot.state.store(FREE, Ordering::Release);
        }
    }
}

impl AllocationNotices {
    /// Creates an empty set of notices, for a process under a limit of `limit_pages`.
    pub fn new(limit_pages: i64) -> AllocationNotices {
        AllocationNotices {
            limit_pages: AtomicI64::new(limit_pages),
            slots: std::array::from_fn(|_| Slot::default()),
            next_slot: AtomicUsize::new(0),
            is_monitor_late: AtomicBool::new(false),
            finds: AtomicU32::new(0),
            futile: AtomicU32::new(0),
            pass_pages: AtomicI64::new(0),
            heap_end: AtomicUsize::new(NO_HEAP),
            border: AtomicUsize::new(NO_HEAP),
            pauses: AtomicU32::new(0),
        }
    }

    /// Sets the limit, in pages.
    pub fn set_limit(&self, limit_pages: i64) {
        self.limit_pages.store(limit_pages, Ordering::Relaxed);
    }

    /// Returns how much of the heap may be unmanaged.
    fn heap_pages(&self) -> i64 {
        (self.limit_pages.load(Ordering::Relaxed) >> HEAP_SHIFT).max(HEAP_MIN_PAGES)
    }

    fn much_pages(&self) -> i64 {
        (self.limit_pages.load(Ordering::Relaxed) >> MUCH_SHIFT).max(MUCH_MIN_PAGES)
    }

    /// Returns whether `range` alone needs a notice.
    pub fn is_much(&self, range: &Range<usize>) -> bool {
        pages(range) >= self.much_pages()
    }

    /// Returns whether an allocation that ends at `end` needs a notice, however small it is: if it
    /// lies well above the managed part of the heap, or if threads are paused.
    #[inline]
    pub fn is_watched(&self, end: usize) -> bool {
        self.pauses.load(Ordering::Relaxed) != 0
            || end.wrapping_sub(self.border.load(Ordering::Relaxed)) < HEAP_REACH_BYTES
    }

    /// Returns whether an allocated `range` needs no notice, because it is not watched and its
    /// pages may still pass. Subtracts the pages from those that may pass.
    pub fn may_pass(&self, range: &Range<usize>) -> bool {
        let pages = pages(range);
        !self.is_watched(range.end)
            && self.pass_pages.load(Ordering::Relaxed) > 0
            && self.pass_pages.fetch_sub(pages, Ordering::Relaxed) >= pages
    }

    /// Pauses allocating threads until the returned guard is dropped. Only threads of the agent may
    /// call.
    pub fn pause(&self) -> Paused<'_> {
        // Relaxed: a thread that sees the change late allocates once more before it waits.
        self.pauses.fetch_add(1, Ordering::Relaxed);
        Paused(self)
    }

    fn release(&self) {
        word_wait::wake(&self.pauses, ALL);
    }

    /// Waits until threads are not paused. Allocating threads call this.
    pub fn wait_while_paused(&self) {
        // Acquire pairs with the AcqRel in the drop of `Paused`.
        let pauses = self.pauses.load(Ordering::Acquire);
        if pauses != 0 {
            // A wake-up for another reason may let the thread go on, too.
            word_wait::wait_for(&self.pauses, pauses, Duration::from_nanos(MAX_WAIT_NS));
        }
    }

    /// Notes that a part of the heap is managed up to `end`. (Another part may lie higher.)
    pub fn note_managed_heap(&self, end: usize) {
        let known = self.heap_end.load(Ordering::Relaxed);
        if known == NO_HEAP || known < end {
            self.heap_ends(end);
        }
    }

    fn heap_ends(&self, end: usize) {
        self.heap_end.store(end, Ordering::Relaxed);
        self.border.store(end + self.heap_pages() as usize * PAGE_BYTES, Ordering::Relaxed);
    }

    /// Notes that the program has unmapped `range`, which may be the end of the heap.
    pub fn unmapped(&self, range: &Range<usize>) {
        let end = self.heap_end.load(Ordering::Relaxed);
        if range.start < end && end <= range.end {
            self.heap_ends(range.start);
        }
    }

    /// Sends a notice about `range`, calls `wake` to wake the monitor, and waits for the answer.
    /// Returns whether the answer came in time.
    pub fn notify(&self, what: NoticeKind, range: Range<usize>, wake: impl FnOnce()) -> bool {
        if self.is_monitor_late.load(Ordering::Relaxed) {
            return false;
        }
        let Some(slot) = self.slots.iter().find(|slot| slot.change(FREE, TAKEN)) else { return false };
        slot.what.store(what.word(), Ordering::Relaxed);
        slot.start.store(range.start, Ordering::Relaxed);
        slot.end.store(range.end, Ordering::Relaxed);
        slot.finds.store(self.finds.load(Ordering::Relaxed), Ordering::Relaxed);
        // Release pairs with the AcqRel of `receive`, which reads the range.
        slot.state.store(POSTED, Ordering::Release);
        wake();
        let until_ns = now_ns() + MAX_WAIT_NS;
        loop {
            // Acquire pairs with the AcqRel of `answer`: the thread sees what the monitor has done.
            let state = slot.state.load(Ordering::Acquire);
            if state == ANSWERED {
                // Release pairs with the AcqRel by which the next thread takes the slot.
                slot.state.store(FREE, Ordering::Release);
                return true;
            }
            let left_ns = until_ns.saturating_sub(now_ns());
            if left_ns == 0 {
                self.is_monitor_late.store(true, Ordering::Relaxed);
                if slot.change(POSTED, FREE) || slot.change(RECEIVED, ABANDONED) {
                    return false;
                }
                continue;
            }
            word_wait::wait_for(&slot.state, state, Duration::from_nanos(left_ns));
        }
    }

    /// Receives a notice, if there is one. The monitor calls this.
    pub fn receive(&self) -> Option<Notice<'_>> {
        self.is_monitor_late.store(false, Ordering::Relaxed);
        // Slots take turns, so a thread that sends notices all the time cannot starve others.
        let start = self.next_slot.load(Ordering::Relaxed);
        let index = (start..start + SLOTS).find(|index| self.slots[index % SLOTS].change(POSTED, RECEIVED))?;
        self.next_slot.store((index + 1) % SLOTS, Ordering::Relaxed);
        let slot = &self.slots[index % SLOTS];
        let what = NoticeKind::from_word(slot.what.load(Ordering::Relaxed));
        let range = slot.start.load(Ordering::Relaxed)..slot.end.load(Ordering::Relaxed);
        Some(Notice { slot, what, range, finds: slot.finds.load(Ordering::Relaxed) })
    }

    /// Returns whether a notice waits to be received. The monitor calls this.
    pub fn has_pending(&self) -> bool {
        // Relaxed: `receive` acquires the notice.
        self.slots.iter().any(|slot| slot.state.load(Ordering::Relaxed) == POSTED)
    }

    /// Notes that the monitor has found something new, with or without a notice.
    pub fn note_found(&self) {
        self.finds.fetch_add(1, Ordering::Relaxed);
        self.futile.store(0, Ordering::Relaxed);
        self.pass_pages.store(self.much_pages(), Ordering::Relaxed);
    }

    /// Notes that a notice about `range`, sent after `finds` finds, has shown nothing new.
    pub fn note_futile(&self, range: &Range<usize>, finds: u32) {
        if finds != self.finds.load(Ordering::Relaxed) {
            // The memory was new when the notice was sent, and the monitor found it with something
            // else.
            return;
        }
        // A notice that was needed only because threads are paused says nothing about the heap.
        if range.end.wrapping_sub(self.border.load(Ordering::Relaxed)) < HEAP_REACH_BYTES {
            // This part of the heap cannot be managed.
            self.heap_ends(range.end);
        }
        let futile = self.futile.load(Ordering::Relaxed);
        let shift = FIRST_PASS_SHIFT.saturating_sub(futile).max(LAST_PASS_SHIFT);
        self.futile.store(futile.saturating_add(1), Ordering::Relaxed);
        self.pass_pages.store(self.limit_pages.load(Ordering::Relaxed) >> shift, Ordering::Relaxed);
    }

    /// Returns whether no slot is in use.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.iter().all(|slot| slot.state.load(Ordering::Relaxed) == FREE)
    }

    /// Resets the slots and pauses in the child of a fork, where no other thread waits.
    pub fn reset(&self) {
        let AllocationNotices {
            slots,
            is_monitor_late,
            pauses,
            // Kept: the child has the parent's limit, heap, and finds.
            limit_pages: _,
            next_slot: _,
            finds: _,
            futile: _,
            pass_pages: _,
            heap_end: _,
            border: _,
        } = self;
        slots.iter().for_each(|slot| slot.state.store(FREE, Ordering::Relaxed));
        is_monitor_late.store(false, Ordering::Relaxed);
        pauses.store(0, Ordering::Relaxed);
        self.release();
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    const LIMIT_PAGES: i64 = 128 * MUCH_MIN_PAGES;

    #[test]
    fn a_thread_goes_on_when_the_monitor_has_answered() {
        const THREADS: usize = SLOTS / 2;
        let (notices, stop) = (AllocationNotices::new(LIMIT_PAGES), AtomicBool::new(false));
        let seen: [AtomicUsize; THREADS] = Default::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    while let Some(notice) = notices.receive() {
                        seen[notice.range.start].store(notice.range.end, Ordering::Release);
                        notice.answer();
                    }
                    foliomem_sync::back_off();
                }
            });
            let senders: Vec<_> = (0..THREADS)
                .map(|sender| {
                    let (notices, seen) = (&notices, &seen);
                    scope.spawn(move || {
                        (0..200)
                            .filter(|&turn| {
                                notices.notify(NoticeKind::Allocated, sender..turn, || {})
                                    && seen[sender].load(Ordering::Acquire) == turn
                            })
                            .count()
                    })
                })
                .collect();
            let answered: Vec<_> = senders.into_iter().map(|sender| sender.join().unwrap()).collect();
            stop.store(true, Ordering::Release);
            // The monitor thread of the test may starve.
            assert!(answered.iter().all(|&answered| answered > 100), "{answered:?}");
        });
        assert!(notices.is_idle());
    }

    #[test]
    fn a_thread_waits_once_and_not_forever_without_a_monitor() {
        let notices = AllocationNotices::new(LIMIT_PAGES);
        let mut woken = 0;
        assert!(!(0..3).any(|_| notices.notify(NoticeKind::Allocated, 0..1, || woken += 1)));
        assert_eq!(woken, 1);
        // The monitor is late. Then the next notice is sent again.
        assert!(notices.receive().is_none());
        notices.notify(NoticeKind::Allocated, 0..1, || woken += 1);
        assert_eq!(woken, 2);
    }

    #[test]
    fn the_monitor_receives_each_kind_of_notice() {
        let notices = AllocationNotices::new(LIMIT_PAGES);
        for what in
            [NoticeKind::Allocated, NoticeKind::JoinMappings, NoticeKind::ThreadStarted(Pid::from_raw(7).unwrap())]
        {
            std::thread::scope(|scope| {
                let sender = scope.spawn(|| notices.notify(what, 5..6, || {}));
                let notice = loop {
                    if let Some(notice) = notices.receive() {
                        break notice;
                    }
                };
                assert_eq!((notice.what, notice.range.clone()), (what, 5..6));
                notice.answer();
                assert!(sender.join().unwrap());
            });
        }
    }

    #[test]
    fn an_abandoned_slot_is_free_in_the_end() {
        let notices = AllocationNotices::new(LIMIT_PAGES);
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| notices.notify(NoticeKind::JoinMappings, 5..6, || {}));
            let notice = loop {
                if let Some(notice) = notices.receive() {
                    break notice;
                }
                foliomem_sync::back_off();
            };
            assert_eq!((notice.what, notice.range.clone()), (NoticeKind::JoinMappings, 5..6));
            sender.join().unwrap();
            notice.answer();
        });
        assert!(notices.is_idle());
    }

    #[test]
    fn paused_threads_go_on_with_the_last_guard() {
        let notices = AllocationNotices::new(LIMIT_PAGES);
        notices.wait_while_paused();
        let (first, other) = (notices.pause(), notices.pause());
        drop(other);
        assert!([64, 0x5555_0000_0000, 0x7f00_0000_0000].iter().all(|&end| notices.is_watched(end)));
        let gone_on = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let wait = || {
                notices.wait_while_paused();
                gone_on.fetch_add(1, Ordering::Release);
            };
            let waiting = [(); 3].map(|()| scope.spawn(wait));
            drop(first);
            waiting.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(gone_on.load(Ordering::Acquire), 3);
        });
        assert!(!notices.is_watched(64));
        // The child of a fork inherits the count of pauses, but not their guards.
        std::mem::forget(notices.pause());
        notices.wait_while_paused();
        notices.reset();
        assert!(!notices.is_watched(64));
    }

    #[test]
    fn futile_notices_let_more_allocations_pass() {
        let notices = AllocationNotices::new(LIMIT_PAGES);
        let piece = 0..MUCH_MIN_PAGES as usize * PAGE_BYTES;
        let passed = || (0..).take_while(|_| notices.may_pass(&piece)).count();
        assert_eq!(passed(), 0);
        let after = [(); 6].map(|()| {
            notices.note_futile(&(0..0), notices.finds.load(Ordering::Relaxed));
            passed()
        });
        assert_eq!(after, [4, 8, 16, 32, 32, 32]);
        let before = notices.finds.load(Ordering::Relaxed);
        notices.note_found();
        assert_eq!(passed(), 2);
        notices.note_futile(&(0..0), before);
        assert_eq!(passed(), 0, "it was found with something else");
        notices.note_futile(&(0..0), notices.finds.load(Ordering::Relaxed));
        assert_eq!(passed(), 4);
    }

    #[test]
    fn an_allocation_above_the_managed_heap_is_new() {
        const END: usize = 0x5555_0000_0000;
        let notices = AllocationNotices::new(LIMIT_PAGES);
        let is_new = |start: usize, bytes: usize| {
            notices.note_futile(&(0..0), notices.finds.load(Ordering::Relaxed));
            !notices.may_pass(&(start..start + bytes))
        };
        let above = END + notices.heap_pages() as usize * PAGE_BYTES;
        assert!([END, above, 0x40_0000, 0x7f00_0000_0000].iter().all(|&start| !is_new(start, 64)), "no heap is known");
        notices.note_managed_heap(END);
        assert_eq!([END - 64, END, above - 64, above].map(|start| is_new(start, 32)), [false, false, false, true]);
        assert!(!is_new(0x7f00_0000_0000, 64), "another mapping");
        notices.unmapped(&(END..END + 64));
        notices.unmapped(&(END - 128..END - 64));
        assert!(!is_new(above - 64, 32));
        notices.unmapped(&(END - 64..END + 64));
        assert!(is_new(above - 64, 64), "it has shrunk");
        notices.note_managed_heap(END);
        notices.note_managed_heap(END - 4096);
        assert_eq!(
            [above - 64, above].map(|start| is_new(start, 32)),
            [false, true],
            "a lower part does not change the end"
        );
        notices.note_futile(&(above..above + 64), 0);
        assert!(!is_new(above, 32), "it cannot be managed");
    }
}
