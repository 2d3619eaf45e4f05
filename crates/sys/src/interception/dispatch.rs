//! Runs the hooks around the system call that forks if the C library is not patched.
//!
//! This is the fallback if [`crate::interception::patches`] does not recognise the C library or the
//! CPU, or cannot write code. It intercepts only forks by functions that the agent's hooks replace,
//! and uses the program's stack.
//!
//! `pthread_atfork` is too early and too late: between its handlers and the system call, the C
//! library touches the program's heap. The child cannot do that before its memory is registered
//! again. So while a function that forks runs, the kernel dispatches its system calls to a SIGSYS
//! handler (Syscall User Dispatch, Linux 5.11, prctl(2)), which makes them for the program. The
//! handler makes the fork on a stack of the agent, between the hooks, with all signals blocked.
//! During the fork nothing touches memory of the program, not even the kernel: thread ids are
//! stored afterwards. The trap ends with the fork; the child does not inherit the dispatch.
//!
//! A `pthread_atfork` handler that starts a thread or a program ends the trap early. Then the child
//! of the fork is not managed: when it touches managed memory it gets SIGSEGV instead of wrong
//! data.
//!
//! Lock order: `FORKING` comes before the gate. It is held over the fork, and the child drops its
//! copy.

use crate::interception::fork_call::{CallKind, ForkCall, ForkHooks};
use crate::thread_control_block::{self, BLOCK_PAGES};
use linux_raw_sys::general as raw;
use linux_raw_sys::prctl::{PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_OFF, PR_SYS_DISPATCH_ON};
use std::arch::{global_asm, naked_asm};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, Ordering};

/// Maximum number of threads that fork at the same time; more threads wait.
const TRAPS: usize = 16;
/// `si_code` of a SIGSYS of Syscall User Dispatch.
const SYS_USER_DISPATCH: i32 = raw::SYS_USER_DISPATCH as i32;
/// SIGSYS in a signal mask.
const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);
/// Value of a selector: the kernel makes the system calls.
const SELECTOR_ALLOW: u8 = 0;
/// Value of a selector: the kernel dispatches the system calls.
const SELECTOR_BLOCK: u8 = 1;

/// The state of a thread whose system calls are dispatched.
struct Trap {
    /// Thread id of the owner; 0 if the trap is free.
    thread: AtomicU32,
    /// The selector, which the kernel reads at each system call of the thread.
    selector: AtomicU8,
    /// Whether SIGSYS is blocked from the program's view. In fact it is never blocked.
    sigsys_blocked: AtomicBool,
    /// Address of the reference to the hooks, on the thread's stack.
    hooks: AtomicPtr<&'static dyn ForkHooks>,
}

impl Trap {
    /// Makes a free trap.
    const fn new() -> Trap {
        Trap {
            thread: AtomicU32::new(0),
            selector: AtomicU8::new(SELECTOR_ALLOW),
            sigsys_blocked: AtomicBool::new(false),
            hooks: AtomicPtr::new(std::ptr::null_mut()),
        }
    }
}

/// The traps. A thread owns at most one.
static ALL_TRAPS: [Trap; TRAPS] = [const { Trap::new() }; TRAPS];

/// The kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// The state of SIGSYS: how many traps need the agent's action, and the program's action.
struct Disposition {
    /// Number of armed traps. The agent's action is set while this is not 0.
    traps: u32,
    /// The program's action, while the agent's action is set.
    program: Action,
}

/// The lock of this module. It protects the action of SIGSYS and is held over a fork.
static FORKING: Mutex<Disposition> =
    Mutex::new(Disposition { traps: 0, program: Action { handler: 0, flags: 0, restorer: 0, mask: 0 } });

/// Takes the lock.
fn forking() -> std::sync::MutexGuard<'static, Disposition> {
    // A panic aborts: the lock cannot be poisoned.
    FORKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

