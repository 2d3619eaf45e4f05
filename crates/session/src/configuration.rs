//! The settings of a run in the control segment: each one is a word of its own.
//!
//! The supervisor writes them before the program starts. They stay constant, except the limit and
//! the folio sizes, which can change for the whole tree at any time. There is no lock.

use crate::segment::Control;
use foliomem_sys::shared_words;
use foliomem_types::codec::{Codec, ZSTD_MAX_LEVEL};
use foliomem_types::settings::{Configuration, Limit};
use foliomem_types::size_policy::SizePolicy;
use foliomem_types::units::Order;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Evict as much as possible all the time (for tests).
const FLAG_TORTURE: u32 = 1 << 0;
/// Stop the tree rather than exceed the limit.
const FLAG_HARD: u32 = 1 << 1;
/// Record the events of the processes.
const FLAG_RECORD: u32 = 1 << 2;

shared_words! {
    /// The settings of a run. A new setting needs a word here, and a line in `set` and in `get`.
    pub(crate) struct SettingWords {
        /// A limit that follows the need lies between that at the start and the maximum, and is the
        /// need divided by `need_divisor`; that is 0 for another limit.
        pub(crate) start_limit_bytes: AtomicU64,
        pub(crate) max_limit_bytes: AtomicU64,
        pub(crate) need_divisor: AtomicU32,
        sizes: AtomicU32,
        codec: AtomicU32,
        /// As `codec`, or [`NO_CODEC`].
        recompress: AtomicU32,
        granule: AtomicU32,
        reclaimers: AtomicU32,
        flags: AtomicU32,
    }
}

impl SettingWords {
    /// Writes the settings. The segment becomes valid only afterwards.
    pub(crate) fn set(&self, configuration: &Configuration) {
        let set = |field: &AtomicU32, value: u32| field.store(value, Ordering::Relaxed);
        let limit = configuration.limit;
        self.start_limit_bytes.store(limit.start_bytes(), Ordering::Relaxed);
        self.max_limit_bytes.store(limit.most_bytes(), Ordering::Relaxed);
        if let Limit::OfNeed { divisor, .. } = limit {
            set(&self.need_divisor, divisor.get());
        }
        set(&self.sizes, configuration.sizes.bits());
        set(&self.codec, encode_codec(configuration.codec));
        set(&self.recompress, configuration.recompress.map_or(NO_CODEC, encode_codec));
        set(&self.granule, u32::from(configuration.granule.get()));
        set(&self.reclaimers, configuration.reclaimers);
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        let flags = flag(configuration.torture, FLAG_TORTURE) | flag(configuration.hard, FLAG_HARD);
        set(&self.flags, flags | flag(configuration.records, FLAG_RECORD));
    }

    /// Returns the settings.
    fn get(&self) -> Configuration {
        let get = |field: &AtomicU32| field.load(Ordering::Relaxed);
        let flags = get(&self.flags);
        let [start_bytes, max_bytes] =
            [&self.start_limit_bytes, &self.max_limit_bytes].map(|bytes| bytes.load(Ordering::Relaxed));
        Configuration {
            limit: match NonZeroU32::new(get(&self.need_divisor)) {
                None if start_bytes == max_bytes => Limit::Bytes(max_bytes),
                None => Limit::Container { start_bytes, most_bytes: max_bytes },
                Some(divisor) => Limit::OfNeed { divisor, least_bytes: start_bytes, most_bytes: max_bytes },
            },
            sizes: SizePolicy::from_bits(get(&self.sizes)),
            // The program may have overwritten a codec that was valid when the segment was opened.
            codec: decode_codec(get(&self.codec)).unwrap_or(Codec::Lz4),
            recompress: decode_codec(get(&self.recompress)),
            granule: Order::new(get(&self.granule) as u8).unwrap_or(Order::ZERO),
            reclaimers: get(&self.reclaimers),
            torture: flags & FLAG_TORTURE != 0,
            hard: flags & FLAG_HARD != 0,
            records: flags & FLAG_RECORD != 0,
        }
    }

    /// Returns whether the codec is one that exists.
    pub(crate) fn have_codec(&self) -> bool {
        decode_codec(self.codec.load(Ordering::Relaxed)).is_some()
    }
}

impl Control {
    /// Returns the settings that the supervisor wrote.
    pub fn configuration(&self) -> Configuration {
        self.header.settings.get()
    }

    /// Returns the folio sizes that the whole tree may use now.
    pub fn sizes(&self) -> SizePolicy {
        SizePolicy::from_bits(self.header.settings.sizes.load(Ordering::Relaxed))
    }

    /// Changes the folio sizes with `change`, as one atomic update.
    pub fn change_sizes(&self, change: impl Fn(SizePolicy) -> SizePolicy) {
        let changed = |bits| Some(change(SizePolicy::from_bits(bits)).bits());
        // `changed` always returns a value, so the update cannot fail.
        let _ = self.header.settings.sizes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
    }
}

/// The encoding of "no codec".
const NO_CODEC: u32 = u32::MAX;

/// Encodes a codec: bits 0..8 have its kind, 8..16 its level, bit 16 whether it uses dictionaries.
fn encode_codec(codec: Codec) -> u32 {
    match codec {
        Codec::Lz4 => 0,
        Codec::Zstd { level, dictionary } => 1 | u32::from(level) << 8 | u32::from(dictionary) << 16,
    }
}

/// Decodes the word of [`encode_codec`]; `None` if no codec has this encoding.
fn decode_codec(word: u32) -> Option<Codec> {
    match (word & 0xff, (word >> 8) as u8, word >> 16) {
        (0, 0, 0) => Some(Codec::Lz4),
        (1, level @ 1..=ZSTD_MAX_LEVEL, dictionary @ 0..=1) => Some(Codec::Zstd { level, dictionary: dictionary == 1 }),
        _ => None,
    }
}
