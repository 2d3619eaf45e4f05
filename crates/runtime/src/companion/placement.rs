//! On which CPUs the threads that serve faults run.
//!
//! As a rule a handler waits on each CPU, and the scheduler places reclaimers. But a page that is
//! moved is flushed from the TLBs of all CPUs that run the process, and a thread that wakes up
//! elsewhere is woken by an interrupt. Between the CPUs of a virtual machine an interrupt may take
//! longer than to compress three pages. So where interrupts are dear and one thread raises the
//! faults, the agent *comes together* with it: one handler, the *follower*, serves all, on the CPU
//! where that thread runs, and all others of the agent go there, too.
//!
//! The scheduler puts a thread that is woken on an idle CPU, unless its own has nothing to run but
//! SCHED_IDLE threads. So the follower is one: the thread that it wakes stays, and goes on at once
//! in its stead. Who else runs there drives it away, so the monitor looks around less often. Where
//! the thread is taken away all the same, the follower goes after it: it looks where the thread is
//! whenever a fault comes later than from nearby.
//!
//! A stream of large folios is served better apart, while the reclaimers need no CPU: there are few
//! moves and few wakes for what is decompressed, which the handler does beside the program then,
//! not in its stead.
//!
//! A SCHED_IDLE thread starves where others want the CPU. The other handlers look now and then
//! whether the follower gets on ([`Standby`]), and end it all for a while where it does not. So do
//! a fork, which must not wait for it, and the adoption of new mappings.
//!
//! No lock: where they are is written by the follower, and taken back by anybody.

use foliomem_sys::clock::now_ns;
use foliomem_sys::cpus::{self, Urgency, run_on, set_affinity, set_urgency};
use foliomem_sys::region::Region;
use foliomem_types::units::{Order, PAGE_BYTES};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::thread::{CpuSet, Pid};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// A flush that interrupts another CPU takes 18 us in a virtual machine without help of its host, 2
/// to 4 us elsewhere; on one CPU 1 us.
const DEAR_NS: u64 = 7_000;
/// Flushes measured.
const FLUSHES: usize = 9;
/// The longest that one handler waits for the other to measure.
const MEET_NS: u64 = 5_000_000;
/// So many faults of one thread, less [`STRANGER`] for each of another, bring the agent together,
/// and fewer than half apart.
const STREAK: u32 = 64;
const STRANGER: u32 = 16;
/// From this size on moves cost little next to what is moved.
const LARGE_BYTES: usize = 64 << 10;
/// So many faults with large folios ahead of them, less those without, take the agent apart, and a
/// quarter as many keep it so.
const STREAMING: u32 = 16;
/// A thread that was woken nearby and touches one page after the other raises its next fault within
/// this time.
const NEAR_NS: u64 = 12_000;
/// A follower that does nothing about a fault for so long starves.
const STUCK_NS: u64 = 8_000_000;
/// How long the agent stays apart after the follower has starved.
pub(crate) const APART_AFTER_STARVING_NS: u64 = 1_000_000_000;
/// And after the program has got new memory, or forked: then others have more to do than to serve
/// its faults.
pub(crate) const APART_WHILE_GROWING_NS: u64 = 20_000_000;
/// Neither a CPU nor a thread.
const NONE: u32 = u32::MAX;

/// See the module.
#[derive(Debug)]
pub(crate) struct Placement {
    /// What a flush takes while another CPU runs the process; 0 until it is measured. A fork takes
    /// it along.
    flush_ns: AtomicU64,
    is_other_cpu_busy: AtomicBool,
    /// Whether a thread may come back from SCHED_IDLE.
    is_allowed: AtomicBool,
    /// The thread that raises the faults, and how sure that is.
    faulting: AtomicU32,
    streak: AtomicU32,
    /// Faults with large folios ahead of them, less those without.
    streaming: AtomicU32,
    /// The CPU they are together on.
    cpu: AtomicU32,
    /// The follower's thread, while it is SCHED_IDLE.
    follower: AtomicU32,
    /// Faults that the follower has begun and ended: odd while it serves one.
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
            follower: AtomicU32::new(NONE),
            progress: AtomicU32::new(0),
            woke_ns: AtomicU64::new(0),
            apart_until_ns: AtomicU64::new(0),
        }
    }
}

