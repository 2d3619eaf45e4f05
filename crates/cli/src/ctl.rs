//! `foliomem ctl`: shows and changes a run while it goes on.

use crate::args::{CtlArgs, CtlCommand};
use crate::error::{BadValue, CliError};
use crate::policy::{change_policy, show_policy};
use foliomem_session::find_run;

/// Performs the command on the run that a process belongs to.
pub fn ctl(args: &CtlArgs) -> Result<u8, CliError> {
    let control = find_run::run_of(args.pid)?;
    match &args.what {
        CtlCommand::Sizes { list: None } => print!("{}", show_policy(control.sizes())),
        CtlCommand::Sizes { list: Some(list) } => {
            let bad = |source| CliError::Setting {
                name: "sizes",
                origin: "command line".to_owned(),
                source: Box::new(BadValue::Size(source)),
            };
            // Whether a list is valid does not depend on the policy that it changes.
            change_policy(control.sizes(), list).map_err(bad)?;
            control.change_sizes(|sizes| change_policy(sizes, list).unwrap_or(sizes));
        }
    }
    Ok(0)
}
