//! The split-folios variant: "Enable >0 order folio memory compaction" (2023-11, first patch).
//! Every folio is split and moved page by page, whatever its order. It needs no run as a target,
//! and leaves no large folio whole.

use super::Policy;
use foliomem_types::units::Order;

pub(in crate::compaction) struct SplitFolios;

impl Policy for SplitFolios {
    fn isolates(&self, _source: Order, _wanted: Order) -> bool {
        true
    }

    fn splits_first(&self) -> bool {
        true
    }
}
