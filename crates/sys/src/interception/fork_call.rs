//! Fork calls: reading the arguments of a fork, and making the fork between the hooks.
//!
//! The arguments are stored in the form of clone3(2). The kernel must not write to the program's
//! memory while the agent is quiesced. So the agent itself stores the requested thread ids, after
//! the fork. A call with invalid arguments fails with the kernel's error.
//!
//! There is no lock. The callers, `entry` and `dispatch`, hold their own locks over the fork.

use crate::interception::entry::note_shared_memory;
use crate::maps::ADDRESSES_END;
use crate::region::Region;
use crate::thread_control_block::{self, BLOCK_BYTES, BLOCK_PAGES};
use linux_raw_sys::general as raw;
use rustix::io::Errno;
use rustix::process::Pid;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The functions that run before and after a fork.
///
/// Between the start of `before` and the end of `parent_after` or `child_after`, nothing may touch
/// memory of the program. So neither the hooks' object nor their stack may lie there.
pub trait ForkHooks: Sync {
    /// Returns the stack for the hooks. One thread at a time uses it.
    fn stack(&self) -> &Region;
    /// Runs before the fork.
    ///
    /// `needed` are the pages of the calling thread's control block, to which the kernel writes at
    /// any time (rseq(2)). They must be resident from here on.
    fn before(&'static self, needed: [usize; BLOCK_PAGES]);
    /// Runs in the parent, after the fork or its failure. From here on the pages may be swapped out
    /// again.
    fn parent_after(&'static self, outcome: ForkOutcome);
    /// Runs in the child, which has the pid `own`, and whose only thread is the calling one.
    fn child_after(&'static self, own: Pid);
    /// Runs before the program makes a thread that needs `words` to be resident until it ends. The
    /// addresses may be unmapped. A filter may forbid all system calls but those that make threads.
    fn thread_starts(&'static self, words: Range<usize>);
    /// Runs before the process ends itself. Nothing may touch memory of the program afterwards. The
    /// calling process may also be a child of `vfork(2)`.
    fn exiting(&'static self) {}
    /// Runs when the loader has loaded or unloaded libraries, before any code of new libraries
    /// runs.
    fn objects_changed(&'static self) {}
}

/// The result of a fork, as the parent sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForkOutcome {
    /// There is a child.
    Forked,
    /// The kernel has refused the fork.
    Failed,
}

/// Flags of a child that shares the memory and has [`NeededWords`].
pub const NEEDS_WORDS: u32 = raw::CLONE_SETTLS | raw::CLONE_CHILD_CLEARTID;

/// The words that must be resident while a child that shares the memory runs: the kernel writes to
/// them when the child ends, and a debugger reads them as soon as the child exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NeededWords {
    /// Address of the child's control block (CLONE_SETTLS).
    block: Option<usize>,
    /// Address of the thread id that the kernel clears (CLONE_CHILD_CLEARTID).
    cleared: Option<usize>,
}

impl NeededWords {
    /// Returns the words that the child of a call with `arguments` needs.
    fn of(arguments: &raw::clone_args) -> NeededWords {
        let address = |flag: u32, address: u64| {
            let is_named = arguments.flags & u64::from(flag) != 0 && (1..ADDRESSES_END as u64).contains(&address);
            is_named.then_some(address as usize)
        };
        NeededWords {
            block: address(raw::CLONE_SETTLS, arguments.tls),
            cleared: address(raw::CLONE_CHILD_CLEARTID, arguments.child_tid),
        }
    }

    /// Notifies `hooks` of the words that must be resident from here on.
    pub fn announce(self, hooks: &'static dyn ForkHooks) {
        let block = self.block.map(|start| start..start + BLOCK_BYTES);
        let cleared = self.cleared.map(|start| start..start + size_of::<i32>());
        // In glibc the thread id lies in the block.
        let cleared = cleared.filter(|word| block.as_ref().is_none_or(|block| !block.contains(&word.start)));
        for words in [block, cleared].into_iter().flatten() {
            hooks.thread_starts(words);
        }
    }
}

/// Maximum number of requested thread ids: one for each level of pid namespaces that Linux
/// supports.
const MAX_TIDS: usize = 32;
/// Maximum size of `struct clone_args` in bytes; the kernel refuses a larger one.
const MAX_CLONE_ARGS_BYTES: usize = 4096;
/// Minimum size of `struct clone_args` in bytes: the size of its first version. The kernel refuses
/// a smaller one.
const MIN_CLONE_ARGS_BYTES: usize = 64;

/// The kind of a system call that may be a fork.
#[expect(clippy::large_enum_variant, reason = "it lies on a stack; a box would be allocated at every fork")]
pub enum CallKind {
    /// A fork.
    Fork(ForkCall),
    /// The child shares the memory: it is a thread, or a process made with CLONE_VM. The caller
    /// makes the call unchanged, after [`NeededWords::announce`].
    Shared(NeededWords),
    /// The call makes no child, or the kernel refuses it. The caller makes the call unchanged.
    Other,
    /// The call fails with this error.
    Invalid(Errno),
}

/// The arguments and the result of a fork.
#[derive(Clone, Copy)]
pub struct ForkCall {
    /// `clone` or `clone3`, as the program chose: a filter may forbid the other.
    number: u32,
    arguments: raw::clone_args,
    /// The thread ids that the program requests, for `arguments.set_tid`.
    wanted_tids: [i32; MAX_TIDS],
    /// Address at which the parent stores the child's thread id; 0 for none.
    parent_tid: usize,
    /// Address at which the child stores its thread id; 0 for none, or if the kernel stores it.
    child_tid: usize,
    /// Address at which the parent stores the pidfd; 0 for none.
    pidfd_target: usize,
    /// Stack pointer of the child, 0 for the caller's.
    stack: usize,
    pidfd: i32,
    result: isize,
}

impl ForkCall {
    /// Reads the arguments of system call `number`.
    pub fn read(number: u32, [a, b, c, d, e, _]: [usize; 6]) -> CallKind {
        // SAFETY: the struct consists of integers, for which zero is valid.
        let mut arguments: raw::clone_args = unsafe { std::mem::zeroed() };
        match number {
            raw::__NR_fork => arguments.exit_signal = libc::SIGCHLD as u64,
            raw::__NR_clone3 => {
                if !(MIN_CLONE_ARGS_BYTES..=MAX_CLONE_ARGS_BYTES).contains(&b) {
                    return CallKind::Other;
                }
                match read_clone_args(a, b) {
                    Ok(read) => arguments = read,
                    Err(errno) => return CallKind::Invalid(errno),
                }
            }
            raw::__NR_clone => {
                // The arguments are clone(flags, stack, parent_tid, child_tid, tls). The kernel
                // ignores the upper half of the flags.
                const SIGNAL_MASK: u64 = 0xff;
                const FLAGS_MASK: u64 = 0xffff_ffff & !SIGNAL_MASK;
                arguments.flags = a as u64 & FLAGS_MASK;
                arguments.exit_signal = a as u64 & SIGNAL_MASK;
                arguments.stack = b as u64;
                arguments.parent_tid = c as u64;
                arguments.pidfd = c as u64;
                arguments.child_tid = d as u64;
                arguments.tls = e as u64;
            }
            _ => return CallKind::Other,
        }
        if arguments.flags & u64::from(raw::CLONE_VM) != 0 {
            note_shared_memory(arguments.flags);
            return CallKind::Shared(NeededWords::of(&arguments));
        }
        if number == raw::__NR_clone3 && (arguments.stack == 0) != (arguments.stack_size == 0) {
            return CallKind::Invalid(Errno::INVAL);
        }
        Self::of(number, arguments)
    }

    /// Makes a fork call from `arguments`, which lack CLONE_VM.
    fn of(number: u32, arguments: raw::clone_args) -> CallKind {
        let has = |flag: u32| arguments.flags & u64::from(flag) != 0;
        let address = |wanted: bool, address: u64| if wanted { address as usize } else { 0 };
        let mut call = ForkCall {
            number: if number == raw::__NR_clone3 { number } else { raw::__NR_clone },
            wanted_tids: [0; MAX_TIDS],
            parent_tid: address(has(raw::CLONE_PARENT_SETTID), arguments.parent_tid),
            child_tid: address(has(raw::CLONE_CHILD_SETTID), arguments.child_tid),
            pidfd_target: address(has(raw::CLONE_PIDFD), arguments.pidfd),
            stack: arguments.stack.wrapping_add(arguments.stack_size) as usize,
            pidfd: -1,
            result: 0,
            arguments,
        };
        let tids = call.arguments.set_tid_size as usize;
        if call.arguments.set_tid != 0 && (1..=MAX_TIDS).contains(&tids) {
            let mut bytes = [0u8; MAX_TIDS * size_of::<i32>()];
            let len = tids * size_of::<i32>();
            if let Err(errno) = read_memory(call.arguments.set_tid as usize, &mut bytes[..len]) {
                return CallKind::Invalid(errno);
            }
            let (words, _) = bytes.as_chunks::<4>();
            call.wanted_tids = std::array::from_fn(|index| i32::from_ne_bytes(words[index]));
        }
        // The kernel writes the pidfd before it forks, and fails if it cannot write there.
        if call.pidfd_target != 0 && rewrite_memory(call.pidfd_target).is_err() {
            return CallKind::Invalid(Errno::FAULT);
        }
        // The agent, not the kernel, writes to the program's memory, after the fork: a page may be
        // swapped out. The calling thread's control block is resident.
        call.arguments.flags &= !u64::from(raw::CLONE_PARENT_SETTID);
        if thread_control_block::own().contains(&call.child_tid) {
            call.child_tid = 0;
        } else {
            call.arguments.flags &= !u64::from(raw::CLONE_CHILD_SETTID);
        }
        call.arguments.stack = 0;
        call.arguments.stack_size = 0;
        CallKind::Fork(call)
    }

    /// Returns the result of the system call: 0 in the child, an error number below 0.
    pub fn result(&self) -> isize {
        self.result
    }

    /// Returns the stack pointer that the child gets, if it is not the caller's.
    pub fn child_stack(&self) -> Option<usize> {
        (self.stack != 0).then_some(self.stack)
    }

    /// Forks between the hooks, with `system_call`. `self` lies on the hooks' stack.
    pub fn make(
        &mut self,
        hooks: &'static dyn ForkHooks,
        needed: [usize; BLOCK_PAGES],
        system_call: unsafe fn(u32, [usize; 6]) -> isize,
    ) {
        self.arguments.pidfd = (&raw mut self.pidfd).expose_provenance() as u64;
        if self.arguments.set_tid != 0 {
            self.arguments.set_tid = self.wanted_tids.as_ptr().expose_provenance() as u64;
        }
        if self.pidfd_target == 0 {
            self.arguments.pidfd = 0;
        }
        let all = &self.arguments;
        let arguments = if self.number == raw::__NR_clone3 {
            [std::ptr::from_ref(all).expose_provenance(), size_of::<raw::clone_args>(), 0, 0, 0, 0]
        } else {
            [all.flags | all.exit_signal, 0, all.pidfd, all.child_tid, all.tls, 0].map(|word| word as usize)
        };
        hooks.before(needed);
        // SAFETY: the call is a fork: the child has a copy of the memory, and continues here.
        self.result = unsafe { system_call(self.number, arguments) };
        match self.result {
            0 => hooks.child_after(self.own_id()),
            1.. => hooks.parent_after(ForkOutcome::Forked),
            _ => hooks.parent_after(ForkOutcome::Failed),
        }
    }

    /// Writes the ids that the kernel would have written, in parent and child. Like the kernel, it
    /// ignores addresses that cannot be written.
    pub fn write_results(&self) {
        if self.result == 0 {
            if self.child_tid != 0 {
                let _ = write_memory(self.child_tid, self.own_id().as_raw_nonzero().get());
            }
        } else if self.result > 0 {
            if self.parent_tid != 0 {
                let _ = write_memory(self.parent_tid, self.result as i32);
            }
            if self.pidfd_target != 0 {
                let _ = write_memory(self.pidfd_target, self.pidfd);
            }
        }
    }
}

impl ForkCall {
    /// Returns the child's pid, which is its thread id, too. Where the kernel has not stored it,
    /// calls set_tid_address(2) with the address that the kernel already has, because filters
    /// rarely forbid that call, unlike getpid(2).
    fn own_id(&self) -> Pid {
        let has = |flag: u32| self.arguments.flags & u64::from(flag) != 0;
        let address = self.arguments.child_tid as usize;
        let id = if has(raw::CLONE_CHILD_SETTID) {
            // SAFETY: the kernel has just written the word, in the calling thread's control block.
            unsafe { std::ptr::with_exposed_provenance::<i32>(address).read_volatile() }
        } else {
            let cleared = if has(raw::CLONE_CHILD_CLEARTID) { address } else { 0 };
            let number = raw::__NR_set_tid_address;
            // SAFETY: the kernel has this address already, so nothing changes.
            unsafe { crate::interception::entry::system_call(number, [cleared, 0, 0, 0, 0, 0]) as i32 }
        };
        Pid::from_raw(id).unwrap_or_else(rustix::process::getpid)
    }
}

/// Reads the `struct clone_args` of `len` bytes at `address`.
fn read_clone_args(address: usize, len: usize) -> Result<raw::clone_args, Errno> {
    let mut bytes = [0u8; MAX_CLONE_ARGS_BYTES];
    let bytes = &mut bytes[..len];
    read_memory(address, bytes)?;
    let (known, unknown) = bytes.split_at(len.min(size_of::<raw::clone_args>()));
    if unknown.iter().any(|&byte| byte != 0) {
        return Err(Errno::TOOBIG);
    }
    // SAFETY: the struct consists of integers, and `known` is at most as long as it.
    unsafe {
        let mut arguments: raw::clone_args = std::mem::zeroed();
        std::ptr::copy_nonoverlapping(known.as_ptr(), (&raw mut arguments).cast::<u8>(), known.len());
        Ok(arguments)
    }
}

/// Whether a filter decides which system calls the program's threads may make.
static HAS_FILTER: AtomicBool = AtomicBool::new(false);

/// Notes that the program has installed a filter, which decides which system calls its threads may
/// make. From here on their arguments are read without a call. (A filter that the program has had
/// from its start lets it open files and ask for pids.)
pub fn note_filter() {
    HAS_FILTER.store(true, Ordering::Relaxed);
}

/// Returns whether a filter is known ([`note_filter`]).
pub fn has_filter() -> bool {
    HAS_FILTER.load(Ordering::Relaxed)
}

/// Reads memory at an address that the program passes to a system call. Fails with `FAULT` if
/// nothing is mapped there.
pub(super) fn read_memory(address: usize, bytes: &mut [u8]) -> Result<(), Errno> {
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: bytes.len() };
    match copied(raw::__NR_process_vm_readv, &local, &remote) {
        Ok(len) if len == bytes.len() => Ok(()),
        Ok(_) | Err(Errno::FAULT) => Err(Errno::FAULT),
        Err(_) => {
            // The address stays unchecked. The arguments of nearly all forks are valid.
            // SAFETY: the program passes an address of that many bytes to its own system call.
            unsafe {
                let source = std::ptr::with_exposed_provenance::<u8>(address);
                std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len());
            }
            Ok(())
        }
    }
}

/// Checks that `address` can be written, by writing its content again. Fails with `FAULT` if it
/// cannot.
fn rewrite_memory(address: usize) -> Result<(), Errno> {
    let mut bytes = [0u8; size_of::<i32>()];
    read_memory(address, &mut bytes)?;
    write_memory(address, i32::from_ne_bytes(bytes))
}

/// Writes `value` to an address at which the program asked its system call to write. Fails with
/// `FAULT` if it cannot be written.
fn write_memory(address: usize, value: i32) -> Result<(), Errno> {
    if !thread_control_block::own().contains(&address) {
        let bytes = value.to_ne_bytes();
        let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let remote = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: bytes.len() };
        match copied(raw::__NR_process_vm_writev, &local, &remote) {
            Ok(len) if len == bytes.len() => return Ok(()),
            Ok(_) | Err(Errno::FAULT) => return Err(Errno::FAULT),
            // The address stays unchecked. The arguments of nearly all forks are valid.
            Err(_) => {}
        }
    }
    // SAFETY: the program asked its own system call to write at this address.
    unsafe { std::ptr::with_exposed_provenance_mut::<i32>(address).write_unaligned(value) };
    Ok(())
}

/// Lets the kernel copy memory inside of the calling process, so that a bad address is an error.
/// Fails with `PERM` if there is a filter, which might kill the process for the call.
fn copied(number: u32, local: &libc::iovec, remote: &libc::iovec) -> Result<usize, Errno> {
    if has_filter() {
        return Err(Errno::PERM);
    }
    let process = rustix::process::getpid().as_raw_nonzero().get() as usize;
    let [local, remote] = [local, remote].map(|vector| std::ptr::from_ref(vector).expose_provenance());
    // SAFETY: there is one vector on each side. The local one is memory of the caller, and the
    // kernel checks the remote one.
    let result = unsafe { crate::interception::entry::system_call(number, [process, local, 1, remote, 1, 0]) };
    if result < 0 { Err(Errno::from_raw_os_error(-result as i32)) } else { Ok(result as usize) }
}
