//! Costs: what operations take in virtual time, and how well memory compresses, as a table in a
//! TOML file.
//!
//! The table of the reference machine is built in; `foliomem lab calibrate` writes one of the
//! machine on which it runs. All keys are required and no others are accepted; an error names the
//! file, the line and the reason. All numbers are integers, so that results are the same
//! everywhere.

use crate::error::LabError;
use crate::scenario::Within;
use foliomem_types::units::ORDERS;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::LazyLock;

const REFERENCE: &str = include_str!("costs/reference.toml");

/// Maximum cost in nanoseconds: the clock has room for as many such accesses as a run can have.
const MAX_NS: u32 = 10_000_000;
/// Bounds of a compression ratio in percent: content never grows, and never shrinks below a
/// thousandth.
const LEAST_PERCENT: u32 = 100;
const MAX_PERCENT: u32 = 100_000;

/// The content of a file of costs.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CostTable {
    /// A description of the machine, one line.
    pub measured_on: String,
    /// The costs on that machine.
    pub costs: Costs,
}

/// Nanoseconds by operation, and how well memory compresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Serving a fault, without the work that the fault needs.
    #[serde(deserialize_with = "ns")]
    pub fault_ns: u32,
    /// A touch of a resident page, including the program's work between touches of new pages.
    #[serde(deserialize_with = "ns")]
    pub touch_ns: u32,
    /// The fixed cost of a move, and the cost of each page.
    #[serde(deserialize_with = "ns")]
    pub move_ns: u32,
    /// The cost of each page of a move.
    #[serde(deserialize_with = "ns")]
    pub move_page_ns: u32,
    /// Getting a page from the system.
    #[serde(deserialize_with = "ns")]
    pub populate_page_ns: u32,
    /// Zeroing a page.
    #[serde(deserialize_with = "ns")]
    pub zero_page_ns: u32,
    /// Hashing a page.
    #[serde(deserialize_with = "ns")]
    pub hash_page_ns: u32,
    /// Copying a page.
    #[serde(deserialize_with = "ns")]
    pub copy_page_ns: u32,
    /// Scanning a cluster for slots.
    #[serde(deserialize_with = "ns")]
    pub cluster_ns: u32,
    /// The costs of a kernel's page cache.
    pub page_cache: PageCacheCosts,
    /// The fast codec.
    pub lz4: CodecCosts,
    /// The denser codec.
    pub zstd: CodecCosts,
}

/// CPU time of a kernel's page cache operations. The costs of a folio do not depend on its size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PageCacheCosts {
    /// `read()` of a cached page in the folio that was read last.
    #[serde(deserialize_with = "ns")]
    pub read_page_ns: u32,
    /// The additional cost of another folio.
    #[serde(deserialize_with = "ns")]
    pub read_folio_ns: u32,
    /// A fault that maps cached pages around it.
    #[serde(deserialize_with = "ns")]
    pub fault_ns: u32,
    /// Mapping one folio in such a fault.
    #[serde(deserialize_with = "ns")]
    pub map_folio_ns: u32,
    /// Allocating a folio and adding it to the page cache, without zeroing or copying its pages.
    #[serde(deserialize_with = "ns")]
    pub insert_folio_ns: u32,
    /// Removing and freeing a folio, and the additional cost of each page.
    #[serde(deserialize_with = "ns")]
    pub free_folio_ns: u32,
    /// The cost of each page of a freed folio.
    #[serde(deserialize_with = "ns")]
    pub free_page_ns: u32,
    /// Visiting one mapping of a page by the reverse map, to test its use or to unmap it.
    #[serde(deserialize_with = "ns")]
    pub rmap_page_ns: u32,
    /// Scanning a page or a folio for compaction.
    #[serde(deserialize_with = "ns")]
    pub scan_ns: u32,
    /// Migrating a folio, and the additional cost of each page.
    #[serde(deserialize_with = "ns")]
    pub migrate_folio_ns: u32,
    /// The cost of each page of a migrated folio.
    #[serde(deserialize_with = "ns")]
    pub migrate_page_ns: u32,
    /// A program that reads or writes all words of a page.
    #[serde(deserialize_with = "ns")]
    pub use_page_ns: u32,
}

