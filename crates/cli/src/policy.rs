//! The size policy as people write it, `16K,64K=madvise,2M=inherit,enabled=always`, and as the
//! kernel shows it.

use foliomem_types::size::{SizeError, format_order, parse_order};
use foliomem_types::size_policy::{Enabled, SizePolicy};
use foliomem_types::units::Order;
use std::fmt::Write;

/// Name of the top-level value, as in /sys/kernel/mm/transparent_hugepage.
const TOP_LEVEL: &str = "enabled";
/// Values and their names, in the kernel's order.
const VALUES: [(Enabled, &str); 4] = [
    (Enabled::Always, "always"),
    (Enabled::Inherit, "inherit"),
    (Enabled::Madvise, "madvise"),
    (Enabled::Never, "never"),
];

/// Returns the policy that a list changes: no size, and `madvise` for sizes that inherit, as in
/// most kernels.
pub fn initial() -> SizePolicy {
    SizePolicy::NONE.with_top_level(Enabled::Madvise)
}

fn parse_value(text: &str) -> Result<Enabled, SizeError> {
    let found = VALUES.iter().find(|(_, name)| *name == text.trim());
    found.map(|&(value, _)| value).ok_or_else(|| SizeError::NotEnabled(text.to_owned()))
}

/// Returns `policy` after the changes of a list, applied in order: `SIZE` for always, `SIZE=VALUE`,
/// `enabled=VALUE` for sizes that inherit, `none` to disable every size.
pub fn change_policy(policy: SizePolicy, text: &str) -> Result<SizePolicy, SizeError> {
    text.split(',').try_fold(policy, |policy, item| {
        let (name, value) = match item.split_once('=') {
            Some((name, value)) => (name.trim(), parse_value(value)?),
            None => (item.trim(), Enabled::Always),
        };
        if name == "none" && !item.contains('=') {
            return Ok(Order::sizes().fold(policy, |policy, order| policy.with(order, Enabled::Never)));
        }
        if name == TOP_LEVEL && item.contains('=') {
            let is_value = value != Enabled::Inherit;
            return is_value.then(|| policy.with_top_level(value)).ok_or_else(|| SizeError::Inherits(item.to_owned()));
        }
        match parse_order(name)? {
            Order::ZERO if value == Enabled::Always => Ok(policy),
            Order::ZERO => Err(SizeError::Base(item.to_owned())),
            order => Ok(policy.with(order, value)),
        }
    })
}

fn name(enabled: Enabled) -> &'static str {
    VALUES.iter().find(|(value, _)| *value == enabled).map_or("", |(_, name)| name)
}

/// Formats a policy as a list that turns [`initial`] into it through [`change_policy`].
pub fn format_policy(policy: SizePolicy) -> String {
    let size = |order| match policy.size(order) {
        Enabled::Never => None,
        Enabled::Always => Some(format_order(order)),
        enabled => Some(format!("{}={}", format_order(order), name(enabled))),
    };
    let mut items: Vec<String> = Order::sizes().filter_map(size).collect();
    if items.is_empty() {
        items.push("none".to_owned());
    }
    if policy.top_level() != initial().top_level() {
        items.push(format!("{TOP_LEVEL}={}", name(policy.top_level())));
    }
    items.join(",")
}

/// Formats a policy as one line for each control, with its value in brackets.
pub fn show_policy(policy: SizePolicy) -> String {
    let mut text = String::new();
    let mut line = |name: &str, holds: Enabled, values: &[(Enabled, &str)]| {
        let value =
            |&(value, name): &(Enabled, &str)| if value == holds { format!("[{name}]") } else { name.to_owned() };
        let values: Vec<String> = values.iter().map(value).collect();
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<8}{}", values.join(" "));
    };
    let top_level: Vec<_> = VALUES.into_iter().filter(|(value, _)| *value != Enabled::Inherit).collect();
    line(TOP_LEVEL, policy.top_level(), &top_level);
    for order in Order::sizes() {
        line(&format_order(order), policy.size(order), &VALUES);
    }
    text
}

