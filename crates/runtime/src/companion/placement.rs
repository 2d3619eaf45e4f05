//! Placement: the CPUs on which the agent's threads run.
//!
//! By default a handler waits on each CPU, and the scheduler places reclaimers. But moving a page
//! flushes the TLBs of all CPUs that run the process, and waking a thread on another CPU takes an
//! interrupt. Between the CPUs of a virtual machine, an interrupt may take longer than to compress
//! three pages. So if interrupts are expensive and one thread raises the faults, the agent is
//! *co-located* with it: one handler, the *pinned handler*, serves all faults on the CPU of that
//! thread, and the agent's other threads move there, too.
//!
//! The scheduler puts a woken thread on an idle CPU, unless its own CPU runs only SCHED_IDLE
//! threads. So the pinned handler has this policy: the thread that it wakes stays, and preempts it
//! at once. Any other thread on the CPU drives the woken thread away, so the monitor samples less
//! often. If the thread moves all the same, the pinned handler follows: it looks up the thread's
//! CPU whenever a fault comes later than expected from the same CPU.
//!
//! A stream of large folios is served better without co-location while the reclaimers need no CPU:
//! there are few moves and wakes for much decompression, and the handler then runs beside the
//! program instead of in its place.
//!
//! A SCHED_IDLE thread starves if others want the CPU. The other handlers check from time to time
//! whether the pinned handler makes progress ([`Standby`]). If it makes none, they separate the
//! agent for a while. A fork separates the agent, too, because the forking thread must not wait for
//! the pinned handler. So does the adoption of new mappings.
//!
//! There is no lock: the pinned handler writes the CPU, and any thread may clear it.

use foliomem_sys::clock::now_ns;
use foliomem_sys::cpus::{self, Urgency, run_on, set_affinity, set_urgency};
use foliomem_sys::region::Region;
use foliomem_sys::tlb_flush::{self, EXPENSIVE_NS};
use foliomem_types::units::Order;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::thread::{CpuSet, Pid};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Maximum time that one handler waits for the other to measure, in nanoseconds.
const MAX_MEETING_NS: u64 = 5_000_000;
/// Number of faults of one thread that co-locates the agent. A fault of another thread subtracts
/// [`STRANGER`]. Below half of the number, the agent separates.
const STREAK: u32 = 64;
const STRANGER: u32 = 16;
/// Minimum size of a folio whose move costs little compared with its decompression.
const LARGE_BYTES: usize = 64 << 10;
/// Number of faults with large folios read ahead, less those without, that separates the agent. A
/// quarter of it keeps the agent separate.
const STREAMING: u32 = 16;
/// Maximum time from a wake-up to the next fault of a thread that touches one page after the other
/// on the same CPU, in nanoseconds.
const NEAR_NS: u64 = 12_000;
/// Time without progress after which the pinned handler counts as starved, in nanoseconds.
const STARVED_NS: u64 = 8_000_000;
/// Time without co-location after the pinned handler has starved, in nanoseconds.
pub(crate) const SEPARATE_AFTER_STARVING_NS: u64 = 1_000_000_000;
/// Time without co-location after the program has got new memory or has forked, in nanoseconds:
/// then the agent's other threads have more to do than the handlers.
pub(crate) const SEPARATE_WHILE_GROWING_NS: u64 = 20_000_000;
/// No CPU, or no thread.
const NONE: u32 = u32::MAX;

/// Whether the agent's threads may be co-located with a thread of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CoLocation {
    /// Threads can leave SCHED_IDLE again here.
    Allowed,
    /// A thread could not leave SCHED_IDLE again, or torture would starve it.
    Forbidden,
}

