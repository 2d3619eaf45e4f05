//! Patches the system calls in the C library that the agent must see, whichever symbol is called.
//!
//! A program may reach the C library's code by a symbol, a handle of `dlsym`, RTLD_DEEPBIND, a
//! function inside of the library, or a C library of another namespace. All these ways end at a few
//! `syscall` instructions of the C library:
//!
//! - forks and new threads: in `_Fork` (or `fork`), `clone`, `clone3` (which has no symbol) and
//!   `syscall`;
//! - calls that change the meaning of memory without a kernel message ([`crate::unseen_calls`]): in
//!   `madvise`, `process_madvise`, `vmsplice`, `setsockopt` and `syscall`;
//! - the end of the process: in `_exit`;
//! - the execution of another program, to which the agent goes along: in `execve`, `execveat`,
//!   `fexecve` and `syscall`. Threads return from them only if they fail.
//!
//! A jump to a stub replaces instructions right before or right after each of them:
//!
//! - before: `mov eax, imm32` or `mov r9, [rsp+8]`, five bytes. This is preferred, because a thread
//!   that is in the system call returns to unchanged code.
//! - after: the system call itself and instructions that work at any address. This is possible only
//!   if no thread can be in the call.
//!
//! The stubs of a C library lie on a page that the jumps can reach. If the call may fork, installs
//! guards, executes another program or ends the process, [`crate::interception::entry`] makes it.
//! If the call lends pages, the stub sets a flag and continues with the call.
//!
//! A site that is not recognised is not patched. If it is a fork in the program's C library,
//! nothing is patched and [`crate::interception::dispatch`] is used. If it is another call, the
//! program counts as one that makes unseen calls.
//!
//! The loader calls an empty function for debuggers after each change of its list of objects. This
//! function is patched, too. So a C library of a new namespace (`dlmopen(3)`) is patched, and the
//! code of a new library is scanned, before any of it runs.
//!
//! Code is written through `/proc/self/mem`, so no mapping becomes writable and executable, which
//! policies may forbid.
//!
//! There is no lock. `install` runs while the process starts; later changes run under the loader's
//! lock.

use crate::interception::entry;
pub use crate::interception::fork_call::ForkHooks;
use crate::link_maps;
use crate::loader::Object;
use crate::unseen_calls;
use foliomem_types::units::PAGE_BYTES;
use linux_raw_sys::general as raw;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ffi::CStr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The `syscall` instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Length of `jmp rel32`.
const JUMP_BYTES: usize = 5;
/// First byte of `jmp rel32`.
const JUMP: u8 = 0xe9;
/// `mov r9, [rsp + 8]`, in the C library's function `syscall`.
const LOAD_SIXTH: [u8; JUMP_BYTES] = [0x4c, 0x8b, 0x4c, 0x24, 0x08];
/// First byte of `mov eax, imm32`.
const MOV_EAX: u8 = 0xb8;
/// Name of the C library.
const C_LIBRARY: &CStr = c"libc.so.6";
/// Maximum distance from a library to its page of stubs, in bytes: the reach of `jmp rel32`, less
/// the size of the largest library and of the page.
const REACH_BYTES: usize = (1 << 31) - (64 << 20);
/// Size to which the code of a stub is allocated, in bytes; no stub is longer.
const STUB_BYTES: usize = 224;
/// Number of words at the start of a page of stubs: the address of the entry function, and that of
/// the flag that a stub sets before a call that may give the kernel references to pages.
const WORDS: usize = 2;
/// `MADV_GUARD_INSTALL`, since Linux 6.13.
pub const GUARD_INSTALL: u8 = 102;

/// Whether the agent sees all forks of the program's C library.
pub static COVERED: AtomicBool = AtomicBool::new(false);

/// The system calls to search for in a function.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// The calls with one of these numbers.
    Numbers(&'static [u32]),
    /// All calls.
    All,
}

impl Wanted {
    /// Returns whether `code`, which ends at a system call, loads the number of a wanted call.
    fn is_among(self, code: &[u8]) -> bool {
        match self {
            Wanted::All => true,
            Wanted::Numbers(numbers) => code.windows(JUMP_BYTES).any(|bytes| loads_number(bytes, numbers)),
        }
    }

