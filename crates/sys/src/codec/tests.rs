//! Tests of all codecs: content survives compression at every size, and damage yields at most an
//! error.

use super::*;
use foliomem_types::units::Order;
use proptest::prelude::*;
use std::sync::LazyLock;

/// All kinds of codec, and the zstd levels at which its strategies change.
fn codecs() -> impl Strategy<Value = Codec> {
    let zstd = (prop::sample::select(vec![1, 2, 3, 5, 7, 9, 12, 15]), any::<bool>());
    prop_oneof![2 => Just(Codec::Lz4), 5 => zstd.prop_map(|(level, dictionary)| Codec::Zstd { level, dictionary })]
}

fn zstd(level: u8) -> Codec {
    Codec::Zstd { level, dictionary: false }
}

/// Returns text made of words that all texts share, for which a dictionary helps.
fn text(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    static WORDS: LazyLock<Vec<Vec<u8>>> =
        LazyLock::new(|| (0..300).map(|word| content(word * 77 + 5, 8 + word as usize % 40, 256, 0)).collect());
    let mut text = Vec::new();
    while text.len() < len {
        text.extend_from_slice(&WORDS[next() as usize % WORDS.len()]);
    }
    text.truncate(len);
    text
}

/// Compresses texts until `compressor` trains a dictionary.
fn train(compressor: &mut Compressor, first_seed: u64, dictionaries: &Arc<Dictionaries>) {
    let before = dictionaries.generations();
    let mut quick = Compressor::new(Codec::Zstd { level: 1, dictionary: true }, dictionaries);
    for seed in 0..100_000 {
        quick.compress(&text(first_seed + seed, 4096), &mut [0; 4096]);
        compressor.train_if_due();
        if dictionaries.generations() > before {
            return;
        }
    }
    panic!("no dictionary is made of texts");
}

/// Returns a compressor and a decompressor that share a dictionary, if `codec` has one.
fn states(codec: Codec) -> (Compressor, Decompressor) {
    static TRAINED: LazyLock<Arc<Dictionaries>> = LazyLock::new(|| {
        let dictionaries = Arc::default();
        let codec = Codec::Zstd { level: 3, dictionary: true };
        train(&mut Compressor::new(codec, &dictionaries), 0, &dictionaries);
        dictionaries
    });
    (Compressor::new(codec, &TRAINED), Decompressor::new(codec, &TRAINED))
}

/// Returns `len` bytes of content between constant and random, from a seed.
fn content(seed: u64, len: usize, distinct: u64, repeat_percent: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes: Vec<u8> = Vec::with_capacity(len);
    while bytes.len() < len {
        if bytes.len() > 16 && next() % 100 < repeat_percent {
            let from = next() as usize % (bytes.len() - 8);
            let count = (4 + next() as usize % 60).min(bytes.len() - from).min(len - bytes.len());
            bytes.extend_from_within(from..from + count);
        } else {
            bytes.push((next() % distinct) as u8);
        }
    }
    bytes
}

/// Returns 32-bit numbers below 10,000.
fn numbers(seed: u64, len: usize) -> Vec<u8> {
    let words = content(seed, len.next_multiple_of(4) * 2, 256, 0);
    let (words, _) = words.as_chunks::<8>();
    let numbers = words.iter().map(|&word| (u64::from_ne_bytes(word) % 10_000) as u32);
    numbers.flat_map(u32::to_ne_bytes).take(len).collect()
}

fn contents(max: usize) -> impl Strategy<Value = Vec<u8>> {
    let len = prop_oneof![3 => 0..=max, 1 => 0..=64usize, 2 => prop::sample::select(vec![4096, 16 << 10, 64 << 10]).prop_map(move |len| len.min(max))];
    (any::<u64>(), len, prop_oneof![Just(256u64), 1..=64u64], 0..100u64, 0..4u8).prop_map(
        |(seed, len, distinct, repeats, kind)| match kind {
            0 => numbers(seed, len),
            1 => text(seed, len),
            _ => content(seed, len, distinct, repeats),
        },
    )
}

