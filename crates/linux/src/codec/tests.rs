//! What goes in comes out, for every codec and size; what is damaged never does more harm than an error.

use super::*;
use foliomem_core::units::Order;
use proptest::prelude::*;

/// Every kind of codec, and the zstd levels where its strategies change.
fn codecs() -> impl Strategy<Value = Codec> {
    prop_oneof![2 => Just(Codec::Lz4), 3 => prop::sample::select(vec![1, 2, 3, 5, 7, 9, 12, 15]).prop_map(|level| Codec::Zstd { level })]
}

/// Content of `len` bytes between all the same and all random, from a seed.
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

fn contents(most: usize) -> impl Strategy<Value = Vec<u8>> {
    let len = prop_oneof![3 => 0..=most, 1 => 0..=64usize, 2 => prop::sample::select(vec![4096, 16 << 10, 64 << 10]).prop_map(move |len| len.min(most))];
    (any::<u64>(), len, prop_oneof![Just(256u64), 1..=64u64], 0..100u64)
        .prop_map(|(seed, len, distinct, repeats)| content(seed, len, distinct, repeats))
}

/// Compresses into the middle of a larger buffer and checks that nothing else of it was written.
fn compress_guarded(compressor: &mut Compressor, src: &[u8], room: usize) -> Option<Vec<u8>> {
    let mut buffer = vec![0xa5; room + 128];
    let len = compressor.compress(src, &mut buffer[64..64 + room]);
    assert!(buffer[..64].iter().chain(&buffer[64 + room..]).all(|&byte| byte == 0xa5), "wrote outside its buffer");
    len.map(|len| buffer[64..64 + len].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, ..ProptestConfig::default() })]

    #[test]
    fn what_was_compressed_comes_back(codec in codecs(), src in contents(300 << 10), short in 0..100usize, start in any::<prop::sample::Index>()) {
        let (mut compressor, mut decompressor) = (Compressor::new(codec), Decompressor::new(codec));
        // A second piece through the same state: nothing of the first may be left in it.
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
        let (mut compressor, mut decompressor) = (Compressor::new(codec), Decompressor::new(codec));
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
        // The state is as good as before.
        prop_assert_eq!(decompressor.decompress(&stored, &mut guarded[64..64 + src.len()]), Ok(()));
        prop_assert!(guarded[64..64 + src.len()] == src);
    }

    #[test]
    fn noise_is_never_more_than_an_error(codec in codecs(), noise in contents(5000), len in 0..10_000usize) {
        let _ = Decompressor::new(codec).decompress(&noise, &mut vec![0; len]);
    }

    #[test]
    fn fill_word_is_what_the_content_repeats(word in any::<u64>(), words in 0..200usize, at in any::<prop::sample::Index>(), bits in 0..=255u8, rest in 0..8usize) {
        let mut bytes: Vec<u8> = std::iter::repeat_n(word.to_ne_bytes(), words).flatten().collect();
        if words > 0 {
            bytes[at.index(words * 8)] ^= bits;
        }
        bytes.extend_from_slice(&word.to_ne_bytes()[..rest]);
        let naive = (rest == 0 && words > 0 && bytes.chunks(8).all(|chunk| chunk == &bytes[..8])).then(|| u64::from_ne_bytes(bytes[..8].try_into().unwrap()));
        prop_assert_eq!(fill_word(&bytes), naive);
    }

    #[test]
    fn names_are_never_misread(name in "(lz4|zstd)?:?[+-]?[0-9a-z]{0,3}") {
        if let Ok(codec) = name.parse::<Codec>() {
            prop_assert_eq!(codec.to_string().parse::<Codec>(), Ok(codec));
            prop_assert!(codec.to_string() == name || name == "zstd:3");
        }
    }
}

#[test]
fn every_level_has_memory_enough_for_every_granule() {
    for codec in std::iter::once(Codec::Lz4).chain((1..=19).map(|level| Codec::Zstd { level })) {
        let (mut compressor, mut decompressor) = (Compressor::new(codec), Decompressor::new(codec));
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

/// The highest levels take seconds for 2 MiB in a test build.
fn codec_is_quick(codec: Codec) -> bool {
    !matches!(codec, Codec::Zstd { level: 16.. }) || !cfg!(debug_assertions)
}

#[test]
fn content_that_hardly_compresses_is_kept_raw() {
    for codec in [Codec::Lz4, Codec::Zstd { level: 3 }] {
        let mut compressor = Compressor::new(codec);
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
fn bad_names_are_refused_with_what_would_work() {
    for name in ["", "LZ4", "lz4:1", "zstd:", "zstd:0", "zstd:20", "zstd:-1", "zstd:+3", "zstd:03", "zstd:3 ", "zst"] {
        let error = name.parse::<Codec>().unwrap_err();
        assert!(error.to_string().contains("zstd:LEVEL with a level from 1 to 19"), "{name}");
    }
    assert_eq!("zstd".parse(), Ok(Codec::Zstd { level: 3 }));
    assert_eq!("zstd:19".parse(), Ok(Codec::Zstd { level: 19 }));
}
