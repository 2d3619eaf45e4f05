//! Custody: the supervisor's copies of the tree's userfaultfds.
//!
//! When the last descriptor of a userfaultfd is closed, swapped-out pages read as zeros. A
//! companion and its guard have one descriptor each. If both are killed at once, the supervisor's
//! copy keeps faults waiting until the program is stopped.
//!
//! | # | actor | step |
//! |---|---|---|
//! | 1 | companion | offers its userfaultfd ([`Offer::make`]) and calls the custodian |
//! | 2 | custodian, a thread of the supervisor | takes a copy by pidfd_getfd(2), and answers |
//! | 3 | companion | waits for the answer before anything is swapped out ([`Offer::wait`]) |
//! | 4 | the process that frees the slot | withdraws the offer: the custodian drops its copy |
//!
//! If the custodian cannot take a copy, or answers too late, the guard is the only other holder; a
//! counter says so. It cannot take one if the companion has another user or another pid namespace.
//!
//! The words lie in the control segment. There is no lock: each word has one writer at a time, and
//! the answer names the companion that it is for.

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

/// Maximum time that a companion waits for the answer, while allocating threads are paused. The
/// supervisor answers within a millisecond if it gets a CPU.
const MAX_ANSWER_TIME: Duration = Duration::from_millis(50);
/// Flag of an answer: the custodian could not take a copy. Process ids are smaller.
const REFUSED: u32 = 1 << 31;
/// Size of the custodian's stack, in bytes.
const STACK_BYTES: usize = 128 << 10;

shared_words! {
    /// The offer of one process's userfaultfd.
    #[derive(Debug, Default)]
    pub struct Offer {
        /// The companion's pid (bits 32..64) and the number of its userfaultfd, plus 1; 0 without
        /// an offer.
        userfaultfd: AtomicU64,
        /// The companion whose userfaultfd the custodian has copied, with [`REFUSED`] if it could
        /// not. A futex word.
        answer: AtomicU32,
    }
}

/// The custodian's answer to an offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The supervisor holds a copy.
    Held,
    /// The supervisor cannot have a copy.
    Refused,
    /// The supervisor has not answered in time.
    Late,
    /// This run has no custodian.
    NoCustodian,
}

shared_words! {
    /// The words by which companions call the custodian.
    #[derive(Debug, Default)]
    pub struct Calls {
        /// 1 if there is a custodian.
        has_custodian: AtomicU32,
        /// Incremented to wake the custodian. A futex word.
        calls: AtomicU32,
        /// Number of companions whose userfaultfd the supervisor did not copy in time.
        unheld: AtomicU32,
    }
}

impl Calls {
    /// Announces that this run will have a custodian.
    pub fn attend(&self) {
        // Relaxed: the program has not started yet.
        self.has_custodian.store(1, Ordering::Relaxed);
    }

    /// Returns the number of companions that began to swap out before the supervisor had a copy.
    pub fn unheld(&self) -> u32 {
        self.unheld.load(Ordering::Relaxed)
    }

    /// Wakes the custodian.
    fn call(&self) {
        // Release pairs with the Acquire in `serve`: the custodian sees the offer or its
        // withdrawal.
        self.calls.fetch_add(1, Ordering::Release);
        let _ = futex::wake(&self.calls, futex::Flags::empty(), 1);
    }
}

impl Offer {
    /// Offers the companion's userfaultfd to the custodian. The companion calls this.
    pub fn make(&self, calls: &Calls, companion: Pid, userfaultfd: impl AsFd) {
        let number = userfaultfd.as_fd().as_raw_fd() as u64 + 1;
        let word = u64::from(raw(companion)) << 32 | number;
        self.userfaultfd.store(word, Ordering::Relaxed);
        calls.call();
    }

    /// Waits for the answer to the companion's offer. Counts every answer but [`Answer::Held`].
    pub fn wait(&self, calls: &Calls, companion: Pid) -> Answer {
        let answer = self.wait_for(calls, companion, MAX_ANSWER_TIME);
        calls.unheld.fetch_add(u32::from(answer != Answer::Held), Ordering::Relaxed);
        answer
    }