/// The placement of the agent's threads, and the measurements that decide about it.
#[derive(Debug)]
pub(crate) struct Placement {
    /// Time that a flush takes while another CPU runs the process, in nanoseconds; 0 until it is
    /// measured. The child of a fork inherits the value.
    flush_ns: AtomicU64,
    is_other_cpu_busy: AtomicBool,
    /// Whether a thread may leave SCHED_IDLE again.
    is_allowed: AtomicBool,
    /// The thread that raises the faults, and the strength of that evidence.
    faulting: AtomicU32,
    streak: AtomicU32,
    /// Number of faults with large folios read ahead, less those without.
    streaming: AtomicU32,
    /// The CPU on which the agent is co-located.
    cpu: AtomicU32,
    /// The pinned handler's thread, while it is SCHED_IDLE.
    pinned_handler: AtomicU32,
    /// Number of faults that the pinned handler has begun and ended: odd while it serves one.
    progress: AtomicU32,
    woke_ns: AtomicU64,
    apart_until_ns: AtomicU64,
}

impl Default for Placement {
    fn default() -> Self {
        Placement {
            flush_ns: AtomicU64::new(0),
            is_other_cpu_busy: AtomicBool::new(false),
            is_allowed: AtomicBool::new(false),
            faulting: AtomicU32::new(NONE),
            streak: AtomicU32::new(0),
            streaming: AtomicU32::new(0),
            cpu: AtomicU32::new(NONE),
            pinned_handler: AtomicU32::new(NONE),
            progress: AtomicU32::new(0),
            woke_ns: AtomicU64::new(0),
            apart_until_ns: AtomicU64::new(0),
        }
    }
}

impl Placement {
    /// Resets the placement before handlers start.
    pub fn begin(&self, co_location: CoLocation) {
        self.is_allowed.store(co_location == CoLocation::Allowed, Relaxed);
        self.streak.store(0, Relaxed);
        self.cpu.store(NONE, Relaxed);
        self.pinned_handler.store(NONE, Relaxed);
        self.progress.store(0, Relaxed);
        self.is_other_cpu_busy.store(false, Relaxed);
    }

    /// Returns whether the cost of a flush is still to be measured.
    pub fn is_unknown(&self) -> bool {
        self.flush_ns.load(Relaxed) == 0
    }

    /// Keeps the caller's CPU busy until a handler on another CPU has measured.
    pub fn be_busy(&self) {
        self.is_other_cpu_busy.store(true, Relaxed);
        let until_ns = now_ns() + MAX_MEETING_NS;
        while self.is_unknown() && now_ns() < until_ns {
            std::hint::spin_loop();
        }
    }

    /// Measures a flush with an agent's page, while another handler keeps its CPU busy.
    pub fn measure(&self, page: &Region) {
        let until_ns = now_ns() + MAX_MEETING_NS;
        while !self.is_other_cpu_busy.load(Relaxed) && now_ns() < until_ns {
            std::hint::spin_loop();
        }
        self.flush_ns.store(tlb_flush::measure_ns(page), Relaxed);
    }

    /// Notes that a fault of `thread` was received.
    pub fn note_fault(&self, thread: u32) {
        let streak = self.streak.load(Relaxed);
        if thread == self.faulting.load(Relaxed) {
            if streak < STREAK {
                self.streak.store(streak + 1, Relaxed);
            }
            return;
        }
        self.streak.store(streak.saturating_sub(STRANGER), Relaxed);
        if streak <= STRANGER {
            self.faulting.store(thread, Relaxed);
        }
    }

    /// Notes a served fault. `ahead` is the order of the folios that were read ahead, `None`
    /// without readahead.
    pub fn note_readahead(&self, ahead: Option<Order>) {
        let streaming = self.streaming.load(Relaxed);
        let is_large = ahead.is_some_and(|order| order.bytes() >= LARGE_BYTES);
        let now = if is_large { (streaming + 1).min(STREAMING) } else { streaming.saturating_sub(1) };
        if now != streaming {
            self.streaming.store(now, Relaxed);
        }
    }

    /// Returns the CPU on which the agent must be co-located, if any.
    pub fn cpu(&self) -> Option<u32> {
        Some(self.cpu.load(Relaxed)).filter(|&cpu| cpu != NONE)
    }

    /// Returns whether co-location pays on this machine and is allowed. The answer is constant once
    /// a flush is measured.
    pub fn pays(&self) -> bool {
        self.is_allowed.load(Relaxed) && self.flush_ns.load(Relaxed) >= EXPENSIVE_NS
    }