/// Compresses into the middle of a larger buffer and checks that no byte outside of `room` changed.
fn compress_guarded(compressor: &mut Compressor, src: &[u8], room: usize) -> Option<Vec<u8>> {
    let mut buffer = vec![0xa5; room + 128];
    let len = compressor.compress(src, &mut buffer[64..64 + room]);
    assert!(buffer[..64].iter().chain(&buffer[64 + room..]).all(|&byte| byte == 0xa5), "wrote outside its buffer");
    len.map(|len| buffer[64..64 + len].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, ..ProptestConfig::default() })]

    #[test]
    fn compressed_content_comes_back(codec in codecs(), src in contents(300 << 10), short in 0..100usize, start in any::<prop::sample::Index>()) {
        let (mut compressor, mut decompressor) = states(codec);
        // The second piece uses the state of the first one, of which nothing may be left.
        for src in [&src[..], &src[..src.len() / 2]] {
            let room = if short == 0 { src.len() / 4 } else { src.len() };
            let Some(stored) = compress_guarded(&mut compressor, src, room) else { continue };
            prop_assert!(stored.len() <= src.len() * 15 / 16);
            let mut back = vec![0; src.len()];
            prop_assert_eq!(decompressor.decompress(&stored, &mut back), Ok(()));
            prop_assert!(back == src);
            let start = start.index(src.len() + 1);
            let mut guarded = vec![0xa5; src.len() + 128];
            prop_assert_eq!(decompressor.decompress_start(&stored, &mut guarded[64..64 + src.len()], start), Ok(()));
            prop_assert!(guarded[64..64 + start] == src[..start]);
            prop_assert!(guarded[..64].iter().chain(&guarded[64 + src.len()..]).all(|&byte| byte == 0xa5));
            prop_assert_eq!(decompressor.decompress(&stored, &mut vec![0; src.len() + 1]), Err(CodecError));
            prop_assert_eq!(decompressor.decompress(&stored, &mut vec![0; src.len() - 1]), Err(CodecError));
        }
    }

    #[test]
    fn damage_is_an_error_or_caught_by_the_checksum(
        codec in codecs(),
        src in contents(40 << 10),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1..=255u8), 1..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let (mut compressor, mut decompressor) = states(codec);
        let Some(stored) = compress_guarded(&mut compressor, &src, src.len()) else { return Ok(()) };
        let mut damaged = stored.clone();
        for (at, bits) in flips {
            damaged[at.index(stored.len())] ^= bits;
        }
        if let Some(at) = cut {
            damaged.truncate(at.index(stored.len()));
        }
        let mut guarded = vec![0xa5; src.len() + 128];
        let _ = decompressor.decompress_start(&damaged, &mut guarded[64..64 + src.len()], src.len() / 2);
        let result = decompressor.decompress(&damaged, &mut guarded[64..64 + src.len()]);
        prop_assert!(guarded[..64].iter().chain(&guarded[64 + src.len()..]).all(|&byte| byte == 0xa5));
        let right = result.is_ok() && guarded[64..64 + src.len()] == src;
        prop_assert!(right || damaged == stored || checksum(&damaged) != checksum(&stored));
        prop_assert!(damaged != stored || right);
        // The state still decompresses an undamaged piece.
        prop_assert_eq!(decompressor.decompress(&stored, &mut guarded[64..64 + src.len()]), Ok(()));
        prop_assert!(guarded[64..64 + src.len()] == src);
    }

    #[test]
    fn noise_yields_at_most_an_error(codec in codecs(), noise in contents(5000), len in 0..10_000usize) {
        let _ = states(codec).1.decompress(&noise, &mut vec![0; len]);
    }

    #[test]
    fn fill_word_returns_the_repeated_word(word in any::<u64>(), words in 0..200usize, at in any::<prop::sample::Index>(), bits in 0..=255u8, rest in 0..8usize) {
        let mut bytes: Vec<u8> = std::iter::repeat_n(word.to_ne_bytes(), words).flatten().collect();
        if words > 0 {
            bytes[at.index(words * 8)] ^= bits;
        }
        bytes.extend_from_slice(&word.to_ne_bytes()[..rest]);
        let naive = (rest == 0 && words > 0 && bytes.chunks(8).all(|chunk| chunk == &bytes[..8])).then(|| u64::from_ne_bytes(bytes[..8].try_into().unwrap()));
        prop_assert_eq!(fill_word(&bytes), naive);
    }

    #[test]
    fn names_are_never_misread(name in "(lz4|zstd)?:?[+-]?[0-9a-z]{0,3}([+]dict)?") {
        if let Ok(codec) = name.parse::<Codec>() {
            prop_assert_eq!(codec.to_string().parse::<Codec>(), Ok(codec));
            prop_assert!(codec.to_string() == name || name.starts_with("zstd:3"));
        }
    }
}

