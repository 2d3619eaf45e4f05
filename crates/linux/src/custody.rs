//! The userfaultfds of the tree, which the supervisor holds, too.
//!
//! When the last descriptor of a userfaultfd is closed, swapped-out pages read as zeros. A companion and its guard have
//! one each. If somebody kills both at once, the supervisor's keeps faults waiting until the program is stopped.
//!
//! The supervisor takes a copy by pidfd_getfd(2), and drops it when the slot of the process is used again. Where that
//! call is refused (the companion has another user), and in another pid namespace, the guard is the only other holder.

use crate::control::Control;
use rustix::fd::{OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// See the module.
#[derive(Debug, Default)]
pub struct Custody {
    /// By companion and number; `None` where it could not be taken.
    held: Vec<((Pid, RawFd), Option<OwnedFd>)>,
}

impl Custody {
    /// Takes what is offered and not held yet, and drops what belongs to no process any more.
    pub fn look(&mut self, control: &Control) {
        let offered: Vec<_> = control.each_slot().filter_map(|(slot, _)| control.process(slot).userfaultfd()).collect();
        self.held.retain(|(key, _)| offered.contains(key));
        for (companion, number) in offered {
            if self.held.iter().all(|(key, _)| *key != (companion, number)) {
                self.held.push(((companion, number), take(companion, number).ok()));
            }
        }
    }
}

fn take(companion: Pid, number: RawFd) -> Result<OwnedFd, Errno> {
    pidfd_getfd(pidfd_open(companion, PidfdFlags::empty())?, number, PidfdGetfdFlags::empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::control::{Configuration, Limit};
    use foliomem_core::policy::SizePolicy;
    use foliomem_core::units::Order;

    #[test]
    fn what_is_offered_stays_open_until_its_slot_is_free() {
        let configuration = Configuration {
            limit: Limit::Bytes(1 << 30),
            sizes: SizePolicy::from_bits(1),
            codec: Codec::Lz4,
            recompress: None,
            granule: Order::new(4).unwrap(),
            reclaimers: 0,
            torture: false,
            hard: false,
            records: false,
        };
        let (control, _segment) = Control::create(&configuration).unwrap();
        let me = rustix::process::getpid();
        let slot = control.process(control.claim_slot(me).unwrap());
        let (reader, writer) = std::io::pipe().unwrap();
        let mut custody = Custody::default();
        custody.look(control);
        slot.offer_userfaultfd(me, &writer);
        custody.look(control);
        custody.look(control);
        drop(writer);
        let is_closed = || {
            let mut ends = [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut ends, Some(&rustix::time::Timespec::default())).unwrap() > 0
        };
        assert!(!is_closed(), "the copy keeps it open");
        slot.has_ended();
        custody.look(control);
        assert!(!is_closed(), "whoever was killed is marked, too");
        control.reap();
        custody.look(control);
        assert!(is_closed());
    }
}
