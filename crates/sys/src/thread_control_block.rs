//! Thread control blocks: the C library's state of a thread, and the kernel's use of it.
//!
//! The C library keeps a thread's control block at the top of its stack. When the thread ends, the
//! kernel clears the thread's id in the block, wakes a joining thread, and reads the list of robust
//! mutexes. So these blocks identify stacks, and must stay resident.
//!
//! At any return to the program, also from a call that the agent makes in a thread of the program,
//! the kernel may access the thread's area for rseq(2). It is a part of the block up to glibc 2.40,
//! and lies below it since.
//!
//! For threads that exist at activation, `get_robust_list(2)` yields the address of the control
//! block. There is no lock.

use crate::loader;
use crate::pagemap;
use crate::seccomp::{self, Call};
use crate::thread::syscall3;
use foliomem_types::units::PAGE_BYTES;
use rustix::fd::AsFd;
use rustix::process::Pid;
use std::arch::asm;
use std::ops::Range;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

/// Maximum size of a block, in bytes. glibc's `struct pthread`, with the area for rseq(2), has 2.3
/// KiB.
pub const BLOCK_BYTES: usize = 0xb00;
/// Maximum distance from the list of robust mutexes at which the kernel uses the block, in bytes.
/// The id is 16 bytes below the list.
const LIST_REACH_BYTES: usize = 64;
/// Length of the start of a block that contains the thread's id and its list of robust mutexes, in
/// bytes.
const ENDS_WITH_BYTES: usize = 1024;
/// Maximum number of pages of a block and its area for rseq(2).
pub const BLOCK_PAGES: usize = BLOCK_BYTES.div_ceil(PAGE_BYTES) + 2;
/// Offset of the area for rseq(2) from the start of a block, in bytes; 0 without such an area.
static RSEQ_OFFSET: AtomicIsize = AtomicIsize::new(0);
/// Offset of the list of robust mutexes from the start of a block, in bytes; 0 if unknown.
static LIST_OFFSET: AtomicUsize = AtomicUsize::new(0);
/// Positions of a block's own address in the block, in words: `fs:[0]` by the ABI, and the field
/// `self` of glibc's `tcbhead_t`.
const SELF_WORDS: [usize; 2] = [0, 2];
/// Minimum alignment of a block, in bytes.
const BLOCK_ALIGN: usize = 64;
/// Minimum alignment of a block, in words.
const BLOCK_ALIGN_WORDS: usize = BLOCK_ALIGN / size_of::<usize>();
/// Length of the end of a stack in which its block lies, in bytes. It is exceeded only if the
/// program has thread-local data with a larger alignment.
const TOP_BYTES: usize = 2 * PAGE_BYTES;

/// Returns the address range of the calling thread's control block.
pub fn own() -> Range<usize> {
    let start: usize;
    // SAFETY: by the x86-64 ABI the first word of the control block is its address; it is only
    // read.
    unsafe { asm!("mov {}, fs:[0]", out(reg) start, options(nostack, readonly)) };
    start..start + BLOCK_BYTES
}

/// Returns the id of the calling thread, which has a control block, usually without a system call.
///
/// The number of the thread's CPU clock contains the id in its upper bits (the kernel's
/// `MAKE_THREAD_CPUCLOCK`), and the C library computes it from the control block.
pub fn own_thread() -> Pid {
    let mut clock = 0;
    // SAFETY: the call is about the calling thread, and only writes `clock`.
    let failed = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
    Pid::from_raw(!(clock >> 3)).filter(|_| failed == 0).unwrap_or_else(rustix::thread::gettid)
}