#[test]
fn every_level_has_enough_memory_for_every_granule() {
    for codec in std::iter::once(Codec::Lz4).chain((1..=19).map(|level| Codec::Zstd { level, dictionary: true })) {
        let (mut compressor, mut decompressor) = states(codec);
        let bytes = compressor.memory_bytes();
        println!("{codec}: {} KiB", bytes >> 10);
        let lens = Order::all().flat_map(|order| [order.bytes(), order.bytes() * 3 / 4 + 1]);
        for len in lens.chain([1000, 300]).filter(|&len| codec_is_quick(codec) || len <= 256 << 10) {
            let src = content(7, len, 16, 40);
            let mut stored = vec![0; len];
            let stored_bytes =
                compressor.compress(&src, &mut stored).unwrap_or_else(|| panic!("{codec} of {len} bytes"));
            let mut back = vec![0; len];
            assert_eq!(decompressor.decompress(&stored[..stored_bytes], &mut back), Ok(()), "{codec} of {len} bytes");
            assert!(back == src, "{codec} of {len} bytes");
        }
        assert_eq!(compressor.memory_bytes(), bytes);
    }
}

/// Returns whether `codec` is fast enough for 2 MiB in this build: high levels of zstd take seconds
/// without optimisation.
fn codec_is_quick(codec: Codec) -> bool {
    !matches!(codec, Codec::Zstd { level: 16.., .. }) || !cfg!(debug_assertions)
}

#[test]
fn content_that_hardly_compresses_is_kept_raw() {
    for codec in [Codec::Lz4, zstd(3), Codec::Zstd { level: 3, dictionary: true }] {
        let (mut compressor, _) = states(codec);
        for len in [0, 1, 15, 4096, 64 << 10] {
            assert_eq!(
                compressor.compress(&content(3, len, 256, 0), &mut vec![0; len]),
                None,
                "{codec} of {len} bytes"
            );
        }
    }
}

#[test]
fn bad_names_are_refused_with_a_remedy() {
    for name in [
        "",
        "LZ4",
        "lz4:1",
        "zstd:",
        "zstd:0",
        "zstd:20",
        "zstd:-1",
        "zstd:+3",
        "zstd:03",
        "zstd:3 ",
        "zst",
        "lz4+dict",
        "+dict",
        "zstd:+dict",
        "zstd+dict:3",
        "zstd+dict+dict",
    ] {
        let error = name.parse::<Codec>().unwrap_err();
        assert!(error.to_string().contains("zstd:LEVEL with a level from 1 to 19"), "{name}");
    }
    assert_eq!("zstd".parse(), Ok(zstd(3)));
    assert_eq!("zstd+dict".parse(), Ok(Codec::Zstd { level: 3, dictionary: true }));
    assert_eq!("zstd:7+dict".parse(), Ok(Codec::Zstd { level: 7, dictionary: true }));
    assert_eq!("zstd:19".parse(), Ok(zstd(19)));
}

#[test]
fn numbers_are_compressed_as_planes() {
    // Without an entropy code for each plane, zstd would need 46%.
    for (codec, percent) in [(Codec::Lz4, 52), (zstd(3), 43), (Codec::Zstd { level: 3, dictionary: true }, 43)] {
        let (mut compressor, mut decompressor) = states(codec);
        for round in 0..40 {
            let src = if round % 2 == 0 { numbers(round, 64 << 10) } else { text(round, 64 << 10) };
            let mut stored = vec![0; src.len()];
            let len = compressor.compress(&src, &mut stored).unwrap();
            let mut back = vec![0; src.len()];
            decompressor.decompress(&stored[..len], &mut back).unwrap();
            assert!(back == src, "{codec}, round {round}");
            if round % 2 == 0 {
                assert!(len < src.len() * percent / 100, "{codec}: {len} bytes");
                stored[0] = 2;
                assert_eq!(decompressor.decompress(&stored[..len], &mut back), Err(CodecError), "no such kind");
            } else {
                assert_eq!(stored[0], 0, "{codec}: text is plain");
            }
        }
    }
}