global_asm!(
    // The system calls between the two outer labels are the only ones that are never dispatched.
    ".hidden foliomem_undispatched_start",
    ".hidden foliomem_undispatched_syscall",
    ".hidden foliomem_undispatched_sigreturn",
    ".hidden foliomem_undispatched_end",
    ".globl foliomem_undispatched_start",
    ".globl foliomem_undispatched_syscall",
    ".globl foliomem_undispatched_sigreturn",
    ".globl foliomem_undispatched_end",
    "foliomem_undispatched_start:",
    "foliomem_undispatched_syscall:",
    "mov rax, rdi",
    "mov r11, rsi",
    "mov rdi, [r11]",
    "mov rsi, [r11 + 8]",
    "mov rdx, [r11 + 16]",
    "mov r10, [r11 + 24]",
    "mov r8, [r11 + 32]",
    "mov r9, [r11 + 40]",
    "syscall",
    "ret",
    "foliomem_undispatched_sigreturn:",
    "mov eax, 15",
    "syscall",
    "ud2",
    "foliomem_undispatched_end:",
);

unsafe extern "C" {
    static foliomem_undispatched_start: u8;
    static foliomem_undispatched_end: u8;
    fn foliomem_undispatched_syscall(number: usize, arguments: *const [usize; 6]) -> isize;
    fn foliomem_undispatched_sigreturn();
}

/// Makes a system call that is never dispatched, and returns its raw result.
///
/// # Safety
/// The caller keeps the contract of the system call.
unsafe fn undispatched(number: u32, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller keeps the contract of the call.
    unsafe { foliomem_undispatched_syscall(number as usize, &raw const arguments) }
}

/// Calls `real`, and runs `hooks` around the fork if `real` forks.
pub fn trap_forks<R>(real: impl FnOnce() -> R, mut hooks: &'static dyn ForkHooks) -> R {
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    if trap_of(thread).is_some() {
        // This fork is inside of another one, whose trap is armed.
        return real();
    }
    let Some(trap) = arm(thread, &raw mut hooks) else { return real() };
    let result = real();
    // If `real` has forked, the fork has already disarmed and freed the trap.
    if trap.thread.load(Ordering::Relaxed) == thread {
        trap.selector.store(SELECTOR_ALLOW, Ordering::Relaxed);
        disarm(trap, &mut forking(), Dispatching::On);
        if trap.sigsys_blocked.load(Ordering::Relaxed) {
            change_mask(libc::SIG_BLOCK, SIGSYS_BIT);
        }
        // Release pairs with the Acquire in `arm` of the next thread that claims the trap.
        trap.thread.store(0, Ordering::Release);
    }
    result
}

/// Returns whether the kernel supports Syscall User Dispatch.
pub fn is_supported() -> bool {
    dispatch(PR_SYS_DISPATCH_OFF, 0, 0, 0) == 0
}

/// Returns the trap of `thread`.
fn trap_of(thread: u32) -> Option<&'static Trap> {
    ALL_TRAPS.iter().find(|trap| trap.thread.load(Ordering::Relaxed) == thread)
}

/// Arms a trap for the calling thread. Returns `None` if the kernel refuses.
fn arm(thread: u32, hooks: *mut &'static dyn ForkHooks) -> Option<&'static Trap> {
    // Acquire pairs with the Release of the thread that owned the trap before.
    let claim = |trap: &&Trap| trap.thread.compare_exchange(0, thread, Ordering::Acquire, Ordering::Relaxed).is_ok();
    let trap = loop {
        match ALL_TRAPS.iter().find(claim) {
            Some(trap) => break trap,
            None => foliomem_sync::back_off(),
        }
    };
    trap.hooks.store(hooks, Ordering::Relaxed);
    trap.selector.store(SELECTOR_ALLOW, Ordering::Relaxed);
    let before = change_mask(libc::SIG_UNBLOCK, SIGSYS_BIT);
    trap.sigsys_blocked.store(before & SIGSYS_BIT != 0, Ordering::Relaxed);
    {
        let mut disposition = forking();
        if disposition.traps == 0 {
            let ours = Action {
                handler: on_sigsys as *const () as usize,
                flags: libc::SA_SIGINFO as u64 | libc::SA_RESTART as u64 | u64::from(raw::SA_RESTORER),
                restorer: foliomem_undispatched_sigreturn as *const () as usize,
                mask: u64::MAX,
            };
            disposition.program = set_action(&ours);
        }
        disposition.traps += 1;
    }
    let (start, end) = (&raw const foliomem_undispatched_start, &raw const foliomem_undispatched_end);
    let selector = trap.selector.as_ptr().expose_provenance();
    let range = [start.expose_provenance(), end.addr() - start.addr()];
    if dispatch(PR_SYS_DISPATCH_ON, range[0], range[1], selector) < 0 {
        disarm(trap, &mut forking(), Dispatching::Off);
        // Release pairs with the Acquire of the next thread that claims the trap.
        trap.thread.store(0, Ordering::Release);
        return None;
    }
    // The kernel reads the selector in this thread, so no Acquire pairs with this Release. It keeps
    // the compiler from moving earlier writes behind it.
    trap.selector.store(SELECTOR_BLOCK, Ordering::Release);
    Some(trap)
}

/// Whether the kernel dispatches the calling thread's system calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Dispatching {
    On,
    Off,
}

