//! Whether this process may use userfaultfd; if not, which cause closes which way to get one.

use crate::checks::{Finding, State, is_nested};
use crate::remedy::Cause;
use foliomem_sys::errno_text::ErrnoText;
use foliomem_sys::system_checks::steps::{self, By, Step};
use foliomem_sys::system_checks::userfaultfd::{self, DEVICE, Node, Ways};
use rustix::io::Errno;
use std::fs;

/// The oldest kernel that can move pages.
const OLDEST: (u32, u32) = (6, 8);
/// Number of CAP_SYS_PTRACE.
const CAP_SYS_PTRACE: u32 = 19;

/// The properties of process and system that explain the result, beside the ways that were tried.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Surroundings {
    /// The kernel's release.
    release: String,
    /// The minor number of the device, if the kernel has it.
    driver: Option<u32>,
    node: Option<Node>,
    /// The user and the groups of this process.
    user: u32,
    groups: Vec<u32>,
    is_filtered: bool,
    /// Whether this process has CAP_SYS_PTRACE, in whichever user namespace.
    has_capability: bool,
    /// Whether the user namespace is not the first one.
    is_nested: bool,
    /// The label that the security module gives this process (`/proc/self/attr/current`).
    label: String,
}

impl Surroundings {
    fn look() -> Surroundings {
        let status = read("/proc/self/status");
        let mut groups: Vec<u32> =
            rustix::process::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()).collect();
        groups.push(rustix::process::getegid().as_raw());
        Surroundings {
            release: release(),
            driver: driver(&read("/proc/misc")),
            node: userfaultfd::node(),
            user: rustix::process::geteuid().as_raw(),
            groups,
            is_filtered: steps::is_filtered(),
            has_capability: effective_capabilities(&status).unwrap_or(0) >> CAP_SYS_PTRACE & 1 != 0,
            is_nested: is_nested(),
            label: read("/proc/self/attr/current").trim_end_matches('\0').to_owned(),
        }
    }
}

fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Returns the minor number of the device, from the text of `/proc/misc`.
fn driver(misc: &str) -> Option<u32> {
    let line = misc.lines().find(|line| line.split_ascii_whitespace().nth(1) == Some("userfaultfd"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Returns the set of capabilities in the text of `/proc/self/status`.
fn effective_capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Returns the first two numbers of a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let (major, rest) = release.split_once('.')?;
    let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Tries all ways to get a userfaultfd. Returns findings about the kernel, the permission, and
/// moving pages.
pub fn check(by: By) -> Vec<Finding> {
    match userfaultfd::probe(by) {
        // Only the cause of a fault depends on more.
        Ok(ways) if ways.suffice() => judge(&ways, &Surroundings { release: release(), ..Surroundings::default() }),
        Ok(ways) => judge(&ways, &Surroundings::look()),
        Err(errno) => vec![super::resources::no_child("userfaultfd", errno)],
    }
}

fn judge(ways: &Ways, surroundings: &Surroundings) -> Vec<Finding> {
    let mut findings = vec![kernel(ways, surroundings)];
    if findings[0].state == State::Fine {
        findings.push(permission(ways, surroundings));
        findings.extend(moves(ways, surroundings));
    }
    findings
}

/// The features of a userfaultfd show what the kernel can do. Without one, only the kernel's
/// release does.
fn kernel(ways: &Ways, surroundings: &Surroundings) -> Finding {
    let found = format!("Linux {}", surroundings.release);
    let is_absent = |step: Step| step.errno() == Some(Errno::NOSYS) && !surroundings.is_filtered;
    let is_old = match ways.features {
        Step::Failed(Errno::INVAL) => true,
        Step::NotTaken | Step::Killed => version(&surroundings.release).is_some_and(|version| version < OLDEST),
        Step::Done(_) | Step::Failed(_) => false,
    };
    if is_old {
        Finding::missing("kernel", format!("{found} cannot move pages (UFFDIO_MOVE)"), Cause::KernelTooOld)
    } else if is_absent(ways.call) && surroundings.driver.is_none() {
        Finding::missing("kernel", format!("{found} was built without userfaultfd"), Cause::KernelWithout)
    } else {
        Finding::fine("kernel", found)
    }
}

fn permission(ways: &Ways, surroundings: &Surroundings) -> Finding {
    const WHAT: &str = "userfaultfd";
    if ways.device_answer.is_done() {
        return Finding::fine(WHAT, format!("opens, by {DEVICE}"));
    }
    if ways.call.is_done() {
        return Finding::fine(WHAT, "opens, by userfaultfd(2)");
    }
    let (cause, device) = device(ways, surroundings);
    Finding::missing(WHAT, format!("{device}; {}", call(ways, surroundings)), cause)
}

/// Says why the device cannot be used.
fn device(ways: &Ways, surroundings: &Surroundings) -> (Cause, String) {
    let absent = Cause::DeviceAbsent(surroundings.driver);
    let errno = match (ways.device, ways.device_answer) {
        (Step::Failed(errno), _) | (_, Step::Failed(errno)) => errno,
        _ => return (Cause::Filter("ioctl"), format!("a filter (seccomp) kills processes that use {DEVICE}")),
    };
    let Some(node) = surroundings.node.filter(|_| errno != Errno::NOENT) else {
        let kernel = if surroundings.driver.is_some() { ", although the kernel has it" } else { "" };
        return (absent, format!("there is no {DEVICE}{kernel}"));
    };
    let is_other = !node.is_character_device || surroundings.driver.is_some_and(|minor| minor != node.minor);
    match errno {
        _ if is_other => (absent, format!("{DEVICE} is something else, not the device")),
        _ if ways.device.is_done() => {
            (Cause::Filter("ioctl"), format!("{DEVICE} opens, but does not answer: {}", ErrnoText(errno)))
        }
        Errno::MFILE | Errno::NFILE => (Cause::OpenFiles, format!("{DEVICE} does not open: {}", ErrnoText(errno))),
        Errno::PERM => (Cause::DeviceRules, format!("the cgroup's device rules refuse {DEVICE}")),
        Errno::ACCESS if node.is_on_nodev => {
            (Cause::DeviceNodev, format!("{DEVICE} lies on a file system that is mounted with nodev"))
        }
        Errno::ACCESS if may_open(&node, surroundings) => {
            let label =
                if surroundings.label.is_empty() { String::new() } else { format!(" to {}", surroundings.label) };
            (Cause::DeviceLabel, format!("SELinux, or another security module, refuses {DEVICE}{label}"))
        }
        Errno::ACCESS => (Cause::DeviceMode, refused_by_mode(&node, surroundings)),
        other => (absent, format!("{DEVICE} does not open: {}", ErrnoText(other))),
    }
}

/// Returns whether the permissions of the node allow reading and writing.
fn may_open(node: &Node, surroundings: &Surroundings) -> bool {
    const READ_AND_WRITE: u32 = 0o6;
    let shift = if node.uid == surroundings.user {
        6
    } else if surroundings.groups.contains(&node.gid) {
        3
    } else {
        0
    };
    node.mode >> shift & READ_AND_WRITE == READ_AND_WRITE
}

fn refused_by_mode(node: &Node, surroundings: &Surroundings) -> String {
    let Node { mode, uid, gid, .. } = node;
    format!(
        "{DEVICE} has mode {mode:04o}, user {uid} and group {gid}, which do not let user {} open it",
        surroundings.user
    )
}

/// Says why the system call cannot be used.
fn call(ways: &Ways, surroundings: &Surroundings) -> String {
    match (ways.call, ways.call_for_user_mode) {
        (Step::Killed, _) | (_, Step::Killed) => "a filter (seccomp) kills callers of userfaultfd(2)".to_owned(),
        (_, Step::Failed(_)) if surroundings.is_filtered => "a filter (seccomp) refuses userfaultfd(2)".to_owned(),
        (Step::Failed(Errno::PERM), _) if surroundings.is_nested && surroundings.has_capability => {
            "userfaultfd(2) needs CAP_SYS_PTRACE outside of this user namespace, whose own does not count".to_owned()
        }
        (Step::Failed(Errno::PERM), _) => {
            "userfaultfd(2) needs CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1".to_owned()
        }
        (Step::Failed(errno), _) => format!("userfaultfd(2) fails: {}", ErrnoText(errno)),
        _ => "userfaultfd(2) was not tried".to_owned(),
    }
}

fn moves(ways: &Ways, surroundings: &Surroundings) -> Option<Finding> {
    const WHAT: &str = "UFFDIO_MOVE";
    let refused = match (ways.features, ways.moved) {
        (_, Step::Done(_)) => return Some(Finding::fine(WHAT, "moves a page and back")),
        (Step::Failed(errno), _) | (_, Step::Failed(errno)) => ErrnoText(errno).to_string(),
        (Step::Killed, _) | (_, Step::Killed) => "the caller is killed".to_owned(),
        _ => return None,
    };
    let found = format!("a userfaultfd that is open refuses ioctl(2): {refused}");
    let cause = if surroundings.is_filtered { Cause::Filter("ioctl") } else { Cause::KernelTooOld };
    Some(Finding::missing(WHAT, found, cause))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remedy::Place;
    use proptest::prelude::*;

    const DONE: Step = Step::Done(0);
    const PERM: Step = Step::Failed(Errno::PERM);
    const NODE: Node = Node { is_character_device: true, minor: 257, mode: 0o600, uid: 0, gid: 0, is_on_nodev: false };
    const OPEN: Ways = Ways {
        device: DONE,
        device_answer: DONE,
        call: Step::NotTaken,
        call_for_user_mode: Step::NotTaken,
        features: DONE,
        moved: DONE,
    };

    fn surroundings() -> Surroundings {
        Surroundings {
            release: "6.18.4".to_owned(),
            driver: Some(257),
            node: Some(NODE),
            user: 1000,
            groups: vec![1000],
            is_filtered: false,
            has_capability: false,
            is_nested: false,
            label: String::new(),
        }
    }

    /// Ways of which the device fails with `device`, and the system call for want of a permission.
    fn closed(device: Step) -> Ways {
        Ways { device, device_answer: Step::NotTaken, call: PERM, call_for_user_mode: DONE, ..OPEN }
    }

    /// The text about the permission.
    fn said(ways: &Ways, surroundings: &Surroundings) -> String {
        let findings = judge(ways, surroundings);
        let finding = findings.iter().find(|finding| finding.what == "userfaultfd").unwrap();
        assert_eq!(finding.state, State::Missing);
        format!("{}{}", finding.found, finding.remedy(Place::Docker))
    }

    #[test]
    fn each_reason_for_which_the_device_does_not_open_is_named() {
        let here = surroundings();
        let denied = Step::Failed(Errno::ACCESS);
        let open_to_all = Surroundings { node: Some(Node { mode: 0o666, ..NODE }), ..here.clone() };
        let nodev = Surroundings { node: Some(Node { is_on_nodev: true, ..NODE }), ..here.clone() };
        let other = Surroundings { node: Some(Node { minor: 5, ..NODE }), ..here.clone() };
        for (step, here, part) in [
            (Step::Failed(Errno::NOENT), &here, "there is no /dev/userfaultfd, although the kernel has it"),
            (denied, &here, "has mode 0600, user 0 and group 0, which do not let user 1000 open it"),
            (PERM, &here, "the cgroup's device rules refuse /dev/userfaultfd"),
            (denied, &nodev, "mounted with nodev"),
            (denied, &open_to_all, "SELinux, or another security module, refuses"),
            (Step::Failed(Errno::NXIO), &other, "is something else"),
            (Step::Failed(Errno::MFILE), &here, "too many open files"),
        ] {
            let said = said(&closed(step), here);
            assert!(said.contains(part) && said.contains(" -> "), "{said}");
        }
    }

    #[test]
    fn each_reason_for_which_the_call_fails_is_named() {
        let (here, ways) = (surroundings(), closed(Step::Failed(Errno::NOENT)));
        let nested = Surroundings { is_nested: true, has_capability: true, ..here.clone() };
        let filtered = Surroundings { is_filtered: true, ..here.clone() };
        let filter = Ways { call_for_user_mode: PERM, features: Step::NotTaken, moved: Step::NotTaken, ..ways };
        let deadly = Ways { call: Step::Killed, call_for_user_mode: Step::NotTaken, ..filter };
        for (ways, here, part) in [
            (&ways, &here, "needs CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1"),
            (&ways, &nested, "outside of this user namespace"),
            (&filter, &filtered, "a filter (seccomp) refuses userfaultfd(2)"),
            (&deadly, &filtered, "a filter (seccomp) kills callers of userfaultfd(2)"),
        ] {
            let said = said(ways, here);
            assert!(said.contains(part) && said.contains("--device /dev/userfaultfd"), "{said}");
        }
    }

    #[test]
    fn a_kernel_is_old_by_what_it_can_do() {
        let here = surroundings();
        let state = |ways: &Ways, release: &str| {
            let here = Surroundings { release: release.to_owned(), ..here.clone() };
            judge(ways, &here)[0].state
        };
        let refused = Ways { features: Step::Failed(Errno::INVAL), moved: Step::NotTaken, ..OPEN };
        let unknown = Ways { features: Step::NotTaken, moved: Step::NotTaken, ..closed(PERM) };
        assert_eq!(state(&OPEN, "6.18.4"), State::Fine);
        assert_eq!(state(&OPEN, "5.14.0-600.el9"), State::Fine, "a distribution may have it in an older kernel");
        assert_eq!(state(&refused, "6.7.1"), State::Missing);
        assert_eq!(state(&unknown, "6.18.4"), State::Fine);
        assert_eq!(state(&unknown, "6.1.0"), State::Missing);
        assert_eq!(judge(&OPEN, &here).len(), 3);
        assert!(judge(&OPEN, &here).iter().all(|finding| finding.state == State::Fine));
    }

    #[test]
    fn the_device_is_found() {
        assert_eq!(driver("234 btrfs-control\n257 userfaultfd\n"), Some(257));
        assert_eq!(driver("234 btrfs-control\n"), None);
    }

    proptest! {
        #[test]
        fn what_the_kernel_says_is_read_and_noise_is_not(
            major: u32, minor: u32, capabilities: u64, rest in "[-+.][0-9a-z+-]{0,12}", noise in "[ -~\n]{0,80}",
        ) {
            prop_assert_eq!(version(&format!("{major}.{minor}{rest}")), Some((major, minor)));
            prop_assert_eq!(version(&format!("{major}.{minor}")), Some((major, minor)));
            let status = format!("Name:\tx\nCapPrm:\t1\nCapEff:\t{capabilities:016x}\nCapBnd:\t2\n");
            prop_assert_eq!(effective_capabilities(&status), Some(capabilities));
            if let Some((major, minor)) = version(&noise) {
                prop_assert!(noise.contains(&minor.to_string()) && noise.contains(&major.to_string()));
            }
            prop_assert!(effective_capabilities(&noise).is_none() || noise.contains("CapEff:"));
        }
    }
}
