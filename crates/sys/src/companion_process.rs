//! The companion: the agent's process beside the program's.
//!
//! It shares the program's memory and nothing else: its descriptors, signal handlers, directories,
//! credentials and filters are its own, and it is in a session of its own. So the program has no
//! thread that it has not made, and is stopped, traced and filtered without the agent. The monitor
//! is the companion's first thread, handlers and reclaimers are the others.
//!
//! An *intermediate* process makes the companion and ends at once, so the companion is nobody's
//! child that the program might wait for: the supervisor adopts it, which is a subreaper. Where the
//! program itself would adopt it (it is a subreaper, or the first process of a pid namespace),
//! there is no intermediate: the companion is then a child that only waits with `__WALL` or
//! `__WCLONE` report.
//!
//! Once anything can be swapped out, a *guard* runs beside the companion, with the companion's
//! descriptors. If the companion is killed, the guard holds the userfaultfd open, so nobody reads
//! zeros, and kills the program.
//!
//! The end of a process clears a word: the kernel clears the thread id in the control block of the
//! program's first thread when that thread ends or executes another program. The monitor sleeps on
//! this *exit word*, too.

use crate::clock::{now_ns, timespec};
use crate::filters::{self, Call};
use crate::identity;
use crate::region::Region;
use crate::thread::{self, Kind, Spec};
use crate::thread_control_block::{self, BLOCK_PAGES};
use crate::word_wait::{self, ExitWord, Found};
use foliomem_sync::atomic as sync;
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::futex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// How often a thread that waits for the companion checks that it is alive.
const ANSWER_PAUSE: Duration = Duration::from_millis(20);

/// Stacks of the companion's processes.
#[derive(Debug)]
pub struct Stacks {
    /// Of the companion's first thread.
    pub companion: Region,
    /// Of the intermediate.
    pub intermediate: Region,
    /// Of the guard.
    pub guard: Region,
}

/// Why the monitor goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// Somebody wants something of it, or its time is over.
    Called,
    /// The exit word has been cleared.
    Exit,
}

/// One process's companion, as the program and the companion itself know it.
#[derive(Debug)]
pub struct Companion {
    stacks: Stacks,
    /// Its process id; 0 when it has ended.
    id: AtomicU32,
    intermediate: AtomicU32,
    guard: AtomicU32,
    /// The numbers of both under `/proc`, which may be of another pid namespace: by [`Member`].
    numbers: [AtomicU32; 2],
    /// The program's process.
    program: AtomicI32,
    /// Where the id of the program's first thread is, and what it is; 0 where that is unknown.
    exit_word: AtomicUsize,
    exit_id: AtomicU32,
    /// The monitor's answer to the starting thread: 0, or an [`Answer`]. A futex word.
    answer: AtomicU32,
    /// It ends by itself.
    is_over: AtomicBool,
    /// The number of the program's process under `/proc`.
    program_number: AtomicU32,
    /// Whether the program, about to end, has asked the companion to end first: a [`Farewell`].
    farewell: AtomicU32,
    /// The pages of the control block of the thread that has asked.
    last_pages: [AtomicUsize; BLOCK_PAGES],
}

/// What the intermediate is given.
struct Birth {
    companion: &'static Companion,
    entry: extern "C" fn(*mut u8),
    argument: *mut u8,
    /// 0, or an error number.
    errno: AtomicI32,
}

impl Companion {
    /// None is running yet.
    pub fn new(stacks: Stacks) -> Companion {
        Companion {
            stacks,
            id: AtomicU32::new(0),
            intermediate: AtomicU32::new(0),
            guard: AtomicU32::new(0),
            numbers: Default::default(),
            program: AtomicI32::new(0),
            exit_word: AtomicUsize::new(0),
            exit_id: AtomicU32::new(0),
            answer: AtomicU32::new(0),
            is_over: AtomicBool::new(false),
            program_number: AtomicU32::new(0),
            farewell: AtomicU32::new(Farewell::None as u32),
            last_pages: Default::default(),
        }
    }