/// Disarms the calling thread's trap. The caller frees the trap.
fn disarm(trap: &Trap, disposition: &mut Disposition, dispatching: Dispatching) {
    trap.selector.store(SELECTOR_ALLOW, Ordering::Relaxed);
    if dispatching == Dispatching::On {
        dispatch(PR_SYS_DISPATCH_OFF, 0, 0, 0);
    }
    disposition.traps -= 1;
    if disposition.traps == 0 {
        set_action(&disposition.program);
    }
}

/// Changes the dispatching of the calling thread's system calls. Returns the raw result.
fn dispatch(mode: u32, start: usize, len: usize, selector: usize) -> isize {
    let option = PR_SET_SYSCALL_USER_DISPATCH as usize;
    // SAFETY: the call changes only how this thread's system calls are made. The selector is in
    // `ALL_TRAPS`, which is static.
    unsafe { undispatched(raw::__NR_prctl, [option, mode as usize, start, len, selector, 0]) }
}

/// Sets the action of SIGSYS and returns the previous one.
fn set_action(action: &Action) -> Action {
    let mut before = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };
    let (new, old) = (std::ptr::from_ref(action).expose_provenance(), (&raw mut before).expose_provenance());
    // SAFETY: the kernel reads one action and writes the other, whose masks have 8 bytes. The
    // handler is `on_sigsys` or the program's own.
    unsafe { undispatched(raw::__NR_rt_sigaction, [libc::SIGSYS as usize, new, old, size_of::<u64>(), 0, 0]) };
    before
}

/// Changes the signal mask of the calling thread and returns the previous one.
fn change_mask(how: i32, set: u64) -> u64 {
    let mut before = 0u64;
    let (new, old) = ((&raw const set).expose_provenance(), (&raw mut before).expose_provenance());
    // SAFETY: the kernel reads one word and writes the other.
    unsafe { undispatched(raw::__NR_rt_sigprocmask, [how as usize, new, old, size_of::<u64>(), 0, 0]) };
    before
}

/// The registers of the thread whose system call was dispatched.
struct Registers<'a>(&'a mut libc::ucontext_t);

impl Registers<'_> {
    /// Returns the value of `register` (`REG_*`).
    fn get(&self, register: i32) -> usize {
        self.0.uc_mcontext.gregs[register as usize] as usize
    }

    /// Sets the value of `register` (`REG_*`).
    fn set(&mut self, register: i32, value: usize) {
        self.0.uc_mcontext.gregs[register as usize] = value as i64;
    }

    /// Returns the arguments of the system call.
    fn arguments(&self) -> [usize; 6] {
        [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9]
            .map(|register| self.get(register))
    }

    /// Returns the signal mask that the kernel restores after the handler. The kernel's mask is one
    /// word.
    fn mask(&mut self) -> &mut u64 {
        // SAFETY: the C library's type begins with the kernel's mask, and is aligned to a word.
        unsafe { &mut *(&raw mut self.0.uc_sigmask).cast::<u64>() }
    }
}

