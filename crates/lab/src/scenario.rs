//! Scenario files: a machine, a swap device and a workload, as TOML.
//!
//! An error in a file names the file, the line and the reason; an error in a `--vary` names the
//! setting and the reason.

use crate::costs::Costs;
use crate::error::{LabError, one_line};
use crate::lab::Lab;
use crate::machine::{Content, LabMachine, Store};
use crate::workload::Workload;
use foliomem_core::cluster::Strategy;
use foliomem_core::compaction::Variant;
use foliomem_core::engine::{EngineConfig, NoRoom};
use foliomem_core::locality::SwapIn;
use foliomem_core::pacing::Pacing;
use foliomem_types::units::{Order, OrderSet};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

/// A number of a scenario that must lie in a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Within<const MIN: u32, const MAX: u32>(u32);

impl<const MIN: u32, const MAX: u32> Within<MIN, MAX> {
    /// Returns the number.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl<'de, const MIN: u32, const MAX: u32> Deserialize<'de> for Within<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = i64::deserialize(from)?;
        match u32::try_from(number) {
            Ok(fits) if (MIN..=MAX).contains(&fits) => Ok(Within(fits)),
            _ => Err(D::Error::custom(format!("{number} is not within {MIN} to {MAX}"))),
        }
    }
}

/// The content of a scenario file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// A description, one line.
    pub about: String,
    /// The seed of random numbers.
    pub seed: u32,
    /// The machine.
    pub machine: MachineSection,
    /// The swap device.
    pub swap: SwapSection,
    /// The workload.
    pub workload: Workload,
    /// The costs, which no scenario contains.
    #[serde(skip, default = "Costs::reference")]
    pub costs: Costs,
}

/// Bounds of a program's limit, in MiB.
pub const MIN_LIMIT_MIB: u32 = 16;
const MAX_LIMIT_MIB: u32 = 1 << 20;

/// The machine of a scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSection {
    /// Number of CPUs.
    pub cpus: Within<1, 1024>,
    /// The program's limit.
    pub limit_mib: Within<MIN_LIMIT_MIB, MAX_LIMIT_MIB>,
    /// Folio sizes in addition to 4 KiB.
    #[serde(deserialize_with = "sizes")]
    pub sizes_kib: OrderSet,
    /// What a fault does when the limit leaves no room for a large folio.
    #[serde(deserialize_with = "no_room")]
    pub no_room: NoRoom,
}

/// The swap device of a scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapSection {
    /// The size of the device.
    pub size_mib: Within<2, 8_388_608>,
    /// The strategy of the slot allocator.
    #[serde(deserialize_with = "strategy")]
    pub strategy: Strategy,
    /// How much of a folio a fault maps in.
    #[serde(deserialize_with = "swap_in")]
    pub swap_in: SwapIn,
    /// Whether to keep slots of swapped-in folios.
    pub keep_copies: bool,
    /// Folio sizes that are split before they are swapped out.
    #[serde(deserialize_with = "sizes")]
    pub split_kib: OrderSet,
    /// The place of compressed memory.
    pub store: Store,
    /// The maximum size of a piece.
    #[serde(deserialize_with = "size")]
    pub granule_kib: Order,
}

fn order(kib: u64) -> Option<Order> {
    kib.checked_mul(1024).and_then(Order::from_bytes)
}

fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Order, D::Error> {
    let kib = u64::deserialize(from)?;
    order(kib).ok_or_else(|| D::Error::custom(format!("{kib} KiB is no folio size: 4, 8, 16, ... 2048 are")))
}

fn sizes<'de, D: Deserializer<'de>>(from: D) -> Result<OrderSet, D::Error> {
    let mut set = OrderSet::EMPTY;
    for kib in Vec::<u64>::deserialize(from)? {
        match order(kib) {
            Some(order) if order > Order::ZERO => set = set.with(order),
            _ => return Err(D::Error::custom(format!("{kib} KiB is no folio size beside 4: 8, 16, ... 2048 are"))),
        }
    }
    Ok(set)
}

fn strategy<'de, D: Deserializer<'de>>(from: D) -> Result<Strategy, D::Error> {
    String::deserialize(from)?.parse().map_err(D::Error::custom)
}

fn swap_in<'de, D: Deserializer<'de>>(from: D) -> Result<SwapIn, D::Error> {
    match String::deserialize(from)?.as_str() {
        "adaptive" => Ok(SwapIn::Adaptive),
        "whole" => Ok(SwapIn::Whole),
        "page" => Ok(SwapIn::Page),
        other => Err(D::Error::custom(format!("unknown swap_in {other:?}: use adaptive, whole or page"))),
    }
}

