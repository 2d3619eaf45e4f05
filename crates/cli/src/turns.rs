//! Turns: decides which processes of a run that thrashes wait, compressed, while others work.
//!
//! Processes whose hot memory together exceeds the limit take each other's memory all the time, and
//! none gets on. The *lost share* of the time of a run is that of its companions' CPU time and of
//! threads that wait for memory; the rest is the programs' CPU time. If more than half is lost,
//! only as many processes *run* as fit uncompressed beside the others, but one for each CPU. The
//! others are *held*: compressed as a whole, and their faults are not served. (Operating systems
//! call this load control.) If those that run still lose too much, one fewer runs for some time,
//! unless they do more together than fewer would.
//!
//! The processes are in a queue, the oldest first. Those that run are chosen from its head. A
//! process that was held for long goes to the head, and the one that has run for longest goes to
//! the end: so each gets on, and none waits for ever for a lock or a pipe of one that is held.
//!
//! Only *active* processes count: one that has slept for a while needs neither a CPU nor its
//! memory, and leaves both to one that is held. It may wait for just that one. If processes fall
//! asleep shortly after others were held, again and again, they work together, and nothing is held
//! for some time. Nor is anything held for some time if those that run then do not work more than
//! all did before: each of them alone may need more than the limit.

use crate::balance::Pressure;
use crate::thrashing::Threads;
use foliomem_session::process_table::LeftFaults;
use std::time::Duration;

/// Size in bytes below which a process is not held.
const MIN_BYTES: u64 = 16 << 20;
/// Time constant of the average lost share.
const WINDOW: Duration = Duration::from_millis(300);
/// A run thrashes if its average share has been above [`MAX_SHARE`] for this long, and fewer
/// processes would work more.
const ONSET: Duration = Duration::from_millis(400);
/// That time before the first process is held, while memory moves from one process to another
/// ([`crate::balance`]): that alone may help.
const ONSET_WHILE_MOVING: Duration = Duration::from_secs(2);
/// Lost share above which a run thrashes.
const MAX_SHARE: f64 = 0.5;
/// Lost share above which fewer processes run, while some are held already.
const MAX_SHARE_IN_TURNS: f64 = 0.2;
/// Share of the CPUs' time for which one process fewer is expected to work.
const EXPECTED_WORK: f64 = 0.9;
/// Time after the last turn for which [`MAX_SHARE_IN_TURNS`] holds.
const MEMORY_OF_TURNS: Duration = Duration::from_secs(30);
/// Time after which as many as before run again, although they have lost too much.
const WIDTH_LIFETIME: Duration = Duration::from_secs(10);
/// Share of the limit that the processes which run, and the stores, may fill.
const FILL: f64 = 0.8;
/// Share of the limit up to which a held process is let run again. The rest is for growth.
const REFILL: f64 = 0.65;
/// Compression ratio from which holding a process saves too little.
const MAX_RATIO: f64 = 0.8;
/// A held process gets its turn after this time, and the time that moving it takes
/// [`TURN_PER_MOVE`] times.
const MIN_TURN: Duration = Duration::from_secs(8);
/// Bytes per second by which a process is compressed and decompressed again.
const MOVED_BYTES_PER_SECOND: u64 = 300 << 20;
/// A turn lasts this many times as long as compressing and decompressing a process.
const TURN_PER_MOVE: u32 = 20;
/// Those that run must work more by this factor than all did, which lost more than [`MAX_SHARE`],
/// before some were held.
const MIN_GAIN: f64 = 1.5;
/// Their work is measured for [`TRIAL`], after the others had [`SETTLING`] to be compressed.
const SETTLING: Duration = Duration::from_secs(1);
const TRIAL: Duration = Duration::from_secs(2);
/// A process that has slept for this long is not active.
const MAX_SLEEP: Duration = Duration::from_millis(150);
/// A process that runs again sooner than this because another sleeps was held for nothing.
const SHORT_HOLD: Duration = Duration::from_secs(1);
/// Number of short holds in a row of processes that work together.
const MAX_SHORT_HOLDS: u32 = 4;
/// The time for which nothing is held after the first [`MAX_SHORT_HOLDS`] short holds, or the first
/// trial without gain. It doubles each time.
const MIN_PAUSE: Duration = Duration::from_secs(10);
/// Maximum of that time.
const MAX_PAUSE: Duration = Duration::from_secs(600);
/// Processes that together use less than this share of a CPU, as a divisor, sleep.
const MIN_USED: u32 = 20;
/// Maximum time that one sample stands for: the supervisor may have been stopped.
const MAX_SAMPLE: Duration = Duration::from_secs(1);