    /// Starts the companion of the calling process in `entry`, which must not return.
    /// `is_subreaper`: the calling process adopts orphans.
    ///
    /// # Safety
    /// `entry` may be called with `argument` in a process that shares the memory. No other thread
    /// calls this.
    pub unsafe fn start(
        &'static self,
        entry: extern "C" fn(*mut u8),
        argument: *mut u8,
        adoption: Adoption,
    ) -> Result<(), Errno> {
        let Companion {
            program,
            exit_word,
            exit_id,
            is_over,
            guard,
            numbers,
            farewell,
            // Set before it is asked to end.
            last_pages: _,
            // Kept: stacks are used again.
            stacks: _,
            // Set when the process is made.
            id: _,
            intermediate: _,
            // Kept: `expect_answer` has reset it.
            answer: _,
            // The monitor notes it before it answers.
            program_number: _,
        } = self;
        let process = rustix::process::getpid();
        program.store(process.as_raw_nonzero().get(), Ordering::Relaxed);
        let (address, thread) = thread_control_block::own_id_word().unwrap_or((0, 0));
        exit_word.store(address, Ordering::Relaxed);
        exit_id.store(thread, Ordering::Relaxed);
        is_over.store(false, Ordering::Relaxed);
        guard.store(0, Ordering::Relaxed);
        farewell.store(Farewell::None as u32, Ordering::Relaxed);
        numbers.iter().for_each(|number| number.store(0, Ordering::Relaxed));
        // In a pid namespace of the program's, orphans are adopted by processes of the program's.
        if adoption == Adoption::ByProgram || process.is_init() || identity::is_nested() {
            // SAFETY: by the contract; the stack and the word live as long as this, which is
            // static.
            return unsafe { self.spawn(entry, argument) }.map(|_| ());
        }
        let birth = Birth { companion: self, entry, argument, errno: AtomicI32::new(0) };
        // SAFETY: the intermediate ends before `birth` does.
        unsafe { self.run_intermediate(intermediate_entry, std::ptr::from_ref(&birth).cast_mut().cast()) }?;
        // Acquire pairs with the Release in `intermediate_entry`.
        match birth.errno.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }

    /// The starting thread, before it starts the companion.
    pub fn expect_answer(&self) {
        self.answer.store(0, Ordering::Relaxed);
    }

    /// The starting thread: returns the monitor's answer; `None` if the companion ended without
    /// one.
    pub fn wait_for_answer(&self) -> Option<Answer> {
        loop {
            // Acquire pairs with the Release in `answer`: what the monitor has prepared.
            match self.answer.load(Ordering::Acquire) {
                answer if answer == Answer::Ready as u32 => return Some(Answer::Ready),
                answer if answer == Answer::Failed as u32 => return Some(Answer::Failed),
                _ if self.process().is_none() => return None,
                _ => {}
            }
            let _ = futex::wait(&self.answer, futex::Flags::PRIVATE, 0, Some(&timespec(ANSWER_PAUSE)));
        }
    }

    /// The monitor: answers the starting thread.
    pub fn answer(&self, answer: Answer) {
        // Release pairs with the Acquire in `wait_for_answer`.
        self.answer.store(answer as u32, Ordering::Release);
        let _ = futex::wake(&self.answer, futex::Flags::PRIVATE, 1);
    }

    /// Runs a process that shares the memory in `entry`, to its end.
    ///
    /// # Safety
    /// `entry` may be called with `argument` in such a process, and ends it. One thread at a time
    /// calls this.
    pub unsafe fn run_intermediate(
        &'static self,
        entry: extern "C" fn(*mut u8),
        argument: *mut u8,
    ) -> Result<(), Errno> {
        let spec = Spec { kind: Kind::Process, stack: &self.stacks.intermediate, cpu: None, id: &self.intermediate };
        // SAFETY: by the contract; the stack and the word live as long as this, which is static.
        let intermediate = unsafe { thread::spawn(&spec, entry, argument) }?;
        thread::wait_for_exit(intermediate, &self.intermediate);
        Ok(())
    }

