//! Balance: has the processes of a run that need their memory least give some to those that fault.
//!
//! Each process of a run swaps out its own memory. One that faults makes room for its next page by
//! itself, so it would stay as small as it is, however much memory others keep that they do not
//! use.
//!
//! The *pressure* on a process is its faults per second for each resident page: those that swap in,
//! and those on staged pages. A process whose pressure is far lower than the highest one gives: it
//! is asked to swap out its oldest pages, as `foliomem ctl PID reclaim` does. If it needs them, its
//! own pressure rises. So the pressure on all processes becomes alike, as it would with one list of
//! the pages of all.
//!
//! One that has been asked and takes as much as before (its memory does not compress, or is pinned)
//! is not asked again for some time.
//!
//! A process that has slept for a while gives at once nearly all it has. Any other gives slowly,
//! because its pressure is known late, and never more than down to the protected minimum.

use crate::swap_ins::SwapIns;
use foliomem_session::memory_request::Wanted;
use foliomem_session::process_table::ProcessSlot;
use foliomem_session::segment::Control;
use foliomem_sys::clock;
use foliomem_types::counters::FaultKind;
use foliomem_types::units::PAGE_BYTES;
use std::collections::BTreeMap;
use std::time::Duration;

/// Minimum time between two looks, and the time for each process: to read one takes some
/// microseconds.
const INTERVAL: Duration = Duration::from_millis(10);
const INTERVAL_EACH: Duration = Duration::from_micros(500);
/// Time constant of the average rate of faults.
const WINDOW: Duration = Duration::from_millis(300);
/// Room that is kept, as a shift of the limit (1/2^6), at least 2 MiB: with less, the process that
/// faults would reclaim its own memory.
const ROOM_SHIFT: u32 = 6;
const ROOM_MIN_PAGES: i64 = (2 << 20) / PAGE_BYTES as i64;
/// The room is also for the faults of this time.
const AHEAD: Duration = Duration::from_millis(50);
/// A run that faults more rarely than this, per second, needs no balance.
const MIN_RATE: f64 = 100.0;
/// A process gives only if its pressure, by this factor, is below the highest one.
const MIN_GAP: f64 = 4.0;
/// A process that has used no CPU time for this long is asleep.
const ASLEEP_AFTER: Duration = Duration::from_millis(500);
/// The pages that a process which is asleep keeps: 512 KiB.
const KEPT_ASLEEP_PAGES: u64 = (512 << 10) / PAGE_BYTES as u64;
/// The pages that a process which is awake keeps, as a shift of the limit (1/2^4), at least 4 MiB:
/// its companion protects as many.
const KEPT_AWAKE_SHIFT: u32 = 4;
const KEPT_AWAKE_MIN_PAGES: u64 = (4 << 20) / PAGE_BYTES as u64;
/// A process that is awake gives at most its resident memory in this time.
const GIVEN_IN: Duration = Duration::from_secs(1);
/// Fewer pages are not asked for: 128 KiB.
const MIN_GIVEN_PAGES: u64 = (128 << 10) / PAGE_BYTES as u64;
/// A process that takes less by this share of what it was asked for, as a divisor, has given.
const MIN_SHARE_GIVEN: u64 = 4;
/// The first time for which a process is not asked that has not given. It doubles each time.
const MIN_PAUSE: Duration = Duration::from_millis(200);
/// Maximum of that time.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Maximum that is asked for at once, as a shift of the limit (1/2^6).
const MAX_SHIFT: u32 = 6;
/// The pressure is alike if nobody was asked to give for this long.
const SETTLED_AFTER: Duration = Duration::from_millis(500);
/// Maximum time that one look stands for: the supervisor may have been stopped.
const MAX_LOOK: Duration = Duration::from_millis(100);

/// Returns the pages that a process which is awake keeps in this limit.
fn kept_awake_pages(limit_pages: i64) -> u64 {
    (limit_pages.max(0) as u64 >> KEPT_AWAKE_SHIFT).max(KEPT_AWAKE_MIN_PAGES)
}

