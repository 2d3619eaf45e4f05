//! The checks of `foliomem doctor`: what this machine allows. Each check tries the feature that it
//! reports. There is no lock.

use crate::errno_text::ErrnoText;
use crate::interception::dispatch;
use crate::region::Region;
use crate::uring::Uring;
use crate::userfaultfd::{Features, Mode, UffdError, Userfaultfd};
use foliomem_types::settings::ARENA_MIN_BYTES;
use foliomem_types::units::PAGE_BYTES;
use rustix::fd::AsFd;
use std::fs;

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The machine allows it.
    Fine,
    /// `foliomem run` works, with a drawback.
    Drawback,
    /// `foliomem run` does not work.
    Missing,
}

/// The report of one check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Name of the check.
    pub what: &'static str,
    /// Result of the check.
    pub state: State,
    /// What the check has found.
    pub found: String,
    /// What the user can do; empty if there is nothing to do.
    pub remedy: String,
}

/// Makes the report of check `what`.
fn finding(what: &'static str, state: State, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { what, state, found: found.into(), remedy: remedy.into() }
}

/// Returns the trimmed content of a file, or `None` if it cannot be read.
fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Checks whether this machine can run a program, as `foliomem run` does before it starts one.
///
/// # Errors
/// Fails if the kernel refuses a userfaultfd with moves and mapping events.
pub fn check_userfaultfd() -> Result<(), UffdError> {
    Userfaultfd::open(Features { events: true })?;
    Ok(())
}

/// Makes all checks, in the order of the report.
pub fn check_all() -> Vec<Finding> {
    vec![
        kernel(),
        userfaultfd(),
        ways_in(),
        page_move(),
        fork_trap(),
        io_uring(),
        overcommit(),
        address_space(),
        maps(),
        locked(),
    ]
}

/// Checks the version of the kernel.
fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if version(&release).is_some_and(|version| version >= (6, 8)) {
        finding("kernel", State::Fine, format!("Linux {release}"), "")
    } else {
        finding(
            "kernel",
            State::Missing,
            format!("Linux {release}"),
            "install Linux 6.8 or later, which can move pages",
        )
    }
}

/// Returns the first two numbers of a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let (major, rest) = release.split_once('.')?;
    let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Checks that userfaultfd can be opened.
fn userfaultfd() -> Finding {
    match check_userfaultfd() {
        Ok(()) => finding("userfaultfd", State::Fine, "opens, with UFFDIO_MOVE and mapping events", ""),
        Err(error) => finding("userfaultfd", State::Missing, error.to_string(), ""),
    }
}

