//! Folios are moved whole (2023-11, second patch): free runs are kept per order, and each is given out at its own order. A folio
//! without one stays, and with it the block it is in.

use super::Policy;
use crate::homes::Homes;
use crate::units::{FrameRun, Order};

pub(in crate::compaction) struct MigrateWhole;

impl Policy for MigrateWhole {
    fn target(&self, homes: &Homes, order: Order) -> Option<FrameRun> {
        homes.alloc_target(order, false)
    }
}