/// Whether a process can give memory now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Giving {
    /// It can.
    Free,
    /// It is held, or serves another request.
    Busy,
}

/// The identity of a process in this run. After it has executed another program, it has two slots
/// for a moment, with counters of their own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Id {
    pid: u32,
    /// The address of the slot.
    slot: usize,
}

/// A process at one moment.
#[derive(Clone, Copy, Debug)]
struct Process {
    id: Id,
    /// The pages that it takes, compressed ones included.
    taken_pages: u64,
    /// Its resident pages that are managed.
    resident_pages: u64,
    /// Number of its faults that memory pressure has caused.
    faults: u64,
    cpu_time: Duration,
    giving: Giving,
}

/// The memory of a run at one moment.
#[derive(Clone, Copy, Debug)]
struct Memory {
    limit_pages: i64,
    /// The room of the tree.
    room_pages: i64,
}

/// The state of a process at the last look.
#[derive(Clone, Copy, Debug)]
struct Known {
    faults: u64,
    /// Average number of faults per second.
    rate: f64,
    cpu_time: Duration,
    /// When the process has used CPU time for the last time.
    awake_at: Duration,
    /// The pages that the process was asked for, and those that it took then.
    asked: Option<(u64, u64)>,
    /// Until when the process is not asked, and the length of the last such pause.
    paused_until: Duration,
    pause: Duration,
}

impl Known {
    /// Returns the state of a process that is new at the moment `at`.
    fn new(at: Duration, process: &Process) -> Known {
        Known {
            faults: process.faults,
            rate: 0.0,
            cpu_time: process.cpu_time,
            awake_at: at,
            asked: None,
            paused_until: at,
            pause: Duration::ZERO,
        }
    }

    /// Follows the process, which is `now` at the moment `at`, `time` after the last look.
    fn follow(&mut self, at: Duration, time: Duration, now: &Process) {
        let weight = 1.0 - (-time.as_secs_f64() / WINDOW.as_secs_f64()).exp();
        // The program may have overwritten the number.
        let new = now.faults.saturating_sub(std::mem::replace(&mut self.faults, now.faults));
        self.rate += (new as f64 / time.as_secs_f64() - self.rate) * weight;
        if std::mem::replace(&mut self.cpu_time, now.cpu_time) != now.cpu_time {
            self.awake_at = at;
        }
        if now.giving == Giving::Free
            && let Some((asked_pages, taken_pages)) = self.asked.take()
        {
            let has_given = taken_pages.saturating_sub(now.taken_pages) >= asked_pages / MIN_SHARE_GIVEN;
            self.pause = if has_given { Duration::ZERO } else { (self.pause * 2).clamp(MIN_PAUSE, MAX_PAUSE) };
            self.paused_until = at + self.pause;
        }
    }

    /// Returns the faults per second for each resident page.
    fn pressure(&self, process: &Process) -> f64 {
        self.rate / (process.resident_pages + 1) as f64
    }

    /// Returns how many pages the process can give at the moment `at`, `time` after the last look.
    fn most_pages(&self, at: Duration, time: Duration, limit_pages: i64, process: &Process) -> u64 {
        if process.giving == Giving::Busy || at < self.paused_until {
            return 0;
        }
        if at.saturating_sub(self.awake_at) >= ASLEEP_AFTER {
            return process.resident_pages.saturating_sub(KEPT_ASLEEP_PAGES);
        }
        let share_pages = (process.resident_pages as f64 * time.div_duration_f64(GIVEN_IN)) as u64;
        let spare_pages = process.resident_pages.saturating_sub(kept_awake_pages(limit_pages));
        spare_pages.min(share_pages.max(MIN_GIVEN_PAGES))
    }
}

/// Whether the pressure on the processes of a run is alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pressure {
    /// Memory has just moved from some to others.
    Moving,
    /// Nobody gives, or nobody needs.
    Settled,
}

/// Watches the processes of a run.
#[derive(Debug, Default)]
pub struct Balance {
    last: Duration,
    known: BTreeMap<Id, Known>,
    swap_ins: SwapIns,
    /// When a process was asked to give for the last time.
    moved: Option<Duration>,
}

