//! Remedies: the command or setting that fixes what a check has found, for the place where foliomem
//! runs (Docker, Podman, Kubernetes, systemd, or a bare host).

use std::ffi::OsString;
use std::fs;
use std::path::Path;

/// Where foliomem runs: what decides on its permissions and limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Place {
    /// A container of Docker.
    Docker,
    /// A container of Podman.
    Podman,
    /// A pod.
    Kubernetes,
    /// A service of systemd.
    Systemd,
    /// Anything else.
    Host,
}

/// The fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cause {
    /// The kernel cannot move pages.
    KernelTooOld,
    /// The kernel has no userfaultfd.
    KernelWithout,
    /// There is no device; its minor number, if the kernel has it.
    DeviceAbsent(Option<u32>),
    /// The permissions of the device do not allow it.
    DeviceMode,
    /// The cgroup does not allow the device.
    DeviceRules,
    /// Devices of the file system cannot be opened.
    DeviceNodev,
    /// A security module forbids it.
    DeviceLabel,
    /// A filter refuses this system call.
    Filter(&'static str),
    /// `/proc` is missing, or parts of it.
    Proc,
    /// RLIMIT_NOFILE.
    OpenFiles,
    /// RLIMIT_NPROC.
    Processes,
    /// The cgroup has too few processes.
    GroupProcesses,
    /// RLIMIT_AS.
    AddressSpace,
    /// RLIMIT_DATA.
    Data,
    /// Address space is charged as memory.
    Overcommit,
    /// RLIMIT_MEMLOCK.
    LockedMemory,
    /// `vm.max_map_count`.
    Mappings,
    /// `kernel.io_uring_disabled`.
    IoUring,
    /// `kernel.yama.ptrace_scope`.
    Yama,
    /// Another fault, which this line mends everywhere.
    Other(&'static str),
}

impl Place {
    /// All of them.
    #[cfg(test)]
    pub const ALL: [Place; 5] = [Place::Docker, Place::Podman, Place::Kubernetes, Place::Systemd, Place::Host];

    /// Finds out where this process runs.
    pub fn detect() -> Place {
        let read = |file| fs::read_to_string(file).unwrap_or_default();
        let variable = |name: &str| std::env::var_os(name);
        let exists = |path: &str| Path::new(path).exists();
        // A machine made of an image has the file, too.
        let is_machine = !is_root_of_container(&read("/proc/self/mountinfo"));
        let exists = |path: &str| exists(path) && !(is_machine && path == "/.dockerenv");
        Place::of(variable, exists, &read("/proc/self/cgroup"))
    }

    /// Tells by variables, files, and the text of `/proc/self/cgroup`.
    fn of(variable: impl Fn(&str) -> Option<OsString>, exists: impl Fn(&str) -> bool, groups: &str) -> Place {
        let is_service = groups.lines().any(|line| {
            let unit = line.rsplit('/').next().unwrap_or_default();
            unit.ends_with(".service") && !unit.starts_with("user@")
        });
        if variable("KUBERNETES_SERVICE_HOST").is_some() || exists("/var/run/secrets/kubernetes.io") {
            Place::Kubernetes
        } else if exists("/run/.containerenv") || variable("container").is_some_and(|name| name == "podman") {
            Place::Podman
        } else if exists("/.dockerenv") || variable("container").is_some() {
            Place::Docker
        } else if is_service {
            Place::Systemd
        } else {
            Place::Host
        }
    }

    /// Returns the line that mends `cause` here.
    pub fn remedy(self, cause: &Cause) -> String {
        match cause {
            Cause::KernelTooOld => self.on_the_host("install Linux 6.8 or later"),
            Cause::KernelWithout => self.on_the_host("install a kernel with CONFIG_USERFAULTFD=y"),
            Cause::DeviceAbsent(_)
            | Cause::DeviceMode
            | Cause::DeviceRules
            | Cause::DeviceNodev
            | Cause::DeviceLabel => self.device(cause),
            Cause::Filter(call) => self.filter(call),
            Cause::Overcommit => self.on_the_host("sysctl vm.overcommit_memory=0"),
            Cause::Mappings => self.on_the_host("sysctl vm.max_map_count=65530"),
            Cause::IoUring => self.on_the_host("sysctl kernel.io_uring_disabled=0"),
            Cause::Proc => match self {
                Place::Docker => {
                    "docker run --security-opt systempaths=unconfined, and nothing else mounted at /proc".to_owned()
                }
                Place::Podman => "podman run --security-opt unmask=ALL, and nothing else mounted at /proc".to_owned(),
                Place::Kubernetes => {
                    "securityContext: {procMount: Unmasked}, and nothing else mounted at /proc".to_owned()
                }
                Place::Systemd => "ProcSubset=all".to_owned(),
                Place::Host => "mount -t proc proc /proc".to_owned(),
            },
            Cause::Yama => match self {
                Place::Docker | Place::Podman => format!("{} --cap-add SYS_PTRACE", self.run()),
                Place::Kubernetes => "securityContext: {capabilities: {add: [SYS_PTRACE]}}".to_owned(),
                Place::Systemd => "AmbientCapabilities=CAP_SYS_PTRACE".to_owned(),
                Place::Host => "sysctl kernel.yama.ptrace_scope=0".to_owned(),
            },
            Cause::GroupProcesses => match self {
                Place::Docker | Place::Podman => format!("{} --pids-limit -1", self.run()),
                Place::Kubernetes => "podPidsLimit: -1 in the kubelet's configuration".to_owned(),
                Place::Systemd => "TasksMax=infinity".to_owned(),
                Place::Host => "raise pids.max of the cgroup, which /proc/self/cgroup names".to_owned(),
            },
            Cause::Other(line) => (*line).to_owned(),
            Cause::OpenFiles => self.resource("nofile", "1024", "NOFILE", "n"),
            Cause::Processes => self.resource("nproc", "-1", "NPROC", "u"),
            Cause::Data => self.resource("data", "-1", "DATA", "d"),
            Cause::LockedMemory => self.resource("memlock", "65536", "MEMLOCK", "l"),
            Cause::AddressSpace => match self {
                Place::Systemd => "LimitAS=infinity".to_owned(),
                _ => "ulimit -v unlimited".to_owned(),
            },
        }
    }

    fn run(self) -> &'static str {
        if self == Place::Podman { "podman run" } else { "docker run" }
    }

    fn on_the_host(self, what: &str) -> String {
        match self {
            Place::Docker | Place::Podman | Place::Kubernetes => format!("on the host: {what}"),
            Place::Systemd | Place::Host => what.to_owned(),
        }
    }

    fn device(self, cause: &Cause) -> String {
        const GIVEN: &str = "--device /dev/userfaultfd";
        match (self, cause) {
            (Place::Docker | Place::Podman, Cause::DeviceLabel) => {
                format!("{} {GIVEN} --security-opt label=disable", self.run())
            }
            (Place::Docker, Cause::DeviceMode) => {
                "on the host: foliomem setup; then docker run --device foliomem.dev/userfaultfd=all".to_owned()
            }
            (Place::Podman, Cause::DeviceMode) => {
                "on the host: foliomem setup, usermod -aG foliomem $USER; then podman run --device /dev/userfaultfd --group-add \
                 keep-groups"
                    .to_owned()
            }
            (Place::Docker | Place::Podman, _) => format!("{} {GIVEN}", self.run()),
            (Place::Kubernetes, Cause::DeviceLabel) => "securityContext: {seLinuxOptions: {type: spc_t}}".to_owned(),
            (Place::Kubernetes, _) => {
                "a device plugin that offers /dev/userfaultfd, or securityContext: {privileged: true}".to_owned()
            }
            (Place::Systemd, Cause::DeviceMode) => "foliomem setup; then SupplementaryGroups=foliomem".to_owned(),
            (Place::Systemd, Cause::DeviceRules) => "DeviceAllow=/dev/userfaultfd rw".to_owned(),
            (Place::Systemd, Cause::DeviceLabel) | (Place::Host, Cause::DeviceLabel) => {
                "ausearch -m avc -ts recent | audit2allow -M foliomem; semodule -i foliomem.pp".to_owned()
            }
            (Place::Systemd, _) => "PrivateDevices=no".to_owned(),
            (Place::Host, Cause::DeviceMode) => {
                "sudo foliomem setup; sudo usermod -aG foliomem $USER; then log in again".to_owned()
            }
            (Place::Host, Cause::DeviceRules) => {
                "allow the device in the cgroup, or start foliomem outside of it".to_owned()
            }
            (Place::Host, Cause::DeviceNodev) => "mount -o remount,dev /dev".to_owned(),
            (Place::Host, Cause::DeviceAbsent(Some(minor))) => {
                format!("mknod -m 0660 /dev/userfaultfd c 10 {minor}")
            }
            (Place::Host, _) => "sysctl vm.unprivileged_userfaultfd=1".to_owned(),
        }
    }

    fn filter(self, call: &str) -> String {
        match self {
            Place::Docker | Place::Podman => {
                format!("{} --security-opt seccomp=PROFILE with a profile that allows {call}", self.run())
            }
            Place::Kubernetes => "securityContext: {seccompProfile: {type: Unconfined}}".to_owned(),
            Place::Systemd => format!("SystemCallFilter={}", call.split('(').next().unwrap_or(call)),
            Place::Host => format!("allow {call} in the filter of the sandbox that foliomem is started in"),
        }
    }

    /// A limit by its names: of containers with a value, of systemd, and of the shell.
    fn resource(self, container: &str, value: &str, unit: &str, shell: &str) -> String {
        match self {
            Place::Docker | Place::Podman => format!("{} --ulimit {container}={value}:{value}", self.run()),
            Place::Kubernetes => format!("Limit{unit}=infinity in the unit of the node's container runtime"),
            Place::Systemd => format!("Limit{unit}=infinity"),
            Place::Host => {
                let value = if value == "-1" {
                    "unlimited"
                } else if shell == "l" {
                    "64"
                } else {
                    value
                };
                format!("ulimit -{shell} {value}")
            }
        }
    }
}