/// A process at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// The memory that it would take without compression, in bytes.
    pub need_bytes: u64,
    /// Its threads.
    pub threads: Threads,
    /// The faults that its companion has left because it is held.
    pub left_faults: LeftFaults,
    /// CPU time of the program since the last look.
    pub worked: Duration,
    /// CPU time of its companion since the last look.
    pub served: Duration,
}

/// The memory of a run at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// The limit, in bytes.
    pub limit_bytes: u64,
    /// What a byte of a process takes once it is swapped out, from 0 to 1.
    pub ratio: f64,
    /// Whether memory moves from one process to another.
    pub pressure: Pressure,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Runs,
    Held,
}

/// A process that may be held.
#[derive(Clone, Copy, Debug)]
struct Member {
    now: Process,
    state: State,
    since: Duration,
    /// Since when it has slept at each look.
    asleep_since: Option<Duration>,
}

impl Member {
    /// Takes over what a process is at the moment `at`.
    fn update(&mut self, at: Duration, now: Process) {
        self.now = now;
        let sleeps = now.threads == Threads::default() && now.left_faults == LeftFaults::None;
        self.asleep_since = sleeps.then(|| self.asleep_since.unwrap_or(at));
    }

    /// Returns whether the process runs, and has not slept for a while before `at`.
    fn is_active(&self, at: Duration) -> bool {
        let sleeps = self.asleep_since.is_some_and(|since| at.saturating_sub(since) >= MAX_SLEEP);
        self.state == State::Runs && !sleeps
    }

    /// Returns what the process takes more while it runs, in bytes.
    fn extra_bytes(&self, memory: Memory) -> f64 {
        self.now.need_bytes as f64 * (1.0 - memory.ratio)
    }
}

/// Why processes change places at the moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    /// They do not; a held process runs if there is room, or if one that runs sleeps.
    None,
    /// The run thrashes: processes that do not fit are held.
    Thrashing,
    /// Another process gets its turn.
    Turn,
}

/// A measurement of whether it pays that processes were held.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// When they were held.
    since: Duration,
    /// Average number of CPUs that the run used before.
    work_before: f64,
    /// CPU time of the processes that run, after [`SETTLING`].
    worked: Duration,
}

/// How many active processes run at once.
#[derive(Clone, Copy, Debug)]
struct Width {
    /// So many run even if they do not fit.
    min: usize,
    /// No more run, even if they fit.
    max: usize,
    /// When they were found to lose too much.
    since: Duration,
}

impl Width {
    /// Returns the width before anything is known: all CPUs are used.
    fn of(cpus: usize) -> Width {
        Width { min: cpus, max: usize::MAX, since: Duration::ZERO }
    }
}

/// The processes of a run that may be held.
#[derive(Debug)]
pub struct Turns {
    /// The queue. What is nearer to the head runs first.
    queue: Vec<Member>,
    last: Duration,
    /// Number of CPUs of the run.
    cpus: usize,
    /// When a process was held for the last time.
    held_at: Option<Duration>,
    width: Width,
    /// Number of active processes after the last look: if one of them ends or sleeps, the others
    /// may lose less.
    active_before: usize,
    /// Average lost share of the processes that run.
    share: f64,
    /// Average number of their threads that run or wait for memory.
    awake: f64,
    /// Average number of CPUs that they use.
    work: f64,
    /// Since when they lose too much.
    above_since: Option<Duration>,
    /// When the last turn began.
    turned: Duration,
    short_holds: u32,
    trial: Option<Trial>,
    /// Until when nothing is held, and the length of the next such pause.
    paused_until: Duration,
    pause: Duration,
    turns: u64,
}