    /// Returns whether `code`, right before a system call, is an instruction that a jump can
    /// replace.
    fn is_ready(self, code: &[u8]) -> bool {
        match self {
            Wanted::All => code == LOAD_SIXTH,
            Wanted::Numbers(numbers) => loads_number(code, numbers),
        }
    }
}

/// The calls that fork.
const FORKS: Wanted = Wanted::Numbers(&[raw::__NR_clone, raw::__NR_fork, raw::__NR_clone3]);

/// Functions that fork. A recognised C library has at least one site in each group.
const FORKING: [(&[&CStr], Wanted); 3] =
    [(&[c"_Fork", c"fork"], FORKS), (&[c"clone"], FORKS), (&[c"syscall"], Wanted::All)];

/// Functions that change the meaning of memory. Only newer C libraries have the last one.
const CHANGING: [(&CStr, Wanted); 4] = [
    (c"madvise", Wanted::Numbers(&[raw::__NR_madvise])),
    (c"vmsplice", Wanted::Numbers(&[raw::__NR_vmsplice])),
    (c"setsockopt", Wanted::Numbers(&[raw::__NR_setsockopt])),
    (c"process_madvise", Wanted::Numbers(&[raw::__NR_process_madvise])),
];

/// Maximum distance in bytes between the code of `clone` and of `clone3`, which has no symbol.
const CLONE3_REACH_BYTES: usize = 32 << 10;

/// The functions that end the process or execute another program. A site of them that is not
/// recognised stays unpatched.
const LEAVING: [(&CStr, Wanted); 4] = [
    (c"_exit", Wanted::All),
    (c"execve", Wanted::Numbers(&[raw::__NR_execve])),
    (c"execveat", Wanted::Numbers(&[raw::__NR_execveat])),
    (c"fexecve", Wanted::Numbers(&[raw::__NR_execveat])),
];

/// Whether a thread may be in a system call that is going to be patched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Users {
    None,
    Possible,
}

/// Position of the instructions that the jump replaces, relative to the system call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Position {
    Before,
    After,
}

/// A system call that is going to be patched.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Site {
    /// Address of the `syscall` instruction.
    at: usize,
    position: Position,
    /// The instructions that the jump replaces, without the system call.
    displaced: Vec<u8>,
}

impl Site {
    /// Recognises the site of the system call at `offset` in `code`, which begins at address
    /// `start`. Returns `None` if it is patched already, or if no instructions can be replaced.
    fn recognise(code: &[u8], start: usize, offset: usize, wanted: Wanted) -> Option<Site> {
        let at = start + offset;
        if offset.checked_sub(JUMP_BYTES).is_some_and(|from| code[from] == JUMP) {
            // The site is patched already.
            return None;
        }
        if let Some(before) = offset.checked_sub(JUMP_BYTES).map(|from| &code[from..offset])
            && wanted.is_ready(before)
        {
            return Some(Site { at, position: Position::Before, displaced: before.to_vec() });
        }
        let after = &code[offset + SYSCALL.len()..];
        let mut len = 0;
        while SYSCALL.len() + len < JUMP_BYTES {
            len += movable_bytes(&after[len..])?;
        }
        Some(Site { at, position: Position::After, displaced: after[..len].to_vec() })
    }

    /// Returns the addresses of the replaced bytes.
    fn patched(&self) -> Range<usize> {
        match self.position {
            Position::Before => self.at - JUMP_BYTES..self.at,
            Position::After => self.at..self.end(),
        }
    }

    /// Returns the end of the system call and of the replaced instructions after it.
    fn end(&self) -> usize {
        match self.position {
            Position::Before => self.at + SYSCALL.len(),
            Position::After => self.at + SYSCALL.len() + self.displaced.len(),
        }
    }