#[test]
fn every_level_has_enough_memory_for_pieces_with_a_dictionary() {
    for level in 1..=19 {
        let codec = Codec::Zstd { level, dictionary: true };
        let dictionaries = Arc::default();
        let (mut compressor, mut decompressor) =
            (Compressor::new(codec, &dictionaries), Decompressor::new(codec, &dictionaries));
        let (mut plain, _) = states(zstd(level));
        train(&mut compressor, u64::from(level) * 1_000_000, &dictionaries);
        for len in [4096, 8192, 16 << 10, 12_345, 64 << 10] {
            let src = text(9, len);
            let (mut stored, mut back) = (vec![0; len], vec![0; len]);
            let stored_bytes = compressor.compress(&src, &mut stored).unwrap();
            assert_eq!(stored[1], u8::from(len <= SMALL_PIECE_BYTES), "level {level}, {len} bytes");
            assert_eq!(decompressor.decompress(&stored[..stored_bytes], &mut back), Ok(()));
            assert!(back == src, "level {level}, {len} bytes");
            let without = plain.compress(&src, &mut vec![0; len]).unwrap_or(len);
            if len == 4096 {
                assert!(stored_bytes * 10 < without * 9, "level {level}: {stored_bytes} instead of {without} bytes");
            }
        }
    }
}

#[test]
fn pieces_of_earlier_generations_stay_readable() {
    let codec = Codec::Zstd { level: 1, dictionary: true };
    let dictionaries = Arc::default();
    let mut compressor = Compressor::new(codec, &dictionaries);
    // The decompressor is older than all dictionaries, and must find each of them later.
    let mut decompressor = Decompressor::new(codec, &dictionaries);
    let mut pieces = Vec::new();
    let mut keep = |compressor: &mut Compressor| {
        let mut stored = vec![0; 8192];
        let len = compressor.compress(&text(3, 8192), &mut stored).unwrap();
        stored.truncate(len);
        pieces.push(stored);
    };
    keep(&mut compressor);
    train(&mut compressor, 0, &dictionaries);
    keep(&mut compressor);
    // From now on the content is of another kind, for which the first dictionary does not help.
    let other = |seed: u64| -> Vec<u8> { text(seed, 4096).iter().map(|byte| byte.rotate_left(3) ^ 0x55).collect() };
    for seed in 0..100_000 {
        compressor.compress(&other(seed), &mut [0; 4096]);
        compressor.train_if_due();
        if dictionaries.generations() == 2 {
            break;
        }
    }
    keep(&mut compressor);
    let generations: Vec<u8> = pieces.iter().map(|stored| stored[1]).collect();
    assert_eq!(generations, [0, 1, 2]);
    for stored in pieces.iter_mut() {
        let mut back = vec![0; 8192];
        assert_eq!(decompressor.decompress(stored, &mut back), Ok(()));
        assert!(back == text(3, 8192));
        stored[1] = 3;
        assert_eq!(decompressor.decompress(stored, &mut back), Err(CodecError), "no such generation");
    }
    assert_eq!(decompressor.decompress(&[], &mut [0; 8]), Err(CodecError));
}

#[test]
fn a_thorough_compressor_makes_equal_bytes_of_equal_content() {
    // Sorted numbers, of which planes pay, and text, of which they do not.
    let numbers: Vec<u8> = (0..8192u64).flat_map(|at| (7_000_000 + at * at % 977 + at * 3).to_le_bytes()).collect();
    for codec in [Codec::Lz4, zstd(3)] {
        let compressed = |earlier: &[u8]| {
            let mut compressor = Compressor::thorough(codec, &Arc::default());
            let mut to = vec![0; numbers.len()];
            for _ in 0..20 {
                compressor.compress(earlier, &mut to).unwrap();
            }
            let len = compressor.compress(&numbers, &mut to).unwrap();
            to[..len].to_vec()
        };
        let [after_text, after_numbers] = [&text(1, 4096), &numbers].map(|earlier| compressed(earlier));
        assert!(after_text == after_numbers, "{codec}");
        let (mut quick, mut decompressor) = states(codec);
        let (mut to, mut back) = (vec![0; numbers.len()], vec![0; numbers.len()]);
        let quick_bytes = quick.compress(&numbers, &mut to).unwrap();
        assert!(after_text.len() <= quick_bytes, "{codec}");
        assert_eq!(decompressor.decompress(&after_text, &mut back), Ok(()));
        assert!(back == numbers, "{codec}");
    }
}
