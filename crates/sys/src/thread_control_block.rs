//! Thread control blocks: where the C library keeps a thread's state, and what the kernel does there.
//!
//! The C library keeps a thread's control block at the top of its stack. When the thread ends, the
//! kernel clears the thread's id there, wakes a joining thread, and reads the list of robust
//! mutexes. So these blocks identify stacks, and must stay resident.
//!
//! For threads that exist at activation, `get_robust_list(2)` yields the address of the control
//! block. There is no lock.

use crate::filters::{self, Call};
use crate::thread::syscall3;
use foliomem_types::units::PAGE_BYTES;
use rustix::fd::AsFd;
use rustix::process::Pid;
use std::arch::asm;
use std::ops::Range;

/// A block is not larger: glibc's `struct pthread`, with the area for rseq(2), has 2.3 KiB.
pub const BLOCK_BYTES: usize = 0xb00;
/// The kernel uses memory this near to the list of robust mutexes: the id is 16 bytes below.
const LIST_REACH_BYTES: usize = 64;
/// The thread's id and its list of robust mutexes lie in this many bytes at its start.
const ENDS_WITH_BYTES: usize = 1024;
/// Pages that a block can lie across.
pub const BLOCK_PAGES: usize = BLOCK_BYTES.div_ceil(PAGE_BYTES) + 1;
/// Where in a block, in words, its own address is: what `fs:[0]` holds by the ABI, and glibc's name
/// of the thread.
const SELF_WORDS: [usize; 2] = [0, 2];
/// A block is as aligned at least.
const BLOCK_ALIGN: usize = 64;
const BLOCK_ALIGN_WORDS: usize = BLOCK_ALIGN / size_of::<usize>();
/// A block lies in the last so many bytes of a stack, unless the program has thread-local data of a
/// larger alignment.
const TOP_BYTES: usize = 2 * PAGE_BYTES;

/// The control block of the calling thread.
pub fn own() -> Range<usize> {
    let start: usize;
    // SAFETY: the x86-64 ABI keeps the address of the control block in its first word.
    unsafe { asm!("mov {}, fs:[0]", out(reg) start, options(nostack, readonly)) };
    start..start + BLOCK_BYTES
}

/// The id of the calling thread, which has a control block, without a system call: the C library
/// finds it there for the number of the thread's clock, which has it in its upper bits (the
/// kernel's `MAKE_THREAD_CPUCLOCK`).
pub fn own_thread() -> Pid {
    let mut clock = 0;
    // SAFETY: asks about the calling thread, and writes to `clock`.
    let failed = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
    Pid::from_raw(!(clock >> 3)).filter(|_| failed == 0).unwrap_or_else(rustix::thread::gettid)
}

/// Where the calling thread's id is in its control block, and the id: the kernel clears it there
/// when the thread ends or executes another program. `None` where the C library keeps it elsewhere.
pub fn own_id_word() -> Option<(usize, u32)> {
    let (start, id) = (own().start, rustix::thread::gettid().as_raw_nonzero().get() as u32);
    let words = (start..start + ENDS_WITH_BYTES).step_by(size_of::<u32>());
    // SAFETY: the block is the calling thread's, aligned, and longer.
    let holds_id =
        |&address: &usize| unsafe { std::ptr::with_exposed_provenance::<u32>(address).read_volatile() } == id;
    words.filter(holds_id).map(|address| (address, id)).next()
}

/// What the kernel uses of the control block of `thread` when that ends, if it has one. (Not all of
/// the block: glibc keeps the id right below the list.)
pub fn of_thread(thread: Pid) -> Option<Range<usize>> {
    if !filters::allow(Call::GetRobustList) {
        return None;
    }
    let (mut list, mut list_bytes) = (0usize, 0usize);
    // SAFETY: writes to the two variables.
    let result = unsafe {
        syscall3(
            linux_raw_sys::general::__NR_get_robust_list as usize,
            thread.as_raw_nonzero().get() as usize,
            (&raw mut list).expose_provenance(),
            (&raw mut list_bytes).expose_provenance(),
        )
    };
    (result == 0 && list != 0).then(|| list - LIST_REACH_BYTES..list + LIST_REACH_BYTES)
}

/// Touches the parts of the calling thread's block that the kernel writes when the thread ends.
pub fn touch_own() {
    let start = own().start;
    for address in [start, start + ENDS_WITH_BYTES - 1] {
        // SAFETY: the block is the calling thread's, and longer.
        unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() };
    }
}

/// The pages of `block`; one twice where it lies in one.
pub fn pages(block: &Range<usize>) -> [usize; BLOCK_PAGES] {
    [block.start, block.end - 1].map(|address| address & !(PAGE_BYTES - 1))
}

/// Whether a control block lies at the top of `stack`, as of what `memory` (`/proc/self/mem`) has
/// there.
pub fn is_at_top(memory: impl AsFd, stack: &Range<usize>) -> bool {
    let mut bytes = [0u8; TOP_BYTES];
    let start = stack.start.max(stack.end.saturating_sub(TOP_BYTES));
    let top = &mut bytes[..stack.end - start];
    // What is not there, nobody has written.
    let Ok(read) = rustix::io::pread(memory, &mut *top, start as u64) else { return false };
    let (words, _) = top[..read].as_chunks::<{ size_of::<usize>() }>();
    let mut blocks = words.chunks_exact(BLOCK_ALIGN_WORDS).zip((start..).step_by(BLOCK_ALIGN));
    blocks.any(|(block, address)| SELF_WORDS.into_iter().all(|word| usize::from_ne_bytes(block[word]) == address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_block_is_where_the_thread_id_is() {
        let (block, id) = (own(), rustix::thread::gettid().as_raw_nonzero().get());
        assert_eq!(own_thread(), rustix::thread::gettid());
        assert_eq!(std::thread::spawn(|| own_thread() == rustix::thread::gettid()).join().ok(), Some(true));
        // SAFETY: it is the calling thread's, which is there and is read only.
        let words = unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<i32>(block.start), BLOCK_BYTES / 4 - 128)
        };
        assert!(words.contains(&id));
        assert_eq!(own_id_word().map(|(_, id)| id), Some(id as u32));
    }

    #[test]
    fn stacks_are_known_by_the_blocks_at_their_tops() {
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let page_of = |address: usize| address & !(PAGE_BYTES - 1);
        let end = std::thread::spawn(move || page_of(own().start) + PAGE_BYTES).join().unwrap();
        // The C library keeps the stack of a thread that has ended, and the next one may get it.
        assert!(is_at_top(&memory, &(end - (1 << 20)..end)));
        assert!(!is_at_top(&memory, &(end - (1 << 20)..end - PAGE_BYTES * 4)), "its middle");
        let mapping = crate::region::Region::reserve(1 << 20).unwrap();
        assert!(!is_at_top(&memory, &(mapping.start()..mapping.start() + mapping.len())));
        assert!(!is_at_top(&memory, &(PAGE_BYTES..2 * PAGE_BYTES)), "nothing is there");
    }

    #[test]
    fn the_kernel_knows_where_the_blocks_of_other_threads_are() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            tell.send((rustix::thread::gettid(), own())).unwrap();
            let _ = wait.recv();
        });
        let (id, block) = told.recv().unwrap();
        let known = of_thread(id).unwrap();
        assert!(block.start < known.start && known.end <= block.end, "{known:x?} in {block:x?}");
        drop(end);
        other.join().unwrap();
        assert_eq!(of_thread(Pid::from_raw(i32::MAX).unwrap()), None, "there is no such thread");
    }
}