/// The SIGSYS handler: makes the dispatched system call.
extern "C" fn on_sigsys(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes both to a handler with SA_SIGINFO, and only this handler uses them.
    let (code, mut registers) = unsafe { ((*info).si_code, Registers(&mut *context)) };
    // SAFETY: gettid(2) takes no arguments.
    let thread = unsafe { undispatched(raw::__NR_gettid, [0; 6]) } as u32;
    let trap = trap_of(thread).filter(|_| code == SYS_USER_DISPATCH);
    let Some(trap) = trap else { return handle_other_sigsys(signal, info, context) };
    trap.selector.store(SELECTOR_ALLOW, Ordering::Relaxed);
    let number = registers.get(libc::REG_RAX) as u32;
    let arguments = registers.arguments();
    match number {
        raw::__NR_rt_sigprocmask => {
            let result = emulate_sigprocmask(trap, &mut registers, arguments);
            registers.set(libc::REG_RAX, result as usize);
        }
        raw::__NR_rt_sigreturn => {
            // A handler of the program returns. It must do so at its stack pointer, by a call that
            // is not dispatched.
            registers.set(libc::REG_RIP, foliomem_undispatched_sigreturn as *const () as usize);
        }
        raw::__NR_fork | raw::__NR_clone | raw::__NR_clone3 | raw::__NR_vfork => {
            match ForkCall::read(number, arguments) {
                CallKind::Fork(call) => return fork_and_disarm(trap, &mut registers, call),
                CallKind::Shared(_) | CallKind::Other => return let_through(trap, &mut registers),
                CallKind::Invalid(errno) => registers.set(libc::REG_RAX, -errno.raw_os_error() as isize as usize),
            }
        }
        _ => {
            // SAFETY: the program makes this call itself, with these arguments.
            let result = unsafe { undispatched(number, arguments) };
            registers.set(libc::REG_RAX, result as usize);
        }
    }
    trap.selector.store(SELECTOR_BLOCK, Ordering::Relaxed);
}

/// Repeats the system call without dispatching. The call makes a thread or a child that shares the
/// memory, which only the calling thread itself can do.
fn let_through(trap: &Trap, registers: &mut Registers<'_>) {
    const SYSCALL_BYTES: usize = 2;
    registers.set(libc::REG_RIP, registers.get(libc::REG_RIP) - SYSCALL_BYTES);
    end_trap(trap, registers, &mut forking());
}

/// Disarms a trap from inside the handler.
fn end_trap(trap: &Trap, registers: &mut Registers<'_>, disposition: &mut Disposition) {
    disarm(trap, disposition, Dispatching::On);
    if trap.sigsys_blocked.load(Ordering::Relaxed) {
        *registers.mask() |= SIGSYS_BIT;
    }
    // Release pairs with the Acquire in `arm` of the next thread that claims the trap.
    trap.thread.store(0, Ordering::Release);
}

/// Handles a SIGSYS that no trap has caused: follows the program's action.
fn handle_other_sigsys(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    let program = forking().program;
    match program.handler {
        libc::SIG_IGN => {}
        libc::SIG_DFL => {
            set_action(&program);
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::SYS);
        }
        handler => {
            // SAFETY: `handler` is the program's. Without SA_SIGINFO it uses the first argument
            // only.
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::ucontext_t) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
    }
}

/// Emulates rt_sigprocmask(2): changes the mask that the kernel restores after the handler. SIGSYS
/// is never blocked in it, because a blocked SIGSYS of the dispatcher kills the process.
fn emulate_sigprocmask(trap: &Trap, registers: &mut Registers<'_>, arguments: [usize; 6]) -> isize {
    let [how, set, before, size, ..] = arguments;
    if size != size_of::<u64>() {
        return -(libc::EINVAL as isize);
    }
    let blocked = if trap.sigsys_blocked.load(Ordering::Relaxed) { SIGSYS_BIT } else { 0 };
    let old = (*registers.mask() & !SIGSYS_BIT) | blocked;
    if set != 0 {
        // SAFETY: the program passes the address of a set to its own system call.
        let set = unsafe { std::ptr::with_exposed_provenance::<u64>(set).read_unaligned() };
        let new = match how as i32 {
            libc::SIG_BLOCK => old | set,
            libc::SIG_UNBLOCK => old & !set,
            libc::SIG_SETMASK => set,
            _ => return -(libc::EINVAL as isize),
        };
        trap.sigsys_blocked.store(new & SIGSYS_BIT != 0, Ordering::Relaxed);
        *registers.mask() = new & !SIGSYS_BIT;
    }
    if before != 0 {
        // SAFETY: the program passes the address for a set to its own system call.
        unsafe { std::ptr::with_exposed_provenance_mut::<u64>(before).write_unaligned(old) };
    }
    0
}

/// The argument of [`fork_between_hooks`].
struct OnStack {
    call: ForkCall,
    hooks: &'static dyn ForkHooks,
    needed: [usize; BLOCK_PAGES],
}