/// Checks the ways to get permission for userfaultfd; one of them suffices.
fn ways_in() -> Finding {
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
    let sysctl = read("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_else(|| "missing".to_owned());
    const CAP_SYS_PTRACE: u32 = 19;
    let capabilities = read("/proc/self/status").and_then(|status| effective_capabilities(&status));
    let has_capability = capabilities.unwrap_or(0) >> CAP_SYS_PTRACE & 1 != 0;
    let is_open = device.is_ok() || sysctl == "1" || has_capability;
    let device = device.map_or_else(|error| error.to_string(), |_| "may be opened".to_owned());
    let found = format!(
        "/dev/userfaultfd: {device}; vm.unprivileged_userfaultfd={sysctl}; CAP_SYS_PTRACE: {}",
        if has_capability { "yes" } else { "no" }
    );
    if is_open {
        finding("permission", State::Fine, found, "")
    } else {
        finding("permission", State::Missing, found, "grant one of these")
    }
}

/// Returns the effective capabilities in the text of `/proc/self/status`.
fn effective_capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Checks page moves by moving a page there and back.
fn page_move() -> Finding {
    match try_move() {
        Ok(()) => finding("UFFDIO_MOVE", State::Fine, "moves a page and back", ""),
        Err(error) => finding("UFFDIO_MOVE", State::Missing, error, "install Linux 6.8 or later"),
    }
}

/// Moves a page there and back and compares its content. Returns the reason of a failure.
fn try_move() -> Result<(), String> {
    const MARK: u8 = 0x5a;
    let uffd = Userfaultfd::open(Features { events: false }).map_err(|error| error.to_string())?;
    let (Ok(one), Ok(other)) = (Region::reserve(PAGE_BYTES), Region::reserve(PAGE_BYTES)) else {
        return Err("cannot map memory".to_owned());
    };
    for region in [&one, &other] {
        uffd.register(region.start(), region.len(), Mode::Destination).map_err(|error| error.to_string())?;
    }
    // SAFETY: this function owns the region, and no other reference into it exists.
    unsafe { one.slice_mut(0, PAGE_BYTES) }.fill(MARK);
    for (from, to) in [(one.start(), other.start()), (other.start(), one.start())] {
        // SAFETY: this function owns both regions, and no reference into them exists.
        let outcome = unsafe { uffd.move_pages(to, from, PAGE_BYTES) };
        if let Some(error) = outcome.error {
            return Err(error.to_string());
        }
    }
    // SAFETY: this function owns the region, whose page has come back, and nobody writes it.
    let content = unsafe { one.slice(0, PAGE_BYTES) };
    if content.iter().all(|&byte| byte == MARK) { Ok(()) } else { Err("the content was lost".to_owned()) }
}

/// Checks that system calls can be dispatched, for forks of a C library that cannot be patched.
fn fork_trap() -> Finding {
    if dispatch::is_supported() {
        finding("fork", State::Fine, "system calls can be dispatched (PR_SET_SYSCALL_USER_DISPATCH)", "")
    } else {
        let remedy = "programs that fork stop with SIGSEGV in the child; allow prctl(2), or use a kernel with \
                      CONFIG_GENERIC_ENTRY";
        finding("fork", State::Drawback, "system calls cannot be dispatched", remedy)
    }
}

/// Checks io_uring, with which agents write to a swap file that is a block device.
fn io_uring() -> Finding {
    match Uring::<1>::new(std::io::stdin().as_fd()) {
        Ok(_) => finding("io_uring", State::Fine, "writes to a swap device overlap with compression", ""),
        Err(errno) => {
            let found = format!("cannot be used: {}; agents write to a swap device with pwrite(2)", ErrnoText(errno));
            let remedy = "a write to a swap device delays compression: set kernel.io_uring_disabled=0, or allow io_uring in the container's filters";
            finding("io_uring", State::Drawback, found, remedy)
        }
    }
}

/// Checks that the kernel does not charge address space as memory.
fn overcommit() -> Finding {
    const STRICT: &str = "2";
    let mode = read("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    if mode == STRICT {
        let remedy = "address space is charged as memory: set vm.overcommit_memory=0, or raise vm.overcommit_ratio";
        finding("overcommit", State::Drawback, "vm.overcommit_memory=2", remedy)
    } else {
        finding("overcommit", State::Fine, format!("vm.overcommit_memory={mode}"), "")
    }
}

/// Checks the limit on address space.
fn address_space() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
    let needed = (ARENA_MIN_BYTES as u64) * 2;
    match limit {
        None => finding("address space", State::Fine, "unlimited", ""),
        Some(bytes) if bytes >= needed => {
            let remedy = "foliomem reserves 1 GiB or four times the limit of `run`, whichever is more, and some 128 MiB: raise it \
                          (ulimit -v) if `run` says so";
            finding("address space", State::Drawback, format!("limited to {} MiB", bytes >> 20), remedy)
        }
        Some(bytes) => {
            let found = format!("limited to {} MiB", bytes >> 20);
            finding("address space", State::Missing, found, "raise the limit (ulimit -v unlimited)")
        }
    }
}

/// Checks the maximum number of mappings.
fn maps() -> Finding {
    const DEFAULT: u64 = 65530;
    let max_maps = read("/proc/sys/vm/max_map_count").and_then(|text| text.parse::<u64>().ok()).unwrap_or(DEFAULT);
    if max_maps >= DEFAULT {
        finding("mappings", State::Fine, format!("vm.max_map_count={max_maps}"), "")
    } else {
        let remedy = format!("a program with many mappings may need more: set vm.max_map_count={DEFAULT}");
        finding("mappings", State::Drawback, format!("vm.max_map_count={max_maps}"), remedy)
    }
}

/// Checks the limit on locked memory: a fork locks two pages of the forking thread for a moment.
fn locked() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    match limit {
        Some(bytes) if bytes < 16 * PAGE_BYTES as u64 => {
            let remedy = "programs that fork should be allowed 64 KiB of locked memory (ulimit -l)";
            finding("locked memory", State::Drawback, format!("limited to {} KiB", bytes >> 10), remedy)
        }
        Some(bytes) => finding("locked memory", State::Fine, format!("up to {} KiB", bytes >> 10), ""),
        None => finding("locked memory", State::Fine, "unlimited", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn texts_of_the_kernel_are_parsed_and_noise_is_refused(
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

    #[test]
    fn every_finding_that_is_not_fine_has_a_remedy() {
        let findings = check_all();
        assert!(findings.len() >= 8);
        for finding in findings {
            assert!(!finding.found.is_empty());
            // The text of a userfaultfd error contains the remedy.
            assert!(finding.state == State::Fine || finding.what == "userfaultfd" || !finding.remedy.is_empty());
        }
    }

    #[test]
    fn root_may_use_userfaultfd() {
        if rustix::process::geteuid().is_root() {
            check_userfaultfd().unwrap();
            try_move().unwrap();
        }
    }
}
