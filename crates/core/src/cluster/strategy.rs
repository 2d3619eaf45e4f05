//! The strategies: how clusters are chosen, one small type for each behind one interface.

mod cluster_lists;
mod nonfull_first;
mod one_fragment;
mod per_cpu_linear;

use super::lists::Place;
use super::search::Search;
use super::table::Cluster;
use foliomem_types::units::{Order, Slot, SlotIndex};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The strategy by which clusters are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Strategy {
    /// 2024-04, before cluster lists: only free clusters and, for order 0, a scan of the whole
    /// device.
    PerCpuLinear,
    /// Late 2024: a free cluster before nonfull ones, then every fragmented one.
    ClusterLists,
    /// 2025-08, first patch: a free cluster before nonfull ones, then only one fragmented one.
    OneFragment,
    /// 2025-08, second patch, Linux 6.18: nonfull clusters before a free one, then a fragmented
    /// one.
    #[default]
    NonfullFirst,
}

impl Strategy {
    /// All strategies, oldest first.
    pub const ALL: [Strategy; 4] =
        [Strategy::PerCpuLinear, Strategy::ClusterLists, Strategy::OneFragment, Strategy::NonfullFirst];

    /// Returns the implementation of the strategy.
    pub(super) fn policy(self) -> &'static dyn Policy {
        match self {
            Strategy::PerCpuLinear => &per_cpu_linear::PerCpuLinear,
            Strategy::ClusterLists => &cluster_lists::ClusterLists,
            Strategy::OneFragment => &one_fragment::OneFragment,
            Strategy::NonfullFirst => &nonfull_first::NonfullFirst,
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Strategy::PerCpuLinear => "per-cpu-linear",
            Strategy::ClusterLists => "cluster-lists",
            Strategy::OneFragment => "one-fragment",
            Strategy::NonfullFirst => "nonfull-first",
        })
    }
}

/// The error for an unknown strategy name.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("unknown swap strategy {0:?}: use per-cpu-linear, cluster-lists, one-fragment or nonfull-first")]
pub struct UnknownStrategy(String);

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Strategy, UnknownStrategy> {
        let found = Strategy::ALL.into_iter().find(|strategy| strategy.to_string() == name);
        found.ok_or_else(|| UnknownStrategy(name.to_owned()))
    }
}

/// The steps in which strategies differ. The defaults are those of the kernel since late 2024.
pub(super) trait Policy: Sync {
    /// Searches for room after the CPU's current cluster had none. Never called for the highest
    /// order, which only a free cluster can serve.
    fn find(&self, search: &mut Search<'_>) -> Option<Slot>;

    /// Returns whether clusters in use are on lists.
    fn keeps_lists(&self) -> bool {
        true
    }

    /// Returns whether a CPU at the end of its current cluster continues at its start, where slots
    /// may have been freed. In the kernel it leaves the cluster.
    fn goes_round(&self) -> bool {
        false
    }

    /// Returns whether a full cluster becomes the spare of the CPU that frees slots in it.
    fn keeps_spares(&self) -> bool {
        false
    }

    /// Returns the place of a cluster with slots in use after `order` was tried in it.
    fn after_try(&self, cluster: &Cluster, _order: Order) -> Place {
        if cluster.is_full() { full(cluster) } else { Place::Frag(cluster.order) }
    }

    /// Returns the place of a cluster with slots in use after `slots` slots from `at` on were
    /// freed.
    fn after_free(&self, cluster: &Cluster, _at: SlotIndex, _slots: u32) -> Place {
        Place::Nonfull(cluster.order)
    }

    /// Returns the place of a cluster after some of its slots became cache-only or in use again.
    fn after_mark(&self, cluster: &Cluster) -> Place {
        if cluster.is_full() { full(cluster) } else { cluster.place }
    }

    /// Panics if the cluster breaks a rule that only this strategy has.
    fn check(&self, _cluster: &Cluster) {}
}

fn full(cluster: &Cluster) -> Place {
    if cluster.cache_only_slots() > 0 { Place::FullCacheOnly } else { Place::Full }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategy_names_parse() {
        for strategy in Strategy::ALL {
            assert_eq!(strategy.to_string().parse(), Ok(strategy));
        }
        assert!("first-fit".parse::<Strategy>().is_err());
    }
}