    /// Returns the thread to be co-located with, if any.
    fn wanted(&self, now_ns: u64) -> Option<u32> {
        let (enough, streaming) = if self.cpu().is_some() { (STREAK / 2, STREAMING) } else { (STREAK, STREAMING / 4) };
        let wanted = self.pays()
            && self.streak.load(Relaxed) >= enough
            && self.streaming.load(Relaxed) < streaming
            && now_ns >= self.apart_until_ns.load(Relaxed);
        wanted.then(|| self.faulting.load(Relaxed))
    }

    /// Notes that the program's thread is about to be woken.
    pub fn note_wake(&self) {
        self.woke_ns.store(now_ns(), Relaxed);
    }

    /// Ends co-location for at least `for_ns` nanoseconds. Any thread may call.
    pub fn separate(&self, for_ns: u64) {
        self.apart_until_ns.fetch_max(now_ns() + for_ns, Relaxed);
        self.cpu.store(NONE, Relaxed);
        let handler = self.pinned_handler.swap(NONE, Relaxed);
        if handler != NONE {
            set_urgency(handler, Urgency::Normal);
        }
    }
}

/// The handler that follows the faulting thread. It exists only if co-location pays; the placement
/// is checked at every fault.
#[derive(Debug)]
pub(crate) struct PinnedHandler {
    /// The handler's own CPU, on which it runs while the agent is not co-located.
    own_cpu: u32,
    /// The CPU on which the handler runs now.
    cpu: u32,
    /// The thread whose CPU was looked up last, and its open `stat` file.
    stat: Option<(u32, OwnedFd)>,
}

impl PinnedHandler {
    /// Creates the state of the handler that runs on `own_cpu`.
    pub fn new(own_cpu: u32) -> PinnedHandler {
        PinnedHandler { own_cpu, cpu: own_cpu, stat: None }
    }

    /// Moves to the CPU of the faulting thread if the agent must be co-located, when a fault was
    /// received. [`PinnedHandler::note_served`] must follow.
    pub fn follow(&mut self, placement: &Placement) {
        placement.progress.fetch_add(1, Relaxed);
        let now_ns = now_ns();
        let Some(thread) = placement.wanted(now_ns) else { return self.return_to_own_cpu(placement) };
        let is_co_located = placement.cpu().is_some();
        if is_co_located && now_ns - placement.woke_ns.load(Relaxed) < NEAR_NS {
            return;
        }
        let Some(cpu) = self.cpu_of(thread) else { return self.return_to_own_cpu(placement) };
        self.go_to(cpu);
        if !is_co_located {
            let own = own_thread();
            set_urgency(own, Urgency::Idle);
            placement.pinned_handler.store(own, Relaxed);
        }
        placement.cpu.store(cpu, Relaxed);
    }

    /// Notes that the fault is served.
    pub fn note_served(&self, placement: &Placement) {
        placement.progress.fetch_add(1, Relaxed);
    }

    fn return_to_own_cpu(&mut self, placement: &Placement) {
        if placement.cpu.swap(NONE, Relaxed) != NONE || self.cpu != self.own_cpu {
            if placement.pinned_handler.swap(NONE, Relaxed) != NONE {
                set_urgency(own_thread(), Urgency::Normal);
            }
            self.go_to(self.own_cpu);
        }
    }

    fn go_to(&mut self, cpu: u32) {
        if self.cpu != cpu {
            self.cpu = cpu;
            run_on(cpu);
        }
    }

    fn cpu_of(&mut self, thread: u32) -> Option<u32> {
        if self.stat.as_ref().is_none_or(|&(of, _)| of != thread) {
            self.stat = Some((thread, open_stat(thread)?));
        }
        let (_, stat) = self.stat.as_ref()?;
        let mut text = [0u8; 1024];
        let read = rustix::io::pread(stat, &mut text, 0).unwrap_or(0);
        let cpu = processor(&text[..read]);
        if cpu.is_none() {
            // The thread has ended, and another may get its id.
            self.stat = None;
        }
        cpu
    }
}