    unsafe fn spawn(&'static self, entry: extern "C" fn(*mut u8), argument: *mut u8) -> Result<Pid, Errno> {
        let spec = Spec { kind: Kind::Process, stack: &self.stacks.companion, cpu: None, id: &self.id };
        // SAFETY: by the caller's contract.
        unsafe { thread::spawn(&spec, entry, argument) }
    }

    /// The companion: starts the guard in `entry`, which must not return.
    ///
    /// # Safety
    /// As for [`Companion::start`]; no guard is running.
    pub unsafe fn start_guard(&'static self, entry: extern "C" fn(*mut u8), argument: *mut u8) -> Result<(), Errno> {
        let spec = Spec { kind: Kind::ProcessOfSameFiles, stack: &self.stacks.guard, cpu: None, id: &self.guard };
        // SAFETY: by the contract.
        unsafe { thread::spawn(&spec, entry, argument) }.map(|_| ())
    }

    /// The companion, at its end: ends the guard, so that no process of the program's adopts it and
    /// is told of its end.
    pub fn end_guard(&self) {
        const WAIT_FOR_ALL_KINDS: usize = 0x4000_0000;
        let Some(guard) = self.guard() else { return };
        let _ = rustix::process::kill_process(guard, rustix::process::Signal::KILL);
        let (number, guard) = (linux_raw_sys::general::__NR_wait4 as usize, guard.as_raw_nonzero().get() as usize);
        // SAFETY: waits for a child, and writes nothing.
        unsafe { thread::syscall4(number, guard, 0, WAIT_FOR_ALL_KINDS, 0) };
    }

    /// The companion's process; `None` when it has ended.
    pub fn process(&self) -> Option<Pid> {
        // Acquire pairs with the kernel's clearing of the word: the companion has ended.
        Pid::from_raw(self.id.load(Ordering::Acquire) as i32)
    }

    /// The guard's, likewise.
    pub fn guard(&self) -> Option<Pid> {
        // Acquire pairs with the kernel's clearing of the word: the guard has ended.
        Pid::from_raw(self.guard.load(Ordering::Acquire) as i32)
    }

    /// The program's process. (It may have ended.)
    pub fn program(&self) -> Pid {
        // There is one from the start of the companion on.
        Pid::from_raw(self.program.load(Ordering::Relaxed)).unwrap_or(Pid::INIT)
    }

    /// The program's process has this number under `/proc`, which may be of another pid namespace.
    pub fn note_program_number(&self, number: u32) {
        self.program_number.store(number, Ordering::Relaxed);
    }

    /// That number.
    pub fn program_number(&self) -> u32 {
        self.program_number.load(Ordering::Relaxed)
    }

    /// Process `member`, which calls this, has this number under `/proc`.
    pub fn note_number(&self, member: Member, number: Option<u32>) {
        self.numbers[member as usize].store(number.unwrap_or(0), Ordering::Relaxed);
    }

    /// The numbers of the agent's processes under `/proc`.
    pub fn numbers(&self) -> [u32; 4] {
        let [companion, guard] = &self.numbers;
        [companion, guard, &self.id, &self.guard].map(|number| number.load(Ordering::Relaxed))
    }