/// The costs of a codec, by the order of the piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CodecCosts {
    /// Compressing one page of the piece.
    #[serde(deserialize_with = "ns_by_order")]
    pub compress_page_ns: [u32; ORDERS],
    /// Decompressing one page of the piece.
    #[serde(deserialize_with = "ns_by_order")]
    pub decompress_page_ns: [u32; ORDERS],
    /// Uncompressed by compressed size, in percent.
    #[serde(deserialize_with = "percent_by_order")]
    pub ratio_percent: [u32; ORDERS],
}

fn ns<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    Within::<0, MAX_NS>::deserialize(from).map(Within::get)
}

fn ns_by_order<'de, D: Deserializer<'de>>(from: D) -> Result<[u32; ORDERS], D::Error> {
    by_order::<D, 0, MAX_NS>(from)
}

fn percent_by_order<'de, D: Deserializer<'de>>(from: D) -> Result<[u32; ORDERS], D::Error> {
    by_order::<D, LEAST_PERCENT, MAX_PERCENT>(from)
}

fn by_order<'de, D: Deserializer<'de>, const MIN: u32, const MAX: u32>(from: D) -> Result<[u32; ORDERS], D::Error> {
    // Deserializing into an array would silently ignore surplus elements.
    let numbers = Vec::<Within<MIN, MAX>>::deserialize(from)?;
    let numbers: Vec<u32> = numbers.into_iter().map(Within::get).collect();
    let there = numbers.len();
    numbers
        .try_into()
        .map_err(|_| D::Error::custom(format!("{there} numbers where {ORDERS} are wanted, one for each order")))
}

impl CostTable {
    /// Returns the table of the reference machine.
    pub fn reference() -> &'static CostTable {
        static TABLE: LazyLock<CostTable> = LazyLock::new(|| match CostTable::parse("reference.toml", REFERENCE) {
            Ok(table) => table,
            Err(error) => unreachable!("the built-in table, which tests parse: {error}"),
        });
        &TABLE
    }

    /// Reads the file at `path`.
    pub fn read(path: &Path) -> Result<CostTable, LabError> {
        let text = std::fs::read_to_string(path).map_err(|error| LabError::UnreadableCosts(path.to_owned(), error))?;
        CostTable::parse(&path.display().to_string(), &text)
    }

    /// Parses the text of the file `name`.
    pub fn parse(name: &str, text: &str) -> Result<CostTable, LabError> {
        toml::from_str(text).map_err(|error| LabError::in_file(name, text, &error))
    }

    /// Returns the table as the text of a file.
    pub fn to_toml(&self) -> String {
        match toml::to_string(self) {
            Ok(text) => format!(
                "# Written by `foliomem lab calibrate`: nanoseconds (by page where the key says so); codecs by order.\n{text}"
            ),
            Err(error) => unreachable!("a table of numbers and a string serializes: {error}"),
        }
    }
}

