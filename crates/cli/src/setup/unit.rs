//! A drop-in that starts a service of systemd inside a limit.
//!
//! It repeats the unit's own command as the program of `foliomem run`. Messages of a program with
//! `Type=notify` come from the program and not from the unit's first process, so systemd must take
//! them from all. The device must be visible to the service.

use crate::args::{Args, Command, SetupHow};
use crate::cgroups::Cgroups;
use crate::error::CliError;
use crate::knob::Machine;
use crate::settings::{Recording, Settings};
use crate::setup::record::{Record, Written};
use crate::setup::{GROUP, SetupError};
use crate::supervise;
use clap::Parser;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Where units and drop-ins are, the strongest first.
const FOLDERS: [&str; 5] = [
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
];
/// Name of the drop-in.
const DROP_IN: &str = "90-foliomem.conf";
/// Prefixes of a command that systemd understands, and that stay before it.
const PREFIXES: [char; 4] = ['-', ':', '+', '!'];

/// Returns the name with its suffix.
pub fn full_name(name: &str) -> Result<String, SetupError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
    let full = if name.contains('.') { name.to_owned() } else { format!("{name}.service") };
    let is_service = full.strip_suffix(".service").is_some_and(|stem| !stem.is_empty());
    if is_service && full.chars().all(is_allowed) { Ok(full) } else { Err(SetupError::NoService(name.to_owned())) }
}

/// Returns the name of the record of a unit.
pub fn record_name(unit: &str) -> String {
    format!("unit-{unit}")
}

/// Writes the drop-in of the unit `name`.
pub fn set_up(name: &str, limit: &str, how: &SetupHow) -> Result<(), CliError> {
    let unit = full_name(name)?;
    check_limit(limit)?;
    let service = Service::read(&how.root, &unit)?;
    let foliomem = supervise::own_executable()?;
    let content = service.drop_in(&unit, limit, &foliomem)?;
    let path = Path::new(FOLDERS[0]).join(format!("{unit}.d")).join(DROP_IN);
    let shown = how.root.join(&path);
    let mut record = Record::new(&record_name(&unit), vec![Written::new(path, content)]);
    if record.exists(&how.root) {
        Record::read(&how.root, &record_name(&unit))?.remove(&how.root)?;
    }
    record.write(&how.root)?;
    eprintln!("foliomem: wrote {}: systemctl daemon-reload && systemctl restart {unit}", shown.display());
    Ok(())
}

/// Refuses what `run` would refuse.
fn check_limit(limit: &str) -> Result<(), CliError> {
    let machine = Machine::around(&Cgroups::find(Path::new("/")));
    if let Ok(Args { command: Command::Run(run), .. }) =
        Args::try_parse_from(["foliomem", "run", "--print-config", &format!("--limit={limit}")])
    {
        Settings::resolve(&run, &Default::default(), machine)?.configuration(Recording::Off, machine)?;
    }
    Ok(())
}

/// What units and drop-ins say of a service: the values of each key, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Service(BTreeMap<String, Vec<String>>);

