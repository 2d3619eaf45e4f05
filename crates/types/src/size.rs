//! Sizes as people write them: `512M`, `1.5G`, `64K`, `25%`.

use crate::units::{Order, OrderSet};
use thiserror::Error;

/// Folio sizes beside 4K, of runs and of replays.
pub const DEFAULT_SIZES: &str = "16K,32K,64K,256K";

/// The reason why a text is not a size.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum SizeError {
    /// The text is not a number with a unit.
    #[error("{0:?} is not a size: use a number with K, M, G or T, such as 512M")]
    Malformed(String),
    /// The text has a sign.
    #[error("{0:?} is not a size: sizes have no sign; did you mean {1}?")]
    Signed(String, String),
    /// The size exceeds the largest supported one.
    #[error("{0:?} is too large")]
    TooLarge(String),
    /// The text has per cent, but bytes are required.
    #[error("{0:?}: a share of memory is not possible here")]
    Percent(String),
    /// The size is not a folio size.
    #[error("{0:?} is not a folio size: use 4K, 8K, 16K, 32K, 64K, 128K, 256K, 512K, 1M or 2M")]
    NotFolio(String),
    /// The value is not one of a control.
    #[error("{0:?} is none of always, inherit, madvise and never")]
    NotEnabled(String),
    /// The top-level value cannot inherit.
    #[error("{0:?}: there is nothing to inherit from: use always, madvise or never")]
    Inherits(String),
    /// Single pages cannot be disabled or restricted.
    #[error("{0:?}: pages of 4K are there always")]
    Base(String),
}

/// Parses a number of bytes. Per cent are a share of `whole_bytes`, if there is one.
pub fn parse_bytes(text: &str, whole_bytes: Option<u64>) -> Result<u64, SizeError> {
    let unsigned = text.trim().strip_prefix(['-', '+']);
    match unsigned.filter(|unsigned| parse_unsigned(unsigned, whole_bytes).is_ok()) {
        Some(unsigned) => Err(SizeError::Signed(text.to_owned(), unsigned.trim().to_owned())),
        None => parse_unsigned(text, whole_bytes),
    }
}

fn parse_unsigned(text: &str, whole_bytes: Option<u64>) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed(text.to_owned());
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.contains('.') || number.ends_with('.') || number.len() > 20 {
        return Err(malformed());
    }
    let value: f64 = number.parse().map_err(|_| malformed())?;
    let scale = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 1.0,
        "K" | "KB" | "KIB" => 1024.0,
        "M" | "MB" | "MIB" => 1024.0 * 1024.0,
        "G" | "GB" | "GIB" => 1024.0 * 1024.0 * 1024.0,
        "T" | "TB" | "TIB" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        "%" => whole_bytes.ok_or_else(|| SizeError::Percent(text.to_owned()))? as f64 / 100.0,
        _ => return Err(malformed()),
    };
    let bytes = value * scale;
    const MAX_BYTES: f64 = (1u64 << 60) as f64;
    if bytes > MAX_BYTES { Err(SizeError::TooLarge(text.to_owned())) } else { Ok(bytes as u64) }
}

/// Parses a folio size and returns its order.
pub fn parse_order(text: &str) -> Result<Order, SizeError> {
    let bytes = parse_bytes(text, None)?;
    Order::from_bytes(bytes).ok_or_else(|| SizeError::NotFolio(text.to_owned()))
}

/// Parses a list of folio sizes such as `16K,64K`.
pub fn parse_orders(text: &str) -> Result<OrderSet, SizeError> {
    text.split(',').try_fold(OrderSet::EMPTY, |set, size| Ok(set.with(parse_order(size)?)))
}

/// Formats the folio size of `order` as [`parse_order`] reads it.
pub fn format_order(order: Order) -> String {
    let kib = order.kib();
    if kib >= 1024 { format!("{}M", kib / 1024) } else { format!("{kib}K") }
}