    /// Returns the code of the stub at `start`, which stands for the replaced instructions. `words`
    /// is the address of the words of its page.
    fn stub(&self, start: usize, words: usize) -> Vec<u8> {
        let mut stub = Stub { start, code: Vec::with_capacity(STUB_BYTES), to_entry: Vec::new(), to_flag: Vec::new() };
        if self.position == Position::Before {
            stub.code.extend(&self.displaced);
        }
        stub.find_watched_calls();
        let call = stub.here();
        let at = match self.position {
            Position::Before => {
                stub.code.extend(jump(stub.here(), self.at));
                self.at
            }
            Position::After => {
                stub.code.extend(SYSCALL);
                stub.code.extend(&self.displaced);
                stub.code.extend(jump(stub.here(), self.end()));
                call
            }
        };
        stub.set_flag(words + size_of::<usize>(), call);
        stub.enter(words, at)
    }
}

/// A stub under construction.
struct Stub {
    start: usize,
    code: Vec<u8>,
    /// Ends of the branches to the call of the entry.
    to_entry: Vec<usize>,
    /// Ends of the branches to the code that sets the flag.
    to_flag: Vec<usize>,
}

impl Stub {
    /// Returns the address of the next instruction.
    fn here(&self) -> usize {
        self.start + self.code.len()
    }

    /// Adds branches for the calls that the agent must see. The registers contain the number and
    /// the arguments of the call.
    fn find_watched_calls(&mut self) {
        const SOL_SOCKET: u8 = libc::SOL_SOCKET as u8;
        const SO_ZEROCOPY: u8 = libc::SO_ZEROCOPY as u8;
        const MADE_BY_ENTRY: [u32; 6] = [
            raw::__NR_fork,
            raw::__NR_clone,
            raw::__NR_clone3,
            raw::__NR_exit_group,
            raw::__NR_execve,
            raw::__NR_execveat,
        ];
        for number in MADE_BY_ENTRY {
            self.compare_number(number);
            let end = self.far_branch();
            self.to_entry.push(end);
        }
        for number in [raw::__NR_vmsplice, raw::__NR_io_uring_setup] {
            self.compare_number(number);
            let end = self.far_branch();
            self.to_flag.push(end);
        }
        // cmp edx, imm8; cmp r10d, imm8
        let advices: [(u32, &[u8]); 2] =
            [(raw::__NR_madvise, &[0x83, 0xfa]), (raw::__NR_process_madvise, &[0x41, 0x83, 0xfa])];
        for (number, compare_advice) in advices {
            self.compare_number(number);
            let other = self.branch_if_other();
            self.code.extend(compare_advice);
            self.code.push(GUARD_INSTALL);
            let end = self.far_branch();
            self.to_entry.push(end);
            self.land(other);
        }
        self.compare_number(raw::__NR_setsockopt);
        let other = self.branch_if_other();
        // cmp esi, imm8
        self.code.extend([0x83, 0xfe, SOL_SOCKET]);
        let other_level = self.branch_if_other();
        // cmp edx, imm8
        self.code.extend([0x83, 0xfa, SO_ZEROCOPY]);
        let end = self.far_branch();
        self.to_flag.push(end);
        self.land(other);
        self.land(other_level);
    }

    /// Adds `cmp eax, imm32`.
    fn compare_number(&mut self, number: u32) {
        self.code.push(0x3d);
        self.code.extend(number.to_le_bytes());
    }

    /// Adds `jne rel8`, which [`Stub::land`] sets. Returns the branch's end.
    fn branch_if_other(&mut self) -> usize {
        self.code.extend([0x75, 0]);
        self.code.len()
    }

    /// Adds `je rel32`, which [`Stub::land_far`] sets. Returns the branch's end.
    fn far_branch(&mut self) -> usize {
        self.code.extend([0x0f, 0x84, 0, 0, 0, 0]);
        self.code.len()
    }

    /// Lets the branch that ends at `end` lead here.
    fn land(&mut self, end: usize) {
        let Ok(distance) = i8::try_from(self.code.len() - end) else { unreachable!("stubs are short") };
        self.code[end - 1] = distance as u8;
    }