/// Forks between the hooks. The trap is over in parent and child.
fn fork_and_disarm(trap: &'static Trap, registers: &mut Registers<'_>, call: ForkCall) {
    let mut disposition = forking();
    // SAFETY: `trap_forks` stored the address of its own variable. This handler runs inside a
    // system call that `trap_forks` leads to, so the variable still exists.
    let hooks = unsafe { *trap.hooks.load(Ordering::Relaxed) };
    let stack = hooks.stack();
    let mut on_stack = OnStack { call, hooks, needed: thread_control_block::pages(&thread_control_block::own()) };
    let argument = (&raw mut on_stack).cast();
    // SAFETY: the stack is the agent's, for one thread at a time, and this thread holds the lock.
    // The function uses `on_stack` only while the program's memory may be touched.
    unsafe { call_on_stack(stack.start() + stack.len(), fork_between_hooks, argument) };
    let call = on_stack.call;
    if call.result() == 0 {
        // The child has only this thread. The kernel does not dispatch its system calls.
        for other in ALL_TRAPS.iter().filter(|other| !std::ptr::eq(*other, trap)) {
            other.thread.store(0, Ordering::Relaxed);
        }
        disposition.traps = 1;
        if let Some(stack) = call.child_stack() {
            registers.set(libc::REG_RSP, stack);
        }
    }
    end_trap(trap, registers, &mut disposition);
    call.write_results();
    registers.set(libc::REG_RAX, call.result() as usize);
}

/// Makes the fork, on the agent's stack.
extern "C" fn fork_between_hooks(on_stack: *mut u8) {
    let on_stack = on_stack.cast::<OnStack>();
    // SAFETY: `fork_and_disarm` passes an `OnStack`. This makes a copy, because the original lies
    // in the program's memory.
    let (mut call, hooks, needed) = unsafe { ((*on_stack).call, (*on_stack).hooks, (*on_stack).needed) };
    call.make(hooks, needed, undispatched);
    // SAFETY: `fork_and_disarm` passes an `OnStack`, and faults of the program are served again.
    unsafe { (*on_stack).call = call };
}

