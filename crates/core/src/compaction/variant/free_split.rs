//! The free-split variant: if no free run has exactly the wanted order, a larger one is split, and
//! its remainder stays free in smaller runs (2023-11, third patch; merged in Linux 6.9).

use super::Policy;

pub(in crate::compaction) struct FreeSplit;

impl Policy for FreeSplit {}
