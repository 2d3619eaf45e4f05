//! The companion: the agent's process beside the program's.
//!
//! It shares the program's memory and nothing else. Its descriptors, signal handlers, directories,
//! credentials and filters are its own, and it has its own session. So the program has no thread
//! that it has not made, and the agent does not take part when the program is stopped, traced or
//! filtered. The companion's first thread is the monitor; handlers and reclaimers are the others.
//!
//! An *intermediate* process starts the companion, and ends when the monitor has answered. So the
//! companion is not a child that the program might wait for: the supervisor, a subreaper, adopts
//! it. If a process of the program would adopt it (a subreaper, or the first process of a pid
//! namespace), the intermediate only waits for the answer. The companion is then a child that only
//! waits with `__WALL` or `__WCLONE` report, and a process that ends itself reaps it first: a
//! subreaper would adopt it otherwise, and get SIGCHLD.
//!
//! The starting thread sleeps in the kernel's wait of vfork(2) meanwhile. The state under `/proc`
//! is then `D`. In any other wait of the agent the state would be `S`: a program that polls its
//! child for state `S`, to learn that the child sleeps in a system call of the program, would be
//! misled before the fork has returned. Reaping a process takes microseconds in state `S`, too. So
//! a process without children of its own lets the kernel reap the intermediate: it ignores SIGCHLD
//! until the intermediate is gone. Then `RUSAGE_CHILDREN` does not count the intermediate, either.
//!
//! As soon as memory can be swapped out, a *guard* process runs beside the companion and shares its
//! descriptors. If the companion is killed, the guard keeps the userfaultfd open, so that the
//! program does not read zeros, and kills the program.
//!
//! The *exit word* is the thread id in the control block of the program's first thread. The kernel
//! clears it when that thread ends or executes another program. The monitor sleeps on it, too.
//!
//! There is no lock: atomics and the kernel's clearing of words order everything.

use crate::clock::{now_ns, sleep, timespec};
use crate::identity;
use crate::interception::fork_call;
use crate::region::Region;
use crate::seccomp::{self, Call};
use crate::signals;
use crate::thread::{self, Kind, Reaped, Spec};
use crate::thread_control_block::{self, BLOCK_PAGES};
use crate::word_wait::{self, ExitWord, Found};
use foliomem_sync::atomic as sync;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::thread::futex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// Interval at which a thread that waits for the companion checks that the companion is alive.
const ANSWER_PAUSE: Duration = Duration::from_millis(20);
/// Interval at which a process that ends checks whether its companion has ended.
const REAP_PAUSE: Duration = Duration::from_micros(100);
/// Maximum time in nanoseconds in which a thread yields to an intermediate that is about to end.
const MAX_YIELDING_NS: u64 = 20_000_000;

/// The stacks of the companion's processes.
#[derive(Debug)]
pub struct Stacks {
    /// Stack of the companion's first thread.
    pub companion: Region,
    /// Stack of the intermediate.
    pub intermediate: Region,
    /// Stack of the guard.
    pub guard: Region,
}

/// The reason why the monitor wakes up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// Another thread has woken the monitor, or the time to sleep is over.
    Called,
    /// The kernel has cleared the exit word.
    Exit,
}

/// The state of a process's companion, which the program and the companion share.
#[derive(Debug)]
pub struct Companion {
    stacks: Stacks,
    /// Process id of the companion; 0 when it has ended.
    id: AtomicU32,
    /// Process id of the intermediate; 0 when it has ended.
    intermediate: AtomicU32,
    /// Process id of the guard; 0 when it has ended.
    guard: AtomicU32,
    /// Number of the companion under `/proc`, which may be of another pid namespace; 0 if it is
    /// unknown.
    number: AtomicU32,
    /// Process id of the program.
    program: AtomicI32,
    /// Address of the exit word; 0 if it is unknown.
    exit_word: AtomicUsize,
    /// Thread id of the program's first thread, the value of the exit word.
    exit_id: AtomicU32,
    /// The monitor's answer to the starting thread: 0, or an [`Answer`]. A futex word.
    answer: AtomicU32,
    /// Whether the companion is about to end by itself.
    is_over: AtomicBool,
    /// Whether the companion is a child of the program.
    is_child: AtomicBool,
    /// Number of the program under `/proc`; 0 if it is unknown.
    program_number: AtomicU32,
    /// The agreement of the program and the companion about the program's end: a [`Farewell`].
    farewell: AtomicU32,
    /// The pages of the control block of the thread that has asked the companion to end.
    last_pages: [AtomicUsize; BLOCK_PAGES],
}

