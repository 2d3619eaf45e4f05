//! Patching the system calls in the C library that may fork, so that no fork depends on which
//! symbol is called.
//!
//! Whichever way a program comes to the C library's code (a symbol, a handle of `dlsym`,
//! RTLD_DEEPBIND, a function inside of the library, a C library of another namespace), a fork ends
//! at one of three `syscall` instructions: those of `_Fork` (or `fork`), `clone`, and `syscall`. A
//! jump to a stub takes the place of instructions right before or right after each:
//!
//! - before: `mov eax, imm32` or `mov r9, [rsp+8]`, five bytes. Preferred: a thread that is in the
//!   system call returns to code that has not changed.
//! - after: the system call itself, with instructions that work at any address. Only where no
//!   thread can be in the call.
//!
//! A stub lies within reach of the jumps, on a page of its own for each C library. It goes on with
//! the call, or has [`crate::fork::entry`] make it if it may be a fork. What is not recognised is
//! not patched; where that is so in the C library of the program, nothing is, and
//! `crate::fork::trap` is used.
//!
//! The loader calls an empty function after each change of its list of objects, for debuggers; that
//! is patched, too, so that a C library of a new namespace (`dlmopen(3)`) is patched before any of
//! its code runs.
//!
//! Code is written through `/proc/self/mem`: no mapping becomes writable and executable, which
//! policies may forbid.

pub use crate::fork::call::ForkHooks;
use crate::fork::entry;
use crate::link_maps::{self, Object};
use foliomem_core::units::PAGE_BYTES;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ffi::CStr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// `jmp rel32`
const JUMP_BYTES: usize = 5;
const JUMP: u8 = 0xe9;
/// `mov r9, [rsp + 8]`, in the C library's `syscall`.
const LOAD_SIXTH: [u8; JUMP_BYTES] = [0x4c, 0x8b, 0x4c, 0x24, 0x08];
/// `mov eax, imm32`
const MOV_EAX: u8 = 0xb8;
const C_LIBRARY: &CStr = c"libc.so.6";
/// A `jmp rel32` reaches so far; less a margin for where in page and library its ends are.
const REACH_BYTES: usize = (1 << 31) - (64 << 20);
/// No stub is longer.
const STUB_BYTES: usize = 96;

/// Whether all forks of the program's C library are known to the agent, whatever the path.
pub static COVERED: AtomicBool = AtomicBool::new(false);

/// What a function is searched for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// The system calls whose number is that of a fork.
    Forks,
    /// All system calls.
    All,
}

/// Each group has at least one site in a C library that is recognised.
const GROUPS: [(&[&CStr], Wanted); 3] =
    [(&[c"_Fork", c"fork"], Wanted::Forks), (&[c"clone"], Wanted::Forks), (&[c"syscall"], Wanted::All)];

/// Whether a thread may be in a system call that is to be patched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Users {
    None,
    Possible,
}

/// Which instructions make room for the jump.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Before,
    After,
}

/// A system call that is to be patched.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Site {
    /// The address of the `syscall` instruction.
    at: usize,
    place: Place,
    /// The instructions that the jump displaces, but for the system call.
    displaced: Vec<u8>,
}

impl Site {
    /// Recognises the site of the system call at `offset` in `code`, which is at `start`.
    fn recognise(code: &[u8], start: usize, offset: usize) -> Option<Site> {
        let at = start + offset;
        if offset.checked_sub(JUMP_BYTES).is_some_and(|from| code[from] == JUMP) {
            // Patched already.
            return None;
        }
        if let Some(before) = offset.checked_sub(JUMP_BYTES).map(|from| &code[from..offset])
            && (before == LOAD_SIXTH || is_number_of_fork(before))
        {
            return Some(Site { at, place: Place::Before, displaced: before.to_vec() });
        }
        let after = &code[offset + SYSCALL.len()..];
        let mut len = 0;
        while SYSCALL.len() + len < JUMP_BYTES {
            len += movable_bytes(&after[len..])?;
        }
        Some(Site { at, place: Place::After, displaced: after[..len].to_vec() })
    }

    /// The bytes of the program that change.
    fn patched(&self) -> Range<usize> {
        match self.place {
            Place::Before => self.at - JUMP_BYTES..self.at,
            Place::After => self.at..self.end(),
        }
    }

