//! Finds the program, and refuses programs that cannot load the agent, before anything is started.

use crate::error::{CliError, Unfit};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Maximum number of interpreters that are themselves scripts.
const MAX_INTERPRETERS: usize = 5;
/// Mode bits of privileged files.
const SETUID_OR_SETGID: u32 = 0o6000;

/// Returns the file that running `program` would execute, if it can load the agent.
pub fn check(program: &OsStr) -> Result<PathBuf, CliError> {
    let path = find(program)?;
    let mut file = path.clone();
    for _ in 0..MAX_INTERPRETERS {
        match look_at(&file)? {
            Found::Program => return Ok(path),
            Found::Script(interpreter) => file = interpreter,
        }
    }
    Ok(path)
}

/// Searches for the program as execvp(3) does.
fn find(program: &OsStr) -> Result<PathBuf, CliError> {
    let name = program.to_string_lossy().into_owned();
    if program.as_bytes().contains(&b'/') {
        return executable(Path::new(program));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/bin:/usr/bin"));
    let mut refused = None;
    for directory in std::env::split_paths(&path) {
        match executable(&directory.join(program)) {
            Ok(found) => return Ok(found),
            Err(CliError::NotFound(_)) => {}
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or(CliError::NotFound(name)))
}

fn executable(path: &Path) -> Result<PathBuf, CliError> {
    let name = path.display().to_string();
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return Err(CliError::NotExecutable(name, error.to_string()));
        }
        Err(_) => return Err(CliError::NotFound(name)),
    };
    if metadata.is_dir() {
        return Err(CliError::NotExecutable(name, "it is a directory".to_owned()));
    }
    if let Err(errno) = rustix::fs::access(path, rustix::fs::Access::EXEC_OK) {
        return Err(CliError::NotExecutable(name, std::io::Error::from(errno).to_string()));
    }
    Ok(path.to_owned())
}

enum Found {
    Program,
    Script(PathBuf),
}

/// Returns the kind of a file. A file that may be executed but not read counts as a manageable
/// program.
fn look_at(path: &Path) -> Result<Found, CliError> {
    let unfit = |why| Err(CliError::Unfit(path.to_owned(), why));
    if let Ok(metadata) = fs::metadata(path)
        && (metadata.permissions().mode() & SETUID_OR_SETGID != 0 || has_capabilities(path))
    {
        return unfit(Unfit::Privileged);
    }
    let Ok(mut file) = File::open(path) else { return Ok(Found::Program) };
    let mut start = Vec::new();
    if (&mut file).take(256).read_to_end(&mut start).is_err() {
        return Ok(Found::Program);
    }
    if let Some(line) = start.strip_prefix(b"#!") {
        return Ok(interpreter(line).map_or(Found::Program, Found::Script));
    }
    match elf_unfit(&file, &start) {
        // A run inside a run has an agent for its own program.
        Some(Unfit::Static) if is_foliomem(path) => Ok(Found::Program),
        Some(why) => unfit(why),
        None => Ok(Found::Program),
    }
}

/// Returns whether it is the file of this very program, which is static and loads no agent.
pub fn is_foliomem(path: &Path) -> bool {
    let own = fs::metadata("/proc/self/exe").ok().zip(fs::metadata(path).ok());
    own.is_some_and(|(own, file)| (own.dev(), own.ino()) == (file.dev(), file.ino()))
}

/// Returns whether musl loads the program. It runs the constructors of libraries after the entry
/// point of the program, and other loaders before.
pub fn is_for_musl(path: &Path) -> bool {
    let mut start = [0; elf::HEADER_BYTES];
    let Ok(file) = File::open(path) else { return false };
    let segments = file.read_exact_at(&mut start, 0).ok().and_then(|()| segments(&file, &start));
    segments.is_some_and(|all| all.iter().any(|(kind, name)| *kind == elf::PT_INTERP && contains(name, b"ld-musl")))
}

/// Returns the reason why an executable file cannot load the agent; `None` also for one that cannot
/// be read.
pub fn unfit(path: &Path) -> Option<Unfit> {
    let mut start = [0; elf::HEADER_BYTES];
    let file = File::open(path).ok()?;
    file.read_exact_at(&mut start, 0).ok()?;
    elf_unfit(&file, &start)
}

/// Returns the interpreter that a script's first line names.
fn interpreter(line: &[u8]) -> Option<PathBuf> {
    let line = line.split(|&byte| byte == b'\n').next()?;
    let words: Vec<&[u8]> = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).collect();
    let path = Path::new(OsStr::from_bytes(words.first()?));
    if path.file_name() == Some(OsStr::new("env")) {
        let program = words[1..].iter().find(|word| !word.starts_with(b"-") && !word.contains(&b'='))?;
        return find(OsStr::from_bytes(program)).ok();
    }
    path.exists().then(|| path.to_owned())
}

