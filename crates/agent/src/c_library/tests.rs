//! Tests of the memory functions against naive models. In this executable the names below are the
//! agent's.

use libc::{c_int, c_void, size_t};
use proptest::prelude::*;

unsafe extern "C" {
    fn memcpy(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void;
    fn memmove(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void;
    fn memset(to: *mut c_void, byte: c_int, bytes: size_t) -> *mut c_void;
    fn memcmp(one: *const c_void, other: *const c_void, bytes: size_t) -> c_int;
    fn bcmp(one: *const c_void, other: *const c_void, bytes: size_t) -> c_int;
    fn strlen(text: *const libc::c_char) -> size_t;
}

/// Returns bytes that differ from their neighbours.
fn noise(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at as u8).wrapping_mul(37) ^ (at >> 8) as u8 ^ seed).collect()
}

/// Compares memmove inside one buffer, and memcpy between two, with copies byte by byte.
fn check_move(bytes: usize, from: usize, to: usize) {
    let before = noise(from.max(to) + bytes + 80, 1);
    let (mut got, mut wanted) = (before.clone(), before.clone());
    (0..bytes).for_each(|at| wanted[to + at] = before[from + at]);
    // SAFETY: both ranges lie in the buffer.
    unsafe {
        let start = got.as_mut_ptr();
        let target = start.add(to).cast();
        assert_eq!(memmove(target, start.add(from).cast(), bytes), target);
    }
    assert!(got == wanted, "memmove of {bytes} bytes from {from} to {to}");
    let mut other = noise(to + bytes + 80, 9);
    let mut wanted = other.clone();
    wanted[to..to + bytes].copy_from_slice(&before[from..from + bytes]);
    // SAFETY: the ranges lie in two buffers.
    unsafe { memcpy(other.as_mut_ptr().add(to).cast(), before.as_ptr().add(from).cast(), bytes) };
    assert!(other == wanted, "memcpy of {bytes} bytes from {from} to {to}");
}

/// Compares memset with a loop.
fn check_set(bytes: usize, to: usize, byte: c_int) {
    let mut got = noise(to + bytes + 80, 3);
    let mut wanted = got.clone();
    wanted[to..to + bytes].iter_mut().for_each(|place| *place = byte as u8);
    // SAFETY: the range lies in the buffer.
    unsafe {
        let target = got.as_mut_ptr().add(to).cast();
        assert_eq!(memset(target, byte, bytes), target);
    }
    assert!(got == wanted, "memset of {bytes} bytes at {to} to {byte}");
}

/// Compares two copies of the same bytes that differ at `differs`, if that index lies in them.
fn check_compare(bytes: usize, one_at: usize, other_at: usize, differs: usize, change: u8) {
    let content = noise(bytes, 5);
    let (mut one, mut other) = (vec![0; one_at + bytes + 32], vec![1; other_at + bytes + 32]);
    one[one_at..one_at + bytes].copy_from_slice(&content);
    other[other_at..other_at + bytes].copy_from_slice(&content);
    if differs < bytes {
        other[other_at + differs] ^= change;
        // Bytes after the first difference must not matter.
        other[other_at + differs + 1..other_at + bytes].reverse();
    }
    let wanted = one[one_at..one_at + bytes].cmp(&other[other_at..other_at + bytes]) as c_int;
    // SAFETY: the ranges lie in the buffers.
    let (ordered, equal) = unsafe {
        let (one, other) = (one.as_ptr().add(one_at).cast(), other.as_ptr().add(other_at).cast());
        (memcmp(one, other, bytes), bcmp(one, other, bytes))
    };
    assert_eq!((ordered.signum(), equal == 0), (wanted, wanted == 0), "{bytes} bytes that differ at {differs}");
}

#[test]
fn every_short_length_and_alignment_is_copied() {
    for bytes in 0..300 {
        for (from, to) in (0..17).flat_map(|from| [0, 1, 7, 8, 15, 16, 31, 64].map(|to| (from, to))) {
            check_move(bytes, from, to);
            check_move(bytes, to, from);
        }
    }
}

#[test]
fn every_short_distance_of_overlap_is_moved() {
    for bytes in [129, 130, 191, 192, 193, 255, 256, 257, 1000, 2047, 2048, 2049, 4096, 5000] {
        for distance in 0..140 {
            check_move(bytes, 0, distance);
            check_move(bytes, distance, 0);
            check_move(bytes, 5, 5 + distance);
            check_move(bytes, 5 + distance, 5);
        }
    }
}