/// The argument of the intermediate.
struct Birth {
    companion: &'static Companion,
    entry: extern "C" fn(*mut u8),
    argument: *mut u8,
    /// Error number of the failure to start the companion; 0 if it started.
    errno: AtomicI32,
}

impl Companion {
    /// Makes the state of a companion that does not run.
    pub fn new(stacks: Stacks) -> Companion {
        Companion {
            stacks,
            id: AtomicU32::new(0),
            intermediate: AtomicU32::new(0),
            guard: AtomicU32::new(0),
            number: AtomicU32::new(0),
            program: AtomicI32::new(0),
            exit_word: AtomicUsize::new(0),
            exit_id: AtomicU32::new(0),
            answer: AtomicU32::new(0),
            is_over: AtomicBool::new(false),
            is_child: AtomicBool::new(false),
            program_number: AtomicU32::new(0),
            farewell: AtomicU32::new(Farewell::None as u32),
            last_pages: Default::default(),
        }
    }

    /// Starts the companion of the calling process, which has the pid `own` and one thread, in
    /// `entry`, which must not return, and waits for the monitor's answer. `adoption` says which
    /// process adopts orphans of the calling process, and `children` whether it has children.
    ///
    /// # Safety
    /// `entry` may be called with `argument` in a process that shares the memory. No other thread
    /// calls this function at the same time.
    ///
    /// # Errors
    /// Fails if the kernel cannot make a process.
    pub unsafe fn start(
        &'static self,
        own: Pid,
        entry: extern "C" fn(*mut u8),
        argument: *mut u8,
        adoption: Adoption,
        children: Children,
    ) -> Result<(), Errno> {
        let Companion {
            program,
            exit_word,
            exit_id,
            is_over,
            is_child,
            guard,
            number,
            farewell,
            // Written before the monitor reads it.
            last_pages: _,
            // Kept: the next companion uses the stacks again.
            stacks: _,
            // Written when the kernel makes the process.
            id: _,
            intermediate: _,
            // Kept: `expect_answer` has reset it.
            answer: _,
            // Written by the monitor before it answers.
            program_number: _,
        } = self;
        // The only thread of a process has its pid as thread id.
        program.store(own.as_raw_nonzero().get(), Ordering::Relaxed);
        exit_word.store(thread_control_block::id_word(own).unwrap_or(0), Ordering::Relaxed);
        exit_id.store(own.as_raw_nonzero().get() as u32, Ordering::Relaxed);
        is_over.store(false, Ordering::Relaxed);
        guard.store(0, Ordering::Relaxed);
        farewell.store(Farewell::None as u32, Ordering::Relaxed);
        number.store(0, Ordering::Relaxed);
        // Inside of a pid namespace of the program, a process of the program would adopt the
        // companion.
        let stays = adoption == Adoption::ByProgram || own.is_init() || identity::is_nested();
        is_child.store(stays, Ordering::Relaxed);
        if stays {
            // SAFETY: the caller keeps the contract of `entry`. The stack and the word are static,
            // like `self`.
            unsafe { self.spawn(entry, argument) }?;
            // SAFETY: the intermediate may run `waiting_entry`, which ends it. `self` is static.
            return unsafe {
                self.run_intermediate(waiting_entry, std::ptr::from_ref(self).cast_mut().cast(), children)
            };
        }
        let birth = Birth { companion: self, entry, argument, errno: AtomicI32::new(0) };
        // SAFETY: the intermediate may run `intermediate_entry`, and ends before `birth` is
        // dropped.
        unsafe { self.run_intermediate(intermediate_entry, std::ptr::from_ref(&birth).cast_mut().cast(), children) }?;
        // Acquire pairs with the Release in `intermediate_entry`.
        match birth.errno.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }

    /// Resets the monitor's answer. The starting thread calls it before it starts the companion.
    pub fn expect_answer(&self) {
        self.answer.store(0, Ordering::Relaxed);
    }