    /// Lets the far branches that end at `ends` lead here.
    fn land_far(&mut self, ends: Vec<usize>) {
        for end in ends {
            let distance = (self.code.len() - end) as u32;
            self.code[end - size_of::<u32>()..end].copy_from_slice(&distance.to_le_bytes());
        }
    }

    /// Adds code that sets the flag whose address is in the word at `word`, and continues at
    /// `call`.
    fn set_flag(&mut self, word: usize, call: usize) {
        let ends = std::mem::take(&mut self.to_flag);
        self.land_far(ends);
        // mov r11, [rip + rel32]; mov byte [r11], 1. The system call changes r11, too.
        self.code.extend([0x4c, 0x8b, 0x1d]);
        self.code.extend((word.wrapping_sub(self.here() + 4) as i32).to_le_bytes());
        self.code.extend([0x41, 0xc6, 0x03, 1]);
        self.code.extend(jump(self.here(), call));
    }

    /// Adds a jump to the entry whose address is in the word at `word`, for the system call at
    /// `call`. Returns the finished code.
    fn enter(mut self, word: usize, call: usize) -> Vec<u8> {
        let ends = std::mem::take(&mut self.to_entry);
        self.land_far(ends);
        // lea rcx, [rip + call]
        self.code.extend([0x48, 0x8d, 0x0d]);
        self.code.extend((call.wrapping_sub(self.here() + 4) as i32).to_le_bytes());
        self.code.extend(jump_through(self.here(), word));
        self.code
    }
}

/// Returns the `jmp rel32` at `from` that leads to `to`.
fn jump(from: usize, to: usize) -> [u8; JUMP_BYTES] {
    let [a, b, c, d] = (to.wrapping_sub(from + JUMP_BYTES) as i32).to_le_bytes();
    [JUMP, a, b, c, d]
}

/// Returns the `jmp [rip + rel32]` at `from` through the word at `word`.
fn jump_through(from: usize, word: usize) -> [u8; 6] {
    let [a, b, c, d] = (word.wrapping_sub(from + 6) as i32).to_le_bytes();
    [0xff, 0x25, a, b, c, d]
}

/// Returns whether `code` is `mov eax, imm32` with one of `numbers`.
fn loads_number(code: &[u8], numbers: &[u32]) -> bool {
    matches!(code, &[MOV_EAX, a, b, c, d] if numbers.contains(&u32::from_le_bytes([a, b, c, d])))
}

/// Returns the length of the instruction at the start of `code`, if it is known to work at any
/// address.
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

/// Returns the sites in the code of a function, or `None` if one is not recognised.
fn sites_in(code: &[u8], start: usize, wanted: Wanted) -> Option<Vec<Site>> {
    let mut sites = Vec::new();
    let mut from = 0;
    while let Some(found) = code[from..].windows(SYSCALL.len()).position(|bytes| bytes == SYSCALL) {
        let offset = from + found;
        if wanted.is_among(&code[from..offset]) {
            sites.push(Site::recognise(code, start, offset, wanted)?);
        }
        from = offset + SYSCALL.len();
    }
    Some(sites)
}

/// Returns the sites of a function of `library`, or `None` if one is not recognised or patched
/// already.
fn sites_of_function(library: Object<'_>, name: &CStr, wanted: Wanted) -> Option<Vec<Site>> {
    let Some(code) = library.code(name) else { return Some(Vec::new()) };
    // SAFETY: the range is code of a loaded library, which only this module changes, one thread at
    // a time.
    let bytes = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(code.start), code.len()) };
    sites_in(bytes, code.start, wanted)
}

/// Returns the sites of `clone3` in `library`. glibc makes threads with `clone3` since version
/// 2.34.
fn clone3_sites(library: Object<'_>) -> Vec<Site> {
    let Some(code) = library.code(c"clone").and_then(|clone| library.code_around(clone.start, CLONE3_REACH_BYTES))
    else {
        return Vec::new();
    };
    // SAFETY: the range is code of a loaded library, which only this module changes, one thread at
    // a time.
    let bytes = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(code.start), code.len()) };
    let call = [&[MOV_EAX][..], &raw::__NR_clone3.to_le_bytes(), &SYSCALL].concat();
    let found = memchr::memmem::find_iter(bytes, &call);
    let wanted = Wanted::Numbers(&[raw::__NR_clone3]);
    found.filter_map(|offset| Site::recognise(bytes, code.start, offset + JUMP_BYTES, wanted)).collect()
}