impl Balance {
    /// Looks at the processes of a run, and asks some of them for memory if others need it. Returns
    /// whether memory has moved lately.
    pub fn look(&mut self, control: &Control) -> Pressure {
        let at = control.elapsed();
        let slots = control.living_processes();
        let interval = INTERVAL.max(INTERVAL_EACH * slots.len() as u32);
        if slots.len() >= 2 && at.saturating_sub(self.last) >= interval && self.swap_ins.look(&slots) {
            let processes: Vec<Process> = slots.iter().map(|&(pid, slot)| Process::of(pid, slot)).collect();
            let memory = Memory { limit_pages: control.limit_pages(), room_pages: control.room_pages() };
            for (id, pages) in self.decide(at, memory, &processes) {
                let slot = slots.iter().find(|&&(pid, slot)| Id::of(pid, slot) == id).map(|&(_, slot)| slot);
                slot.into_iter().for_each(|slot| slot.request.ask_unless_pending(Wanted::Reclaim { pages }));
            }
        }
        self.pressure(at)
    }

    /// Returns whether memory has moved shortly before `at`, counted from the start of the run.
    fn pressure(&self, at: Duration) -> Pressure {
        match self.moved {
            Some(moved) if at.saturating_sub(moved) < SETTLED_AFTER => Pressure::Moving,
            _ => Pressure::Settled,
        }
    }

    /// Returns which processes give how many pages now. `at` is the time since the start of the
    /// run, `processes` are all living ones.
    fn decide(&mut self, at: Duration, memory: Memory, processes: &[Process]) -> Vec<(Id, u64)> {
        let time = at.saturating_sub(std::mem::replace(&mut self.last, at)).min(MAX_LOOK);
        if time.is_zero() {
            return Vec::new();
        }
        self.follow(at, time, processes);
        let rate: f64 = self.known.values().map(|known| known.rate).sum();
        let wanted_pages = (memory.limit_pages >> ROOM_SHIFT).max(ROOM_MIN_PAGES) + (rate * AHEAD.as_secs_f64()) as i64;
        let mut missing_pages = (wanted_pages - memory.room_pages).clamp(0, memory.limit_pages >> MAX_SHIFT) as u64;
        if rate < MIN_RATE || missing_pages == 0 {
            return Vec::new();
        }
        let mut all: Vec<(f64, &Process)> =
            processes.iter().map(|process| (self.known[&process.id].pressure(process), process)).collect();
        all.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let highest = all.last().map_or(0.0, |&(highest, _)| highest);
        let mut given = Vec::new();
        for (_, process) in all.into_iter().take_while(|(pressure, _)| pressure * MIN_GAP < highest) {
            let Some(known) = self.known.get_mut(&process.id) else { continue };
            let most_pages = known.most_pages(at, time, memory.limit_pages, process);
            let pages = most_pages.min(missing_pages.max(MIN_GIVEN_PAGES));
            if missing_pages > 0 && pages >= MIN_GIVEN_PAGES {
                given.push((process.id, pages));
                missing_pages = missing_pages.saturating_sub(pages);
                known.asked = Some((pages, process.taken_pages));
                self.moved = Some(at);
            }
        }
        given
    }

    /// Follows processes that have started or ended, and the faults of all.
    fn follow(&mut self, at: Duration, time: Duration, processes: &[Process]) {
        self.known.retain(|id, _| processes.iter().any(|process| process.id == *id));
        for process in processes {
            self.known.entry(process.id).or_insert_with(|| Known::new(at, process)).follow(at, time, process);
        }
    }
}

impl Id {
    fn of(pid: u32, slot: &ProcessSlot) -> Id {
        Id { pid, slot: std::ptr::from_ref(slot).addr() }
    }
}