impl Costs {
    /// Returns the costs of the reference machine.
    pub fn reference() -> Costs {
        CostTable::reference().costs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refusal(text: &str) -> String {
        CostTable::parse("c.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn a_bad_file_is_refused_with_its_line_and_the_reason() {
        assert!(CostTable::reference().measured_on.contains("Linux"));
        let line_of = |text: &str, what: &str| text[..text.find(what).unwrap()].matches('\n').count() + 1;
        for (from, to, at, why) in [
            ("fault_ns = 5700", "fault_ns = 10000001", "fault_ns", "10000001 is not within 0 to 10000000"),
            ("fault_ns = 5700", "fault_ns = -1", "fault_ns", "-1 is not within"),
            ("fault_ns = 5700", "fault_ns = 5.7", "fault_ns", "floating point"),
            ("fault_ns = 5700", "falut_ns = 5700", "falut_ns", "unknown field `falut_ns`"),
            ("touch_ns = 100\n", "", "[costs]", "missing field `touch_ns`"),
            ("[171, ", "[99, ", "ratio_percent", "99 is not within 100 to 100000"),
            ("[171, ", "[", "ratio_percent", "9 numbers where 10 are wanted"),
            ("[171, ", "[171, 171, ", "ratio_percent", "11 numbers where 10 are wanted"),
            ("[costs.zstd]", "[costs.lz5]", "[costs.lz5]", "unknown field `lz5`"),
            ("scan_ns = 2", "scan_ns = -2", "scan_ns", "-2 is not within"),
            ("scan_ns = 2\n", "", "[costs.page_cache]", "missing field `scan_ns`"),
            ("scan_ns = 2", "skan_ns = 2", "skan_ns", "unknown field `skan_ns`"),
            ("measured_on = \"", "measured_on = 1 #", "measured_on", "string"),
        ] {
            let bad = REFERENCE.replacen(from, to, 1);
            assert_ne!(bad, REFERENCE, "{from}");
            let text = refusal(&bad);
            assert!(text.starts_with(&format!("c.toml:{}: ", line_of(&bad, at))), "{to}: {text}");
            assert!(text.contains(why) && !text.contains('\n'), "{to}: {text}");
        }
    }

    fn page_cache() -> impl Strategy<Value = PageCacheCosts> {
        prop::array::uniform12(0..=MAX_NS).prop_map(|ns| {
            let [read_page_ns, read_folio_ns, fault_ns, map_folio_ns, insert_folio_ns, free_folio_ns, ..] = ns;
            let [.., free_page_ns, rmap_page_ns, scan_ns, migrate_folio_ns, migrate_page_ns, use_page_ns] = ns;
            PageCacheCosts {
                read_page_ns,
                read_folio_ns,
                fault_ns,
                map_folio_ns,
                insert_folio_ns,
                free_folio_ns,
                free_page_ns,
                rmap_page_ns,
                scan_ns,
                migrate_folio_ns,
                migrate_page_ns,
                use_page_ns,
            }
        })
    }

    fn codec() -> impl Strategy<Value = CodecCosts> {
        let ns = || prop::array::uniform10(0..=MAX_NS);
        (ns(), ns(), prop::array::uniform10(LEAST_PERCENT..=MAX_PERCENT)).prop_map(
            |(compress_page_ns, decompress_page_ns, ratio_percent)| CodecCosts {
                compress_page_ns,
                decompress_page_ns,
                ratio_percent,
            },
        )
    }

    proptest! {
        #[test]
        fn a_written_table_is_read_back(
            measured_on in "\\PC{0,40}", ns in prop::array::uniform9(0..=MAX_NS), page_cache in page_cache(), lz4 in codec(),
            zstd in codec()
        ) {
            let [fault_ns, touch_ns, move_ns, move_page_ns, populate_page_ns, zero_page_ns, ..] = ns;
            let [.., hash_page_ns, copy_page_ns, cluster_ns] = ns;
            let costs = Costs {
                fault_ns, touch_ns, move_ns, move_page_ns, populate_page_ns, zero_page_ns, hash_page_ns, copy_page_ns,
                cluster_ns, page_cache, lz4, zstd,
            };
            let table = CostTable { measured_on, costs };
            prop_assert_eq!(CostTable::parse("c.toml", &table.to_toml()).unwrap(), table);
        }

        #[test]
        fn any_file_is_parsed_or_refused_with_its_line(
            at in any::<prop::sample::Index>(), cut in 0usize..60, noise in "[ -~\\n]{0,12}|[0-9]{0,20}|\\PC{0,4}"
        ) {
            let mut bytes = REFERENCE.to_owned().into_bytes();
            let start = at.index(bytes.len());
            let end = (start + cut).min(bytes.len());
            bytes.splice(start..end, noise.into_bytes());
            let text = String::from_utf8_lossy(&bytes);
            if let Err(error) = CostTable::parse("c.toml", &text) {
                let LabError::File { line, why, .. } = &error else { panic!("{error:?}") };
                prop_assert!((1..=text.matches('\n').count() + 1).contains(line), "{error}");
                prop_assert!(!why.is_empty() && !error.to_string().contains('\n'), "{error}");
            }
        }
    }
}