/// Returns whether the file has capabilities that make the loader ignore LD_PRELOAD. Root has them
/// anyway, so its loader does not ignore it.
fn has_capabilities(path: &Path) -> bool {
    let mut value = [0u8; 64];
    let found = rustix::fs::getxattr(path, c"security.capability", &mut value).is_ok();
    found && !rustix::process::geteuid().is_root()
}

/// Numbers of the ELF format (elf(5)).
mod elf {
    pub const MAGIC: &[u8] = b"\x7fELF";
    pub const CLASS_64: u8 = 2;
    pub const MACHINE_X86_64: u16 = 62;
    pub const PT_INTERP: u32 = 3;
    pub const PT_NOTE: u32 = 4;
    pub const HEADER_BYTES: usize = 64;
    /// Maximum number of segments that are read.
    pub const MAX_SEGMENTS: u64 = 256;
    pub const SEGMENT_BYTES: u64 = 56;
    /// Maximum number of bytes that are read of a segment.
    pub const MAX_CONTENT_BYTES: u64 = 4096;
}

/// Returns the reason why an ELF file cannot load the agent. Returns `None` for a manageable file
/// and for any other file, which the kernel will refuse.
fn elf_unfit(file: &File, start: &[u8]) -> Option<Unfit> {
    if !start.starts_with(elf::MAGIC) {
        return None;
    }
    let half = |offset: usize| Some(u16::from_le_bytes(start.get(offset..offset + 2)?.try_into().ok()?));
    if start.len() < elf::HEADER_BYTES || start[4] != elf::CLASS_64 || half(18) != Some(elf::MACHINE_X86_64) {
        return Some(Unfit::Architecture);
    }
    let mut is_go = false;
    for (kind, content) in segments(file, start)? {
        match kind {
            elf::PT_INTERP => return None,
            elf::PT_NOTE => is_go |= contains(&content, b"Go\0\0"),
            _ => {}
        }
    }
    Some(if is_go { Unfit::GoWithoutCgo } else { Unfit::Static })
}

/// Returns the type and the first bytes of each segment of an ELF file for this architecture. Stops
/// at the first program header that cannot be read.
fn segments(file: &File, start: &[u8]) -> Option<Vec<(u32, Vec<u8>)>> {
    let table = u64::from_le_bytes(start.get(32..40)?.try_into().ok()?);
    let count = u64::from(u16::from_le_bytes(start.get(56..58)?.try_into().ok()?)).min(elf::MAX_SEGMENTS);
    let mut found = Vec::new();
    for index in 0..count {
        let mut segment = [0u8; elf::SEGMENT_BYTES as usize];
        let offset = table.checked_add(index * elf::SEGMENT_BYTES)?;
        if file.read_exact_at(&mut segment, offset).is_err() {
            break;
        }
        let kind = u32::from_le_bytes(std::array::from_fn(|index| segment[index]));
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| segment[at + index]));
        let mut content = vec![0u8; word(32).min(elf::MAX_CONTENT_BYTES) as usize];
        if file.read_exact_at(&mut content, word(8)).is_err() {
            content.clear();
        }
        found.push((kind, content));
    }
    Some(found)
}