/// Calls `function` with `argument` on the stack that ends at `top`.
#[unsafe(naked)]
unsafe extern "C" fn call_on_stack(top: usize, function: extern "C" fn(*mut u8), argument: *mut u8) {
    naked_asm!("push rbp", "mov rbp, rsp", "mov rsp, rdi", "mov rdi, rdx", "call rsi", "mov rsp, rbp", "pop rbp", "ret",)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interception::fork_call::ForkOutcome;
    use crate::region::Region;
    use std::ops::Range;
    use std::sync::OnceLock;

    /// Hooks that count their calls.
    struct Counting {
        stack: Region,
        before: AtomicU32,
        parent: AtomicU32,
        /// Number of the children's hooks that ran, in this process and its ancestors.
        child: AtomicU32,
    }

    impl ForkHooks for Counting {
        fn stack(&self) -> &Region {
            &self.stack
        }

        fn before(&'static self, needed: [usize; BLOCK_PAGES]) {
            assert_eq!(needed, thread_control_block::pages(&thread_control_block::own()));
            self.before.fetch_add(1, Ordering::SeqCst);
        }

        fn parent_after(&'static self, outcome: ForkOutcome) {
            assert_eq!(outcome, ForkOutcome::Forked);
            self.parent.fetch_add(1, Ordering::SeqCst);
        }

        fn child_after(&'static self, own: rustix::process::Pid) {
            assert_eq!(own, rustix::process::getpid());
            self.child.fetch_add(1, Ordering::SeqCst);
        }

        fn thread_starts(&'static self, _words: Range<usize>) {
            unreachable!("only patched calls announce threads");
        }
    }

    fn hooks() -> &'static Counting {
        static HOOKS: OnceLock<Counting> = OnceLock::new();
        HOOKS.get_or_init(|| Counting {
            stack: Region::reserve(256 << 10).unwrap(),
            before: AtomicU32::new(0),
            parent: AtomicU32::new(0),
            child: AtomicU32::new(0),
        })
    }

    /// Waits for `child` and returns its exit code, or 128 plus the number of the signal that ended
    /// it.
    fn wait(child: i32) -> i32 {
        let mut status = 0;
        // SAFETY: waitpid(2) only writes the status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) }
    }

    fn sigsys_handler() -> usize {
        // SAFETY: sigaction(2) only writes the action.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGSYS, std::ptr::null(), &raw mut action);
            action.sa_sigaction
        }
    }

    fn mask() -> u64 {
        change_mask(libc::SIG_BLOCK, 0)
    }

    /// Leaves the child of a test without running anything of the test harness.
    fn leave(is_right: bool) -> ! {
        // SAFETY: _exit(2) ends the process and does not return.
        unsafe { libc::_exit(if is_right { 0 } else { 1 }) }
    }

    fn fork_once() {
        let before = mask();
        let (ran_before, children) = (hooks().before.load(Ordering::SeqCst), hooks().child.load(Ordering::SeqCst));
        // SAFETY: the child calls only functions that are safe after a fork.
        match trap_forks(|| unsafe { libc::fork() }, hooks()) {
            0 => {
                let hooked = hooks().child.load(Ordering::SeqCst) == children + 1;
                // SAFETY: both calls only return ids.
                let ids = unsafe { libc::getpid() == libc::syscall(libc::SYS_getpid) as i32 };
                let unarmed = trap_of(rustix::thread::gettid().as_raw_nonzero().get() as u32).is_none();
                leave(hooked && ids && unarmed && mask() == before && sigsys_handler() == libc::SIG_DFL)
            }
            child => {
                assert!(child > 0);
                assert_eq!(wait(child), 0);
                assert!(hooks().before.load(Ordering::SeqCst) > ran_before);
                assert_eq!(mask(), before);
            }
        }
    }

    #[test]
    fn hooks_run_in_parent_and_child_and_leave_no_trace() {
        for _ in 0..20 {
            fork_once();
        }
        change_mask(libc::SIG_BLOCK, SIGSYS_BIT);
        fork_once();
        assert_ne!(mask() & SIGSYS_BIT, 0);
        change_mask(libc::SIG_UNBLOCK, SIGSYS_BIT);
    }

    #[test]
    fn threads_fork_at_the_same_time() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..25).for_each(|_| fork_once()));
            }
        });
    }

    #[test]
    fn a_child_forks_again() {
        // SAFETY: the child calls only functions that are safe after a fork.
        match trap_forks(|| unsafe { libc::fork() }, hooks()) {
            // SAFETY: the child calls only functions that are safe after a fork.
            0 => match trap_forks(|| unsafe { libc::fork() }, hooks()) {
                0 => leave(true),
                grandchild => leave(grandchild > 0 && wait(grandchild) == 0),
            },
            child => assert_eq!(wait(child), 0),
        }
    }

    #[test]
    fn calls_that_do_not_fork_are_unchanged() {
        let before = mask();
        let file = trap_forks(|| std::fs::read_to_string("/proc/self/stat"), hooks()).unwrap();
        assert!(file.starts_with(&std::process::id().to_string()));
        assert_eq!(trap_forks(mask, hooks()), before);
        assert_eq!(mask(), before);
    }

    #[test]
    fn a_child_runs_on_its_own_stack() {
        extern "C" fn body(argument: *mut libc::c_void) -> i32 {
            let here = 0u8;
            let stack = argument.addr();
            let on_it = (stack..stack + (64 << 10)).contains(&(&raw const here).addr());
            i32::from(!on_it) + 2 * i32::from(hooks().child.load(Ordering::SeqCst) == 0)
        }
        let stack = Region::reserve(64 << 10).unwrap();
        let (start, top) = (stack.start(), stack.start() + stack.len());
        // SAFETY: the child runs on its copy of the stack, and calls only functions that are safe
        // after a fork.
        let child = trap_forks(
            || unsafe {
                let (top, argument) =
                    (std::ptr::with_exposed_provenance_mut(top), std::ptr::without_provenance_mut(start));
                libc::clone(body, top, libc::SIGCHLD, argument)
            },
            hooks(),
        );
        assert!(child > 0);
        assert_eq!(wait(child), 0);
    }

    #[test]
    fn programs_and_threads_start_inside_of_a_trap() {
        let status = trap_forks(|| std::process::Command::new("true").status(), hooks()).unwrap();
        assert!(status.success());
        let thread = trap_forks(|| std::thread::spawn(|| 7).join(), hooks());
        assert_eq!(thread.unwrap(), 7);
    }
}