impl Turns {
    /// Creates the state of a run that starts on so many CPUs: nothing is held.
    pub fn new(cpus: usize) -> Turns {
        Turns {
            queue: Vec::new(),
            cpus,
            width: Width::of(cpus),
            active_before: 0,
            held_at: None,
            last: Duration::ZERO,
            share: 0.0,
            awake: 0.0,
            work: 0.0,
            above_since: None,
            turned: Duration::ZERO,
            short_holds: 0,
            trial: None,
            paused_until: Duration::ZERO,
            pause: MIN_PAUSE,
            turns: 0,
        }
    }

    /// Returns whether a process is held.
    pub fn is_held(&self, pid: u32) -> bool {
        self.held().any(|member| member.now.pid == pid)
    }

    /// Returns whether any process is held.
    pub fn holds_any(&self) -> bool {
        self.held().next().is_some()
    }

    /// Returns how many times a process was held so far.
    pub fn count(&self) -> u64 {
        self.turns
    }

    /// Decides which processes are held from now on. `at` is the time since the start of the run,
    /// `processes` are all that can be held.
    pub fn look(&mut self, at: Duration, memory: Memory, processes: &[Process]) {
        let time = at.saturating_sub(self.last).min(MAX_SAMPLE);
        self.last = at;
        self.follow(at, processes);
        let worked = self.measure(at, time, processes);
        self.try_out(at, worked);
        let change = self.change(at, memory.pressure);
        self.assign(at, memory, change);
        self.active_before = self.active(at).count();
        debug_assert!(!self.holds_any() || self.has_runner());
    }

    /// Follows processes that have started, ended, or changed their size.
    fn follow(&mut self, at: Duration, processes: &[Process]) {
        self.queue.retain_mut(|member| {
            let now = processes.iter().find(|process| process.pid == member.now.pid);
            now.is_some_and(|now| {
                member.update(at, *now);
                member.state == State::Held || now.need_bytes >= MIN_BYTES
            })
        });
        // A process that starts while others wait is let run at once if there is room.
        let state = if self.holds_any() { State::Held } else { State::Runs };
        for &now in processes {
            let is_known = self.queue.iter().any(|member| member.now.pid == now.pid);
            if !is_known && now.need_bytes >= MIN_BYTES {
                self.queue.push(Member { now, state, since: at, asleep_since: None });
            }
        }
    }

    /// Updates what is known about the processes that are not held, large and small. Returns the
    /// CPU time that they have used since the last look.
    fn measure(&mut self, at: Duration, time: Duration, processes: &[Process]) -> Duration {
        let not_held = || processes.iter().filter(|process| !self.is_held(process.pid));
        let threads: Threads = not_held().map(|process| process.threads).sum();
        let worked: Duration = not_held().map(|process| process.worked).sum();
        let lost = not_held().map(|process| process.served).sum::<Duration>() + time * threads.waiting;
        let all = worked + lost;
        let share = if all < time / MIN_USED { 0.0 } else { lost.as_secs_f64() / all.as_secs_f64() };
        let weight = 1.0 - (-time.as_secs_f64() / WINDOW.as_secs_f64()).exp();
        let awake = f64::from(threads.waiting + threads.running);
        let work = if time.is_zero() { 0.0 } else { worked.div_duration_f64(time) };
        for (average, now) in [(&mut self.share, share), (&mut self.awake, awake), (&mut self.work, work)] {
            *average += (now - *average) * weight;
        }
        if self.holds_any() {
            self.held_at = Some(at);
        }
        let max_share = if self.is_in_turns(at) { MAX_SHARE_IN_TURNS } else { MAX_SHARE };
        let loses_too_much = self.share > max_share && self.work < self.work_of_fewer(at);
        self.above_since = loses_too_much.then(|| self.above_since.unwrap_or(at));
        worked
    }