impl Placement {
    /// Before handlers are started: nobody follows. `is_allowed`: threads may come back from
    /// SCHED_IDLE here.
    pub fn begin(&self, is_allowed: bool) {
        self.is_allowed.store(is_allowed, Relaxed);
        self.streak.store(0, Relaxed);
        self.cpu.store(NONE, Relaxed);
        self.follower.store(NONE, Relaxed);
        self.progress.store(0, Relaxed);
        self.is_other_cpu_busy.store(false, Relaxed);
    }

    /// Whether flushes are still to be measured.
    pub fn is_unknown(&self) -> bool {
        self.flush_ns.load(Relaxed) == 0
    }

    /// Keeps the caller's CPU busy until another handler, on another CPU, has measured.
    pub fn be_busy(&self) {
        self.is_other_cpu_busy.store(true, Relaxed);
        let until_ns = now_ns() + MEET_NS;
        while self.is_unknown() && now_ns() < until_ns {
            std::hint::spin_loop();
        }
    }

    /// Measures a flush, with a page of ours, while another handler keeps its CPU busy.
    pub fn measure(&self, page: &Region) {
        let until_ns = now_ns() + MEET_NS;
        while !self.is_other_cpu_busy.load(Relaxed) && now_ns() < until_ns {
            std::hint::spin_loop();
        }
        let mut took_ns = [0; FLUSHES];
        for took_ns in &mut took_ns {
            // A failure leaves the page, and costs nothing.
            let _ = page.populate(0, PAGE_BYTES);
            let started_ns = now_ns();
            let _ = page.discard(0, PAGE_BYTES);
            *took_ns = now_ns() - started_ns;
        }
        took_ns.sort_unstable();
        self.flush_ns.store(took_ns[FLUSHES / 2].max(1), Relaxed);
    }

    /// A fault of `thread` was heard.
    pub fn heard(&self, thread: u32) {
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

    /// A fault is served, and folios like its own, of the order `ahead`, are fetched ahead; or none
    /// are.
    pub fn streams(&self, ahead: Option<Order>) {
        let streaming = self.streaming.load(Relaxed);
        let is_large = ahead.is_some_and(|order| order.bytes() >= LARGE_BYTES);
        let now = if is_large { (streaming + 1).min(STREAMING) } else { streaming.saturating_sub(1) };
        if now != streaming {
            self.streaming.store(now, Relaxed);
        }
    }

    /// The CPU that the agent's threads are to be on, if they are together.
    pub fn cpu(&self) -> Option<u32> {
        Some(self.cpu.load(Relaxed)).filter(|&cpu| cpu != NONE)
    }

    /// Whether to come together pays here at all, and is allowed. Nothing changes that once it is
    /// measured.
    pub fn pays(&self) -> bool {
        self.is_allowed.load(Relaxed) && self.flush_ns.load(Relaxed) >= DEAR_NS
    }

    /// The thread to be together with, if they ought to be.
    fn wanted(&self, now_ns: u64) -> Option<u32> {
        let (enough, streaming) = if self.cpu().is_some() { (STREAK / 2, STREAMING) } else { (STREAK, STREAMING / 4) };
        let wanted = self.pays()
            && self.streak.load(Relaxed) >= enough
            && self.streaming.load(Relaxed) < streaming
            && now_ns >= self.apart_until_ns.load(Relaxed);
        wanted.then(|| self.faulting.load(Relaxed))
    }

    /// The program's thread is about to be woken.
    pub fn wakes(&self) {
        self.woke_ns.store(now_ns(), Relaxed);
    }

    /// Everybody goes where he was, and stays there for so long. For any thread.
    pub fn come_apart(&self, for_ns: u64) {
        self.apart_until_ns.fetch_max(now_ns() + for_ns, Relaxed);
        self.cpu.store(NONE, Relaxed);
        let follower = self.follower.swap(NONE, Relaxed);
        if follower != NONE {
            set_urgency(follower, Urgency::Normal);
        }
    }
}

/// The handler that follows. There is one only where that pays: it is asked at every fault.
#[derive(Debug)]
pub(crate) struct Follower {
    /// Its own CPU.
    home: u32,
    /// Where it is.
    at: u32,
    /// What tells where a thread is.
    stat: Option<(u32, OwnedFd)>,
}

impl Follower {
    /// Of the thread that runs on `home` alone.
    pub fn new(home: u32) -> Follower {
        Follower { home, at: home, stat: None }
    }