/// The sites of a C library.
struct Sites {
    /// The sites that are patched only if no thread may be in them.
    all: Vec<Site>,
    /// The sites of [`LEAVING`] that can be patched at any time: no thread returns from them, or
    /// the jump comes before the call.
    leaving: Vec<Site>,
    /// Whether `all` contains all calls that the agent must see.
    are_complete: bool,
}

impl Sites {
    /// Finds the sites of `library`. Returns `None` if a fork is not recognised or patched already.
    fn of(library: Object<'_>) -> Option<Sites> {
        let leaving = LEAVING.iter().flat_map(|&(name, wanted)| {
            let found = sites_of_function(library, name, wanted).unwrap_or_default();
            found.into_iter().filter(move |site| wanted == Wanted::All || site.position == Position::Before)
        });
        let mut sites = Sites { all: Vec::new(), leaving: leaving.collect(), are_complete: true };
        for (functions, wanted) in FORKING {
            let before = sites.all.len();
            for name in functions {
                sites.add(sites_of_function(library, name, wanted)?);
            }
            if sites.all.len() == before {
                return None;
            }
        }
        sites.add(clone3_sites(library));
        for (name, wanted) in CHANGING {
            let is_missing = library.code(name).is_none();
            match sites_of_function(library, name, wanted) {
                Some(found) if is_missing || !found.is_empty() => sites.add(found),
                _ => sites.are_complete = false,
            }
        }
        Some(sites)
    }

    /// Adds sites that are not known yet.
    fn add(&mut self, found: Vec<Site>) {
        for site in found {
            if !self.all.iter().any(|known| known.at == site.at) {
                self.all.push(site);
            }
        }
    }

    /// Patches the sites. If they are complete, the calls of this library count as seen.
    fn patch(&self) -> Result<(), Errno> {
        patch(&[&self.all[..], &self.leaving].concat())?;
        if let Some(first) = self.all.first().filter(|_| self.are_complete) {
            unseen_calls::note_seen_code(first.at);
        }
        Ok(())
    }
}

/// The code of this process, for writing.
struct Code(OwnedFd);

impl Code {
    /// Opens the memory of this process.
    fn open() -> Result<Code, Errno> {
        rustix::fs::openat(rustix::fs::CWD, c"/proc/self/mem", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map(Code)
    }

    /// Writes `bytes` to address `at`.
    fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        match rustix::io::pwrite(self.0.as_fd(), bytes, at as u64)? {
            written if written == bytes.len() => Ok(()),
            _ => Err(Errno::IO),
        }
    }
}

