//! Runs of processes with made-up sizes and clocks.

use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const STEP: Duration = Duration::from_millis(50);
const MEMORY: Memory = Memory { limit_bytes: 400 * MIB, ratio: 0.25, pressure: Pressure::Settled };

/// What a process of the run does while it is not held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Doing {
    /// It works.
    Work,
    /// It works, but its companion takes almost half of the CPU.
    Slow,
    /// It waits for memory.
    Wait,
    /// It works for a tenth of the time, and waits for memory otherwise.
    Thrash,
    /// It sleeps.
    Sleep,
}

/// A run, its clock, and what its processes need and do.
struct Run {
    turns: Turns,
    at: Duration,
    memory: Memory,
    processes: Vec<(u32, u64, Doing)>,
}

impl Run {
    /// Returns a run on one CPU.
    fn new(need_mib: &[u64], doing: Doing) -> Run {
        let processes = need_mib.iter().zip(1..).map(|(&mib, pid)| (pid, mib * MIB, doing)).collect();
        Run { turns: Turns::new(1), at: Duration::ZERO, memory: MEMORY, processes }
    }

    /// Looks after one step. A held process waits if it is not asleep.
    fn step(&mut self) {
        self.at += STEP;
        let (turns, waits) = (&self.turns, Threads { waiting: 1, running: 0 });
        let now: Vec<Process> = self
            .processes
            .iter()
            .map(|&(pid, need_bytes, doing)| {
                let idle = Process {
                    pid,
                    need_bytes,
                    threads: Threads::default(),
                    worked: Duration::ZERO,
                    served: Duration::ZERO,
                    left_faults: LeftFaults::None,
                };
                match (doing, turns.is_held(pid)) {
                    (Doing::Sleep, _) => idle,
                    (_, true) => Process { threads: waits, left_faults: LeftFaults::Some, ..idle },
                    (Doing::Work, false) => {
                        Process { threads: Threads { waiting: 0, running: 1 }, worked: STEP, ..idle }
                    }
                    (Doing::Slow, false) => {
                        let threads = Threads { waiting: 0, running: 1 };
                        Process { threads, worked: STEP * 6 / 10, served: STEP * 4 / 10, ..idle }
                    }
                    (Doing::Thrash, false) => Process { threads: waits, worked: STEP / 10, served: STEP, ..idle },
                    (Doing::Wait, false) => Process { threads: waits, served: STEP, ..idle },
                }
            })
            .collect();
        self.turns.look(self.at, self.memory, &now);
    }

    /// Looks until `condition` holds. Returns the time that took; panics after an hour.
    fn until(&mut self, condition: impl Fn(&Turns) -> bool) -> Duration {
        let started = self.at;
        while !condition(&self.turns) {
            self.step();
            assert!(self.at - started < Duration::from_secs(3600), "{:?}", self.turns);
        }
        self.at - started
    }

    fn during(&mut self, time: Duration) {
        for _ in 0..time.div_duration_f64(STEP) as u32 {
            self.step();
        }
    }

    fn held(&self) -> Vec<u32> {
        self.processes.iter().map(|&(pid, ..)| pid).filter(|&pid| self.turns.is_held(pid)).collect()
    }

    fn set(&mut self, pid: u32, doing: Doing) {
        self.processes.iter_mut().find(|process| process.0 == pid).unwrap().2 = doing;
    }
}

#[test]
fn nothing_is_held_while_processes_work_or_sleep() {
    for doing in [Doing::Work, Doing::Sleep] {
        let mut run = Run::new(&[300, 300, 300], doing);
        run.during(Duration::from_secs(60));
        assert_eq!((run.held(), run.turns.count()), (vec![], 0));
    }
}

#[test]
fn the_oldest_that_fit_run_and_small_ones_are_never_held() {
    let mut run = Run::new(&[100, 10, 100, 100, 100, 30], Doing::Wait);
    let time = run.until(Turns::holds_any);
    assert!(time >= ONSET && time < ONSET + WINDOW * 2, "{time:?}");
    // A quarter of 430 MiB, and three quarters of 100, 100 and 30 MiB: 280 of 320 MiB.
    assert_eq!((run.held(), run.turns.count()), (vec![4, 5], 2));
}