    fn wait_for(&self, calls: &Calls, companion: Pid, max_wait: Duration) -> Answer {
        if calls.has_custodian.load(Ordering::Relaxed) == 0 {
            return Answer::NoCustodian;
        }
        let until_ns = now_ns() + max_wait.as_nanos() as u64;
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

    /// Withdraws the offer: its slot is free, and the userfaultfd is closed.
    pub fn withdraw(&self, calls: &Calls) {
        self.answer.store(0, Ordering::Relaxed);
        if self.userfaultfd.swap(0, Ordering::Relaxed) != 0 {
            calls.call();
        }
    }

    /// Returns the offering companion, which may have ended, and the number of its userfaultfd.
    fn offered(&self) -> Option<(Pid, RawFd)> {
        let word = self.userfaultfd.load(Ordering::Relaxed);
        let number = (word & u64::from(u32::MAX)).checked_sub(1)?;
        Some((Pid::from_raw((word >> 32) as i32)?, number as RawFd))
    }

    /// Publishes the custodian's answer to the companion's offer.
    fn answer(&self, companion: Pid, copy: Option<&OwnedFd>) {
        let answer = raw(companion) | if copy.is_some() { 0 } else { REFUSED };
        // Release pairs with the Acquire in `wait_for`.
        if self.answer.swap(answer, Ordering::Release) != answer {
            let _ = futex::wake(&self.answer, futex::Flags::empty(), 1);
        }
    }
}

fn raw(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get() as u32
}

/// The custodian's copies of userfaultfds.
#[derive(Debug, Default)]
pub struct Custody {
    /// The copies by companion and number; `None` if a copy could not be taken.
    held: HashMap<(Pid, RawFd), Option<OwnedFd>>,
}

impl Custody {
    /// Starts the custodian, a thread that lives as long as the process. The caller has
    /// [announced](Calls::attend) it. Fails if the thread cannot be created.
    pub fn start(control: &'static Control) -> std::io::Result<()> {
        let thread = std::thread::Builder::new().name("custodian".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || serve(control)).map(|_| ())
    }

    /// Drops copies whose offer is withdrawn, takes a copy of each new offer, and answers.
    fn update(&mut self, control: &Control) {
        let offers: Vec<_> = control.each_slot().map(|(slot, _)| &control.process(slot).offer).collect();
        let offered: HashSet<_> = offers.iter().filter_map(|offer| offer.offered()).collect();
        self.held.retain(|key, _| offered.contains(key));
        for offer in offers {
            let Some((companion, number)) = offer.offered() else { continue };
            let copy = self.held.entry((companion, number)).or_insert_with(|| take(companion, number).ok());
            offer.answer(companion, copy.as_ref());
        }
    }
}

fn serve(control: &'static Control) -> ! {
    let mut custody = Custody::default();
    let calls = &control.custody().calls;
    loop {
        // Acquire pairs with the Release in `call`: `update` sees the offers that the call was
        // about.
        let seen = calls.load(Ordering::Acquire);
        custody.update(control);
        let _ = futex::wait(calls, futex::Flags::empty(), seen, None);
    }
}

/// Takes a copy of the descriptor `number` of a companion. Fails with `EBADF` if it is no
/// userfaultfd.
fn take(companion: Pid, number: RawFd) -> Result<OwnedFd, Errno> {
    let copy = pidfd_getfd(pidfd_open(companion, PidfdFlags::empty())?, number, PidfdGetfdFlags::empty())?;
    // In another pid namespace, the companion's pid means an unrelated process here.
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", copy.as_raw_fd()), Vec::new())?;
    if link.as_bytes() == b"anon_inode:[userfaultfd]" { Ok(copy) } else { Err(Errno::BADF) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_table::ProcessSlot;
    use foliomem_sys::userfaultfd::{Features, Userfaultfd};
    use foliomem_types::settings::{Configuration, Limit};

    /// Creates a run's segment, and claims a slot of this process in it.
    fn segment() -> (&'static Control, OwnedFd, &'static ProcessSlot) {
        let configuration = Configuration::plain(Limit::Bytes(1 << 30));
        let (control, segment) = Control::create(&configuration).unwrap();
        let slot = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
        (control, segment, slot)
    }

    fn userfaultfd() -> Userfaultfd {
        Userfaultfd::open(Features { events: false }).unwrap()
    }

    #[test]
    fn an_offered_descriptor_is_held_until_its_slot_is_free() {
        let ((control, _segment, slot), me) = (segment(), rustix::process::getpid());
        let mut custody = Custody::default();
        control.custody().attend();
        custody.update(control);
        slot.offer.make(control.custody(), me, userfaultfd());
        assert_eq!(slot.offer.wait_for(control.custody(), me, Duration::ZERO), Answer::Late);
        let offered = userfaultfd();
        slot.offer.make(control.custody(), me, &offered);
        custody.update(control);
        custody.update(control);
        assert_eq!(slot.offer.wait(control.custody(), me), Answer::Held);
        assert_eq!((custody.held.len(), control.custody().unheld()), (1, 0));
        slot.mark_ended();
        custody.update(control);
        assert_eq!(custody.held.len(), 1, "a companion that was killed is marked, too");
        control.reap();
        custody.update(control);
        assert!(custody.held.is_empty());
    }

    #[test]
    fn a_descriptor_that_is_no_userfaultfd_is_refused_and_counted() {
        let ((control, _segment, slot), me) = (segment(), rustix::process::getpid());
        assert_eq!(slot.offer.wait_for(control.custody(), me, Duration::MAX), Answer::NoCustodian);
        control.custody().attend();
        let (reader, _writer) = std::io::pipe().unwrap();
        slot.offer.make(control.custody(), me, &reader);
        Custody::default().update(control);
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