/// Formats bytes as [`parse_bytes`] reads them, without loss and in the largest unit.
pub fn format_bytes(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let fits = |&(shift, _): &(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= shift;
    units
        .iter()
        .find(|unit| fits(unit))
        .map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

/// Formats bytes as mebibytes for people, with a decimal below 10 MiB.
pub fn format_mib(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 10.0 { format!("{mib:.1} MiB") } else { format!("{mib:.0} MiB") }
}

/// Formats bytes for a column of at most six characters, in units of [`parse_bytes`], rounded to
/// two digits or more: `9.5M`, `740M`, `1.46G`.
pub fn format_short(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["K", "M", "G", "T", "P", "E"];
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = match () {
        () if unit == 0 || value >= 99.95 => 0,
        () if unit == 1 || value >= 9.995 => 1,
        () => 2,
    };
    format!("{value:.decimals$}{}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Generates texts that are nearly sizes, and others.
    fn texts() -> impl Strategy<Value = String> {
        prop_oneof![
            2 => r"[ ]?[0-9]{0,22}[.]?[0-9]{0,3}[ ]?([KMGTkmgt]?(i?[Bb])?|%)",
            1 => "[0-9a-zA-Z.,%+_ -]{0,12}",
            1 => any::<String>(),
        ]
    }

    proptest! {
        #[test]
        fn a_refusal_quotes_the_text(text in texts(), whole: u64, percent: bool) {
            let said = format!("{text:?}");
            if let Err(error) = parse_bytes(&text, percent.then_some(whole)) {
                prop_assert!(error.to_string().contains(&said), "{error}");
            }
            if let Err(error) = parse_order(&text) {
                prop_assert!(error.to_string().contains(&said), "{error}");
            }
            if let Err(error) = parse_orders(&text) {
                let names_a_part = text.split(',').any(|part| error.to_string().contains(&format!("{part:?}")));
                prop_assert!(names_a_part, "{error}");
            }
        }

        #[test]
        fn a_number_is_multiplied_by_its_unit(number in 0u64..1 << 20, unit in 0u32..5, share in 0u64..=100) {
            let text = format!("{number}{}", ["", "k", "MiB", " G", "TB"][unit as usize]);
            prop_assert_eq!(parse_bytes(&text, None), Ok(number << (10 * unit)));
            prop_assert_eq!(parse_bytes(&format!("{share}%"), Some(100 * number)), Ok(share * number));
        }

        #[test]
        fn formatted_bytes_parse_back(number in 0u64..1 << 20, shift in 0u32..40) {
            prop_assert_eq!(parse_bytes(&format_bytes(number << shift), None), Ok(number << shift));
        }

        #[test]
        fn a_short_size_is_short_and_right_within_one_in_twenty(bytes: u64, shift in 0u32..64) {
            let bytes = bytes >> shift;
            let text = format_short(bytes);
            prop_assert!(text.len() <= 6, "{text}");
            if let Ok(read) = parse_bytes(&text, None) {
                prop_assert!(read.abs_diff(bytes) <= (bytes / 20).max(512), "{bytes} is {text}");
            }
        }

        #[test]
        fn a_formatted_order_parses_back(order in 0u8..10) {
            let order = Order::new(order).unwrap();
            prop_assert_eq!(parse_order(&format_order(order)), Ok(order));
        }
    }

    #[test]
    fn sizes_may_have_fractions_spaces_and_small_letters() {
        let bytes = |text| parse_bytes(text, Some(1000)).unwrap();
        assert_eq!(bytes("4096"), 4096);
        assert_eq!(bytes("64k"), 64 << 10);
        assert_eq!(bytes("1.5G"), 3 << 29);
        assert_eq!(bytes("256 MiB"), 256 << 20);
        assert_eq!(bytes("25%"), 250);
        for bad in ["", "M", "1x", "1.2.3K", "-5M", "1e9", "5.", ".5M", "K5", "99999999999T", "0x10"] {
            assert!(parse_bytes(bad, Some(1000)).is_err(), "{bad}");
        }
        assert!(parse_bytes("5%", None).is_err());
    }

    #[test]
    fn short_sizes_have_about_three_digits() {
        let shown = [0, 4 << 10, 9_961_472, 740 << 20, 1023 << 20, 1500 << 20, 99_999 << 20].map(format_short);
        assert_eq!(shown, ["0K", "4K", "9.5M", "740M", "1.00G", "1.46G", "97.7G"]);
    }

    #[test]
    fn folio_sizes_are_powers_of_two_of_pages() {
        assert_eq!(parse_orders("64K,16K,2M").unwrap().bits(), 1 << 4 | 1 << 2 | 1 << 9);
        assert_eq!(parse_orders("4K").unwrap(), OrderSet::EMPTY);
        for bad in ["2K", "48K", "4M", "64K,", "all"] {
            assert!(parse_orders(bad).is_err(), "{bad}");
        }
    }
}