#[test]
fn nothing_is_held_at_once_while_memory_moves() {
    let mut run = Run::new(&[300, 300, 300], Doing::Wait);
    run.memory.pressure = Pressure::Moving;
    let time = run.until(Turns::holds_any);
    assert!(time >= ONSET_WHILE_MOVING && time < ONSET_WHILE_MOVING + WINDOW * 2, "{time:?}");
    run.step();
    assert!(run.turns.is_in_turns(run.at));
}

#[test]
fn one_process_alone_is_not_held_and_the_oldest_runs_even_if_it_does_not_fit() {
    let mut run = Run::new(&[900], Doing::Wait);
    run.during(Duration::from_secs(20));
    assert_eq!(run.held(), [0u32; 0]);
    let mut run = Run::new(&[900, 100], Doing::Wait);
    run.until(Turns::holds_any);
    assert_eq!(run.held(), [2]);
}

#[test]
fn nothing_is_held_if_memory_does_not_compress() {
    let mut run = Run::new(&[300, 300], Doing::Wait);
    run.memory.ratio = 0.9;
    run.during(Duration::from_secs(20));
    assert_eq!(run.held(), [0u32; 0]);
}

#[test]
fn a_held_process_runs_when_there_is_room_and_what_starts_meanwhile_waits() {
    let mut run = Run::new(&[300, 150], Doing::Wait);
    run.until(Turns::holds_any);
    run.set(1, Doing::Work);
    run.processes.push((3, 20 * MIB, Doing::Work));
    run.during(Duration::from_secs(1));
    assert_eq!(run.held(), [2, 3]);
    run.processes.remove(0);
    run.during(STEP);
    assert_eq!(run.held(), [0u32; 0], "all that is left fits");
}

#[test]
fn one_process_runs_on_each_cpu_unless_they_lose_too_much() {
    let mut run = Run { turns: Turns::new(2), ..Run::new(&[300, 300, 300], Doing::Wait) };
    run.until(Turns::holds_any);
    assert_eq!(run.held(), [3]);
    let time = run.until(|turns| turns.is_held(2));
    assert!(time < ONSET + WINDOW * 2, "{time:?}");
    run.during(WIDTH_LIFETIME / 2);
    assert_eq!(run.held(), [2, 3]);
    // What has lost too much has ended.
    run.processes.remove(0);
    run.during(STEP);
    assert_eq!(run.held(), [0u32; 0]);
}

#[test]
fn what_lost_too_much_runs_again_later() {
    let mut run = Run { turns: Turns::new(2), ..Run::new(&[300, 300], Doing::Wait) };
    run.until(|turns| turns.is_held(2));
    run.set(1, Doing::Work);
    run.set(2, Doing::Work);
    let time = run.until(|turns| !turns.is_held(2));
    assert!(time > WIDTH_LIFETIME - STEP * 2 && time <= WIDTH_LIFETIME + STEP, "{time:?}");
    assert!(!run.turns.is_held(1));
}

#[test]
fn a_held_process_runs_at_once_when_all_that_ran_have_ended() {
    for steps in 0..20 {
        let mut run = Run { turns: Turns::new(2), ..Run::new(&[300; 4], Doing::Wait) };
        run.until(Turns::holds_any);
        run.during(STEP * steps);
        let held = run.held();
        run.processes.retain(|process| held.contains(&process.0));
        run.during(STEP);
        assert!(run.held().len() < held.len(), "after {steps} steps");
    }
}