    /// Waits for the monitor's answer and returns it. Returns `None` if the companion ended without
    /// an answer. The starting thread calls it.
    pub fn wait_for_answer(&self) -> Option<Answer> {
        loop {
            // Acquire pairs with the Release in `answer`: the caller sees what the monitor
            // prepared.
            match self.answer.load(Ordering::Acquire) {
                answer if answer == Answer::Ready as u32 => return Some(Answer::Ready),
                answer if answer == Answer::Failed as u32 => return Some(Answer::Failed),
                _ if self.process().is_none() => return None,
                _ => {}
            }
            let _ = futex::wait(&self.answer, futex::Flags::PRIVATE, 0, Some(&timespec(ANSWER_PAUSE)));
        }
    }

    /// Sends `answer` to the starting thread. The monitor calls it.
    pub fn answer(&self, answer: Answer) {
        // Release pairs with the Acquire in `wait_for_answer`.
        self.answer.store(answer as u32, Ordering::Release);
        let _ = futex::wake(&self.answer, futex::Flags::PRIVATE, 1);
    }

    /// Runs `entry` in a process that shares the memory, and waits until it has ended. `children`
    /// says whether the calling process has others.
    ///
    /// # Safety
    /// `entry` may be called with `argument` in such a process, and ends the process. No other
    /// thread calls this function at the same time.
    ///
    /// # Errors
    /// Fails if the kernel cannot make a process.
    pub unsafe fn run_intermediate(
        &'static self,
        entry: extern "C" fn(*mut u8),
        argument: *mut u8,
        children: Children,
    ) -> Result<(), Errno> {
        let run = |kind| {
            let spec = Spec { kind, stack: &self.stacks.intermediate, cpu: None, id: &self.intermediate };
            // SAFETY: the caller keeps the contract of `entry`. The stack and the word are static,
            // like `self`.
            unsafe { thread::spawn(&spec, entry, argument) }
        };
        // The intermediate no longer uses the memory, and ends within microseconds. A filter may
        // forbid this thread to yield.
        if fork_call::has_filter() {
            thread::reap(run(Kind::Intermediate)?);
            return Ok(());
        }
        if children == Children::None {
            return signals::without_child_signals(|| {
                let intermediate = run(Kind::SignallingIntermediate)?;
                yield_until(|| test_kill_process(intermediate) == Err(Errno::SRCH));
                // It may get no CPU because this is a real-time thread. Then this thread sleeps.
                thread::reap(intermediate);
                Ok(())
            });
        }
        let intermediate = run(Kind::Intermediate)?;
        yield_until(|| thread::reap_ended(intermediate));
        thread::reap(intermediate);
        Ok(())
    }

    /// Starts the companion in `entry`. The contract is that of [`Companion::start`].
    unsafe fn spawn(&'static self, entry: extern "C" fn(*mut u8), argument: *mut u8) -> Result<Pid, Errno> {
        let spec = Spec { kind: Kind::Process, stack: &self.stacks.companion, cpu: None, id: &self.id };
        // SAFETY: the caller keeps the contract of `entry`. The stack and the word are static, like
        // `self`.
        unsafe { thread::spawn(&spec, entry, argument) }
    }

    /// Starts the guard in `entry`, which must not return. The companion calls it.
    ///
    /// # Safety
    /// `entry` may be called with `argument` in a process that shares the memory. No guard is
    /// running.
    ///
    /// # Errors
    /// Fails if the kernel cannot make a process.
    pub unsafe fn start_guard(&'static self, entry: extern "C" fn(*mut u8), argument: *mut u8) -> Result<(), Errno> {
        let spec = Spec { kind: Kind::ProcessOfSameFiles, stack: &self.stacks.guard, cpu: None, id: &self.guard };
        // SAFETY: the caller keeps the contract of `entry`. The stack and the word are static, like
        // `self`.
        unsafe { thread::spawn(&spec, entry, argument) }.map(|_| ())
    }

    /// Ends the guard and reaps it, so that no process of the program adopts it and gets a signal
    /// at its end. The companion calls it at its own end.
    pub fn end_guard(&self) {
        let Some(guard) = self.guard() else { return };
        let _ = rustix::process::kill_process(guard, rustix::process::Signal::KILL);
        thread::reap(guard);
    }

    /// Returns the process id of the companion, or `None` when it has ended.
    pub fn process(&self) -> Option<Pid> {
        // Acquire pairs with the kernel's clearing of the word when the companion ends.
        Pid::from_raw(self.id.load(Ordering::Acquire) as i32)
    }