    /// The program's only thread, about to end: asks the companion to end, and waits until it has
    /// ended or stays, until `until_ns` of the monotonic clock. Returns whether it has ended.
    pub fn ask_to_end(&self, wake_monitor: impl FnOnce(), until_ns: u64) -> bool {
        let pages = thread_control_block::pages(&thread_control_block::own());
        self.last_pages.iter().zip(pages).for_each(|(last, page)| last.store(page, Ordering::Relaxed));
        // Release pairs with the Acquire in `is_asked_to_end`: the pages are there.
        self.farewell.store(Farewell::Asked as u32, Ordering::Release);
        wake_monitor();
        loop {
            // Acquire pairs with the kernel's clearing of the word: the companion has ended.
            let id = self.id.load(Ordering::Acquire);
            if id == 0 {
                return true;
            }
            let left_ns = until_ns.saturating_sub(now_ns());
            if left_ns == 0 || self.farewell.load(Ordering::Relaxed) != Farewell::Asked as u32 {
                return false;
            }
            let time = ANSWER_PAUSE.min(Duration::from_nanos(left_ns));
            // The kernel wakes by the shared kind of futex.
            let _ = futex::wait(&self.id, futex::Flags::empty(), id, Some(&timespec(time)));
        }
    }

    /// The monitor: whether the program waits for the end of the companion.
    pub fn is_asked_to_end(&self) -> bool {
        // Acquire pairs with the Release in `ask_to_end`.
        self.farewell.load(Ordering::Acquire) == Farewell::Asked as u32
    }

    /// The monitor, when it is asked to end: where the kernel reads and writes until the end of the
    /// thread (rseq(2), robust locks).
    pub fn last_pages(&self) -> [usize; BLOCK_PAGES] {
        std::array::from_fn(|index| self.last_pages[index].load(Ordering::Relaxed))
    }

    /// The monitor: does not end, because others use the memory.
    pub fn stays(&self) {
        self.farewell.store(Farewell::Stays as u32, Ordering::Relaxed);
        let _ = futex::wake(&self.id, futex::Flags::empty(), 1);
    }

    /// The companion is about to end by itself.
    pub fn is_ending(&self) {
        // Release pairs with the Acquire of the guard, in `ends_by_itself`.
        self.is_over.store(true, Ordering::Release);
    }

    /// Whether it ends by itself.
    pub fn ends_by_itself(&self) -> bool {
        // Acquire pairs with the Release in `is_ending`.
        self.is_over.load(Ordering::Acquire)
    }

    /// The monitor: the program's first thread has ended, and others have not.
    pub fn forget_exit_word(&self) {
        self.exit_word.store(0, Ordering::Relaxed);
    }

    /// The monitor: sleeps until `kick` is not `kicks` any more, or the exit word is cleared, or
    /// for `time`.
    pub fn doze(&self, kick: &sync::AtomicU32, kicks: u32, time: Duration) -> Woken {
        let address = self.exit_word.load(Ordering::Relaxed);
        if address == 0 || !filters::allow(Call::FutexWaitv) {
            word_wait::wait_for(kick, kicks, time);
            return Woken::Called;
        }
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

/// Whether a companion that has been started can work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Answer {
    /// It works.
    Ready = 1,
    /// It cannot, and has said why.
    Failed = 2,
}

/// What the program and its companion have agreed on about the program's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
enum Farewell {
    /// Nothing.
    None,
    /// The program is about to end, and waits for the companion's end.
    Asked,
    /// The companion ends later.
    Stays,
}

/// One of the agent's processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Member {
    /// The companion.
    Companion,
    /// Its guard.
    Guard,
}

/// Who adopts an orphan of the calling process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adoption {
    /// The supervisor, or another process above the program.
    ByOthers,
    /// The program itself.
    ByProgram,
}

extern "C" fn intermediate_entry(argument: *mut u8) {
    // SAFETY: `start` passes what it keeps until this process has ended.
    let birth = unsafe { &*argument.cast::<Birth>() };
    // SAFETY: by the contract of `start`.
    if let Err(errno) = unsafe { birth.companion.spawn(birth.entry, birth.argument) } {
        // Release pairs with the Acquire in `start`.
        birth.errno.store(errno.raw_os_error(), Ordering::Release);
    }
    thread::exit_thread();
}
