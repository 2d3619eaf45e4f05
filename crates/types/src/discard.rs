//! Discards: how a swap device wants to learn that a cluster is free.

/// When a cluster is discarded before it is used again (the kernel's `SWP_PAGE_DISCARD`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Discard {
    /// Clusters are not discarded.
    #[default]
    Never,
    /// Discarded so that others can use its room until then. The fewer clusters are in use, the
    /// better.
    ForRoom,
    /// Discarded so that the device need not keep the content. Such a device prefers spread writes.
    ForDevice,
}