fn no_room<'de, D: Deserializer<'de>>(from: D) -> Result<NoRoom, D::Error> {
    match String::deserialize(from)?.as_str() {
        "reclaim" => Ok(NoRoom::Reclaim),
        "fall-back" => Ok(NoRoom::FallBack),
        other => Err(D::Error::custom(format!("unknown no_room {other:?}: use reclaim or fall-back"))),
    }
}

/// Pages in a MiB.
const MIB_PAGES: u32 = 256;

/// Arena frames for each page that may be in use at a time, so that some are always free.
const ARENA_PER_MOST: u32 = 2;

impl Scenario {
    /// Parses the scenario `text` of the file `name`.
    pub fn parse(name: &str, text: &str) -> Result<Scenario, LabError> {
        toml::from_str(text).map_err(|error| LabError::in_file(name, text, &error))
    }

    /// Parses a scenario with some settings replaced, given as pairs of a dotted key and a value.
    pub fn parse_with(name: &str, text: &str, settings: &[(String, String)]) -> Result<Scenario, LabError> {
        let Some((last_key, last_value)) = settings.last() else { return Scenario::parse(name, text) };
        let set = replaced(name, text, settings).and_then(|table| {
            Scenario::deserialize(table).map_err(|error| {
                let list: Vec<String> = settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
                match list.as_slice() {
                    [_] => bad_setting(last_key, last_value, error.message()),
                    _ => LabError::Setting { setting: list.join(" "), why: one_line(error.message()) },
                }
            })
        });
        // Errors of the file itself come first. (They are searched only after another error:
        // parsing reads a trace.)
        set.or_else(|error| Scenario::parse(name, text).and(Err(error)))
    }

    /// Returns the scenario with another limit, as near as a machine can have.
    pub fn within(&self, limit_mib: u64) -> Scenario {
        let limit_mib = u32::try_from(limit_mib).unwrap_or(u32::MAX).clamp(MIN_LIMIT_MIB, MAX_LIMIT_MIB);
        let machine = MachineSection { limit_mib: Within(limit_mib), ..self.machine.clone() };
        Scenario { machine, ..self.clone() }
    }

    /// Returns all settings of a scenario with some replaced: dotted keys, sorted, with their
    /// values.
    pub fn settings(
        name: &str,
        text: &str,
        settings: &[(String, String)],
    ) -> Result<Vec<(String, toml::Value)>, LabError> {
        let mut flat = Vec::new();
        flatten("", replaced(name, text, settings)?, &mut flat);
        Ok(flat)
    }

    /// Makes the machine, with its costs, and the engine of the scenario.
    pub fn lab(&self, check_every: Option<u64>) -> Lab {
        let limit_pages = self.machine.limit_mib.get() * MIB_PAGES;
        let most_pages = self.workload.most_pages(limit_pages);
        let arena_frames = ARENA_PER_MOST * most_pages;
        let config = EngineConfig {
            granule: self.swap.granule_kib,
            arena_frames,
            swap_slots: self.swap.size_mib.get() * MIB_PAGES,
            strategy: self.swap.strategy,
            swap_in: self.swap.swap_in,
            no_room: self.machine.no_room,
            whole_out: OrderSet::from_bits(!self.swap.split_kib.bits()),
            keep_copies: self.swap.keep_copies,
            make_ahead: true,
            pacing: Pacing::Watermarks,
            compaction: Variant::default(),
            cpus: self.machine.cpus.get() as u16,
            protected_pages: self.workload.protected_pages(limit_pages),
            backing: None,
            recompress_idle_ns: None,
        };
        let pages = self.workload.pages();
        let content = Content { store: self.swap.store, filled: self.workload.is_filled() };
        let machine = LabMachine::new(pages, arena_frames, limit_pages, self.machine.sizes_kib, content, self.costs);
        self.workload.density(&self.costs).into_iter().for_each(|density| machine.set_density(density));
        Lab::new(machine, config, most_pages.into(), check_every)
    }
}

/// Parses the text of the file `name` as a table, with some settings replaced.
fn replaced(name: &str, text: &str, settings: &[(String, String)]) -> Result<toml::Table, LabError> {
    let mut table = toml::from_str(text).map_err(|error| LabError::in_file(name, text, &error))?;
    for (key, value) in settings {
        set(&mut table, key, value).map_err(|why| bad_setting(key, value, &why))?;
    }
    Ok(table)
}

fn flatten(above: &str, table: toml::Table, flat: &mut Vec<(String, toml::Value)>) {
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => flatten(&format!("{above}{key}."), inner, flat),
            value => flat.push((format!("{above}{key}"), value)),
        }
    }
}