impl Service {
    /// Reads a unit and its drop-ins, but not the one that is to be written.
    fn read(root: &Path, unit: &str) -> Result<Service, SetupError> {
        let template = unit.split_once('@').map(|(stem, _)| format!("{stem}@.service"));
        let names: Vec<&str> = [Some(unit), template.as_deref()].into_iter().flatten().collect();
        let all = |name: &str| FOLDERS.map(|folder| root.join(folder).join(name));
        let main = names.iter().flat_map(|name| all(name)).find(|path| path.is_file());
        let Some(main) = main else { return Err(SetupError::NoUnit { name: unit.to_owned(), root: root.to_owned() }) };
        // Of two drop-ins of one name, the stronger one counts.
        let mut drop_ins: BTreeMap<_, PathBuf> = BTreeMap::new();
        for folder in names.iter().flat_map(|name| all(&format!("{name}.d"))) {
            for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
                if let Some(name) = path.file_name().filter(|_| path.extension().is_some_and(|end| end == "conf")) {
                    drop_ins.entry(name.to_owned()).or_insert(path);
                }
            }
        }
        drop_ins.remove(std::ffi::OsStr::new(DROP_IN));
        let mut service = Service::default();
        for path in std::iter::once(main).chain(drop_ins.into_values()) {
            let text = fs::read_to_string(&path).map_err(|error| SetupError::File("read", path, error))?;
            service.add(&text);
        }
        Ok(service)
    }

    /// Adds what a file says in its section `[Service]`.
    fn add(&mut self, text: &str) {
        let mut section = String::new();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let mut line = line.trim().to_owned();
            if line.starts_with(['#', ';']) {
                continue;
            }
            while let Some(start) = line.strip_suffix('\\') {
                // Comments may stand between the parts of a line.
                let next = lines.by_ref().find(|next| !next.trim_start().starts_with(['#', ';'])).unwrap_or_default();
                line = format!("{} {}", start.trim_end(), next.trim());
            }
            if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                name.clone_into(&mut section);
            } else if let Some((key, value)) = line.split_once('=').filter(|_| section == "Service") {
                let values = self.0.entry(key.trim().to_owned()).or_default();
                match value.trim() {
                    "" => values.clear(),
                    value => values.push(value.to_owned()),
                }
            }
        }
    }

    fn last(&self, key: &str) -> &str {
        self.0.get(key).and_then(|values| values.last()).map_or("", String::as_str)
    }

    /// Returns the text of the drop-in.
    fn drop_in(&self, unit: &str, limit: &str, foliomem: &Path) -> Result<String, SetupError> {
        let unfit = |why| SetupError::Unfit(unit.to_owned(), why);
        if self.last("Type") == "forking" {
            return Err(unfit("Type=forking: its first process ends at once, and the run with it"));
        }
        let commands = self.0.get("ExecStart").filter(|commands| !commands.is_empty());
        let commands = commands.ok_or_else(|| unfit("it has no ExecStart="))?;
        let mut lines = vec![
            format!("# Written by foliomem setup; foliomem setup unit {unit} --undo removes it."),
            "[Service]".to_owned(),
            "ExecStart=".to_owned(),
        ];
        let foliomem = escape(&foliomem.display().to_string());
        for command in commands {
            let program = command.trim_start_matches(PREFIXES);
            let prefix = &command[..command.len() - program.len()];
            if program.starts_with(['@', '|']) {
                return Err(unfit("its ExecStart= begins with @ or |"));
            }
            lines.push(format!("ExecStart={prefix}{foliomem} run --limit {} --quiet -- {program}", escape(limit)));
        }
        lines.push("NotifyAccess=all".to_owned());
        lines.push("KillMode=mixed".to_owned());
        lines.push("RestartPreventExitStatus=125".to_owned());
        if !matches!(self.last("User"), "" | "root" | "0") || self.last("DynamicUser") == "yes" {
            lines.push(format!("SupplementaryGroups={GROUP}"));
        }
        let hides_devices = ["yes", "true", "on", "1"].contains(&self.last("PrivateDevices"));
        if hides_devices {
            lines.push("PrivateDevices=no".to_owned());
        }
        let has_rules = self.0.get("DeviceAllow").is_some_and(|rules| !rules.is_empty());
        if hides_devices || has_rules || matches!(self.last("DevicePolicy"), "closed" | "strict") {
            if hides_devices && self.last("DevicePolicy").is_empty() {
                lines.push("DevicePolicy=closed".to_owned());
            }
            lines.push("DeviceAllow=/dev/userfaultfd rw".to_owned());
        }
        lines.push(String::new());
        Ok(lines.join("\n"))
    }
}

/// Escapes what systemd would replace in a word of a command.
fn escape(word: &str) -> String {
    let escaped = word.replace('%', "%%").replace('$', "$$");
    if escaped.contains(|c: char| c.is_whitespace() || c == '"' || c == '\\') {
        format!("\"{}\"", escaped.replace('\\', "\\\\").replace('"', "\\\""))
    } else {
        escaped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drop_in(text: &str) -> Result<String, String> {
        let mut service = Service::default();
        service.add(text);
        service.drop_in("a.service", "75%", Path::new("/opt/f m/foliomem")).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_stays_as_it_is_behind_foliomem() {
        let text = drop_in(
            "[Unit]\nDescription=x\n[Service]\nExecStart=/bin/old\nExecStart=\n# no\nExecStart=-/bin/new 'a b' \\\n; no\n  --c=%i $D\n",
        )
        .unwrap();
        let wanted =
            "ExecStart=\nExecStart=-\"/opt/f m/foliomem\" run --limit 75%% --quiet -- /bin/new 'a b' --c=%i $D\n";
        assert!(text.contains(wanted) && text.contains("\nNotifyAccess=all\n"), "{text}");
        assert!(
            !text.contains("/bin/old") && !text.contains("SupplementaryGroups") && !text.contains("Device"),
            "{text}"
        );
    }

    #[test]
    fn the_service_keeps_the_device() {
        let with = |line: &str| drop_in(&format!("[Service]\nExecStart=/bin/x\n{line}\n")).unwrap();
        assert!(with("User=app").contains("\nSupplementaryGroups=foliomem\n"));
        assert!(with("DevicePolicy=closed").contains("\nDeviceAllow=/dev/userfaultfd rw\n"));
        assert!(with("DeviceAllow=/dev/null rw").contains("\nDeviceAllow=/dev/userfaultfd rw\n"));
        let hidden = with("PrivateDevices=yes");
        assert!(
            hidden.contains("\nPrivateDevices=no\nDevicePolicy=closed\nDeviceAllow=/dev/userfaultfd rw\n"),
            "{hidden}"
        );
    }

    #[test]
    fn services_that_cannot_be_wrapped_are_refused() {
        for (text, part) in [
            ("[Service]\nType=forking\nExecStart=/bin/x\n", "Type=forking"),
            ("[Service]\nType=oneshot\n", "no ExecStart="),
            ("[Install]\nExecStart=/bin/x\n", "no ExecStart="),
            ("[Service]\nExecStart=@/bin/x y\n", "begins with @"),
        ] {
            assert!(drop_in(text).unwrap_err().contains(part), "{text}");
        }
        assert_eq!(full_name("nginx").unwrap(), "nginx.service");
        assert_eq!(full_name("getty@tty1.service").unwrap(), "getty@tty1.service");
        for bad in ["", "../x", "a/b", "a.timer", ".service", "a b"] {
            assert!(full_name(bad).is_err(), "{bad}");
        }
    }
}
