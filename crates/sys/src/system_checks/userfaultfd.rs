//! Probes of userfaultfd: each way to open one, the features that the agent needs, and a page that
//! is moved.

use crate::region::Region;
use crate::system_checks::steps::{self, By, Step, Steps};
use crate::userfaultfd::{Features, Mode, MoveError, Served, Userfaultfd, ask_device, call, device};
use foliomem_types::units::PAGE_BYTES;
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, StatVfsMountFlags};
use rustix::io::Errno;
use std::path::Path;

/// The device.
pub const DEVICE: &str = "/dev/userfaultfd";

/// The results of the probe's steps, in this order. A later way is tried only if the earlier ones
/// failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ways {
    /// Opening the device.
    pub device: Step,
    /// The result of asking the device for a userfaultfd.
    pub device_answer: Step,
    /// `userfaultfd(2)` for faults of user mode and of the kernel.
    pub call: Step,
    /// `userfaultfd(2)` for faults of user mode only: the kernel allows everybody that, so only a
    /// filter, or a kernel without userfaultfd, refuses.
    pub call_for_user_mode: Step,
    /// Agreeing on the features, which old kernels refuse.
    pub features: Step,
    /// Moving a page into a mapping and back. A move that fails without an errno counts as failed
    /// with `EIO`.
    pub moved: Step,
}

impl Ways {
    /// Returns whether the agent can do all it needs.
    pub fn suffice(&self) -> bool {
        (self.device_answer.is_done() || self.call.is_done()) && self.moved.is_done()
    }
}

/// The device's node in the file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node {
    /// Whether the node is a character device.
    pub is_character_device: bool,
    /// Its minor number.
    pub minor: u32,
    /// Its permissions.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Whether the node lies on a file system whose devices cannot be opened (`nodev`).
    pub is_on_nodev: bool,
}

/// Tries all ways.
///
/// # Errors
/// Fails if there can be no child to try them in.
pub fn probe(by: By) -> Result<Ways, Errno> {
    let [device, device_answer, call, call_for_user_mode, features, moved] = steps::run(by, try_ways)?;
    Ok(Ways { device, device_answer, call, call_for_user_mode, features, moved })
}

fn try_ways(steps: &Steps<'_>) {
    let by_device = steps.take(0, device).and_then(|device| steps.take(1, || ask_device(&device)));
    let opened = by_device
        .or_else(|| steps.take(2, || call(Served::All)))
        // This userfaultfd shows what the kernel can do, although the agent may not use it.
        .or_else(|| steps.take(3, || call(Served::UserMode)));
    let agree = |fd| steps.take(4, || Userfaultfd::agree(fd, Features { events: true }));
    if opened.and_then(agree).is_some() {
        steps.take(5, || open_again(steps).and_then(|fd| move_page(&fd)));
    }
}

/// Opens another userfaultfd, in the way that has worked: with mapping events, a move of memory
/// would wait until the events are read.
fn open_again(steps: &Steps<'_>) -> Result<Userfaultfd, Errno> {
    let device = device().and_then(|device| ask_device(&device));
    let fd: OwnedFd = device.or_else(|_| call(if steps.is_done(2) { Served::All } else { Served::UserMode }))?;
    Userfaultfd::agree(fd, Features { events: false })
}

/// Moves a page there and back.
fn move_page(uffd: &Userfaultfd) -> Result<(), Errno> {
    const MARK: u8 = 0x5a;
    let (one, other) = (Region::reserve(PAGE_BYTES)?, Region::reserve(PAGE_BYTES)?);
    for region in [&one, &other] {
        uffd.register(region.start(), region.len(), Mode::Destination).map_err(|_| Errno::IO)?;
    }
    // SAFETY: the region is ours, and nobody else knows of it.
    unsafe { one.slice_mut(0, PAGE_BYTES) }.fill(MARK);
    for (from, to) in [(one.start(), other.start()), (other.start(), one.start())] {
        // SAFETY: as above, for both.
        let outcome = unsafe { uffd.move_pages(to, from, PAGE_BYTES) };
        match outcome.error {
            None => {}
            Some(MoveError::Other(errno)) => return Err(errno),
            Some(MoveError::NoMemory) => return Err(Errno::NOMEM),
            Some(_) => return Err(Errno::IO),
        }
    }
    // SAFETY: as above; the page has come back.
    let content = unsafe { one.slice(0, PAGE_BYTES) };
    if content.iter().all(|&byte| byte == MARK) { Ok(()) } else { Err(Errno::IO) }
}

/// Returns the node of the device, if there is one.
pub fn node() -> Option<Node> {
    let path = Path::new(DEVICE);
    let stat = rustix::fs::stat(path).ok()?;
    let mounted = rustix::fs::statvfs(path).map_or(StatVfsMountFlags::empty(), |system| system.f_flag);
    Some(Node {
        is_character_device: FileType::from_raw_mode(stat.st_mode).is_char_device(),
        minor: rustix::fs::minor(stat.st_rdev),
        mode: stat.st_mode & 0o777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        is_on_nodev: mounted.contains(StatVfsMountFlags::NODEV),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_moved_by_the_way_that_opens() {
        let ways = probe(By::Child).unwrap();
        if rustix::process::geteuid().is_root() && !steps::is_filtered() {
            assert!(ways.suffice(), "{ways:?}");
            assert_eq!(probe(By::Caller), Ok(ways));
        }
        if ways.device.is_done() {
            assert!(node().unwrap().is_character_device);
        }
    }
}
