//! Names of codecs, as settings spell them. `foliomem_sys::codec` compresses with them.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// A codec of the store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Codec {
    /// Fast.
    Lz4,
    /// Denser.
    Zstd {
        /// The level, 1 to 19. Another level counts as the nearest of those.
        level: u8,
        /// Whether small pieces are compressed with a dictionary of the program's own content.
        dictionary: bool,
    },
}

/// The level of a codec named `zstd`: zstd's own default.
const ZSTD_DEFAULT_LEVEL: u8 = 3;
/// The highest level. Higher ones, which zstd calls *ultra*, need more memory to decompress.
pub const ZSTD_MAX_LEVEL: u8 = 19;

/// The end of the name of a codec with dictionaries.
const DICTIONARY_SUFFIX: &str = "+dict";

/// A name that no codec has.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("unknown codec {0:?}: use lz4, zstd or zstd:LEVEL with a level from 1 to 19, and zstd+dict or zstd:LEVEL+dict")]
pub struct UnknownCodec(String);

impl FromStr for Codec {
    type Err = UnknownCodec;

    fn from_str(name: &str) -> Result<Codec, UnknownCodec> {
        let (base, dictionary) = match name.strip_suffix(DICTIONARY_SUFFIX) {
            Some(base) => (base, true),
            None => (name, false),
        };
        let level = match base.split_once(':') {
            None if name == "lz4" => return Ok(Codec::Lz4),
            None if base == "zstd" => Some(ZSTD_DEFAULT_LEVEL),
            // `parse` would take a sign and leading zeros.
            Some(("zstd", level)) if !level.starts_with(['+', '0']) => level.parse().ok(),
            _ => None,
        };
        match level {
            Some(level @ 1..=ZSTD_MAX_LEVEL) => Ok(Codec::Zstd { level, dictionary }),
            _ => Err(UnknownCodec(name.to_owned())),
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Codec::Lz4 => return f.write_str("lz4"),
            Codec::Zstd { level: ZSTD_DEFAULT_LEVEL, .. } => f.write_str("zstd")?,
            Codec::Zstd { level, .. } => write!(f, "zstd:{level}")?,
        }
        match *self {
            Codec::Zstd { dictionary: true, .. } => f.write_str(DICTIONARY_SUFFIX),
            _ => Ok(()),
        }
    }
}
