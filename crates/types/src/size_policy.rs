//! The size policy: which folio sizes a mapping may have, like the kernel's controls of multi-size
//! THP.
//!
//! Each size is `always`, `madvise` (only where the program called madvise(MADV_HUGEPAGE)),
//! `inherit` (the top-level value applies) or `never`. A mapping with MADV_NOHUGEPAGE has 4K pages
//! only; so has a process that disabled huge pages with PR_SET_THP_DISABLE. A policy is one word,
//! so that one store changes it for a running tree of processes.

use crate::units::{Order, OrderSet};

/// The value of one control. The top-level control is never `Inherit`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Enabled {
    /// The size is never used.
    #[default]
    Never,
    /// The size is used wherever it fits.
    Always,
    /// The size is used where the program asked for huge pages.
    Madvise,
    /// The top-level value applies.
    Inherit,
}

/// The program's madvise(2) advice about a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Advice {
    /// No advice.
    #[default]
    None,
    /// MADV_HUGEPAGE.
    Huge,
    /// MADV_NOHUGEPAGE.
    NoHuge,
}

/// Whether a process disabled huge pages for itself (PR_SET_THP_DISABLE).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Disabled {
    /// The process did not disable huge pages.
    #[default]
    No,
    /// The process disabled huge pages except where it asked for them.
    ExceptAdvised,
    /// The process disabled huge pages everywhere.
    Yes,
}

impl Disabled {
    /// Returns the value with this number. Other numbers are [`Disabled::No`].
    pub const fn from_number(number: u8) -> Disabled {
        match number {
            number if number == Disabled::ExceptAdvised as u8 => Disabled::ExceptAdvised,
            number if number == Disabled::Yes as u8 => Disabled::Yes,
            _ => Disabled::No,
        }
    }
}

/// All size controls in one word. Each order has two bits. Order 0 is always enabled, so its bits
/// hold the top-level value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SizePolicy(u32);

impl SizePolicy {
    /// The policy that allows 4K only.
    pub const NONE: SizePolicy = SizePolicy(0);
    const TOP_LEVEL: Order = Order::ZERO;

    /// Returns the policy that [`bits`](SizePolicy::bits) encodes. Every word is a valid policy.
    pub const fn from_bits(bits: u32) -> SizePolicy {
        SizePolicy(bits & 0xf_ffff)
    }

    /// Returns the policy as one word.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns the policy that always allows the sizes of `set` and never allows the others.
    pub fn always(set: OrderSet) -> SizePolicy {
        let enabled = Order::sizes().filter(|&order| set.contains(order));
        enabled.fold(SizePolicy::NONE, |policy, order| policy.with(order, Enabled::Always))
    }

    fn control(self, order: Order) -> Enabled {
        match self.0 >> (2 * order.get()) & 3 {
            0 => Enabled::Never,
            1 => Enabled::Always,
            2 => Enabled::Madvise,
            _ => Enabled::Inherit,
        }
    }

    /// Returns the control of a size above 4K.
    pub fn size(self, order: Order) -> Enabled {
        debug_assert!(order > Order::ZERO, "4K has no control");
        self.control(order)
    }

    /// Returns the top-level value, which applies to sizes that inherit.
    pub fn top_level(self) -> Enabled {
        match self.control(Self::TOP_LEVEL) {
            Enabled::Inherit => Enabled::Never,
            enabled => enabled,
        }
    }

    /// Returns the policy with the control of `order` replaced.
    #[must_use]
    pub fn with(self, order: Order, enabled: Enabled) -> SizePolicy {
        let shift = 2 * order.get();
        let value = match enabled {
            Enabled::Never => 0,
            Enabled::Always => 1,
            Enabled::Madvise => 2,
            Enabled::Inherit => 3,
        };
        SizePolicy(self.0 & !(3 << shift) | value << shift)
    }