/// Returns the address of the calling thread's `id` in its control block. The kernel clears the id
/// when the thread ends or executes another program. Returns `None` if the C library keeps it
/// elsewhere.
pub fn id_word(id: Pid) -> Option<usize> {
    let (start, id) = (own().start, id.as_raw_nonzero().get() as u32);
    let mut words = (start..start + ENDS_WITH_BYTES).step_by(size_of::<u32>());
    // SAFETY: the addresses are aligned and lie in the calling thread's block, which is longer.
    let holds_id =
        |&address: &usize| unsafe { std::ptr::with_exposed_provenance::<u32>(address).read_volatile() } == id;
    words.find(holds_id)
}

/// Notes the offsets from a control block of the rseq(2) area and of the list of robust mutexes,
/// which the kernel accesses. The offsets are the same in all threads. A thread of the program
/// calls this function before any of the functions below.
pub fn note_layout() {
    let list = robust_list(rustix::thread::gettid()).unwrap_or(0);
    let offset = list.wrapping_sub(own().start);
    LIST_OFFSET.store(if offset < BLOCK_BYTES { offset } else { 0 }, Ordering::Relaxed);
    if let Some(offset) = loader::variable(c"__rseq_offset") {
        // SAFETY: the C library defines the name as a `ptrdiff_t` that nobody writes once the
        // program runs.
        let offset = unsafe { std::ptr::with_exposed_provenance::<isize>(offset).read_unaligned() };
        RSEQ_OFFSET.store(offset, Ordering::Relaxed);
    }
}

/// Returns the control block of `thread`, or `None` if it has no list of robust mutexes. If the
/// layout is unknown, returns only the part around the list that the kernel uses when the thread
/// ends. This part contains the id.
pub fn of_thread(thread: Pid) -> Option<Range<usize>> {
    let list = robust_list(thread)?;
    match LIST_OFFSET.load(Ordering::Relaxed) {
        0 => Some(list - LIST_REACH_BYTES..list + LIST_REACH_BYTES),
        offset => Some(list - offset..list - offset + BLOCK_BYTES),
    }
}

/// Returns the address of the list of robust mutexes of `thread`, if it has one.
fn robust_list(thread: Pid) -> Option<usize> {
    if !seccomp::allow(Call::GetRobustList) {
        return None;
    }
    let (mut list, mut list_bytes) = (0usize, 0usize);
    // SAFETY: get_robust_list(2) only writes the two variables.
    let result = unsafe {
        syscall3(
            linux_raw_sys::general::__NR_get_robust_list as usize,
            thread.as_raw_nonzero().get() as usize,
            (&raw mut list).expose_provenance(),
            (&raw mut list_bytes).expose_provenance(),
        )
    };
    (result == 0 && list != 0).then_some(list)
}

/// Returns the pages of `block` and of its area for rseq(2). If they lie in fewer pages, these are
/// returned several times.
pub fn pages(block: &Range<usize>) -> [usize; BLOCK_PAGES] {
    let rseq = block.start.wrapping_add_signed(RSEQ_OFFSET.load(Ordering::Relaxed));
    [block.start, block.end - 1, rseq].map(|address| address & !(PAGE_BYTES - 1))
}

