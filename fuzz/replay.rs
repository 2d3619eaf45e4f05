//! Replays the kept corpus of a fuzz target: a module of the tests of several crates.

/// Calls `target` with each file of the corpus `name`.
pub fn replay(name: &str, target: impl Fn(&[u8])) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/").to_owned() + name;
    let files: Vec<_> = std::fs::read_dir(&folder).expect("a corpus").collect();
    assert!(!files.is_empty(), "{folder}");
    for file in files {
        target(&std::fs::read(file.unwrap().path()).unwrap());
    }
}
