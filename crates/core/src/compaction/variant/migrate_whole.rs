//! The migrate-whole variant: folios move whole (2023-11, second patch). Free runs are kept by
//! order, and each serves exactly its order. If there is no free run for a folio, compaction gives
//! up the whole block, and the moves already made out of that block are wasted.

use super::Policy;
use crate::compaction::Occupant;
use crate::homes::Homes;
use foliomem_types::units::{FrameRun, ORDERS, Order};

pub(in crate::compaction) struct MigrateWhole;

impl Policy for MigrateWhole {
    fn has_targets(&self, homes: &Homes, sources: &[Occupant]) -> bool {
        let mut wanted = [0; ORDERS];
        for source in sources {
            if let Occupant::Folio(run) = source {
                wanted[run.order.index()] += 1;
            }
        }
        Order::all().all(|order| wanted[order.index()] == 0 || wanted[order.index()] <= homes.empty_runs(order))
    }

    fn target(&self, homes: &Homes, order: Order, _most: Order) -> Option<FrameRun> {
        homes.alloc_target(order, order)
    }
}
