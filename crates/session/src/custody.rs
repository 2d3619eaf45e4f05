//! The userfaultfds of the tree, which the supervisor holds, too.
//!
//! When the last descriptor of a userfaultfd is closed, swapped-out pages read as zeros. A companion
//! and its guard have one each. If somebody kills both at once, the supervisor's copy keeps faults
//! waiting until the program is stopped.
//!
//! | # | who | does |
//! |---|---|---|
//! | 1 | companion | offers its userfaultfd ([`Offer::make`]) and calls the custodian |
//! | 2 | custodian, a thread of the supervisor | takes a copy by pidfd_getfd(2), and answers |
//! | 3 | companion | waits for the answer before anything is swapped out ([`Offer::wait`]) |
//! | 4 | whoever frees the slot | withdraws the offer: the custodian drops its copy |
//!
//! Where the custodian cannot take a copy (the companion has another user, or is of another pid
//! namespace), or answers too late, the guard is the only other holder. That is counted.
//!
//! The words lie in the control segment. No locks: each word has one writer at a time, and the
//! answer names the companion that it is for.

use crate::segment::Control;
use foliomem_sys::clock::{now_ns, timespec};
use foliomem_sys::shared_words;
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use rustix::thread::futex;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The longest time that a companion waits for the answer, while allocating threads are paused. The
/// supervisor answers within a millisecond where it gets a CPU.
const MAX_ANSWER_TIME: Duration = Duration::from_millis(50);
/// In an answer: no copy could be taken. Process ids are smaller.
const REFUSED: u32 = 1 << 31;
/// The custodian's stack, in bytes.
const STACK_BYTES: usize = 128 << 10;

shared_words! {
    /// One process's offer.
    #[derive(Debug, Default)]
    pub struct Offer {
        /// The companion's pid (bits 32..64) and the number of its userfaultfd, plus 1; 0 where there is
        /// none.
        userfaultfd: AtomicU64,
        /// The companion whose userfaultfd the custodian has taken, or [`REFUSED`] and that. A futex
        /// word.
        answer: AtomicU32,
    }
}

/// What an offer has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The supervisor holds a copy.
    Held,
    /// It cannot have one.
    Refused,
    /// It has not answered in time.
    Late,
    /// Nobody takes copies in this run.
    NoCustodian,
}

shared_words! {
    /// How companions call the custodian.
    #[derive(Debug, Default)]
    pub struct Calls {
        /// 1 if there is a custodian.
        is_attended: AtomicU32,
        /// Bumped to wake the custodian. A futex word.
        calls: AtomicU32,
        /// Companions of which the supervisor had no copy in time.
        unheld: AtomicU32,
    }
}

impl Calls {
    /// There will be a custodian in this run.
    pub fn attend(&self) {
        // Relaxed: before the program starts.
        self.is_attended.store(1, Ordering::Relaxed);
    }

    /// Companions of which the supervisor had no copy before they began to swap out.
    pub fn unheld(&self) -> u32 {
        self.unheld.load(Ordering::Relaxed)
    }

    fn call(&self) {
        // Release pairs with the Acquire in `serve`: the offer, or its withdrawal.
        self.calls.fetch_add(1, Ordering::Release);
        let _ = futex::wake(&self.calls, futex::Flags::empty(), 1);
    }
}

impl Offer {
    /// The companion offers its userfaultfd to the custodian.
    pub fn make(&self, calls: &Calls, companion: Pid, userfaultfd: impl AsFd) {
        let number = userfaultfd.as_fd().as_raw_fd() as u64 + 1;
        let word = u64::from(raw(companion)) << 32 | number;
        self.userfaultfd.store(word, Ordering::Relaxed);
        calls.call();
    }

    /// The companion: waits for the answer to its offer. Counts all answers but [`Answer::Held`].
    pub fn wait(&self, calls: &Calls, companion: Pid) -> Answer {
        let answer = self.wait_for(calls, companion, MAX_ANSWER_TIME);
        calls.unheld.fetch_add(u32::from(answer != Answer::Held), Ordering::Relaxed);
        answer
    }

    fn wait_for(&self, calls: &Calls, companion: Pid, most: Duration) -> Answer {
        if calls.is_attended.load(Ordering::Relaxed) == 0 {
            return Answer::NoCustodian;
        }
        let until_ns = now_ns() + most.as_nanos() as u64;
        loop {
            // Acquire pairs with the Release in `answer`: the copy has been taken.
            let now = self.answer.load(Ordering::Acquire);
            match now {
                _ if now == raw(companion) => return Answer::Held,
                _ if now == raw(companion) | REFUSED => return Answer::Refused,
                _ => {}
            }
            let left_ns = until_ns.saturating_sub(now_ns());
            if left_ns == 0 {
                return Answer::Late;
            }
            let _ =
                futex::wait(&self.answer, futex::Flags::empty(), now, Some(&timespec(Duration::from_nanos(left_ns))));
        }
    }

    /// The slot is free: there is no userfaultfd any more.
    pub fn withdraw(&self, calls: &Calls) {
        self.answer.store(0, Ordering::Relaxed);
        if self.userfaultfd.swap(0, Ordering::Relaxed) != 0 {
            calls.call();
        }
    }

    /// The companion, which may have ended, and the number of its userfaultfd.
    fn userfaultfd(&self) -> Option<(Pid, RawFd)> {
        let word = self.userfaultfd.load(Ordering::Relaxed);
        let number = (word & u64::from(u32::MAX)).checked_sub(1)?;
        Some((Pid::from_raw((word >> 32) as i32)?, number as RawFd))
    }

