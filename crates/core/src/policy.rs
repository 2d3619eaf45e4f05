//! Which folio sizes a mapping may have: the kernel's controls of multi-size THP.
//!
//! Each size is `always`, `madvise` (where the program has asked for huge pages with MADV_HUGEPAGE), `inherit` (what the
//! top-level value says) or `never`. A mapping with MADV_NOHUGEPAGE has pages of 4K only, and so has a process that has
//! disabled huge pages (PR_SET_THP_DISABLE). A policy is one word, so that it can be changed at once for a whole tree of
//! processes while they run.

use crate::units::{Order, OrderSet};

/// What a control says. The top-level one is never `Inherit`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Enabled {
    /// Nowhere.
    #[default]
    Never,
    /// Wherever it fits.
    Always,
    /// Where the program has asked for huge pages.
    Madvise,
    /// As the top-level value says.
    Inherit,
}

/// What the program has said about a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Advice {
    /// Nothing.
    #[default]
    None,
    /// MADV_HUGEPAGE.
    Huge,
    /// MADV_NOHUGEPAGE.
    NoHuge,
}

/// Whether a process has disabled huge pages for itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Disabled {
    /// It has not.
    #[default]
    No,
    /// Everywhere but where it has asked for them.
    ExceptAdvised,
    /// Everywhere.
    Yes,
}

/// All controls. Two bits for each order; those of order 0, which is always enabled, hold the top-level value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SizePolicy(u32);

impl SizePolicy {
    /// 4K alone.
    pub const NONE: SizePolicy = SizePolicy(0);
    const TOP_LEVEL: Order = Order::ZERO;

    /// The policy that [`bits`](SizePolicy::bits) are of. Any bits are of one.
    pub const fn from_bits(bits: u32) -> SizePolicy {
        SizePolicy(bits & 0xf_ffff)
    }

    /// As one word.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The sizes of `set` always, the others never.
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

    /// What the control of a size above 4K says.
    pub fn size(self, order: Order) -> Enabled {
        debug_assert!(order > Order::ZERO, "4K has no control");
        self.control(order)
    }

    /// What sizes that inherit do.
    pub fn top_level(self) -> Enabled {
        match self.control(Self::TOP_LEVEL) {
            Enabled::Inherit => Enabled::Never,
            enabled => enabled,
        }
    }

    /// The same with another control.
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

    /// The same with another top-level value.
    #[must_use]
    pub fn with_top_level(self, enabled: Enabled) -> SizePolicy {
        debug_assert!(enabled != Enabled::Inherit, "there is nothing above to inherit from");
        self.with(Self::TOP_LEVEL, enabled)
    }

    /// The sizes that a mapping may have.
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
        fn every_control_is_what_it_was_set_to_last(
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
            prop_assert_eq!(asked.bits() & not.bits(), not.bits(), "asking takes nothing away");
        }
    }

    #[test]
    fn what_is_allowed_is_what_the_kernel_allows() {
        use {Advice::*, Enabled::*};
        let order = Order::new(4).unwrap();
        // By the control, the top-level value and the advice, with and without one: transhuge.rst.
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
