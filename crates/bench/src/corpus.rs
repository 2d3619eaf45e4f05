//! The data that measurements swap: a mix of content of real programs.
//!
//! The corpus consists of 64 KiB blocks, in turn: machine code and data of installed executables
//! and libraries; installed text (headers, scripts); JSON records; measurements as `f64`; a heap of
//! small objects full of pointers. The last three are generated, so that a machine without the
//! files still has a corpus. One machine gives equal bytes each time. Another machine has other
//! files, hence slightly other ratios: compare only figures of one run.
//!
//! [`RATIOS`] has the ratios with lz4 on Debian 12 (the codec alone, without an allocator's waste).
//!
//! No page is filled with one byte: the kernel and foliomem store such pages for nothing, which
//! would flatter both.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::scratch::ScratchFile;

/// Bytes of one kind of data before the next.
pub const BLOCK: usize = 64 << 10;

/// `(granule KiB, ratio)` of 256 MiB with lz4 at its default level, measured on Debian 12 with
/// python3, g++ and redis.
pub const RATIOS: [(usize, f64); 4] = [(4, 2.18), (16, 2.38), (64, 2.51), (2048, 2.49)];

/// Directories of executables and libraries.
const CODE: [&str; 5] =
    ["/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
/// Directories of text.
const TEXT: [&str; 4] = ["/usr/include", "/usr/share/perl", "/usr/lib/python3", "/usr/share/doc"];
/// File name extensions of text.
const TEXT_ENDS: [&str; 9] = ["h", "hpp", "py", "pm", "pl", "txt", "md", "html", "xml"];

/// Builds a corpus of exactly `bytes` bytes.
#[must_use]
pub fn build(bytes: usize) -> Vec<u8> {
    let share = bytes / 5 + BLOCK;
    let mut code = Files::read(&CODE.map(PathBuf::from), share, is_program);
    let mut text = Files::read(&TEXT.map(PathBuf::from), share, is_text);
    let mut chance = Chance(0x9E37_79B9_7F4A_7C15);
    let mut corpus = Vec::with_capacity(bytes + BLOCK);
    while corpus.len() < bytes {
        let end = corpus.len() + BLOCK;
        match (corpus.len() / BLOCK) % 5 {
            0 if code.any() => code.append(&mut corpus, end),
            1 if text.any() => text.append(&mut corpus, end),
            3 => measurements(&mut corpus, end, &mut chance),
            0 | 4 => heap(&mut corpus, end, &mut chance),
            _ => json(&mut corpus, end, &mut chance),
        }
        corpus.truncate(end);
    }
    corpus.truncate(bytes);
    corpus
}

/// The pages of some files, returned in turn and again from the first.
struct Files {
    pages: Vec<u8>,
    next: usize,
}

impl Files {
    /// Reads files below `dirs`, in the order of their names, up to `enough` bytes.
    fn read(dirs: &[PathBuf], enough: usize, wanted: fn(&Path, &[u8]) -> bool) -> Self {
        let mut pages = Vec::new();
        for dir in dirs {
            read_below(dir, enough, wanted, &mut pages, 0);
        }
        Self { pages, next: 0 }
    }

    fn any(&self) -> bool {
        !self.pages.is_empty()
    }

    fn append(&mut self, corpus: &mut Vec<u8>, end: usize) {
        while corpus.len() < end {
            if self.next == self.pages.len() {
                self.next = 0;
            }
            let take = (end - corpus.len()).min(self.pages.len() - self.next);
            corpus.extend_from_slice(&self.pages[self.next..self.next + take]);
            self.next += take;
        }
    }
}

/// Deepest directory level that is searched. It guards against loops and is deeper than any of the
/// directories.
const DEPTH: u32 = 8;
/// Maximum bytes of one file, so that no single program makes up the corpus.
const PER_FILE: usize = 4 << 20;

fn read_below(dir: &Path, enough: usize, wanted: fn(&Path, &[u8]) -> bool, pages: &mut Vec<u8>, depth: u32) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.sort();
    for path in paths {
        if pages.len() >= enough {
            return;
        }
        let Ok(kind) = path.symlink_metadata() else { continue };
        if kind.is_dir() && depth < DEPTH {
            read_below(&path, enough, wanted, pages, depth + 1);
        } else if kind.is_file()
            && kind.len() <= 256 << 20
            && let Ok(data) = std::fs::read(&path)
            && wanted(&path, &data)
        {
            let varied = |page: &&[u8]| page.iter().any(|b| *b != page[0]);
            data[..data.len().min(PER_FILE)].chunks_exact(4096).filter(varied).for_each(|p| pages.extend_from_slice(p));
        }
    }
}