    /// A fault was heard: goes where its thread is, if it is to be there. To be followed by
    /// [`Follower::has_served`].
    pub fn follow(&mut self, placement: &Placement) {
        placement.progress.fetch_add(1, Relaxed);
        let now_ns = now_ns();
        let Some(thread) = placement.wanted(now_ns) else { return self.go_home(placement) };
        let is_together = placement.cpu().is_some();
        if is_together && now_ns - placement.woke_ns.load(Relaxed) < NEAR_NS {
            return;
        }
        let Some(cpu) = self.cpu_of(thread) else { return self.go_home(placement) };
        self.go_to(cpu);
        if !is_together {
            let own = own_thread();
            set_urgency(own, Urgency::Idle);
            placement.follower.store(own, Relaxed);
        }
        placement.cpu.store(cpu, Relaxed);
    }

    /// The fault is served.
    pub fn has_served(&self, placement: &Placement) {
        placement.progress.fetch_add(1, Relaxed);
    }

    fn go_home(&mut self, placement: &Placement) {
        if placement.cpu.swap(NONE, Relaxed) != NONE || self.at != self.home {
            if placement.follower.swap(NONE, Relaxed) != NONE {
                set_urgency(own_thread(), Urgency::Normal);
            }
            self.go_to(self.home);
        }
    }

    fn go_to(&mut self, cpu: u32) {
        if self.at != cpu {
            self.at = cpu;
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
            // It has ended, and another may get its number.
            self.stat = None;
        }
        cpu
    }
}

/// The place of a thread that serves no faults.
#[derive(Debug)]
pub(crate) struct Place {
    /// Where it may be at all.
    all: CpuSet,
    /// Where the others were together when it was settled last.
    seen: Option<u32>,
}

impl Place {
    /// Of the calling thread, which may be wherever it may now.
    pub fn here() -> Place {
        Place { all: cpus::allowed_cpus(), seen: None }
    }