/// The placement of a thread of the agent that serves no faults.
#[derive(Debug)]
pub(crate) struct ThreadPlacement {
    /// The CPUs on which the thread may run.
    all: CpuSet,
    /// The CPU of the co-located agent at the last update.
    seen: Option<u32>,
}

impl ThreadPlacement {
    /// Creates the placement of the calling thread, with the CPUs that it may use now.
    pub fn here() -> ThreadPlacement {
        ThreadPlacement { all: cpus::allowed_cpus(), seen: None }
    }

    /// Moves the thread to the CPU of the co-located agent, or lets it run on all its CPUs again.
    pub fn update(&mut self, placement: &Placement) {
        let cpu = placement.cpu();
        if std::mem::replace(&mut self.seen, cpu) != cpu {
            match cpu {
                Some(cpu) => run_on(cpu),
                None => set_affinity(&self.all),
            }
        }
    }
}

/// A handler that does not listen, because the pinned handler does.
#[derive(Debug, Default)]
pub(crate) struct Standby {
    /// The pinned handler's progress, and when it was seen first.
    seen: u32,
    since_ns: u64,
}

impl Standby {
    /// Returns whether the pinned handler has made no progress for a while although there is work.
    pub fn finds_starved(&mut self, placement: &Placement, now_ns: u64, has_message: impl FnOnce() -> bool) -> bool {
        let progress = placement.progress.load(Relaxed);
        if std::mem::replace(&mut self.seen, progress) != progress {
            self.since_ns = now_ns;
        }
        now_ns - self.since_ns >= STARVED_NS && (progress % 2 == 1 || has_message())
    }
}

pub(crate) fn own_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