fn contains(bytes: &[u8], word: &[u8]) -> bool {
    bytes.windows(word.len()).any(|window| window == word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn strange_first_lines_name_existing_interpreters(
            words in prop::collection::vec(
                prop_oneof![
                    prop::sample::select(vec!["/usr/bin/env", "env", "-S", "A=b", "sh", "/bin/sh", " ", "\t"])
                        .prop_map(|word| word.as_bytes().to_vec()),
                    prop::collection::vec(any::<u8>(), 0..20),
                ],
                0..6,
            )
        ) {
            if let Some(found) = interpreter(&words.join(&b' ')) {
                prop_assert!(found.exists());
            }
        }

        #[test]
        fn strange_elf_files_do_not_panic(
            table: [u8; 8],
            segments: u16,
            kind in 0u32..8,
            place: [u64; 5],
            flips in prop::collection::vec((0usize..120, any::<u8>()), 0..4),
        ) {
            let mut bytes = elf(elf::CLASS_64, elf::MACHINE_X86_64, kind, b"\x04\0\0\0Go\0\0");
            bytes[56..58].copy_from_slice(&segments.to_le_bytes());
            for (field, value) in bytes[72..112].chunks_exact_mut(8).zip(place) {
                field.copy_from_slice(&value.to_le_bytes());
            }
            let fd = rustix::fs::memfd_create("elf", rustix::fs::MemfdFlags::empty()).unwrap();
            let file = File::from(fd);
            for (at, byte) in flips {
                bytes[at] = byte;
            }
            for table in [64u64.to_le_bytes(), table] {
                bytes[32..40].copy_from_slice(&table);
                file.write_all_at(&bytes, 0).unwrap();
                elf_unfit(&file, &bytes);
            }
        }
    }

    fn outcome(content: &[u8], mode: u32) -> Result<PathBuf, CliError> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("foliomem-preflight-{}-{number}", std::process::id()));
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let outcome = check(path.as_os_str());
        fs::remove_file(&path).unwrap();
        outcome
    }

    /// Builds an ELF file with one segment.
    fn elf(class: u8, machine: u16, kind: u32, content: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 120];
        bytes[..4].copy_from_slice(elf::MAGIC);
        bytes[4] = class;
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32] = 64;
        bytes[56] = 1;
        bytes[64..68].copy_from_slice(&kind.to_le_bytes());
        bytes[72] = 120;
        bytes[96] = content.len() as u8;
        bytes.extend_from_slice(content);
        bytes
    }

    #[test]
    fn programs_of_musl_are_known_by_their_loader() {
        let path = std::env::temp_dir().join(format!("foliomem-musl-{}", std::process::id()));
        let loaders = ["/lib64/ld-linux-x86-64.so.2\0", "/lib/ld-musl-x86_64.so.1\0"];
        let found = loaders.map(|loader| {
            fs::write(&path, elf(2, 62, elf::PT_INTERP, loader.as_bytes())).unwrap();
            is_for_musl(&path)
        });
        fs::remove_file(&path).unwrap();
        assert_eq!((found, is_for_musl(&path)), ([false, true], false));
    }

    #[test]
    fn programs_that_cannot_load_the_agent_are_refused() {
        let unfit = |content: &[u8]| match outcome(content, 0o755) {
            Err(CliError::Unfit(_, why)) => Some(why),
            Ok(_) => None,
            Err(other) => panic!("{other}"),
        };
        assert_eq!(unfit(&elf(2, 62, elf::PT_INTERP, b"/lib64/ld-linux-x86-64.so.2\0")), None);
        assert_eq!(unfit(&elf(2, 62, elf::PT_INTERP, b"/lib/ld-musl-x86_64.so.1\0")), None);
        assert_eq!(unfit(&elf(2, 62, 1, b"")), Some(Unfit::Static));
        assert_eq!(unfit(&elf(2, 62, elf::PT_NOTE, b"\x04\0\0\0Go\0\0")), Some(Unfit::GoWithoutCgo));
        assert_eq!(unfit(&elf(1, 3, elf::PT_INTERP, b"/lib/ld-linux.so.2\0")), Some(Unfit::Architecture));
        assert_eq!(unfit(b"#!/bin/sh\necho\n"), None);
        assert_eq!(unfit(b"\x7fELF"), Some(Unfit::Architecture));
        assert!(matches!(outcome(b"#!/bin/sh\n", 0o4755), Err(CliError::Unfit(_, Unfit::Privileged))));
        assert!(matches!(outcome(b"#!/bin/sh\n", 0o644), Err(CliError::NotExecutable(..))));
        assert!(matches!(check(OsStr::new("/nonexistent")), Err(CliError::NotFound(_))));
        assert!(matches!(check(OsStr::new("no-such-program-anywhere")), Err(CliError::NotFound(_))));
        assert!(matches!(check(OsStr::new("/")), Err(CliError::NotExecutable(..))));
    }

    #[test]
    fn damaged_files_do_not_panic() {
        let whole = elf(2, 62, elf::PT_NOTE, b"\x04\0\0\0Go\0\0");
        for len in 0..whole.len() {
            let _ = outcome(&whole[..len], 0o755);
        }
        for (index, value) in (0..whole.len()).flat_map(|index| [0, 0x7f, 0xff].map(|value| (index, value))) {
            let mut bytes = whole.clone();
            bytes[index] = value;
            let _ = outcome(&bytes, 0o755);
        }
        for line in ["#!", "#!\n", "#! \n", "#!/usr/bin/env\n", "#!/usr/bin/env -S A=b sh\n", "#!/nonexistent x\n"] {
            let _ = outcome(line.as_bytes(), 0o755);
        }
    }
}
