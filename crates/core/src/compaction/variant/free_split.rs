//! Larger free runs are cut where there is none of the very order (2023-11, third patch; merged in Linux 6.9). The rest goes
//! back to the free runs of its orders.

use super::Policy;

pub(in crate::compaction) struct FreeSplit;

impl Policy for FreeSplit {}