/// A target of the fuzzer (`fuzz/`): any bytes as a list of sizes and as an amount.
#[cfg(any(test, fuzzing))]
pub fn fuzz(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(policy) = change_policy(initial(), text) {
        assert_eq!(change_policy(initial(), &format_policy(policy)), Ok(policy));
    }
    let _ = foliomem_types::size::parse_bytes(text, Some(1 << 34));
    let _ = foliomem_types::size::parse_orders(text);
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use replay::replay;

    #[test]
    fn the_corpus_of_the_fuzzer_is_replayed() {
        replay("sizes", fuzz);
    }

    fn any_policy() -> impl Strategy<Value = SizePolicy> {
        let top = prop::sample::select(vec![Enabled::Always, Enabled::Madvise, Enabled::Never]);
        (any::<u32>(), top).prop_map(|(bits, top)| SizePolicy::from_bits(bits).with_top_level(top))
    }

    /// Generates lists that are nearly valid, and others.
    fn lists() -> impl Strategy<Value = String> {
        let item =
            "(none|enabled|4K|8k|16K|64 K|2M|3M|[0-9]{0,3}[KMG%]?)(=( ?(always|inherit|madvise|never|maybe) ?|=)?)?";
        prop_oneof![
            3 => prop::collection::vec(item, 0..5).prop_map(|items| items.join(",")),
            1 => "[0-9a-zA-Z.,%=_ -]{0,20}",
            1 => any::<String>(),
        ]
    }

    proptest! {
        #[test]
        fn a_formatted_policy_parses_back(policy in any_policy(), before in any_policy()) {
            let text = format_policy(policy);
            prop_assert_eq!(change_policy(initial(), &text), Ok(policy), "{}", text);
            let all = format!("none,enabled=madvise,{text}");
            prop_assert_eq!(change_policy(before, &all), Ok(policy));
        }

        #[test]
        fn a_refusal_quotes_the_invalid_part(policy in any_policy(), text in lists()) {
            if let Err(error) = change_policy(policy, &text) {
                let said = error.to_string();
                let parts = text.split([',', '=']).chain(text.split(',')).chain(text.split(',').filter_map(|item| item.split_once('=').map(|(_, value)| value)));
                let is_named = parts.into_iter().any(|part| said.contains(&format!("{part:?}")) || said.contains(&format!("{:?}", part.trim())));
                prop_assert!(is_named, "{said} of {text:?}");
            }
        }

        #[test]
        fn sizes_that_a_list_does_not_name_stay(policy in any_policy(), order in 1u8..10, value in 0usize..4) {
            let order = Order::new(order).unwrap();
            let (enabled, name) = VALUES[value];
            let changed = change_policy(policy, &format!("{}={name}", format_order(order)));
            prop_assert_eq!(changed, Ok(policy.with(order, enabled)));
        }

        #[test]
        fn each_line_shown_has_one_value_in_brackets(policy in any_policy()) {
            let shown = show_policy(policy);
            prop_assert_eq!(shown.lines().count(), 10);
            let items: Vec<String> = shown.lines().map(|line| {
                let (name, _) = line.split_once(' ').unwrap();
                let (_, value) = line.split_once('[').unwrap();
                format!("{name}={}", value.split_once(']').unwrap().0)
            }).collect();
            prop_assert_eq!(change_policy(SizePolicy::NONE, &items.join(",")), Ok(policy));
        }
    }

    #[test]
    fn lists_may_have_spaces_and_small_letters() {
        let read = |text| change_policy(initial(), text).map(format_policy);
        assert_eq!(read("64K, 16k").unwrap(), "16K,64K");
        assert_eq!(read("2M=inherit,64K=madvise,enabled=always").unwrap(), "64K=madvise,2M=inherit,enabled=always");
        assert_eq!(read("16K,none,32K").unwrap(), "32K");
        assert_eq!(read("4K").unwrap(), "none");
        for bad in ["", "2K", "64K,", "all", "64K=", "64K=on", "enabled", "enabled=inherit", "none=always", "4K=never"]
        {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert!(
            show_policy(initial())
                .starts_with("enabled always [madvise] never\n8K      always inherit madvise [never]\n")
        );
    }
}