#[test]
fn every_short_length_and_alignment_is_set() {
    for bytes in (0..300).chain([2047, 2048, 2049, 4096, 70_000]) {
        for to in 0..17 {
            check_set(bytes, to, 0);
            check_set(bytes, to, -91);
        }
    }
}

#[test]
fn every_short_length_is_compared() {
    for bytes in 0..130 {
        for differs in 0..=bytes {
            check_compare(bytes, bytes % 17, differs % 16, differs, 0x81);
        }
    }
}

#[test]
fn strings_of_every_length_and_alignment_are_measured() {
    for bytes in 0..300 {
        for at in 0..17 {
            let mut text = vec![0u8; at];
            text.resize(at + bytes, 0x80);
            text.extend([0, 1, 2, 0]);
            // SAFETY: the string ends in the buffer.
            assert_eq!(unsafe { strlen(text.as_ptr().add(at).cast()) }, bytes, "at {at}");
        }
    }
}

proptest! {
    #[test]
    fn random_ranges_are_moved(bytes in 0usize..40_000, from in 0usize..5_000, to in 0usize..5_000) {
        check_move(bytes, from, to);
    }

    #[test]
    fn random_ranges_are_set(bytes in 0usize..40_000, to in 0usize..100, byte: c_int) {
        check_set(bytes, to, byte);
    }

    #[test]
    fn random_ranges_are_compared(bytes in 0usize..9_000, at in 0usize..40, differs in 0usize..10_000, change in 1u8..) {
        check_compare(bytes, at, 40 - at, differs, change);
    }
}

/// Prints the speed of the functions relative to the C library's. Command:
/// `cargo test --release -p foliomem-agent speed -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn speed_beside_the_c_library() {
    type Copy = unsafe extern "C" fn(*mut c_void, *const c_void, size_t) -> *mut c_void;
    type Set = unsafe extern "C" fn(*mut c_void, c_int, size_t) -> *mut c_void;
    type Compare = unsafe extern "C" fn(*const c_void, *const c_void, size_t) -> c_int;
    let theirs = |name| foliomem_sys::loader::c_library_function(name).unwrap();
    // SAFETY: the types are those of the functions.
    let (copies, sets, compares) = unsafe {
        let copies: [Copy; 2] = [memcpy, std::mem::transmute::<usize, Copy>(theirs(c"memcpy"))];
        let sets: [Set; 2] = [memset, std::mem::transmute::<usize, Set>(theirs(c"memset"))];
        let compares: [Compare; 2] = [memcmp, std::mem::transmute::<usize, Compare>(theirs(c"memcmp"))];
        (copies, sets, compares)
    };
    let (from, mut to) = (vec![7u8; 65_536 + 64], vec![7u8; 65_536 + 64]);
    let nanoseconds = |act: &mut dyn FnMut()| {
        let best = (0..9).map(|_| {
            let start = std::time::Instant::now();
            act();
            start.elapsed()
        });
        best.min().unwrap().as_nanos() as f64
    };
    for bytes in [16usize, 64, 256, 1024, 4096, 65_536] {
        let rounds = (1 << 23) / bytes.max(64);
        let (source, target) = (from.as_ptr().wrapping_add(16), to.as_mut_ptr().wrapping_add(32));
        let ratio = |[ours, theirs]: [f64; 2]| format!("{:.2}", ours / theirs);
        // SAFETY: the ranges lie in the two buffers.
        let times = unsafe {
            [
                copies.map(|copy| {
                    nanoseconds(&mut || (0..rounds).for_each(|_| _ = copy(target.cast(), source.cast(), bytes)))
                }),
                sets.map(|set| nanoseconds(&mut || (0..rounds).for_each(|_| _ = set(target.cast(), 7, bytes)))),
                compares.map(|compare| {
                    nanoseconds(&mut || (0..rounds).for_each(|_| _ = compare(target.cast(), source.cast(), bytes)))
                }),
            ]
        };
        let each = times[0][0] / rounds as f64;
        println!("{bytes} B: memcpy {each:.1} ns; ours/theirs: memcpy, memset, memcmp {:?}", times.map(ratio));
    }
}