    /// The end of the system call and what is displaced after it.
    fn end(&self) -> usize {
        match self.place {
            Place::Before => self.at + SYSCALL.len(),
            Place::After => self.at + SYSCALL.len() + self.displaced.len(),
        }
    }

    /// The code at `start` that stands in for what is displaced. The address of the entry is at
    /// `entry`.
    fn stub(&self, start: usize, entry: usize) -> Vec<u8> {
        use linux_raw_sys::general::{__NR_clone, __NR_clone3, __NR_fork};
        let mut stub = Vec::with_capacity(STUB_BYTES);
        if self.place == Place::Before {
            stub.extend(&self.displaced);
        }
        let mut branches = [0; 3];
        for (number, branch) in [__NR_fork, __NR_clone, __NR_clone3].into_iter().zip(&mut branches) {
            // cmp eax, imm32; je rel8
            stub.push(0x3d);
            stub.extend(number.to_le_bytes());
            stub.extend([0x74, 0]);
            *branch = stub.len();
        }
        let call = match self.place {
            Place::Before => {
                stub.extend(jump(start + stub.len(), self.at));
                self.at
            }
            Place::After => {
                let call = start + stub.len();
                stub.extend(SYSCALL);
                stub.extend(&self.displaced);
                stub.extend(jump(start + stub.len(), self.end()));
                call
            }
        };
        for branch in branches {
            stub[branch - 1] = (stub.len() - branch) as u8;
        }
        // lea rcx, [rip + call]
        stub.extend([0x48, 0x8d, 0x0d]);
        stub.extend((call.wrapping_sub(start + stub.len() + 4) as i32).to_le_bytes());
        stub.extend(jump_through(start + stub.len(), entry));
        stub
    }
}

/// `jmp rel32`
fn jump(from: usize, to: usize) -> [u8; JUMP_BYTES] {
    let [a, b, c, d] = (to.wrapping_sub(from + JUMP_BYTES) as i32).to_le_bytes();
    [JUMP, a, b, c, d]
}

/// `jmp [rip + rel32]`
fn jump_through(from: usize, word: usize) -> [u8; 6] {
    let [a, b, c, d] = (word.wrapping_sub(from + 6) as i32).to_le_bytes();
    [0xff, 0x25, a, b, c, d]
}

fn is_number_of_fork(code: &[u8]) -> bool {
    use linux_raw_sys::general::{__NR_clone, __NR_clone3, __NR_fork};
    matches!(code, &[MOV_EAX, a, b, c, d] if [__NR_clone, __NR_fork, __NR_clone3].contains(&u32::from_le_bytes([a, b, c, d])))
}

/// The length of the instruction at the start of `code`, if it is known to work at any address.
fn movable_bytes(code: &[u8]) -> Option<usize> {
    const REGISTERS: u8 = 0xc0;
    let len = match code {
        [0x48, 0x3d, ..] => 6,                                                   // cmp rax, imm32
        [0x3d, ..] => 5,                                                         // cmp eax, imm32
        [0x48, 0x83, 0xf8, ..] => 4,                                             // cmp rax, imm8
        [0x83, 0xf8, ..] => 3,                                                   // cmp eax, imm8
        [0x48, 0x85, 0xc0, ..] => 3,                                             // test rax, rax
        [0x85, 0xc0, ..] => 2,                                                   // test eax, eax
        [0x48 | 0x49 | 0x41, 0x89, operands, ..] if *operands >= REGISTERS => 3, // mov register, rax
        [0x89, operands, ..] if *operands >= REGISTERS => 2,                     // mov register, eax
        _ => return None,
    };
    (len <= code.len()).then_some(len)
}

/// The sites in the code of a function; `None` if one is not recognised.
fn sites_in(code: &[u8], start: usize, wanted: Wanted) -> Option<Vec<Site>> {
    let mut sites = Vec::new();
    let mut from = 0;
    while let Some(found) = code[from..].windows(SYSCALL.len()).position(|bytes| bytes == SYSCALL) {
        let offset = from + found;
        if wanted == Wanted::All || code[from..offset].windows(JUMP_BYTES).any(is_number_of_fork) {
            sites.push(Site::recognise(code, start, offset)?);
        }
        from = offset + SYSCALL.len();
    }
    Some(sites)
}