    /// Waits until the companion has ended. The guard calls it if it may not open a pidfd.
    pub fn wait_for_end(&self) {
        thread::wait_until_cleared(&self.id, None);
    }

    /// Returns the process id of the guard, or `None` when it has ended.
    pub fn guard(&self) -> Option<Pid> {
        // Acquire pairs with the kernel's clearing of the word when the guard ends.
        Pid::from_raw(self.guard.load(Ordering::Acquire) as i32)
    }

    /// Returns the process id of the program, which may have ended.
    pub fn program(&self) -> Pid {
        // `start` has written the process id.
        Pid::from_raw(self.program.load(Ordering::Relaxed)).unwrap_or(Pid::INIT)
    }

    /// Notes the number of the program under `/proc`, which may be of another pid namespace.
    pub fn note_program_number(&self, number: u32) {
        self.program_number.store(number, Ordering::Relaxed);
    }

    /// Returns the number of the program under `/proc`; 0 if it is unknown.
    pub fn program_number(&self) -> u32 {
        self.program_number.load(Ordering::Relaxed)
    }

    /// Notes the number of the companion under `/proc`. The companion calls it.
    pub fn note_number(&self, number: Option<u32>) {
        self.number.store(number.unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns the number of the companion under `/proc`; 0 if it is unknown.
    pub fn number(&self) -> u32 {
        self.number.load(Ordering::Relaxed)
    }

    /// Returns the process ids of the agent's processes that have not ended.
    pub fn processes(&self) -> [Option<Pid>; 2] {
        [self.process(), self.guard()]
    }

    /// Asks the companion to end, and waits for that until `until_ns` of the monotonic clock.
    /// Returns whether the companion has ended; it has not if it declined or the time is over. The
    /// program's only thread calls it when it is about to end.
    pub fn ask_to_end(&self, wake_monitor: impl FnOnce(), until_ns: u64) -> bool {
        let pages = thread_control_block::pages(&thread_control_block::own());
        self.last_pages.iter().zip(pages).for_each(|(last, page)| last.store(page, Ordering::Relaxed));
        // Release pairs with the Acquire in `is_asked_to_end`: the monitor sees the pages.
        self.farewell.store(Farewell::Asked as u32, Ordering::Release);
        wake_monitor();
        loop {
            // Acquire pairs with the kernel's clearing of the word when the companion ends.
            let id = self.id.load(Ordering::Acquire);
            if id == 0 {
                return true;
            }
            let left_ns = until_ns.saturating_sub(now_ns());
            if left_ns == 0 || self.farewell.load(Ordering::Relaxed) != Farewell::Asked as u32 {
                return false;
            }
            let time = ANSWER_PAUSE.min(Duration::from_nanos(left_ns));
            // The kernel wakes sleepers on the word with a futex of the shared kind.
            let _ = futex::wait(&self.id, futex::Flags::empty(), id, Some(&timespec(time)));
        }
    }

    /// Returns whether the companion is a child of the program.
    pub fn is_child(&self) -> bool {
        self.is_child.load(Ordering::Relaxed)
    }

    /// Reaps the companion, which has ended, and those of programs that the process has executed
    /// before, if they are children of the calling process. It waits for their ends at most until
    /// `until_ns` of the monotonic clock: among the children may be others that send no SIGCHLD.
    /// The program's only thread calls it when it is about to end.
    pub fn reap_children(&self, until_ns: u64) {
        if !self.is_child() {
            return;
        }
        loop {
            match thread::reap_signalless() {
                Reaped::One => {}
                Reaped::NoneYet if now_ns() < until_ns => sleep(REAP_PAUSE),
                Reaped::NoneYet | Reaped::NoChildren => return,
            }
        }
    }

    /// Returns whether the program waits for the end of the companion. The monitor calls it.
    pub fn is_asked_to_end(&self) -> bool {
        // Acquire pairs with the Release in `ask_to_end`.
        self.farewell.load(Ordering::Acquire) == Farewell::Asked as u32
    }

    /// Returns the pages that the kernel accesses until the end of the program's thread (rseq(2),
    /// robust lists). The monitor calls it when it is asked to end.
    pub fn last_pages(&self) -> [usize; BLOCK_PAGES] {
        std::array::from_fn(|index| self.last_pages[index].load(Ordering::Relaxed))
    }

    /// Declines to end, because other processes use the memory. The monitor calls it.
    pub fn decline_to_end(&self) {
        self.farewell.store(Farewell::Stays as u32, Ordering::Relaxed);
        let _ = futex::wake(&self.id, futex::Flags::empty(), 1);
    }

    /// Notes that the companion is about to end by itself. The monitor calls it.
    pub fn note_end(&self) {
        // Release pairs with the Acquire in `ends_by_itself`, which the guard calls.
        self.is_over.store(true, Ordering::Release);
    }

    /// Returns whether the companion is about to end by itself. The guard calls it.
    pub fn ends_by_itself(&self) -> bool {
        // Acquire pairs with the Release in `note_end`.
        self.is_over.load(Ordering::Acquire)
    }

    /// Stops watching the exit word: the program's first thread has ended, and others have not. The
    /// monitor calls it.
    pub fn forget_exit_word(&self) {
        self.exit_word.store(0, Ordering::Relaxed);
    }

    /// Returns whether [`Companion::doze`] ends when the program's first thread does. The monitor
    /// calls it.
    pub fn notices_exit(&self) -> bool {
        self.exit_word.load(Ordering::Relaxed) != 0 && seccomp::allow(Call::FutexWaitv)
    }

    /// Sleeps until `kick` differs from `kicks`, the exit word is cleared, or `time` is over. The
    /// monitor calls it.
    pub fn doze(&self, kick: &sync::AtomicU32, kicks: u32, time: Duration) -> Woken {
        if !self.notices_exit() {
            word_wait::wait_for(kick, kicks, time);
            return Woken::Called;
        }
        let address = self.exit_word.load(Ordering::Relaxed);
        let exit = ExitWord { address, id: self.exit_id.load(Ordering::Relaxed) };
        match word_wait::wait_for_both(kick, kicks, exit, time) {
            Found::Exit => Woken::Exit,
            Found::Change => Woken::Called,
            Found::NoExitWord => {
                self.forget_exit_word();
                Woken::Called
            }
        }
    }
}

/// The monitor's answer to the thread that started the companion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Answer {
    /// The companion works.
    Ready = 1,
    /// The companion cannot work, and has reported the reason.
    Failed = 2,
}

/// The agreement of the program and its companion about the program's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
enum Farewell {
    /// The program has not asked.
    None,
    /// The program is about to end, and waits until the companion has ended.
    Asked,
    /// The companion has declined: it ends later.
    Stays,
}

/// The process that adopts an orphan of the calling process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adoption {
    /// The supervisor.
    ByOthers,
    /// A process of the program.
    ByProgram,
}