/// Maps a page for stubs that a jump at `target` can reach.
fn page_near(target: usize) -> Result<usize, Errno> {
    const STEP_BYTES: usize = 1 << 20;
    let (protection, flags) = (ProtFlags::READ | ProtFlags::EXEC, MapFlags::PRIVATE);
    // SAFETY: the kernel chooses the address, or maps the page at `hint` only if nothing is mapped
    // there.
    let map = |hint: usize, flags| unsafe {
        mmap_anonymous(std::ptr::with_exposed_provenance_mut(hint), PAGE_BYTES, protection, flags)
    };
    let page = map(0, flags)?.expose_provenance();
    if page.abs_diff(target) < REACH_BYTES {
        return Ok(page);
    }
    // SAFETY: the page was mapped above, and nobody uses it.
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

/// Patches `sites`, which are in one library.
fn patch(sites: &[Site]) -> Result<(), Errno> {
    let Some(first) = sites.first() else { return Ok(()) };
    let code = Code::open()?;
    let page = page_near(first.at)?;
    let words: [usize; WORDS] = [entry::address(), unseen_calls::lending_flag()];
    let mut stubs = words.map(usize::to_ne_bytes).concat();
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

/// Returns whether threads other than the calling one may be in a system call.
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
    // The agent's calls are known, and the loader makes no calls on behalf of others.
    [Some(entry::address()), link_maps::notify_function()].into_iter().flatten().for_each(unseen_calls::note_seen_code);
    if !entry::is_supported() || !patch_c_library() || follow_loader().is_err() {
        // The agent cannot scan libraries that are loaded later.
        unseen_calls::assume();
    }
}

/// Patches the C library of the program. Returns whether it could.
fn patch_c_library() -> bool {
    let mut sites = None;
    link_maps::visit(|object| {
        if sites.is_none() && object.is_named(C_LIBRARY) {
            sites = Sites::of(object);
        }
    });
    let Some(sites) = sites else { return false };
    if sites.all.iter().any(|site| site.position == Position::After) && users() == Users::Possible {
        return false;
    }
    let is_patched = sites.patch().is_ok();
    if is_patched {
        // Release pairs with the reads of the hooks, which then call functions that are patched.
        COVERED.store(true, Ordering::Release);
    }
    is_patched
}

/// Runs `hooks` around all forks from here on.
pub fn activate(hooks: &'static dyn ForkHooks) {
    entry::set_hooks(hooks);
}

/// Notes that the program dispatches the calling thread's system calls (Syscall User Dispatch) by
/// the selector at this address, or no longer dispatches them if `selector` is `None`.
pub fn note_dispatch(selector: Option<usize>) {
    entry::note_dispatch(selector);
}

/// Lets the loader call [`objects_changed`].
///
/// # Errors
/// Fails if the loader's function is not empty, or if it cannot be patched.
fn follow_loader() -> Result<(), Errno> {
    let function = link_maps::notify_function().ok_or(Errno::NOENT)?;
    // SAFETY: the address is a function of the loader. Functions are aligned to 16 bytes, so that
    // many bytes are mapped.
    let code = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(function), JUMP_BYTES) };
    if !is_empty_function(code) {
        return Err(Errno::NOTSUP);
    }
    let writer = Code::open()?;
    let page = page_near(function)?;
    let mut stub = (objects_changed as *const ()).expose_provenance().to_ne_bytes().to_vec();
    let start = page + stub.len();
    stub.extend(jump_through(start, page));
    writer.write(page, &stub)?;
    writer.write(function, &jump(function, start))
}