/// Tells by the text of `/proc/self/mountinfo` whether the root directory is a layer of files, or a
/// part of another file system.
fn is_root_of_container(mounts: &str) -> bool {
    let root = mounts.lines().rev().find_map(|line| {
        let (fields, kind) = line.split_once(" - ")?;
        let mut fields = fields.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        (point == "/").then_some((root, kind))
    });
    root.is_some_and(|(root, kind)| root != "/" || kind.split(' ').next().is_some_and(|kind| kind.contains("overlay")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_has_a_root_of_its_own() {
        assert!(!is_root_of_container(
            "25 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n30 25 0:5 / /dev rw - devtmpfs x rw\n"
        ));
        assert!(is_root_of_container("25 1 0:52 / / rw,relatime master:1 - overlay overlay rw,lowerdir=x\n"));
        assert!(is_root_of_container("25 1 254:0 /var/lib/x / rw,relatime - ext4 /dev/vda rw\n"));
        assert!(!is_root_of_container("") && !is_root_of_container("noise\n - \n"));
    }

    #[test]
    fn the_place_is_recognized_by_its_marks() {
        let place = |variable: &str, file: &str, groups: &str| {
            let value = if variable == "container" { "oci" } else { "1" };
            Place::of(|name| (name == variable).then(|| value.into()), |path| path == file, groups)
        };
        assert_eq!(place("", "", "0::/user.slice/session-1.scope\n"), Place::Host);
        assert_eq!(place("", "", "0::/user.slice/user@1000.service\n"), Place::Host);
        assert_eq!(place("", "", "0::/system.slice/app.service\n"), Place::Systemd);
        assert_eq!(place("", "/.dockerenv", "0::/\n"), Place::Docker);
        assert_eq!(place("container", "", "0::/\n"), Place::Docker);
        assert_eq!(place("", "/run/.containerenv", "0::/\n"), Place::Podman);
        assert_eq!(place("KUBERNETES_SERVICE_HOST", "/.dockerenv", "0::/\n"), Place::Kubernetes);
    }

    #[test]
    fn each_cause_has_one_line_for_each_place() {
        let causes = [
            Cause::KernelTooOld,
            Cause::KernelWithout,
            Cause::DeviceAbsent(None),
            Cause::DeviceAbsent(Some(257)),
            Cause::DeviceMode,
            Cause::DeviceRules,
            Cause::DeviceNodev,
            Cause::DeviceLabel,
            Cause::Filter("prctl(PR_SET_SYSCALL_USER_DISPATCH)"),
            Cause::Proc,
            Cause::OpenFiles,
            Cause::Processes,
            Cause::GroupProcesses,
            Cause::AddressSpace,
            Cause::Data,
            Cause::Overcommit,
            Cause::LockedMemory,
            Cause::Mappings,
            Cause::IoUring,
            Cause::Yama,
        ];
        for place in Place::ALL {
            for cause in &causes {
                let line = place.remedy(cause);
                assert!(!line.is_empty() && !line.contains('\n'), "{cause:?} {line:?}");
                assert!(place == Place::Podman || !line.contains("podman"), "{line}");
            }
        }
        assert_eq!(Place::Docker.remedy(&Cause::DeviceAbsent(None)), "docker run --device /dev/userfaultfd");
        assert_eq!(Place::Systemd.remedy(&Cause::Filter("prctl(X)")), "SystemCallFilter=prctl");
    }
}