    /// Returns whether a process was held lately.
    fn is_in_turns(&self, at: Duration) -> bool {
        self.held_at.is_some_and(|held_at| at.saturating_sub(held_at) < MEMORY_OF_TURNS)
    }

    /// Continues the trial, if there is one and something is held. At its end, pauses turns if they
    /// do not pay.
    fn try_out(&mut self, at: Duration, worked: Duration) {
        let Some(mut trial) = self.trial.take().filter(|_| self.holds_any()) else { return };
        let time = at.saturating_sub(trial.since);
        if time > SETTLING {
            trial.worked += worked;
        }
        if time < SETTLING + TRIAL {
            self.trial = Some(trial);
        } else if trial.worked.div_duration_f64(time - SETTLING) >= trial.work_before * MIN_GAIN {
            self.pause = MIN_PAUSE;
        } else {
            self.pause_turns(at);
        }
    }

    /// Lets all processes run for some time, longer each time.
    fn pause_turns(&mut self, at: Duration) {
        self.short_holds = 0;
        self.trial = None;
        self.paused_until = at + self.pause;
        self.pause = (self.pause * 2).min(MAX_PAUSE);
    }

    /// Returns how many CPUs one process fewer is expected to use. While those that run use more,
    /// no other one is held.
    fn work_of_fewer(&self, at: Duration) -> f64 {
        let active = self.active(at).count().max(1) as f64;
        (self.awake * (active - 1.0) / active).min(self.cpus as f64) * EXPECTED_WORK
    }

    /// Decides whether processes change places, and moves in the queue those that do.
    fn change(&mut self, at: Duration, pressure: Pressure) -> Change {
        if at < self.paused_until {
            return Change::None;
        }
        let waiting = self.held().filter(|member| member.now.left_faults == LeftFaults::Some);
        if let Some(&next) = waiting.min_by_key(|member| member.since) {
            let is_due = at.saturating_sub(next.since) >= turn_of(next.now.need_bytes);
            if is_due && at.saturating_sub(self.turned) >= MIN_TURN {
                (self.turned, self.short_holds) = (at, 0);
                let longest = self.active(at).min_by_key(|member| member.since).map(|member| member.now.pid);
                self.queue.sort_by_key(|member| match member.now.pid {
                    pid if pid == next.now.pid => 0,
                    pid if Some(pid) == longest => 2,
                    _ => 1,
                });
                return Change::Turn;
            }
        }
        let onset = match pressure {
            Pressure::Moving if !self.is_in_turns(at) => ONSET_WHILE_MOVING,
            Pressure::Moving | Pressure::Settled => ONSET,
        };
        let is_thrashing = self.above_since.is_some_and(|since| at.saturating_sub(since) >= onset);
        if is_thrashing && self.active(at).next().is_some() { Change::Thrashing } else { Change::None }
    }

    /// Notes that a process that was held since `held_since` runs again because another one sleeps.
    /// Those that sleep go to the end of the queue.
    fn count_sleep(&mut self, at: Duration, held_since: Duration) {
        let is_short = at.saturating_sub(held_since) < SHORT_HOLD;
        self.short_holds = if is_short { self.short_holds + 1 } else { 0 };
        if self.short_holds >= MAX_SHORT_HOLDS {
            self.pause_turns(at);
        }
        self.queue.sort_by_key(|member| member.state == State::Runs && !member.is_active(at));
    }