/// Returns whether `code` is a function that only returns and has room for a jump.
fn is_empty_function(code: &[u8]) -> bool {
    const RETURN: u8 = 0xc3;
    match code {
        [0xf3, 0x0f, 0x1e, 0xfa, RETURN, ..] => true, // endbr64; ret
        // Padding up to the next function: nop, int3, or the beginning of longer nops.
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

/// Runs when the loader has changed its list of objects or is about to. The loader holds its lock.
extern "C" fn objects_changed() {
    let are_complete = link_maps::visit(|object| {
        if object.is_named(C_LIBRARY)
            && let Some(sites) = Sites::of(object)
        {
            // A library that cannot be patched now is found again at the next change.
            let _ = sites.patch();
        }
    });
    // The code of a library may be mapped before the loader lists the library, but runs only after.
    if are_complete && unseen_calls::is_watching() && !unseen_calls::can_be_made() {
        entry::objects_changed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYS_GETPID: u8 = 39;

    /// `_Fork` of glibc 2.36, from the number of its call to the next call.
    const FORK_2_36: &[u8] = &[
        0x4c, 0x8d, 0x90, 0xd0, 0x02, 0x00, 0x00, 0xb8, 0x38, 0x00, 0x00, 0x00, 0x0f, 0x05, 0x48, 0x3d, 0x00, 0xf0,
        0xff, 0xff, 0x77, 0x35, 0x89, 0xc2, 0x85, 0xc0, 0x75, 0x2c, 0xb8, 0x11, 0x01, 0x00, 0x00, 0x0f, 0x05, 0x89,
        0xd0, 0xc3,
    ];
    /// `mov eax, 56; xor esi, esi; syscall`. Each test appends the instructions that follow the
    /// call.
    const EARLY_NUMBER: [u8; 9] = [0xb8, 0x38, 0, 0, 0, 0x31, 0xf6, 0x0f, 0x05];

    fn with(tail: &[u8]) -> Vec<u8> {
        [&EARLY_NUMBER, tail].concat()
    }

    #[test]
    fn only_the_calls_of_forks_are_sites_of_forks() {
        let sites = sites_in(FORK_2_36, 0x1000, FORKS).unwrap();
        assert_eq!(sites, [Site { at: 0x100c, position: Position::Before, displaced: vec![0xb8, 0x38, 0, 0, 0] }]);
        assert_eq!(sites[0].patched(), 0x1007..0x100c);
        assert_eq!(sites_in(&FORK_2_36[28..], 0, FORKS), Some(Vec::new()), "set_robust_list");
        assert_eq!(sites_in(&[0x90; 40], 0, Wanted::All), Some(Vec::new()));
    }

    #[test]
    fn movable_instructions_after_a_call_make_room() {
        let compare = [0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff];
        let site =
            |displaced: &[u8]| Some(vec![Site { at: 7, position: Position::After, displaced: displaced.to_vec() }]);
        assert_eq!(sites_in(&with(&compare), 0, FORKS), site(&compare));
        assert_eq!(sites_in(&with(&[0x48, 0x85, 0xc0, 0x7c, 0x13]), 0, FORKS), site(&[0x48, 0x85, 0xc0]));
        assert_eq!(sites_in(&with(&[0x89, 0xc2, 0x85, 0xc0]), 0, FORKS), site(&[0x89, 0xc2, 0x85, 0xc0]));
        let unknown: [&[u8]; 4] = [&[0x75, 0x20, 0x90, 0x90], &[0x89, 0x05, 1, 2, 3, 4], &[0x48, 0x3d, 0], &[]];
        for tail in unknown {
            assert_eq!(sites_in(&with(tail), 0, FORKS), None, "{tail:x?}");
        }
    }

    #[test]
    fn a_patched_site_is_not_patched_again() {
        let mut code = FORK_2_36.to_vec();
        code[7..12].copy_from_slice(&jump(7, 0x1000));
        assert_eq!(sites_in(&code, 0, Wanted::All), None);
        assert_eq!(sites_in(&code, 0, FORKS), Some(Vec::new()));
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

    /// Returns a patched function that makes the system call of its first argument. `before` and
    /// `after` are the instructions around the call.
    fn patched(before: &[u8], after: &[u8]) -> extern "C" fn(usize) -> isize {
        // mov rax, rdi
        let code = [&[0x48, 0x89, 0xf8], before, &SYSCALL, after, &[0xc3]].concat();
        let page = page_near(entry::address()).unwrap();
        Code::open().unwrap().write(page, &code).unwrap();
        let sites = sites_in(&code, page, Wanted::All).unwrap();
        assert_eq!(sites.len(), 1);
        patch(&sites).unwrap();
        // SAFETY: the page contains the function that was just written.
        unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<u8>(page)) }
    }

    #[test]
    fn patched_functions_still_work() {
        // cmp rax, 1; mov rdx, rax
        let after = patched(&[], &[0x48, 0x83, 0xf8, 0x01, 0x48, 0x89, 0xc2]);
        for function in [patched(&LOAD_SIXTH, &[]), after] {
            assert_eq!(function(SYS_GETPID.into()), std::process::id() as isize);
            assert_eq!(function(usize::MAX >> 33), -(libc::ENOSYS as isize));
            // The agent is not active here, so the entry lets the function fork by itself.
            match function(libc::SYS_fork as usize) {
                // SAFETY: _exit(2) ends the child.
                0 => unsafe { libc::_exit(3) },
                child => {
                    let mut status = 0;
                    // SAFETY: waitpid(2) only writes the status.
                    assert_eq!(unsafe { libc::waitpid(child as i32, &raw mut status, 0) }, child as i32);
                    assert_eq!(libc::WEXITSTATUS(status), 3);
                }
            }
        }
    }
}