#[test]
fn less_loss_is_enough_shortly_after_turns() {
    let all = |run: &mut Run, doing| (1..=5).for_each(|pid| run.set(pid, doing));
    let mut run = Run { turns: Turns::new(5), ..Run::new(&[100; 5], Doing::Slow) };
    run.during(Duration::from_secs(60));
    assert_eq!(run.turns.count(), 0);
    all(&mut run, Doing::Wait);
    run.until(Turns::holds_any);
    run.memory.limit_bytes *= 10;
    all(&mut run, Doing::Work);
    run.during(WIDTH_LIFETIME * 2);
    assert!(!run.turns.holds_any(), "all fit");
    run.memory.limit_bytes /= 10;
    run.during(Duration::from_secs(1));
    assert!(!run.turns.holds_any(), "all work");
    all(&mut run, Doing::Slow);
    let time = run.until(Turns::holds_any);
    assert!(time >= ONSET && time < ONSET + WINDOW * 4, "{time:?}");
}

#[test]
fn what_loses_much_runs_if_it_works_more_than_one_process_fewer_would() {
    let mut run = Run { turns: Turns::new(2), ..Run::new(&[300, 300, 300], Doing::Wait) };
    run.until(Turns::holds_any);
    assert_eq!(run.held(), [3]);
    // Together they use 1.2 CPUs, one alone would use one.
    run.set(1, Doing::Slow);
    run.set(2, Doing::Slow);
    run.during(Duration::from_secs(5));
    assert_eq!(run.held(), [3]);
}

#[test]
fn processes_take_turns() {
    let mut run = Run::new(&[300, 300, 300], Doing::Wait);
    run.until(Turns::holds_any);
    for next in [2, 3, 1, 2] {
        let time = run.until(|turns| !turns.is_held(next));
        assert!(time <= turn_of(300 * MIB) * 2, "{next}: {time:?}");
        assert_eq!(run.held().len(), 2);
    }
}

#[test]
fn what_runs_but_sleeps_leaves_its_cpu_to_a_held_process() {
    let mut run = Run { turns: Turns::new(2), ..Run::new(&[300; 4], Doing::Wait) };
    run.set(1, Doing::Sleep);
    run.until(Turns::holds_any);
    assert_eq!(run.held(), [4], "the first one needs no CPU");
    run.set(2, Doing::Work);
    run.set(3, Doing::Work);
    run.during(Duration::from_secs(2));
    run.set(2, Doing::Sleep);
    let time = run.until(|turns| !turns.is_held(4));
    assert!(time >= MAX_SLEEP && time <= MAX_SLEEP + STEP * 2, "{time:?}");
    assert_eq!(run.held(), [0u32; 0]);
}

#[test]
fn what_slept_waits_behind_what_worked() {
    let mut run = Run::new(&[300, 300], Doing::Wait);
    run.until(Turns::holds_any);
    run.set(2, Doing::Work);
    run.during(Duration::from_secs(2));
    run.set(1, Doing::Sleep);
    run.until(|turns| !turns.is_held(2));
    run.set(1, Doing::Wait);
    run.set(2, Doing::Wait);
    run.until(Turns::holds_any);
    assert_eq!(run.held(), [1]);
}

#[test]
fn processes_that_wait_for_each_other_work_together() {
    let mut run = Run::new(&[300, 300], Doing::Wait);
    let mut pauses = Vec::new();
    for _ in 0..3 {
        for _ in 0..MAX_SHORT_HOLDS {
            run.until(Turns::holds_any);
            // The one that runs soon waits for the other.
            run.set(if run.turns.is_held(1) { 2 } else { 1 }, Doing::Sleep);
            run.until(|turns| !turns.holds_any());
            run.set(1, Doing::Wait);
            run.set(2, Doing::Wait);
        }
        pauses.push(run.until(Turns::holds_any));
    }
    assert!(pauses[0] >= MIN_PAUSE && pauses[0] < MIN_PAUSE + ONSET * 2, "{pauses:?}");
    assert!(pauses[1] >= MIN_PAUSE * 2 && pauses[2] >= MIN_PAUSE * 4, "{pauses:?}");
}

