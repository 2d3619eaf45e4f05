//! The configuration file: where it lies, and its keys with their lines.

use crate::error::CliError;
use crate::knob::{Environment, ON, Origin};
use crate::settings::DECLARATIONS;
use foliomem_command::similar;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// The text of a switch that is off.
const OFF: &str = "no";

/// The values of a configuration file.
#[derive(Debug, Default)]
pub struct ConfigFile {
    path: PathBuf,
    /// Text and line of each key.
    values: BTreeMap<&'static str, (String, usize)>,
}

impl ConfigFile {
    /// Reads the file that `named`, a variable or the user's directory names. Only a file that is
    /// named must exist.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or has something that is no setting.
    pub fn find(named: Option<&Path>, environment: &Environment) -> Result<ConfigFile, CliError> {
        let named = named.map(Path::to_owned).or_else(|| environment.get("FOLIOMEM_CONFIG").map(PathBuf::from));
        if let Some(path) = named {
            let text = std::fs::read_to_string(&path).map_err(|error| unreadable(&path, &error))?;
            return ConfigFile::parse(path, &text);
        }
        let base = environment.get("XDG_CONFIG_HOME").map(PathBuf::from);
        let base = base.or_else(|| environment.get("HOME").map(|home| Path::new(home).join(".config")));
        let Some(base) = base else { return Ok(ConfigFile::default()) };
        let path = base.join("foliomem/config.toml");
        match std::fs::read_to_string(&path) {
            Ok(text) => ConfigFile::parse(path, &text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(ConfigFile::default()),
            Err(error) => Err(unreadable(&path, &error)),
        }
    }

    fn parse(path: PathBuf, text: &str) -> Result<ConfigFile, CliError> {
        let line_of = |offset: usize| text.get(..offset).unwrap_or_default().matches('\n').count() + 1;
        let bad = |offset, why: String| CliError::Config { path: path.clone(), line: line_of(offset), why };
        let table = DeTable::parse(text).map_err(|error| {
            bad(error.span().map_or(0, |span| span.start), error.message().trim().replace('\n', " "))
        })?;
        let mut values = BTreeMap::new();
        for (key, value) in table.get_ref() {
            let start = key.span().start;
            let Some(declaration) = DECLARATIONS.iter().find(|declaration| declaration.name == key.get_ref()) else {
                let names = DECLARATIONS.iter().map(|declaration| declaration.name);
                let hint =
                    similar(key.get_ref(), names).map_or_else(String::new, |name| format!(": did you mean {name}?"));
                return Err(bad(start, format!("there is no setting {:?}{hint}", key.get_ref())));
            };
            let text = match (value.get_ref(), declaration.is_switch()) {
                (DeValue::String(text), _) => text.clone().into_owned(),
                (DeValue::Boolean(on), true) => if *on { ON } else { OFF }.to_owned(),
                (other, _) => return Err(bad(start, wrong_type(declaration.name, other, &text[value.span()]))),
            };
            values.insert(declaration.name, (text, line_of(start)));
        }
        Ok(ConfigFile { path, values })
    }

    /// Returns the text of a setting, and its place.
    pub fn get(&self, name: &str) -> Option<(&str, Origin)> {
        let (text, line) = self.values.get(name)?;
        Some((text, Origin::File(self.path.clone(), *line)))
    }
}

fn wrong_type(name: &str, value: &DeValue, written: &str) -> String {
    match value {
        DeValue::Integer(_) | DeValue::Float(_) => {
            format!("{name} = {written} has no unit: write a text, such as {name} = \"{written}M\"")
        }
        _ => format!("{name} must be a text in quotes, not {}", value.type_str()),
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> CliError {
    CliError::UnreadableConfig(path.to_owned(), error.to_string())
}