/// The children of the process that starts a companion, apart from processes of the agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Children {
    /// It has none.
    None,
    /// It may have some, which only itself may reap.
    Some,
}

impl Children {
    /// Returns whether the calling process has children.
    pub fn of_caller() -> Children {
        if thread::has_no_children() { Children::None } else { Children::Some }
    }
}

/// Yields to other threads until `is_over` returns true, for [`MAX_YIELDING_NS`] at most.
fn yield_until(is_over: impl Fn() -> bool) {
    let until_ns = now_ns() + MAX_YIELDING_NS;
    while !is_over() && now_ns() < until_ns {
        #[expect(clippy::disallowed_methods, reason = "the intermediate is of the caller's session")]
        rustix::thread::sched_yield();
    }
}

/// First function of the intermediate: starts the companion, waits for the answer, and ends.
extern "C" fn intermediate_entry(argument: *mut u8) {
    // SAFETY: `start` passes a `Birth`, and keeps it until this process has ended.
    let birth = unsafe { &*argument.cast::<Birth>() };
    // SAFETY: `start`'s caller keeps the contract of `entry`.
    match unsafe { birth.companion.spawn(birth.entry, birth.argument) } {
        Ok(_) => drop(birth.companion.wait_for_answer()),
        // Release pairs with the Acquire in `start`.
        Err(errno) => birth.errno.store(errno.raw_os_error(), Ordering::Release),
    }
    thread::exit_thread();
}

/// First function of an intermediate beside a companion that the program has made itself: waits for
/// the answer, and ends.
extern "C" fn waiting_entry(argument: *mut u8) {
    // SAFETY: `start` passes the companion, which is static.
    let companion: &'static Companion = unsafe { &*argument.cast() };
    companion.wait_for_answer();
    thread::exit_thread();
}