#[test]
fn sleep_long_after_others_were_held_does_not_mean_that_they_wait_for_each_other() {
    let mut run = Run::new(&[300, 300], Doing::Wait);
    for _ in 0..MAX_SHORT_HOLDS * 2 {
        let time = run.until(Turns::holds_any);
        assert!(time < MIN_PAUSE / 2, "{time:?}");
        run.during(SHORT_HOLD);
        run.set(if run.turns.is_held(1) { 2 } else { 1 }, Doing::Sleep);
        run.until(|turns| !turns.holds_any());
        run.set(1, Doing::Wait);
        run.set(2, Doing::Wait);
    }
}

#[test]
fn turns_pause_if_those_that_run_do_not_work_more() {
    let mut run = Run::new(&[500, 500], Doing::Thrash);
    for pause in [MIN_PAUSE, MIN_PAUSE * 2, MIN_PAUSE * 4] {
        run.until(Turns::holds_any);
        let time = run.until(|turns| !turns.holds_any());
        assert!(time >= SETTLING + TRIAL && time <= SETTLING + TRIAL + STEP * 2, "{time:?}");
        let time = run.until(Turns::holds_any);
        assert!(time >= pause && time < pause + ONSET * 2, "{time:?}");
    }
    // Now it pays, and the next pause is short again.
    run.set(1, Doing::Work);
    run.during(SETTLING + TRIAL);
    assert_eq!(run.held(), [2]);
    run.set(1, Doing::Sleep);
    run.until(|turns| !turns.holds_any());
    run.set(1, Doing::Thrash);
    run.set(2, Doing::Thrash);
    run.until(Turns::holds_any);
    run.until(|turns| !turns.holds_any());
    let time = run.until(Turns::holds_any);
    assert!(time < MIN_PAUSE + ONSET * 2, "{time:?}");
}

#[test]
fn a_trial_ends_when_nothing_is_held_any_more() {
    let mut run = Run::new(&[500, 500], Doing::Thrash);
    run.until(Turns::holds_any);
    run.during(SETTLING);
    run.processes.remove(0);
    run.during(TRIAL);
    run.processes.push((3, 500 * MIB, Doing::Thrash));
    let time = run.until(Turns::holds_any);
    assert!(time < MIN_PAUSE / 2, "{time:?}");
}

fn doing() -> impl Strategy<Value = Doing> {
    prop_oneof![4 => Just(Doing::Wait), 2 => Just(Doing::Thrash), 2 => Just(Doing::Work), 2 => Just(Doing::Slow), 1 => Just(Doing::Sleep)]
}

proptest! {
    /// Whatever processes do, one that can be held runs, and none that is awake is held for ever.
    #[test]
    fn each_process_gets_its_turn(
        need_mib in prop::collection::vec(1u64..500, 1..8),
        changes in prop::collection::vec((1u32..10, doing(), 1u64..500, 1u32..400), 0..40),
        ratio in 0.0..1.0,
        cpus in 1usize..6,
    ) {
        let mut run = Run { turns: Turns::new(cpus), ..Run::new(&need_mib, Doing::Wait) };
        run.memory.ratio = ratio;
        let mut held_since = [Duration::MAX; 10];
        let longest = turn_of(500 * MIB) * 10;
        for (pid, doing, mib, steps) in changes {
            match run.processes.iter().position(|process| process.0 == pid) {
                Some(at) if mib % 5 == 0 => _ = run.processes.remove(at),
                Some(at) => run.processes[at] = (pid, mib * MIB, doing),
                None => run.processes.push((pid, mib * MIB, doing)),
            }
            for _ in 0..steps {
                run.step();
                prop_assert!(run.turns.queue.is_empty() || run.turns.has_runner());
                for pid in 1..10 {
                    let is_awake = run.processes.iter().any(|&(its, _, doing)| its == pid && doing != Doing::Sleep);
                    let since = &mut held_since[pid as usize];
                    *since = if is_awake && run.turns.is_held(pid) { (*since).min(run.at) } else { Duration::MAX };
                    prop_assert!(run.at.saturating_sub(*since) < longest, "{pid}: {:?}", run.turns);
                }
            }
        }
    }
}