/// Returns whether a control block lies at the top of `stack`, by the content that `memory`
/// (`/proc/self/mem`) has there. Leaves pages that `pagemap` shows absent as they are: the kernel
/// would fill them with zeros for the reader.
pub fn is_at_top(memory: impl AsFd, pagemap: impl AsFd, stack: &Range<usize>) -> bool {
    let mut bytes = [0u8; TOP_BYTES];
    let mut present = stack.end..stack.end;
    let top_start = stack.start.max(stack.end.saturating_sub(TOP_BYTES));
    pagemap::present(pagemap, top_start, stack.end, &mut |run| present = run);
    if present.end != stack.end || present.is_empty() {
        return false;
    }
    let (start, top) = (present.start, &mut bytes[..present.len()]);
    let Ok(read) = rustix::io::pread(memory, &mut *top, start as u64) else { return false };
    let (words, _) = top[..read].as_chunks::<{ size_of::<usize>() }>();
    let mut blocks = words.chunks_exact(BLOCK_ALIGN_WORDS).zip((start..).step_by(BLOCK_ALIGN));
    blocks.any(|(block, address)| SELF_WORDS.into_iter().all(|word| usize::from_ne_bytes(block[word]) == address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_block_contains_the_thread_id() {
        let (block, id) = (own(), rustix::thread::gettid().as_raw_nonzero().get());
        assert_eq!(own_thread(), rustix::thread::gettid());
        assert_eq!(std::thread::spawn(|| own_thread() == rustix::thread::gettid()).join().ok(), Some(true));
        // SAFETY: the block belongs to the calling thread, so it is mapped; the words are only
        // read.
        let words = unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<i32>(block.start), BLOCK_BYTES / 4 - 128)
        };
        assert!(words.contains(&id));
        assert!(id_word(Pid::from_raw(id).unwrap()).is_some());
    }

    #[test]
    fn the_kernel_keeps_the_number_of_the_cpu_in_the_area_for_rseq() {
        note_layout();
        let area = own().start.wrapping_add_signed(RSEQ_OFFSET.load(Ordering::Relaxed));
        assert!(pages(&own()).contains(&(area & !(PAGE_BYTES - 1))));
        // SAFETY: the area belongs to the calling thread, and its second word is the CPU's number.
        let in_area = || unsafe { std::ptr::with_exposed_provenance::<u32>(area + 4).read_volatile() };
        let is_right = || in_area() as usize == rustix::thread::sched_getcpu();
        // The thread may change its CPU in between.
        assert!(loader::variable(c"__rseq_offset").is_none() || (0..1000).any(|_| is_right()));
    }

    #[test]
    fn stacks_are_recognised_by_the_blocks_at_their_tops() {
        let open = |name| std::fs::File::open(name).unwrap();
        let (memory, pagemap) = (open("/proc/self/mem"), open("/proc/self/pagemap"));
        let is_stack = |range: Range<usize>| is_at_top(&memory, &pagemap, &range);
        let page_of = |address: usize| address & !(PAGE_BYTES - 1);
        let end = std::thread::spawn(move || page_of(own().start) + PAGE_BYTES).join().unwrap();
        // The C library keeps the stack of an ended thread, and the next thread may get it.
        assert!(is_stack(end - (1 << 20)..end));
        assert!(!is_stack(end - (1 << 20)..end - PAGE_BYTES * 4), "the middle of the stack");
        assert!(!is_stack(PAGE_BYTES..2 * PAGE_BYTES), "nothing is mapped there");
    }

    #[test]
    fn the_search_for_a_block_fills_no_page() {
        let open = |name| std::fs::File::open(name).unwrap();
        let (memory, pagemap) = (open("/proc/self/mem"), open("/proc/self/pagemap"));
        let mapping = crate::region::Region::reserve(1 << 20).unwrap();
        let (start, end) = (mapping.start(), mapping.start() + mapping.len());
        let absent_bytes = || pagemap::leading_absent_bytes(&pagemap, start, end);
        assert!(!is_at_top(&memory, &pagemap, &(start..end)));
        assert_eq!(absent_bytes(), mapping.len());
        mapping.populate(mapping.len() - PAGE_BYTES, PAGE_BYTES).unwrap();
        assert!(!is_at_top(&memory, &pagemap, &(start..end)));
        assert_eq!(absent_bytes(), mapping.len() - PAGE_BYTES);
    }

    #[test]
    fn the_kernel_returns_the_blocks_of_other_threads() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            sender.send((rustix::thread::gettid(), own())).unwrap();
            let _ = wait.recv();
        });
        let (id, block) = receiver.recv().unwrap();
        note_layout();
        assert_eq!(of_thread(id).unwrap(), block);
        drop(end);
        other.join().unwrap();
        assert_eq!(of_thread(Pid::from_raw(i32::MAX).unwrap()), None, "there is no such thread");
    }
}