impl Process {
    /// Reads the process of `slot`.
    fn of(pid: u32, slot: &ProcessSlot) -> Process {
        let counters = &slot.counters;
        let is_busy = slot.is_held(clock::now_ns) || slot.request.pending().is_some();
        Process {
            id: Id::of(pid, slot),
            taken_pages: slot.measured_bytes() / PAGE_BYTES as u64,
            resident_pages: counters.resident_pages(),
            faults: counters.vm.pgmajfault.get().saturating_add(counters.faults(FaultKind::Staged).count()),
            cpu_time: clock::process_cpu_time(pid).unwrap_or_default(),
            giving: if is_busy { Giving::Busy } else { Giving::Free },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STEP: Duration = Duration::from_millis(10);
    const MIB: u64 = (1 << 20) / PAGE_BYTES as u64;
    /// A limit of 128 MiB, without room.
    const FULL: Memory = Memory { limit_pages: 128 * MIB as i64, room_pages: 0 };

    /// A run with made-up processes.
    struct Run {
        balance: Balance,
        at: Duration,
        processes: Vec<Process>,
        /// Whether what is given takes half of the room then, and not as much as before.
        compresses: bool,
    }

    impl Run {
        /// Creates a run with processes of these sizes, in MiB.
        fn of(sizes: &[u64]) -> Run {
            let process = |(pid, &mib): (u32, &u64)| Process {
                id: Id { pid, slot: 0 },
                taken_pages: mib * MIB,
                resident_pages: mib * MIB,
                faults: 0,
                cpu_time: Duration::ZERO,
                giving: Giving::Free,
            };
            let processes = (1..).zip(sizes).map(process).collect();
            Run { balance: Balance::default(), at: Duration::ZERO, processes, compresses: true }
        }

        /// Goes on for `steps` looks, in each of which the processes have so many faults; one with
        /// `None` sleeps. Returns what each has given, in pages.
        fn go_on(&mut self, memory: Memory, steps: u32, faults: &[Option<u64>]) -> Vec<u64> {
            let mut given = vec![0; self.processes.len()];
            for _ in 0..steps {
                self.at += STEP;
                for (process, faults) in self.processes.iter_mut().zip(faults) {
                    process.faults += faults.unwrap_or(0);
                    process.cpu_time += STEP * u32::from(faults.is_some());
                }
                for (id, pages) in self.balance.decide(self.at, memory, &self.processes) {
                    let index = id.pid as usize - 1;
                    given[index] += pages;
                    self.processes[index].resident_pages -= pages;
                    self.processes[index].taken_pages -= if self.compresses { pages / 2 } else { 0 };
                }
            }
            given
        }
    }

    #[test]
    fn sleepers_give_nearly_all_before_others_give_anything() {
        let mut run = Run::of(&[20, 20, 20]);
        // Everything fits, and nothing faults.
        let fits = Memory { room_pages: 50 * MIB as i64, ..FULL };
        assert_eq!(run.go_on(fits, 60, &[Some(0), Some(0), None]), [0; 3]);
        let given = run.go_on(FULL, 12, &[Some(20), Some(0), None]);
        assert_eq!((given[0], given[2]), (0, 20 * MIB - KEPT_ASLEEP_PAGES));
        assert_eq!(run.balance.pressure(run.at), Pressure::Moving);
        assert_eq!(run.balance.pressure(run.at + SETTLED_AFTER), Pressure::Settled);
    }

    #[test]
    fn those_that_work_without_faults_give_slowly_and_keep_the_protected_minimum() {
        let mut run = Run::of(&[40, 40]);
        let given = run.go_on(FULL, 100, &[Some(20), Some(0)]);
        assert!(given[0] == 0 && (15 * MIB..35 * MIB).contains(&given[1]), "{given:?}");
        run.go_on(FULL, 1000, &[Some(20), Some(0)]);
        let kept = run.processes[1].resident_pages;
        let protected = kept_awake_pages(FULL.limit_pages);
        assert!((protected..protected + MIN_GIVEN_PAGES).contains(&kept), "{kept}");
    }

    #[test]
    fn alike_pressure_moves_nothing() {
        let mut run = Run::of(&[30, 60]);
        assert_eq!(run.go_on(FULL, 300, &[Some(20), Some(20)]), [0; 2], "half the pressure");
        assert_eq!(run.balance.pressure(run.at), Pressure::Settled);
        let given = run.go_on(FULL, 300, &[Some(40), Some(5)]);
        assert!(given[0] == 0 && given[1] > MIB, "{given:?}");
        assert_eq!(run.go_on(FULL, 300, &[Some(0), Some(0)])[0], 0);
    }

    #[test]
    fn nobody_gives_while_there_is_room_or_few_faults() {
        let roomy = Memory { room_pages: 20 * MIB as i64, ..FULL };
        assert_eq!(Run::of(&[20, 20]).go_on(roomy, 300, &[Some(20), None]), [0; 2]);
        let mut run = Run::of(&[20, 20]);
        for _ in 0..30 {
            // 50 faults per second.
            assert_eq!(run.go_on(FULL, 1, &[Some(1), None]), [0; 2]);
            assert_eq!(run.go_on(FULL, 1, &[Some(0), None]), [0; 2]);
        }
    }

    #[test]
    fn who_gives_in_vain_is_asked_ever_more_rarely() {
        let mut run = Run { compresses: false, ..Run::of(&[20, 900]) };
        run.go_on(FULL, 100, &[Some(20), None]);
        let times = |run: &mut Run, steps| (0..steps).filter(|_| run.go_on(FULL, 1, &[Some(20), None])[1] > 0).count();
        assert!((3..6).contains(&times(&mut run, 1000)), "after 0.2, 0.4, 0.8 s and so on");
        assert_eq!(times(&mut run, 3000), 3, "every 10 s");
        run.compresses = true;
        assert!(times(&mut run, 3000) > 100);
    }

    #[test]
    fn a_process_with_two_slots_does_not_seem_to_fault() {
        let mut run = Run::of(&[20, 20, 20]);
        run.processes[2].faults = 1_000_000;
        // It has executed another program: its old slot is still there.
        run.processes[2].id = Id { pid: 1, slot: 1 };
        assert_eq!(run.go_on(FULL, 300, &[Some(0), None, Some(0)]), [0; 3]);
    }

    #[test]
    fn those_that_are_held_or_asked_give_nothing() {
        let mut run = Run::of(&[20, 20]);
        run.processes[1].giving = Giving::Busy;
        assert_eq!(run.go_on(FULL, 300, &[Some(20), None]), [0; 2]);
    }

    proptest! {
        /// Whatever the processes do: what is asked for at once is bounded, nobody gives what it
        /// has not, and the one under the highest pressure gives nothing.
        #[test]
        fn no_look_asks_for_too_much(
            looks in prop::collection::vec((1u64..200, 0i64..200, prop::collection::vec((0u64..100_000, 0u64..1000, any::<bool>()), 0..6)), 1..50)
        ) {
            let (mut balance, mut at) = (Balance::default(), Duration::ZERO);
            let mut faults = [0; 6];
            for (ms, room_mib, processes) in looks {
                at += Duration::from_millis(ms);
                let processes: Vec<_> = (0..).zip(&processes).map(|(pid, &(resident_pages, new, works))| {
                    faults[pid as usize] += new;
                    let cpu_time = if works { at } else { Duration::ZERO };
                    let taken_pages = resident_pages;
                    Process {
                        id: Id { pid, slot: 0 },
                        taken_pages,
                        resident_pages,
                        faults: faults[pid as usize],
                        cpu_time,
                        giving: Giving::Free,
                    }
                }).collect();
                let memory = Memory { limit_pages: 64 * MIB as i64, room_pages: room_mib * MIB as i64 / 4 };
                let given = balance.decide(at, memory, &processes);
                let all: u64 = given.iter().map(|&(_, pages)| pages).sum();
                prop_assert!(all < MIB + MIN_GIVEN_PAGES, "{all}");
                let highest = processes.iter().map(|process| balance.known[&process.id].pressure(process)).fold(0.0, f64::max);
                for &(id, pages) in &given {
                    let process = &processes[id.pid as usize];
                    prop_assert!(pages < process.resident_pages && balance.known[&id].pressure(process) < highest);
                }
            }
        }
    }
}
