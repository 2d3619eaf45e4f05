//! `foliomem advise`: records a run, if it is given a program, and lets the lab predict from the
//! trace how much slower other limits would be.
//!
//! The lab is a program of its own, `foliomem-lab`, which this command becomes: it has another
//! build of the engine and writes Parquet files, which would make every `foliomem run` carry them.

use crate::args::{AdviseArgs, RunArgs};
use crate::error::CliError;
use crate::record::Target;
use foliomem_command::{BesideError, beside};
use foliomem_sys::signals;
use rustix::io::FdFlags;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const LAB: &str = "foliomem-lab";

/// Runs the command. Returns only if it fails, or if the program could not run.
pub fn advise(args: AdviseArgs) -> Result<u8, CliError> {
    let lab = beside(LAB)?;
    let options = lab_options(&args);
    let AdviseArgs { trace, program, options: run_options, config, output, json, .. } = args;
    if let Some(trace) = trace {
        return become_lab(&lab, trace.as_os_str().to_owned(), options, Stdio::inherit());
    }
    // Opened before the run: an unwritable file is refused at once, not hours later.
    if let Some(path) = json.as_deref().filter(|path| *path != Path::new("-")) {
        File::create(path).map_err(|error| CliError::Advice(path.to_owned(), error))?;
    }
    let run = RunArgs { options: run_options, config, program, ..RunArgs::default() };
    let failed = |error| CliError::System("use a temporary file", error);
    let file = if output.is_none() { Some(unnamed_file()?) } else { None };
    let copy = file.as_ref().map(File::try_clone).transpose().map_err(failed)?;
    let target = output.as_deref().map(Target::Path).or(copy.map(Target::Unnamed));
    let code = crate::run(&run, target)?;
    if code != 0 {
        eprintln!("foliomem: the program ended with code {code}: the advice is about that run");
    }
    let mut trace = output.map_or_else(OsString::new, PathBuf::into_os_string);
    if let Some(file) = &file {
        rustix::io::fcntl_setfd(file.as_fd(), FdFlags::empty()).map_err(|errno| failed(errno.into()))?;
        trace.push(format!("/proc/self/fd/{}", file.as_raw_fd()));
    }
    // stdout belongs to the program that was run: the table goes to stderr.
    let is_on_stdout = json.is_some_and(|path| path == Path::new("-"));
    let stdout = if is_on_stdout { Stdio::inherit() } else { Stdio::from(std::io::stderr()) };
    // The supervisor has blocked all signals.
    signals::unblock_all();
    become_lab(&lab, trace, options, stdout)
}

/// Returns the options for the lab.
fn lab_options(args: &AdviseArgs) -> Vec<OsString> {
    let at = args.at.iter().flat_map(|limit| [OsString::from("--at"), OsString::from(limit)]);
    let json = args.json.iter().flat_map(|path| [OsString::from("--json"), path.as_os_str().to_owned()]);
    at.chain(json).collect()
}

fn become_lab(lab: &Path, trace: OsString, options: Vec<OsString>, stdout: Stdio) -> Result<u8, CliError> {
    let error = Command::new(lab).arg("advise").args(options).arg("--").arg(trace).stdout(stdout).exec();
    Err(BesideError::NotStarted(lab.to_owned(), error).into())
}

/// Creates a file without a name. The kernel removes it with its last descriptor.
fn unnamed_file() -> Result<File, CliError> {
    let path: PathBuf = std::env::temp_dir().join(format!("foliomem-advise-{}.mft", std::process::id()));
    let failed = |error| CliError::Trace(path.clone(), error);
    let file = File::options().read(true).write(true).create_new(true).open(&path).map_err(failed)?;
    fs::remove_file(&path).map_err(failed)?;
    Ok(file)
}