/// Replaces the value under the dotted `key`.
fn set(table: &mut toml::Table, key: &str, value: &str) -> Result<(), String> {
    let (path, last) = key.rsplit_once('.').map_or((None, key), |(path, last)| (Some(path), last));
    let mut at = table;
    for part in path.into_iter().flat_map(|path| path.split('.')) {
        at = at.get_mut(part).and_then(toml::Value::as_table_mut).ok_or_else(|| format!("there is no [{part}]"))?;
    }
    let old = at.get_mut(last).ok_or_else(|| format!("there is no {last:?} to set"))?;
    *old = match old {
        toml::Value::String(_) => value.into(),
        toml::Value::Boolean(_) => value.parse::<bool>().map_err(|_| "true or false is wanted".to_owned())?.into(),
        toml::Value::Integer(_) => value.parse::<i64>().map_err(|_| "a number is wanted".to_owned())?.into(),
        toml::Value::Array(_) if value.is_empty() => toml::Value::Array(Vec::new()),
        toml::Value::Array(_) => {
            let numbers = value.split('+').map(str::parse::<i64>).collect::<Result<Vec<_>, _>>();
            numbers.map_err(|_| "numbers joined by + are wanted".to_owned())?.into()
        }
        _ => return Err("it has no single value".to_owned()),
    };
    Ok(())
}

fn bad_setting(key: &str, value: &str, why: &str) -> LabError {
    LabError::Setting { setting: format!("{key}={value}"), why: one_line(why) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shipped::SHIPPED;
    use proptest::prelude::{any, prop, prop_assert, proptest};

    fn refusal(text: &str) -> String {
        Scenario::parse("s.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn a_bad_file_is_refused_with_its_line_and_the_reason() {
        let good = SHIPPED[0].text;
        let line_of = |text: &str, what: &str| text[..text.find(what).unwrap()].matches('\n').count() + 1;
        for (from, to, why) in [
            ("cpus = 1", "cpus = 0", "0 is not within 1 to 1024"),
            ("sizes_kib = [64]", "sizes_kib = [60]", "60 KiB is no folio size"),
            ("strategy = \"", "strategy = \"x", "unknown swap strategy"),
            ("store = \"outside\"", "store = \"inside\"", "unknown variant `inside`"),
            ("aligned = false", "alinged = false", "unknown field `alinged`"),
            ("about = \"", "about = 1 #", "string"),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good, "{from}");
            let text = refusal(&bad);
            assert!(text.starts_with(&format!("s.toml:{}: ", line_of(&bad, to))), "{text}");
            assert!(text.contains(why) && !text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn a_setting_replaces_the_files_value_or_is_refused() {
        let text = SHIPPED[0].text;
        let with = |key: &str, value: &str| Scenario::parse_with("s.toml", text, &[(key.to_owned(), value.to_owned())]);
        assert_eq!(with("swap.strategy", "one-fragment").unwrap().swap.strategy, Strategy::OneFragment);
        assert_eq!(with("machine.cpus", "7").unwrap().machine.cpus.get(), 7);
        assert_eq!(with("machine.sizes_kib", "16+64").unwrap().machine.sizes_kib.bits(), 0b10100);
        for (key, value, why) in [
            ("swap.strategy", "best", "unknown swap strategy"),
            ("swap.stratgy", "one-fragment", "there is no \"stratgy\" to set"),
            ("swop.strategy", "one-fragment", "there is no [swop]"),
            ("machine.cpus", "many", "a number is wanted"),
            ("machine.cpus", "5000", "5000 is not within"),
            ("swap.keep_copies", "2", "true or false"),
            ("machine", "2", "no single value"),
        ] {
            let refused = with(key, value).unwrap_err().to_string();
            assert!(refused.starts_with(&format!("--vary {key}={value}: ")) && refused.contains(why), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn any_file_is_parsed_or_refused_with_its_line(
            which in 0..SHIPPED.len(), at in any::<prop::sample::Index>(), cut in 0usize..40, noise in "[ -~\\n]{0,12}|\\PC{0,4}"
        ) {
            let mut bytes = SHIPPED[which].text.to_owned().into_bytes();
            let start = at.index(bytes.len());
            let end = (start + cut).min(bytes.len());
            bytes.splice(start..end, noise.into_bytes());
            let text = String::from_utf8_lossy(&bytes);
            if let Err(error) = Scenario::parse("s.toml", &text) {
                let LabError::File { line, why, .. } = &error else { panic!("{error:?}") };
                prop_assert!((1..=text.matches('\n').count() + 1).contains(line), "{error}");
                prop_assert!(!why.is_empty() && !error.to_string().contains('\n'), "{error}");
            }
        }
    }
}