    /// The custodian: tells the companion what its offer has come to.
    fn answer(&self, companion: Pid, is_held: bool) {
        let answer = raw(companion) | if is_held { 0 } else { REFUSED };
        // Release pairs with the Acquire in `wait_for`.
        if self.answer.swap(answer, Ordering::Release) != answer {
            let _ = futex::wake(&self.answer, futex::Flags::empty(), 1);
        }
    }
}

fn raw(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get() as u32
}

/// The copies.
#[derive(Debug, Default)]
pub struct Custody {
    /// By companion and number; `None` where it could not be taken.
    held: HashMap<(Pid, RawFd), Option<OwnedFd>>,
}

impl Custody {
    /// Starts the custodian, a thread that runs as long as the process. The caller has
    /// [announced](Calls::attend) it.
    pub fn start(control: &'static Control) -> std::io::Result<()> {
        let thread = std::thread::Builder::new().name("custodian".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || serve(control)).map(|_| ())
    }

    /// Drops copies that belong to no process any more, takes those that are offered and not held
    /// yet, and answers.
    fn look(&mut self, control: &Control) {
        let offers: Vec<_> = control.each_slot().map(|(slot, _)| &control.process(slot).offer).collect();
        let offered: HashSet<_> = offers.iter().filter_map(|offer| offer.userfaultfd()).collect();
        self.held.retain(|key, _| offered.contains(key));
        for offer in offers {
            let Some((companion, number)) = offer.userfaultfd() else { continue };
            let copy = self.held.entry((companion, number)).or_insert_with(|| take(companion, number).ok());
            offer.answer(companion, copy.is_some());
        }
    }
}

fn serve(control: &'static Control) -> ! {
    let mut custody = Custody::default();
    let calls = &control.custody().calls;
    loop {
        // Acquire pairs with the Release in `call`: what there is to look at.
        let seen = calls.load(Ordering::Acquire);
        custody.look(control);
        let _ = futex::wait(calls, futex::Flags::empty(), seen, None);
    }
}

/// Takes a copy of the descriptor `number` of a process.
fn take(companion: Pid, number: RawFd) -> Result<OwnedFd, Errno> {
    let copy = pidfd_getfd(pidfd_open(companion, PidfdFlags::empty())?, number, PidfdGetfdFlags::empty())?;
    // In another pid namespace the companion's number is that of a process that has nothing to do with it.
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", copy.as_raw_fd()), Vec::new())?;
    if link.as_bytes() == b"anon_inode:[userfaultfd]" { Ok(copy) } else { Err(Errno::BADF) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_table::ProcessSlot;
    use foliomem_sys::userfaultfd::{Features, Userfaultfd};
    use foliomem_types::codec::Codec;
    use foliomem_types::settings::{Configuration, Limit};
    use foliomem_types::size_policy::SizePolicy;
    use foliomem_types::units::Order;

    /// A run's segment, and a slot of this process there.
    fn segment() -> (&'static Control, OwnedFd, &'static ProcessSlot) {
        let configuration = Configuration {
            limit: Limit::Bytes(1 << 30),
            sizes: SizePolicy::from_bits(1),
            codec: Codec::Lz4,
            recompress: None,
            granule: Order::new(4).unwrap(),
            reclaimers: 0,
            torture: false,
            hard: false,
            records: false,
        };
        let (control, segment) = Control::create(&configuration).unwrap();
        let slot = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
        (control, segment, slot)
    }

    fn userfaultfd() -> Userfaultfd {
        Userfaultfd::open(Features { events: false }).unwrap()
    }

    #[test]
    fn what_is_offered_is_held_until_its_slot_is_free() {
        let ((control, _segment, slot), me) = (segment(), rustix::process::getpid());
        let mut custody = Custody::default();
        control.custody().attend();
        custody.look(control);
        slot.offer.make(control.custody(), me, userfaultfd());
        assert_eq!(slot.offer.wait_for(control.custody(), me, Duration::ZERO), Answer::Late);
        let offered = userfaultfd();
        slot.offer.make(control.custody(), me, &offered);
        custody.look(control);
        custody.look(control);
        assert_eq!(slot.offer.wait(control.custody(), me), Answer::Held);
        assert_eq!((custody.held.len(), control.custody().unheld()), (1, 0));
        slot.has_ended();
        custody.look(control);
        assert_eq!(custody.held.len(), 1, "a companion that was killed is marked, too");
        control.reap();
        custody.look(control);
        assert!(custody.held.is_empty());
    }

    #[test]
    fn a_descriptor_that_is_no_userfaultfd_is_refused_and_counted() {
        let ((control, _segment, slot), me) = (segment(), rustix::process::getpid());
        assert_eq!(slot.offer.wait_for(control.custody(), me, Duration::MAX), Answer::NoCustodian);
        control.custody().attend();
        let (reader, _writer) = std::io::pipe().unwrap();
        slot.offer.make(control.custody(), me, &reader);
        Custody::default().look(control);
        assert_eq!(slot.offer.wait(control.custody(), me), Answer::Refused);
        assert_eq!(control.custody().unheld(), 1);
    }

    #[test]
    fn the_custodian_answers_within_the_time_limit() {
        let ((control, _segment, slot), me) = (segment(), rustix::process::getpid());
        control.custody().attend();
        Custody::start(control).unwrap();
        for _ in 0..100 {
            let offered = userfaultfd();
            slot.offer.make(control.custody(), me, &offered);
            assert_eq!(slot.offer.wait_for(control.custody(), me, Duration::from_secs(10)), Answer::Held);
            slot.offer.withdraw(control.custody());
        }
    }
}
