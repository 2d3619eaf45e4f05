//! `foliomem setup`: lets ordinary users, containers and services use foliomem.
//!
//! - The machine: a group, a udev rule that gives `/dev/userfaultfd` to it, and a description of
//!   the device for containers (CDI, the container device interface).
//! - A unit of systemd ([`mod@unit`]): a drop-in that starts the service inside a limit.
//!
//! Each has a record of what was written ([`record`]), so undoing removes that and nothing else.

mod record;
mod unit;

use crate::args::{SetupArgs, SetupCommand, SetupHow};
use crate::error::CliError;
use foliomem_sys::system_checks::userfaultfd::DEVICE;
use record::{DeviceBefore, Record, Written};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use thiserror::Error;

/// The group that may open the device.
pub const GROUP: &str = "foliomem";
/// Name of the machine's record.
const MACHINE: &str = "machine";
/// Mode of the device, for its user and its group.
const DEVICE_MODE: u32 = 0o660;
/// The rule, after the one of udev itself.
const RULE_PATH: &str = "etc/udev/rules.d/60-foliomem.rules";
const RULE: &str = "KERNEL==\"userfaultfd\", GROUP=\"foliomem\", MODE=\"0660\"\n";
/// The device for containers. Its mode is that of the node inside the container, whose users all
/// may open it.
const CDI_PATH: &str = "etc/cdi/foliomem.json";
const CDI: &str = r#"{
  "cdiVersion": "0.5.0",
  "kind": "foliomem.dev/userfaultfd",
  "devices": [
    {
      "name": "all",
      "containerEdits": {
        "deviceNodes": [{ "path": "/dev/userfaultfd", "permissions": "rw", "fileMode": 438 }]
      }
    }
  ]
}
"#;

/// Why nothing could be set up or undone.
#[derive(Debug, Error)]
pub enum SetupError {
    /// A file is somebody else's.
    #[error("{0} exists, and foliomem did not write it: move it away first")]
    Exists(PathBuf),
    /// A file has another content now.
    #[error("{0} has been changed since foliomem wrote it, and stays: remove it by hand")]
    Changed(PathBuf),
    /// There is no record.
    #[error("there is nothing to undo: {0} does not exist")]
    NothingToUndo(PathBuf),
    /// A file cannot be read or written.
    #[error("cannot {0} {1}: {2}")]
    File(&'static str, PathBuf, std::io::Error),
    /// A program failed.
    #[error("cannot change the group {GROUP}: {program}: {why}")]
    Group {
        /// The program.
        program: &'static str,
        /// What it said.
        why: String,
    },
    /// The name is not that of a service.
    #[error("{0:?} is no service of systemd: name one such as nginx or nginx.service")]
    NoService(String),
    /// The unit does not exist.
    #[error("there is no unit {name} in {root}: systemctl list-unit-files lists all")]
    NoUnit {
        /// Its name.
        name: String,
        /// Where it was looked for.
        root: PathBuf,
    },
    /// The unit cannot be run inside a limit.
    #[error("{0} cannot be started by a drop-in: {1}")]
    Unfit(String, &'static str),
}

/// Sets up, or undoes.
pub fn setup(args: &SetupArgs) -> Result<u8, CliError> {
    match &args.what {
        None if args.how.undo => undo(&args.how.root, MACHINE)?,
        None => machine(&args.how)?,
        Some(SetupCommand::Unit { name, how, .. }) if how.undo => {
            undo(&how.root, &unit::record_name(&unit::full_name(name)?))?;
            eprintln!("foliomem: undone; it takes effect after systemctl daemon-reload and a restart of the service");
        }
        Some(SetupCommand::Unit { name, limit, how }) => unit::set_up(name, limit.as_deref().unwrap_or_default(), how)?,
    }
    Ok(0)
}

fn machine(how: &SetupHow) -> Result<(), SetupError> {
    let is_running = how.root == Path::new("/");
    let files = [(RULE_PATH, RULE), (CDI_PATH, CDI)].map(|(path, content)| Written::new(path, content));
    let mut record = Record::new(MACHINE, files.into());
    if record.exists(&how.root) {
        eprintln!("foliomem: is set up already; foliomem setup --undo removes it");
        return Ok(());
    }
    record.made_group = !has_group(&how.root);
    record.device = if is_running { device_before() } else { None };
    record.write(&how.root)?;
    if record.made_group {
        change_group("groupadd", &["--system"], &how.root)?;
    }
    if let Some(before) = &record.device {
        let group = group_id(&how.root).unwrap_or(before.gid);
        // Permissions that are wider than the rule's are kept until the next boot applies the rule.
        set_device(group, before.mode | DEVICE_MODE)?;
    }
    eprintln!(
        "foliomem: the group {GROUP} may use {DEVICE} (usermod -aG {GROUP} USER), and so may containers (docker run --device \
         foliomem.dev/userfaultfd=all)"
    );
    Ok(())
}

fn undo(root: &Path, name: &str) -> Result<(), SetupError> {
    let record = Record::read(root, name)?;
    if let Some(before) = &record.device {
        set_device(before.gid, before.mode)?;
    }
    if record.made_group && has_group(root) {
        change_group("groupdel", &[], root)?;
    }
    record.remove(root)
}

fn group_id(root: &Path) -> Option<u32> {
    let groups = fs::read_to_string(root.join("etc/group")).ok()?;
    let line = groups.lines().find(|line| line.split(':').next() == Some(GROUP))?;
    line.split(':').nth(2)?.parse().ok()
}

fn has_group(root: &Path) -> bool {
    group_id(root).is_some()
}

fn change_group(program: &'static str, options: &[&str], root: &Path) -> Result<(), SetupError> {
    let mut command = Command::new(program);
    if root != Path::new("/") {
        command.arg("--prefix").arg(root);
    }
    let failed = |why: String| SetupError::Group { program, why };
    let output = command.args(options).arg(GROUP).output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

fn device_before() -> Option<DeviceBefore> {
    let metadata = fs::metadata(DEVICE).ok()?;
    Some(DeviceBefore { mode: metadata.mode() & 0o777, gid: metadata.gid() })
}

fn set_device(gid: u32, mode: u32) -> Result<(), SetupError> {
    let changed =
        chown(DEVICE, None, Some(gid)).and_then(|()| fs::set_permissions(DEVICE, fs::Permissions::from_mode(mode)));
    changed.map_err(|error| SetupError::File("change the permissions of", DEVICE.into(), error))
}
