//! Tests of forks by the patched C library of this process: the hooks run around each, and nothing
//! else changes.

use foliomem_sys::interception::fork_call::ForkOutcome;
use foliomem_sys::interception::patches::{self, ForkHooks};
use foliomem_sys::region::Region;
use foliomem_sys::thread_control_block::BLOCK_PAGES;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock};

/// Hooks that count their calls. Each process has its own counts.
struct Counting {
    stack: Region,
    before: AtomicU32,
    parent: AtomicU32,
    failed: AtomicU32,
    child: AtomicU32,
    /// The memory that the announced threads need. It never grows: a hook that waits for the
    /// allocator waits for a thread that forks, has locked the allocator and waits for the hook.
    words: Mutex<Vec<Range<usize>>>,
}

/// More threads than these tests make.
const THREADS_MAX: usize = 4096;

impl ForkHooks for Counting {
    fn stack(&self) -> &Region {
        &self.stack
    }

    fn before(&'static self, _needed: [usize; BLOCK_PAGES]) {
        let here = 0u8;
        let stack = self.stack.start()..self.stack.start() + self.stack.len();
        assert!(stack.contains(&(&raw const here).addr()));
        assert_eq!(mask() | SIGSYS_BIT | UNBLOCKABLE, u64::MAX);
        self.before.fetch_add(1, SeqCst);
    }

    fn parent_after(&'static self, outcome: ForkOutcome) {
        let count = if outcome == ForkOutcome::Forked { &self.parent } else { &self.failed };
        count.fetch_add(1, SeqCst);
    }

    fn child_after(&'static self, own: rustix::process::Pid) {
        assert_eq!(own, rustix::process::getpid());
        self.child.fetch_add(1, SeqCst);
    }

    fn thread_starts(&'static self, words: Range<usize>) {
        let mut all = self.words.lock().unwrap();
        assert!(all.len() < all.capacity(), "a hook must not allocate");
        all.push(words);
    }
}

/// SIGSYS in a signal mask.
const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);
/// The signals that cannot be blocked, in a signal mask.
const UNBLOCKABLE: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);

/// Patches the C library of this process, and returns the hooks.
fn hooks() -> &'static Counting {
    static HOOKS: OnceLock<Counting> = OnceLock::new();
    static INSTALLED: OnceLock<()> = OnceLock::new();
    let hooks = HOOKS.get_or_init(|| Counting {
        stack: Region::reserve(256 << 10).unwrap(),
        before: AtomicU32::new(0),
        parent: AtomicU32::new(0),
        failed: AtomicU32::new(0),
        child: AtomicU32::new(0),
        words: Mutex::new(Vec::with_capacity(THREADS_MAX)),
    });
    INSTALLED.get_or_init(|| {
        patches::install();
        assert!(patches::COVERED.load(SeqCst), "the C library of this machine is not recognised");
        patches::activate(hooks);
    });
    hooks
}

/// Returns the signal mask of the calling thread, by a system call.
fn mask() -> u64 {
    let mut mask = 0u64;
    // SAFETY: the system call only writes the mask.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, 0, &raw mut mask, 8) };
    mask
}

/// Waits for `child` and returns its exit code, or 128 plus the number of the signal that ended it.
fn wait(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: waitpid(2) only writes the status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) }
}

/// Ends the child of a test without running code of the test harness.
fn leave(is_right: bool) -> ! {
    // SAFETY: _exit(2) ends the process and does not return.
    unsafe { libc::_exit(if is_right { 0 } else { 1 }) }
}

/// Forks with `fork`, and checks that the hooks run once in the child and that the mask stays.
fn check(fork: impl Fn() -> i32) {
    let (hooks, mask_before) = (hooks(), mask());
    let (before, children) = (hooks.before.load(SeqCst), hooks.child.load(SeqCst));
    match fork() {
        0 => leave(hooks.child.load(SeqCst) == children + 1 && mask() == mask_before),
        child => {
            assert!(child > 0, "{}", std::io::Error::last_os_error());
            assert_eq!(wait(child), 0);
            assert!(hooks.before.load(SeqCst) > before);
            assert_eq!(mask(), mask_before);
        }
    }
}

fn fork() -> i32 {
    // SAFETY: the children of these tests call only functions that are safe after a fork.
    unsafe { libc::fork() }
}

#[test]
fn hooks_run_around_forks_of_several_threads() {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    check(fork);
                    // SAFETY: the child calls only functions that are safe after a fork.
                    check(|| unsafe { libc::syscall(libc::SYS_fork) as i32 });
                    // SAFETY: the child calls only functions that are safe after a fork.
                    check(|| unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32 });
                }
            });
        }
    });
}

#[test]
fn the_mask_of_a_thread_that_blocks_sigsys_stays() {
    std::thread::spawn(|| {
        // SAFETY: the calls only read and write the set, and block all signals of this thread.
        unsafe {
            let mut all = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        }
        assert_ne!(mask() & SIGSYS_BIT, 0);
        check(fork);
    })
    .join()
    .unwrap();
}

#[test]
fn a_child_runs_on_its_own_stack() {
    extern "C" fn body(stack: *mut libc::c_void) -> i32 {
        let here = 0u8;
        i32::from(!(stack.addr()..stack.addr() + (64 << 10)).contains(&(&raw const here).addr()))
    }
    let stack = Region::reserve(64 << 10).unwrap();
    let (start, top) = (stack.start(), std::ptr::with_exposed_provenance_mut(stack.start() + stack.len()));
    hooks();
    // SAFETY: the child runs on its copy of the stack, and calls only functions that are safe after
    // a fork.
    let child = unsafe { libc::clone(body, top, libc::SIGCHLD, std::ptr::without_provenance_mut(start)) };
    assert_eq!(wait(child), 0);
}