fn open_stat(thread: u32) -> Option<OwnedFd> {
    let thread = Pid::from_raw(thread as i32)?;
    let mut path = [0u8; 64];
    let mut rest = &mut path[..63];
    std::io::Write::write_fmt(&mut rest, format_args!("/proc/{}/stat", thread.as_raw_nonzero())).ok()?;
    let path = std::ffi::CStr::from_bytes_until_nul(&path).ok()?;
    rustix::fs::openat(rustix::fs::CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// Returns the CPU on which a thread ran last, from its `/proc/PID/stat`.
fn processor(stat: &[u8]) -> Option<u32> {
    foliomem_sys::pagemap::stat_field(stat, 39)
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::units::PAGE_BYTES;
    use proptest::prelude::*;

    fn expensive() -> Placement {
        let placement = Placement::default();
        placement.begin(CoLocation::Allowed);
        placement.flush_ns.store(EXPENSIVE_NS, Relaxed);
        placement
    }

    fn raise_faults(placement: &Placement, thread: u32, times: u32) {
        (0..times).for_each(|_| placement.note_fault(thread));
    }

    #[test]
    fn one_faulting_thread_co_locates_and_several_do_not() {
        let placement = expensive();
        raise_faults(&placement, 7, STREAK);
        assert_eq!(placement.wanted(0), None, "the first fault only names the thread");
        raise_faults(&placement, 7, 1);
        assert_eq!(placement.wanted(0), Some(7));
        raise_faults(&placement, 8, 1);
        assert_eq!(placement.wanted(0), None);
        for _ in 0..200 {
            raise_faults(&placement, 7, 3);
            raise_faults(&placement, 8, 3);
            assert_eq!(placement.wanted(0), None);
        }
        raise_faults(&placement, 8, 2 * STREAK);
        assert_eq!(placement.wanted(0), Some(8));
    }

    #[test]
    fn streams_of_large_folios_end_co_location() {
        let (placement, large, small) = (expensive(), Order::new(4), Order::new(2));
        raise_faults(&placement, 7, STREAK + 1);
        placement.cpu.store(1, Relaxed);
        let streams = |ahead, times| (0..times).for_each(|_| placement.note_readahead(ahead));
        streams(small, 2 * STREAMING);
        streams(large, STREAMING - 1);
        assert_eq!(placement.wanted(0), Some(7));
        streams(large, 2);
        assert_eq!(placement.wanted(0), None);
        placement.separate(0);
        streams(None, STREAMING / 2);
        assert_eq!(placement.wanted(u64::MAX), None, "not for a few others");
        streams(None, STREAMING / 2);
        assert_eq!(placement.wanted(u64::MAX), Some(7));
    }

    #[test]
    fn a_fault_of_another_thread_does_not_end_co_location() {
        let placement = expensive();
        raise_faults(&placement, 7, STREAK + 1);
        placement.cpu.store(1, Relaxed);
        raise_faults(&placement, 8, 2);
        assert_eq!(placement.wanted(0), Some(7));
        raise_faults(&placement, 8, 1);
        assert_eq!(placement.wanted(0), None);
    }

    #[test]
    fn co_location_needs_expensive_flushes_and_permission() {
        let placement = expensive();
        raise_faults(&placement, 7, STREAK + 1);
        placement.flush_ns.store(EXPENSIVE_NS - 1, Relaxed);
        assert_eq!(placement.wanted(0), None);
        placement.flush_ns.store(EXPENSIVE_NS, Relaxed);
        placement.is_allowed.store(false, Relaxed);
        assert_eq!(placement.wanted(0), None);
        placement.is_allowed.store(true, Relaxed);
        placement.separate(SEPARATE_AFTER_STARVING_NS);
        assert_eq!(placement.wanted(now_ns()), None);
        assert_eq!(placement.wanted(now_ns() + SEPARATE_AFTER_STARVING_NS), Some(7));
    }

    #[test]
    fn a_pinned_handler_that_ignores_a_fault_is_starved() {
        let (placement, mut standby) = (expensive(), Standby::default());
        let mut handler = PinnedHandler::new(0);
        let mut later_ns = 0;
        let mut look = |placement: &Placement, has_message| {
            later_ns += STARVED_NS;
            standby.finds_starved(placement, later_ns - 1, || has_message);
            standby.finds_starved(placement, later_ns, || has_message)
        };
        assert!(!look(&placement, false));
        assert!(look(&placement, true));
        handler.follow(&placement);
        assert!(!look(&placement, true), "it has begun something");
        assert!(look(&placement, false));
        handler.note_served(&placement);
        assert!(!look(&placement, true));
        assert!(!look(&placement, false));
    }

    /// The threads really change their policy and CPU, and change them back.
    #[test]
    fn a_pinned_handler_moves_to_the_thread_and_back() {
        let cpus = rustix::thread::sched_getaffinity(None).unwrap();
        let Some(home) = (0..CpuSet::MAX_CPU).find(|&cpu| cpus.is_set(cpu)) else { unreachable!("runs somewhere") };
        let policy = || {
            // SAFETY: reads the calling thread's policy.
            unsafe { libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK }
        };
        let is_root = rustix::process::geteuid().is_root();
        std::thread::spawn(move || {
            let placement = expensive();
            let mut handler = PinnedHandler::new(home as u32);
            run_on(home as u32);
            raise_faults(&placement, own_thread(), STREAK + 1);
            handler.follow(&placement);
            assert_eq!(placement.cpu(), Some(home as u32));
            assert_eq!(policy(), libc::SCHED_IDLE);
            if is_root {
                placement.separate(SEPARATE_AFTER_STARVING_NS);
                assert_eq!((placement.cpu(), policy()), (None, libc::SCHED_OTHER));
                handler.follow(&placement);
                assert_eq!((placement.cpu(), policy()), (None, libc::SCHED_OTHER));
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn flushes_are_measured() {
        let (placement, page) = (Placement::default(), Region::reserve(PAGE_BYTES).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| placement.be_busy());
            placement.measure(&page);
        });
        assert!(!placement.is_unknown());
    }

    #[test]
    fn the_processor_is_found() {
        let text = std::fs::read("/proc/self/stat").unwrap();
        assert!(processor(&text).is_some());
        let mut fields: Vec<String> = (3..=52).map(|number| number.to_string()).collect();
        fields.insert(0, "1 (a) b) c)".into());
        assert_eq!(processor(fields.join(" ").as_bytes()), Some(39));
        assert_eq!(processor(b"1 (a) S 2 3"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(noise in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = processor(&noise);
        }
    }
}