/// The sites of a C library; `None` if it is not recognised, or patched already.
fn sites_of(library: &Object) -> Option<Vec<Site>> {
    let mut sites: Vec<Site> = Vec::new();
    for (functions, wanted) in GROUPS {
        let before = sites.len();
        for code in functions.iter().filter_map(|name| library.function(name)) {
            // SAFETY: code of a loaded library, which nobody else changes.
            let bytes =
                unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(code.start), code.len()) };
            let found = sites_in(bytes, code.start, wanted)?;
            sites.extend(
                found.into_iter().filter(|site| !sites.iter().any(|known| known.at == site.at)).collect::<Vec<_>>(),
            );
        }
        if sites.len() == before {
            return None;
        }
    }
    Some(sites)
}

/// The code of this process, to be written.
struct Code(OwnedFd);

impl Code {
    fn open() -> Result<Code, Errno> {
        rustix::fs::open(c"/proc/self/mem", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map(Code)
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        match rustix::io::pwrite(self.0.as_fd(), bytes, at as u64)? {
            written if written == bytes.len() => Ok(()),
            _ => Err(Errno::IO),
        }
    }
}

/// Maps a page for stubs that a jump at `target` reaches.
fn page_near(target: usize) -> Result<usize, Errno> {
    const STEP_BYTES: usize = 1 << 20;
    let (protection, flags) = (ProtFlags::READ | ProtFlags::EXEC, MapFlags::PRIVATE);
    // SAFETY: a new mapping, at an address of the kernel's choice or where nothing is mapped.
    let map = |hint: usize, flags| unsafe {
        mmap_anonymous(std::ptr::with_exposed_provenance_mut(hint), PAGE_BYTES, protection, flags)
    };
    let page = map(0, flags)?.expose_provenance();
    if page.abs_diff(target) < REACH_BYTES {
        return Ok(page);
    }
    // SAFETY: the mapping just made.
    unsafe { rustix::mm::munmap(std::ptr::with_exposed_provenance_mut(page), PAGE_BYTES) }?;
    let start = target & !(PAGE_BYTES - 1);
    let down = (start.saturating_sub(REACH_BYTES).max(STEP_BYTES)..start).rev().step_by(STEP_BYTES);
    for hint in down {
        match map(hint & !(PAGE_BYTES - 1), flags | MapFlags::FIXED_NOREPLACE) {
            Ok(page) => return Ok(page.expose_provenance()),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    Err(Errno::NOMEM)
}

/// Patches `sites`, which lie in one library.
fn patch(sites: &[Site]) -> Result<(), Errno> {
    let Some(first) = sites.first() else { return Ok(()) };
    let code = Code::open()?;
    let page = page_near(first.at)?;
    let mut stubs = entry::address().to_ne_bytes().to_vec();
    let mut starts = Vec::with_capacity(sites.len());
    for site in sites {
        stubs.resize(stubs.len().next_multiple_of(16), 0xcc);
        starts.push(page + stubs.len());
        stubs.extend(site.stub(page + stubs.len(), page));
        if stubs.len() > PAGE_BYTES {
            return Err(Errno::NOMEM);
        }
    }
    code.write(page, &stubs)?;
    for (site, start) in sites.iter().zip(starts) {
        let patched = site.patched();
        code.write(patched.start, &jump(patched.start, start))?;
    }
    Ok(())
}

/// Whether the calling thread is the only one.
fn users() -> Users {
    const LINKS_OF_EMPTY: u64 = 2;
    match rustix::fs::stat(c"/proc/self/task") {
        Ok(stat) if stat.st_nlink == LINKS_OF_EMPTY + 1 => Users::None,
        _ => Users::Possible,
    }
}

/// Patches the C library of the program. Does nothing if the C library or the CPU is not
/// recognised.
pub fn install() {
    link_maps::find();
    if !entry::is_supported() {
        return;
    }
    let mut sites = None;
    link_maps::visit(|object| {
        if sites.is_none() && object.soname() == Some(C_LIBRARY) {
            sites = sites_of(object);
        }
    });
    let Some(sites) = sites else { return };
    if sites.iter().any(|site| site.place == Place::After) && users() == Users::Possible {
        return;
    }
    if patch(&sites).is_ok() {
        // Release pairs with the plain reads of the hooks: they jump to functions that are patched by then.
        COVERED.store(true, Ordering::Release);
        // Without it forks in other namespaces are not seen, as with a loader that is not
        // recognised.
        let _ = follow_loader();
    }
}

/// Runs `hooks` around all forks from here on.
pub fn activate(hooks: &'static dyn ForkHooks) {
    entry::set_hooks(hooks);
}

/// The program has the calling thread's system calls dispatched (Syscall User Dispatch), by the
/// selector at an address, or no longer has.
pub fn dispatches(selector: Option<usize>) {
    entry::dispatches(selector);
}

/// Has the loader call [`objects_changed`].
fn follow_loader() -> Result<(), Errno> {
    let Some(function) = link_maps::notify_function() else { return Ok(()) };
    // SAFETY: code of the loader, of a function that is aligned, so as long.
    let code = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(function), JUMP_BYTES) };
    if !is_empty_function(code) {
        return Ok(());
    }
    let writer = Code::open()?;
    let page = page_near(function)?;
    let mut stub = (objects_changed as *const ()).expose_provenance().to_ne_bytes().to_vec();
    let start = page + stub.len();
    stub.extend(jump_through(start, page));
    writer.write(page, &stub)?;
    writer.write(function, &jump(function, start))
}

/// Whether a function only returns, and has room for a jump.
fn is_empty_function(code: &[u8]) -> bool {
    const RETURN: u8 = 0xc3;
    match code {
        [0xf3, 0x0f, 0x1e, 0xfa, RETURN, ..] => true, // endbr64; ret
        // What fills up to the next function: nop, int3, or the longer nops that begin so.
        [RETURN, rest @ ..] => matches!(
            rest,
            [0x90, 0x90, 0x90, 0x90, ..]
                | [0xcc, 0xcc, 0xcc, 0xcc, ..]
                | [0x66, 0x66 | 0x2e, 0x66 | 0x2e | 0x0f, 0x66 | 0x2e | 0x0f | 0x1f, ..]
                | [0x0f, 0x1f, 0x40 | 0x44 | 0x80 | 0x84, 0, ..]
        ),
        _ => false,
    }
}

/// The loader has changed its list of objects, or is about to. It holds its lock.
extern "C" fn objects_changed() {
    link_maps::visit(|object| {
        if object.soname() == Some(C_LIBRARY)
            && let Some(sites) = sites_of(object)
        {
            // One that cannot be patched now is found again with the next change.
            let _ = patch(&sites);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYS_GETPID: u8 = 39;

    /// `_Fork` of glibc 2.36, from the number of the call to that of the next.
    const FORK_2_36: &[u8] = &[
        0x4c, 0x8d, 0x90, 0xd0, 0x02, 0x00, 0x00, 0xb8, 0x38, 0x00, 0x00, 0x00, 0x0f, 0x05, 0x48, 0x3d, 0x00, 0xf0,
        0xff, 0xff, 0x77, 0x35, 0x89, 0xc2, 0x85, 0xc0, 0x75, 0x2c, 0xb8, 0x11, 0x01, 0x00, 0x00, 0x0f, 0x05, 0x89,
        0xd0, 0xc3,
    ];
    /// `mov eax, 56; xor esi, esi; syscall`, and what is known or not known after it.
    const EARLY_NUMBER: [u8; 9] = [0xb8, 0x38, 0, 0, 0, 0x31, 0xf6, 0x0f, 0x05];

    fn with(tail: &[u8]) -> Vec<u8> {
        [&EARLY_NUMBER, tail].concat()
    }

    #[test]
    fn only_the_calls_of_forks_are_sites_of_forks() {
        let sites = sites_in(FORK_2_36, 0x1000, Wanted::Forks).unwrap();
        assert_eq!(sites, [Site { at: 0x100c, place: Place::Before, displaced: vec![0xb8, 0x38, 0, 0, 0] }]);
        assert_eq!(sites[0].patched(), 0x1007..0x100c);
        assert_eq!(sites_in(&FORK_2_36[28..], 0, Wanted::Forks), Some(Vec::new()), "set_robust_list");
        assert_eq!(sites_in(&[0x90; 40], 0, Wanted::All), Some(Vec::new()));
    }

    #[test]
    fn instructions_after_a_call_make_room_if_they_are_known_to_work_elsewhere() {
        let compare = [0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff];
        let site = |displaced: &[u8]| Some(vec![Site { at: 7, place: Place::After, displaced: displaced.to_vec() }]);
        assert_eq!(sites_in(&with(&compare), 0, Wanted::Forks), site(&compare));
        assert_eq!(sites_in(&with(&[0x48, 0x85, 0xc0, 0x7c, 0x13]), 0, Wanted::Forks), site(&[0x48, 0x85, 0xc0]));
        assert_eq!(sites_in(&with(&[0x89, 0xc2, 0x85, 0xc0]), 0, Wanted::Forks), site(&[0x89, 0xc2, 0x85, 0xc0]));
        let unknown: [&[u8]; 4] = [&[0x75, 0x20, 0x90, 0x90], &[0x89, 0x05, 1, 2, 3, 4], &[0x48, 0x3d, 0], &[]];
        for tail in unknown {
            assert_eq!(sites_in(&with(tail), 0, Wanted::Forks), None, "{tail:x?}");
        }
    }

    #[test]
    fn what_is_patched_is_not_patched_again() {
        let mut code = FORK_2_36.to_vec();
        code[7..12].copy_from_slice(&jump(7, 0x1000));
        assert_eq!(sites_in(&code, 0, Wanted::All), None);
        assert_eq!(sites_in(&code, 0, Wanted::Forks), Some(Vec::new()));
    }

    #[test]
    fn empty_functions_have_room_for_a_jump() {
        assert!(is_empty_function(&[0xc3, 0x66, 0x66, 0x2e, 0x0f]));
        assert!(is_empty_function(&[0xc3, 0x90, 0x90, 0x90, 0x90]));
        assert!(is_empty_function(&[0xc3, 0x0f, 0x1f, 0x44, 0x00]));
        assert!(is_empty_function(&[0xf3, 0x0f, 0x1e, 0xfa, 0xc3]));
        assert!(!is_empty_function(&[0xc3, 0x48, 0x8d, 0x05, 0xa1]));
        assert!(!is_empty_function(&[0xc3, 0x0f, 0x1f, 0xf0, 0x48]));
        assert!(!is_empty_function(&[0x55, 0x48, 0x89, 0xe5, 0xc3]));
        assert!(!is_empty_function(&[0xcc, 0x66, 0x66, 0x2e, 0x0f]));
    }

    /// A function that makes the system call of its first argument, patched: `before` and `after`
    /// are around the call.
    fn patched(before: &[u8], after: &[u8]) -> extern "C" fn(usize) -> isize {
        // mov rax, rdi
        let code = [&[0x48, 0x89, 0xf8], before, &SYSCALL, after, &[0xc3]].concat();
        let page = page_near(entry::address()).unwrap();
        Code::open().unwrap().write(page, &code).unwrap();
        let sites = sites_in(&code, page, Wanted::All).unwrap();
        assert_eq!(sites.len(), 1);
        patch(&sites).unwrap();
        // SAFETY: the function just written.
        unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<u8>(page)) }
    }

    #[test]
    fn patched_functions_do_what_they_did() {
        // cmp rax, 1; mov rdx, rax
        let after = patched(&[], &[0x48, 0x83, 0xf8, 0x01, 0x48, 0x89, 0xc2]);
        for function in [patched(&LOAD_SIXTH, &[]), after] {
            assert_eq!(function(SYS_GETPID.into()), std::process::id() as isize);
            assert_eq!(function(usize::MAX >> 33), -(libc::ENOSYS as isize));
            // Nothing is managed here, so the entry has the function fork by itself.
            match function(libc::SYS_fork as usize) {
                // SAFETY: ends the child.
                0 => unsafe { libc::_exit(3) },
                child => {
                    let mut status = 0;
                    // SAFETY: writes the status.
                    assert_eq!(unsafe { libc::waitpid(child as i32, &raw mut status, 0) }, child as i32);
                    assert_eq!(libc::WEXITSTATUS(status), 3);
                }
            }
        }
    }
}