    /// Lets those processes run that fit, from the head of the queue, and holds the others. A
    /// process that gets its turn takes the room of others, from the end of the queue.
    fn assign(&mut self, at: Duration, memory: Memory, change: Change) {
        let is_paused = at < self.paused_until;
        if is_paused || memory.ratio > MAX_RATIO || self.queue.len() < 2 {
            let held = self.queue.iter_mut().filter(|member| member.state == State::Held);
            held.for_each(|member| (member.state, member.since) = (State::Runs, at));
            return;
        }
        if change == Change::None && !self.holds_any() {
            return;
        }
        self.widen(at, change);
        let swapped_out: f64 = self.queue.iter().map(|member| member.now.need_bytes as f64 * memory.ratio).sum();
        let room = |share| memory.limit_bytes as f64 * share - swapped_out;
        let (mut filled, room, mut active) = match change {
            Change::None => {
                let filled = self.active(at).map(|member| member.extra_bytes(memory)).sum();
                (filled, room(REFILL), self.active(at).count())
            }
            Change::Thrashing | Change::Turn => (0.0, room(FILL), 0),
        };
        let sleepers = self.runners().filter(|member| !member.is_active(at));
        let fell_asleep = sleepers.filter_map(|member| member.asleep_since).max();
        let mut slept_for = None;
        let mut has_changed = false;
        let had_held = self.holds_any();
        for (place, member) in self.queue.iter_mut().enumerate() {
            let may_change = match (change, member.state) {
                (Change::None, State::Runs) => false,
                (_, State::Runs) if !member.is_active(at) => false,
                (Change::Turn, State::Held) => place == 0,
                (Change::Thrashing, State::Held) => !had_held,
                _ => true,
            };
            if !may_change {
                continue;
            }
            let has_room = filled + member.extra_bytes(memory) <= room;
            let fits = active < self.width.min || has_room && active < self.width.max;
            let state = if fits { State::Runs } else { State::Held };
            if fits {
                filled += member.extra_bytes(memory);
                active += 1;
            }
            if state != member.state {
                has_changed = true;
                self.turns += u64::from(state == State::Held);
                if state == State::Runs && change == Change::None && fell_asleep >= Some(member.since) {
                    slept_for = Some(member.since);
                }
                (member.state, member.since) = (state, at);
            }
        }
        if let Some(held_since) = slept_for {
            self.count_sleep(at, held_since);
        }
        if has_changed {
            if change == Change::Thrashing && !had_held && self.share > MAX_SHARE {
                self.trial = Some(Trial { since: at, work_before: self.work, worked: Duration::ZERO });
            }
            // What was measured belongs to other processes.
            (self.share, self.above_since) = (0.0, None);
        }
    }

    /// Narrows the width if those that run still lose too much, and widens it again later.
    fn widen(&mut self, at: Duration, change: Change) {
        let active = self.active(at).count();
        match change {
            Change::Thrashing => {
                let fewer = active.saturating_sub(1).max(1);
                // How many fit is a good guess for the first time.
                let max = if self.holds_any() { fewer } else { usize::MAX };
                self.width = Width { min: self.width.min.min(fewer), max, since: at };
            }
            _ if active < self.active_before || at.saturating_sub(self.width.since) > WIDTH_LIFETIME => {
                self.width = Width::of(self.cpus);
            }
            _ => {}
        }
    }

    fn has_runner(&self) -> bool {
        self.runners().next().is_some()
    }

    fn runners(&self) -> impl Iterator<Item = &Member> {
        self.queue.iter().filter(|member| member.state == State::Runs)
    }

    fn active(&self, at: Duration) -> impl Iterator<Item = &Member> {
        self.queue.iter().filter(move |member| member.is_active(at))
    }

    fn held(&self) -> impl Iterator<Item = &Member> {
        self.queue.iter().filter(|member| member.state == State::Held)
    }
}

/// Returns how long a process of this size is held at most before it gets a turn.
fn turn_of(need_bytes: u64) -> Duration {
    let moving = Duration::from_millis(need_bytes * 1000 / MOVED_BYTES_PER_SECOND);
    MIN_TURN + moving * TURN_PER_MOVE
}

#[cfg(test)]
mod tests;