fn is_program(_: &Path, data: &[u8]) -> bool {
    data.starts_with(b"\x7fELF") && data.len() >= BLOCK
}

fn is_text(path: &Path, data: &[u8]) -> bool {
    path.extension().is_some_and(|e| TEXT_ENDS.iter().any(|t| e == *t)) && data.len() >= 4096
}

/// A xorshift64* generator. It is here because the corpus must not change with the version of a
/// crate.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 8
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Adds readings of a 12-bit converter around a slow drift, as the `f64` that a program computes
/// with.
fn measurements(corpus: &mut Vec<u8>, end: usize, chance: &mut Chance) {
    let mut level = 1024 + chance.below(2048);
    while corpus.len() < end {
        level = (level + chance.below(5)).saturating_sub(2).clamp(16, 4079);
        let reading = level + chance.below(16);
        corpus.extend_from_slice(&(reading as f64 / 16.0 - 100.0).to_le_bytes());
    }
}

/// Adds objects as a dynamic language lays them out: a type, a count, pointers to neighbours, small
/// numbers, short text.
fn heap(corpus: &mut Vec<u8>, end: usize, chance: &mut Chance) {
    let base = 0x7F3A_0000_0000 + (chance.below(1 << 16) << 16);
    let types: [u64; 6] = std::array::from_fn(|i| 0x5581_2C40_0000 + 0x1A0 * i as u64);
    let near = |chance: &mut Chance| base + chance.below(BLOCK as u64 / 16) * 16;
    while corpus.len() < end {
        let kind = chance.below(6) as usize;
        let mut word = |w: u64| corpus.extend_from_slice(&w.to_le_bytes());
        word(1 + chance.below(3));
        word(types[kind]);
        match kind {
            0 | 1 => (0..2 + kind).for_each(|_| word(near(chance))),
            2 => {
                word(chance.below(1000));
                word(0);
            }
            3 => word((chance.below(100_000) as f64 / 8.0).to_bits()),
            4 => {
                word(8 + chance.below(8));
                word(u64::MAX);
                word(u64::from_le_bytes(*b"item_key") + (chance.below(26) << 32));
                word(chance.below(1 << 24));
            }
            _ => {
                word(near(chance));
                (0..5).for_each(|_| word(0));
            }
        }
    }
}

/// Adds records as a service logs or stores them.
fn json(corpus: &mut Vec<u8>, end: usize, chance: &mut Chance) {
    const NAMES: [&str; 8] = ["ada", "grace", "edsger", "barbara", "donald", "margaret", "niklaus", "frances"];
    const STATES: [&str; 4] = ["new", "active", "suspended", "closed"];
    let mut line = String::new();
    while corpus.len() < end {
        line.clear();
        let (name, state) = (NAMES[chance.below(8) as usize], STATES[chance.below(4) as usize]);
        let (id, cents, day) = (chance.below(100_000_000), chance.below(10_000_000), chance.below(28) + 1);
        let _ = writeln!(
            line,
            r#"{{"id": {id}, "user": "{name}{:02}", "state": "{state}", "balance": {}.{:02}, "tags": ["t{}", "t{}"], "created": "2024-0{}-{day:02}T{:02}:{:02}:{:02}Z", "token": "{:06x}"}}"#,
            chance.below(100),
            cents / 100,
            cents % 100,
            chance.below(50),
            chance.below(50),
            chance.below(9) + 1,
            chance.below(24),
            chance.below(60),
            chance.below(60),
            chance.below(1 << 24),
        );
        corpus.extend_from_slice(line.as_bytes());
    }
}

/// A corpus as a file for a child. Dropping it removes the file.
#[derive(Debug)]
pub struct CorpusFile(ScratchFile);

impl CorpusFile {
    /// Writes the file.
    ///
    /// # Errors
    /// Fails if the temporary directory is not writable.
    pub fn new(corpus: &[u8]) -> Result<Self, Error> {
        ScratchFile::new("corpus", |path| std::fs::write(path, corpus)).map(Self)
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_are_equal_and_have_the_requested_size() {
        for bytes in [0, 1, 4096, 5 * BLOCK + 17, 40 * BLOCK] {
            let corpus = build(bytes);
            assert_eq!(corpus.len(), bytes);
            assert!(corpus == build(bytes), "{bytes} bytes differ between two builds");
        }
    }

    #[test]
    fn no_page_is_filled_with_one_byte() {
        assert!(build(100 * BLOCK).chunks(4096).all(|page| page.iter().any(|b| *b != page[0])));
    }

    #[test]
    fn missing_directories_still_give_a_corpus() {
        let nowhere = Files::read(&[PathBuf::from("/no/such/place")], BLOCK, is_text);
        assert!(!nowhere.any());
    }
}
