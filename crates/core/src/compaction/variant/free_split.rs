//! The free-split variant: larger free runs are split if none has exactly the order (2023-11, third
//! patch; merged in Linux 6.9). The rest returns to the free runs of its orders.

use super::Policy;

pub(in crate::compaction) struct FreeSplit;

impl Policy for FreeSplit {}