#[test]
fn a_child_forks_again_and_the_parent_starts_threads_and_programs() {
    hooks();
    match fork() {
        0 => match fork() {
            0 => leave(true),
            grandchild => leave(grandchild > 0 && wait(grandchild) == 0),
        },
        child => assert_eq!(wait(child), 0),
    }
    assert!(std::process::Command::new("true").status().unwrap().success());
    assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
}

#[test]
fn invalid_arguments_get_the_errors_of_the_kernel() {
    hooks();
    let clone3 = |arguments: *const u64, bytes: usize| {
        // SAFETY: the kernel refuses the arguments of all these calls.
        let result = unsafe { libc::syscall(libc::SYS_clone3, arguments, bytes) };
        if result == 0 {
            leave(false);
        }
        (result, std::io::Error::last_os_error().raw_os_error())
    };
    let mut arguments = [0u64; 64];
    arguments[4] = libc::SIGCHLD as u64;
    let all = arguments.as_ptr();
    assert_eq!(clone3(std::ptr::without_provenance(8), 88), (-1, Some(libc::EFAULT)));
    assert_eq!(clone3(all, 63), (-1, Some(libc::EINVAL)), "smaller than the first version");
    assert_eq!(clone3(all, 4097), (-1, Some(libc::E2BIG)));
    let mut stack_without_size = arguments;
    stack_without_size[5] = 4096;
    assert_eq!(clone3(stack_without_size.as_ptr(), 88), (-1, Some(libc::EINVAL)));
    let mut unknown = arguments;
    unknown[40] = 1;
    assert_eq!(clone3(unknown.as_ptr(), 512), (-1, Some(libc::E2BIG)));
    let mut bad_tids = arguments;
    (bad_tids[8], bad_tids[9]) = (8, 1);
    assert_eq!(clone3(bad_tids.as_ptr(), 88), (-1, Some(libc::EFAULT)));
    let read_only: &'static [u64; 512] = &[0; 512];
    for address in [0, 8, std::ptr::from_ref(read_only).addr() as u64] {
        let mut bad_pidfd = arguments;
        (bad_pidfd[0], bad_pidfd[1]) = (libc::CLONE_PIDFD as u64, address);
        assert_eq!(clone3(bad_pidfd.as_ptr(), 88), (-1, Some(libc::EFAULT)), "pidfd at {address:#x}");
    }
    let mut bad_flags = arguments;
    bad_flags[0] = libc::CLONE_THREAD as u64;
    let failed = hooks().failed.load(SeqCst);
    assert_eq!(clone3(bad_flags.as_ptr(), 88), (-1, Some(libc::EINVAL)));
    assert!(hooks().failed.load(SeqCst) > failed, "the kernel has refused the fork");
    // The kernel ignores fields that it does not know if they are 0.
    // SAFETY: the child calls only functions that are safe after a fork.
    check(|| unsafe { libc::syscall(libc::SYS_clone3, all, 512) as i32 });
}

#[test]
fn vector_registers_survive_a_fork() {
    const PATTERN: u64 = 0x0123_4567_89ab_cdef;
    hooks();
    // SAFETY: dlsym(3) only looks up the name.
    let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"syscall".as_ptr()) };
    let (result, vector): (i64, u64);
    // SAFETY: this calls a function of the C library with one argument, on an aligned stack below
    // the red zone, and restores the stack pointer.
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "sub rsp, 144",
            "and rsp, -16",
            "movq xmm7, r14",
            "call r13",
            "movq r14, xmm7",
            "mov rsp, r12",
            in("r13") function, inout("r14") PATTERN => vector, in("rdi") libc::SYS_fork, lateout("rax") result,
            out("r12") _, clobber_abi("C"),
        );
    }
    match result {
        0 => leave(vector == PATTERN),
        child => {
            assert_eq!(vector, PATTERN);
            assert_eq!(wait(child as i32), 0);
        }
    }
}

#[test]
fn new_threads_are_announced_with_what_the_kernel_writes_to() {
    let hooks = hooks();
    let own = std::thread::spawn(foliomem_sys::thread_control_block::own).join().unwrap();
    assert!(hooks.words.lock().unwrap().contains(&own), "a thread by pthread_create(3)");

    /// Ends the calling thread, which has no control block of its own.
    extern "C" fn end(_unused: *mut libc::c_void) -> i32 {
        // SAFETY: exit(2) ends the thread. The C library's function would use its control block.
        unsafe { std::arch::asm!("syscall", in("rax") libc::SYS_exit, in("rdi") 0, options(noreturn)) }
    }
    let (mut stack, word) = (vec![0u128; 4096], AtomicU32::new(1));
    let flags = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
    // SAFETY: the thread uses the end of the stack, which lives until the word is cleared.
    let made = unsafe {
        let top = stack.as_mut_ptr_range().end.cast();
        let flags = flags | libc::CLONE_SYSVSEM | libc::CLONE_CHILD_CLEARTID;
        libc::clone(end, top, flags, std::ptr::null_mut(), 0, 0, word.as_ptr())
    };
    assert!(made > 0, "{}", std::io::Error::last_os_error());
    let address = word.as_ptr().addr();
    assert!(hooks.words.lock().unwrap().contains(&(address..address + 4)), "a thread by clone(2)");
    while word.load(SeqCst) != 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