    /// Goes where the others are together, or back.
    pub fn settle(&mut self, placement: &Placement) {
        let cpu = placement.cpu();
        if std::mem::replace(&mut self.seen, cpu) != cpu {
            match cpu {
                Some(cpu) => run_on(cpu),
                None => set_affinity(&self.all),
            }
        }
    }
}

/// A handler that does not listen, because the follower does.
#[derive(Debug, Default)]
pub(crate) struct Standby {
    /// The follower's progress, and when it was seen first.
    seen: u32,
    since_ns: u64,
}

impl Standby {
    /// Whether the follower has not got on for a while, though there is something to do.
    pub fn sees_it_stuck(&mut self, placement: &Placement, now_ns: u64, has_message: impl FnOnce() -> bool) -> bool {
        let progress = placement.progress.load(Relaxed);
        if std::mem::replace(&mut self.seen, progress) != progress {
            self.since_ns = now_ns;
        }
        now_ns - self.since_ns >= STUCK_NS && (progress % 2 == 1 || has_message())
    }
}

fn own_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

fn open_stat(thread: u32) -> Option<OwnedFd> {
    let thread = Pid::from_raw(thread as i32)?;
    let mut path = [0u8; 64];
    let mut rest = &mut path[..63];
    std::io::Write::write_fmt(&mut rest, format_args!("/proc/{}/stat", thread.as_raw_nonzero())).ok()?;
    let path = std::ffi::CStr::from_bytes_until_nul(&path).ok()?;
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// The CPU a thread ran on last, as of its `/proc/PID/stat`.
fn processor(stat: &[u8]) -> Option<u32> {
    foliomem_sys::pagemap::stat_field(stat, 39)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dear() -> Placement {
        let placement = Placement::default();
        placement.begin(true);
        placement.flush_ns.store(DEAR_NS, Relaxed);
        placement
    }

    fn hear(placement: &Placement, thread: u32, times: u32) {
        (0..times).for_each(|_| placement.heard(thread));
    }

    #[test]
    fn one_thread_is_wanted_and_not_several() {
        let placement = dear();
        hear(&placement, 7, STREAK);
        assert_eq!(placement.wanted(0), None, "the first fault only tells who it may be");
        hear(&placement, 7, 1);
        assert_eq!(placement.wanted(0), Some(7));
        hear(&placement, 8, 1);
        assert_eq!(placement.wanted(0), None);
        for _ in 0..200 {
            hear(&placement, 7, 3);
            hear(&placement, 8, 3);
            assert_eq!(placement.wanted(0), None);
        }
        hear(&placement, 8, 2 * STREAK);
        assert_eq!(placement.wanted(0), Some(8));
    }

    #[test]
    fn streams_of_large_folios_are_served_apart() {
        let (placement, large, small) = (dear(), Order::new(4), Order::new(2));
        hear(&placement, 7, STREAK + 1);
        placement.cpu.store(1, Relaxed);
        let streams = |ahead, times| (0..times).for_each(|_| placement.streams(ahead));
        streams(small, 2 * STREAMING);
        streams(large, STREAMING - 1);
        assert_eq!(placement.wanted(0), Some(7));
        streams(large, 2);
        assert_eq!(placement.wanted(0), None);
        placement.come_apart(0);
        streams(None, STREAMING / 2);
        assert_eq!(placement.wanted(u64::MAX), None, "not for a few others");
        streams(None, STREAMING / 2);
        assert_eq!(placement.wanted(u64::MAX), Some(7));
    }

    #[test]
    fn one_stranger_does_not_end_it() {
        let placement = dear();
        hear(&placement, 7, STREAK + 1);
        placement.cpu.store(1, Relaxed);
        hear(&placement, 8, 2);
        assert_eq!(placement.wanted(0), Some(7));
        hear(&placement, 8, 1);
        assert_eq!(placement.wanted(0), None);
    }

    #[test]
    fn nobody_comes_together_where_it_does_not_pay_or_is_not_allowed() {
        let placement = dear();
        hear(&placement, 7, STREAK + 1);
        placement.flush_ns.store(DEAR_NS - 1, Relaxed);
        assert_eq!(placement.wanted(0), None);
        placement.flush_ns.store(DEAR_NS, Relaxed);
        placement.is_allowed.store(false, Relaxed);
        assert_eq!(placement.wanted(0), None);
        placement.is_allowed.store(true, Relaxed);
        placement.come_apart(APART_AFTER_STARVING_NS);
        assert_eq!(placement.wanted(now_ns()), None);
        assert_eq!(placement.wanted(now_ns() + APART_AFTER_STARVING_NS), Some(7));
    }

    #[test]
    fn a_follower_is_stuck_that_does_nothing_about_a_fault() {
        let (placement, mut standby) = (dear(), Standby::default());
        let mut follower = Follower::new(0);
        let mut later_ns = 0;
        let mut look = |placement: &Placement, has_message| {
            later_ns += STUCK_NS;
            standby.sees_it_stuck(placement, later_ns - 1, || has_message);
            standby.sees_it_stuck(placement, later_ns, || has_message)
        };
        assert!(!look(&placement, false));
        assert!(look(&placement, true));
        follower.follow(&placement);
        assert!(!look(&placement, true), "it has begun something");
        assert!(look(&placement, false));
        follower.has_served(&placement);
        assert!(!look(&placement, true));
        assert!(!look(&placement, false));
    }

    /// Threads really change their policy and place, and change them back.
    #[test]
    fn a_follower_goes_where_the_thread_is_and_comes_back() {
        let cpus = rustix::thread::sched_getaffinity(None).unwrap();
        let Some(home) = (0..CpuSet::MAX_CPU).find(|&cpu| cpus.is_set(cpu)) else { unreachable!("runs somewhere") };
        let policy = || {
            // SAFETY: asks for the calling thread's policy.
            unsafe { libc::sched_getscheduler(0) }
        };
        let is_root = rustix::process::geteuid().is_root();
        std::thread::spawn(move || {
            let placement = dear();
            let mut follower = Follower::new(home as u32);
            run_on(home as u32);
            hear(&placement, own_thread(), STREAK + 1);
            follower.follow(&placement);
            assert_eq!(placement.cpu(), Some(home as u32));
            assert_eq!(policy(), libc::SCHED_IDLE);
            if is_root {
                placement.come_apart(APART_AFTER_STARVING_NS);
                assert_eq!((placement.cpu(), policy()), (None, libc::SCHED_OTHER));
                follower.follow(&placement);
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
        fn noise_is_understood_or_not(noise in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = processor(&noise);
        }
    }
}