    /// Returns the policy with the top-level value replaced.
    #[must_use]
    pub fn with_top_level(self, enabled: Enabled) -> SizePolicy {
        debug_assert!(enabled != Enabled::Inherit, "the top-level control cannot inherit");
        self.with(Self::TOP_LEVEL, enabled)
    }

    /// Returns the sizes that a mapping with `advice` may have in a process with `disabled`.
    pub fn allowed(self, advice: Advice, disabled: Disabled) -> OrderSet {
        let asked = advice == Advice::Huge;
        match (advice, disabled) {
            (Advice::NoHuge, _) | (_, Disabled::Yes) | (Advice::None, Disabled::ExceptAdvised) => {
                return OrderSet::EMPTY;
            }
            _ => {}
        }
        let is_allowed = |&order: &Order| {
            let enabled = match self.size(order) {
                Enabled::Inherit => self.top_level(),
                enabled => enabled,
            };
            enabled == Enabled::Always || enabled == Enabled::Madvise && asked
        };
        Order::sizes().filter(is_allowed).fold(OrderSet::EMPTY, OrderSet::with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ENABLED: [Enabled; 4] = [Enabled::Always, Enabled::Inherit, Enabled::Madvise, Enabled::Never];

    proptest! {
        #[test]
        fn each_control_keeps_the_last_value_set(
            steps in prop::collection::vec((1u8..10, 0usize..4), 0..30),
            top in prop::option::of(prop::sample::select(vec![Enabled::Always, Enabled::Madvise, Enabled::Never])),
        ) {
            let (mut policy, mut model) = (SizePolicy::NONE, [Enabled::Never; 10]);
            for (order, value) in steps {
                policy = policy.with(Order::new(order).unwrap(), ENABLED[value]);
                model[order as usize] = ENABLED[value];
            }
            if let Some(top) = top {
                policy = policy.with_top_level(top);
            }
            prop_assert_eq!(policy.top_level(), top.unwrap_or_default());
            prop_assert_eq!(SizePolicy::from_bits(policy.bits()), policy);
            for order in Order::sizes() {
                prop_assert_eq!(policy.size(order), model[order.index()]);
            }
        }

        #[test]
        fn any_word_is_a_policy(bits: u32) {
            let policy = SizePolicy::from_bits(bits);
            prop_assert!(policy.top_level() != Enabled::Inherit);
            prop_assert_eq!(policy.allowed(Advice::NoHuge, Disabled::No), OrderSet::EMPTY);
            prop_assert_eq!(policy.allowed(Advice::Huge, Disabled::Yes), OrderSet::EMPTY);
            let (asked, not) = (policy.allowed(Advice::Huge, Disabled::No), policy.allowed(Advice::None, Disabled::No));
            prop_assert_eq!(asked.bits() & not.bits(), not.bits(), "MADV_HUGEPAGE only adds sizes");
        }
    }

    #[test]
    fn allowed_sizes_match_the_kernels_rules() {
        use {Advice::*, Enabled::*};
        let order = Order::new(4).unwrap();
        // Control, top-level value, allowed without advice, allowed with MADV_HUGEPAGE:
        // transhuge.rst.
        for (enabled, top, unasked, asked) in [
            (Always, Never, true, true),
            (Madvise, Never, false, true),
            (Inherit, Always, true, true),
            (Inherit, Madvise, false, true),
            (Inherit, Never, false, false),
            (Never, Always, false, false),
        ] {
            let policy = SizePolicy::NONE.with(order, enabled).with_top_level(top);
            let allowed = |advice, disabled| policy.allowed(advice, disabled).bits() == 1 << 4;
            assert_eq!(allowed(None, Disabled::No), unasked, "{enabled:?} {top:?}");
            assert_eq!(allowed(Huge, Disabled::No), asked, "{enabled:?} {top:?}");
            assert!(!allowed(None, Disabled::ExceptAdvised) && !allowed(NoHuge, Disabled::No));
            assert_eq!(allowed(Huge, Disabled::ExceptAdvised), asked);
        }
    }
}
