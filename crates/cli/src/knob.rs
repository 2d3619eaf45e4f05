//! Knobs: settings that are declared once.
//!
//! A declaration says how people write the value and what the value means. The following are
//! derived from the declaration: the command-line option, the environment variable, the key of the
//! configuration file, the line of `--print-config`, the value in the control segment, and the row
//! of the reference.
//! [`crate::settings`] has the declarations.

use crate::config_file::ConfigFile;
use crate::container_limit::Container;
use crate::error::{BadValue, CliError};
use clap::{Arg, ArgAction, ArgMatches, Command};
use foliomem_types::settings::Configuration;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// Environment variables, by name.
pub type Environment = BTreeMap<String, String>;

/// The way a knob appears on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// An option with a value, shown as this word.
    Value(&'static str),
    /// An option with a size. A value with a minus sign is parsed as a value, so that its error
    /// explains more than "unknown option".
    Size(&'static str),
    /// An option without a value.
    Switch,
    /// No option: a variable and a key that are either on or off.
    NoOption,
}

/// The part of a knob that does not depend on the type of its value.
#[derive(Clone, Copy, Debug)]
pub struct Declaration {
    /// Key of the configuration file. The option is `--name`, the variable `FOLIOMEM_NAME`.
    pub name: &'static str,
    /// The help text of the option, in lines.
    pub help: &'static [&'static str],
    /// The way it appears on the command line.
    pub form: Form,
    /// The values, for the reference.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test writes the reference"))]
    pub values: &'static str,
    /// The value if no source sets the knob: its text, or words for the reference.
    pub default: DefaultValue,
}

impl Declaration {
    /// Returns the name of the variable.
    pub fn variable(&self) -> String {
        format!("FOLIOMEM_{}", self.name.to_ascii_uppercase())
    }

    /// Returns whether the value is on or off.
    pub fn is_switch(&self) -> bool {
        matches!(self.form, Form::Switch | Form::NoOption)
    }

    /// Returns the option, if there is one.
    fn option(&self) -> Option<Arg> {
        let help: Vec<&str> = self.help.iter().map(|line| line.trim()).collect();
        let default = match self.default {
            DefaultValue::Text(text) if !self.is_switch() => format!(" [default: {text}]"),
            _ => String::new(),
        };
        let option = Arg::new(self.name).long(self.name).help(help.join(" ") + &default);
        match self.form {
            Form::Value(shown) => Some(option.value_name(shown)),
            Form::Size(shown) => Some(option.value_name(shown).allow_hyphen_values(true)),
            Form::Switch => Some(option.action(ArgAction::SetTrue)),
            Form::NoOption => None,
        }
    }

    /// Returns the option's value as text, if it was given.
    fn given(&self, matches: &ArgMatches) -> Option<String> {
        match self.form {
            Form::Value(_) | Form::Size(_) => matches.get_one::<String>(self.name).cloned(),
            Form::Switch => matches.get_flag(self.name).then(|| ON.to_owned()),
            Form::NoOption => None,
        }
    }

    /// Returns the row of the table in the reference.
    #[cfg(test)]
    pub fn row(&self) -> String {
        let option = match self.form {
            Form::Value(shown) | Form::Size(shown) => format!("`--{} {shown}`", self.name),
            Form::Switch => format!("`--{}`", self.name),
            Form::NoOption => String::new(),
        };
        let default = match self.default {
            DefaultValue::Text(_) if self.is_switch() => "off".to_owned(),
            DefaultValue::Text(text) => format!("`{text}`"),
            DefaultValue::Words(words) => words.to_owned(),
        };
        format!("| {option} | `{}` | `{}` | {} | {default} |", self.variable(), self.name, self.values)
    }
}

/// The text of a switch that is on.
pub const ON: &str = "yes";

/// The value of a knob that no source sets.
pub enum Unset<T> {
    /// The value of this text.
    Reads(&'static str),
    /// The value that the function returns, with words for the reference.
    Is(&'static str, fn() -> T),
}

impl<T> Unset<T> {
    /// Returns the default in the form that the declaration shows.
    pub const fn default(&self) -> DefaultValue {
        match self {
            Unset::Reads(text) => DefaultValue::Text(text),
            Unset::Is(words, _) => DefaultValue::Words(words),
        }
    }
}

/// The default of a knob.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DefaultValue {
    /// The value of this text.
    Text(&'static str),
    /// A value without a text, in words.
    Words(&'static str),
}

/// The part of a knob that depends on the type of its value: parsing, formatting and use.
pub struct Knob<T> {
    /// The way it appears on the command line.
    pub form: Form,
    /// The values, for the reference.
    pub values: &'static str,
    /// The value if no source has a text for the knob.
    pub unset: Unset<T>,
    /// Parses a text.
    pub read: fn(&str, &Machine) -> Result<T, BadValue>,
    /// Formats a value for TOML; `None` if the setting is off.
    pub show: fn(&T) -> Option<toml::Value>,
    /// Writes the value into the configuration that the agents of a run read.
    pub configure: fn(&T, &mut Configuration),
}

/// The properties of this machine that texts refer to.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// The memory, of which limits may be a share.
    pub memory_bytes: u64,
    /// The memory that the cgroups around this process allow, if one of them has a limit.
    pub container: Option<Container>,
}

/// The origin of a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// An option.
    CommandLine,
    /// A variable of the environment.
    Variable(String),
    /// A line of the configuration file.
    File(PathBuf, usize),
    /// The declaration.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::CommandLine => f.write_str("command line"),
            Origin::Variable(name) => f.write_str(name),
            Origin::File(path, line) => write!(f, "{}:{line}", path.display()),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// A value and its origin.
#[derive(Clone, Debug)]
pub struct Resolved<T> {
    /// The value.
    pub value: T,
    /// The origin.
    pub origin: Origin,
}

/// The places where values are looked up: the command line before the environment before the file.
pub struct Sources<'a> {
    /// The options.
    pub options: &'a Options,
    /// The variables.
    pub environment: &'a Environment,
    /// The configuration file.
    pub file: &'a ConfigFile,
    /// The machine that texts refer to.
    pub machine: Machine,
}

impl Sources<'_> {
    fn text(&self, declaration: &Declaration) -> Option<(&str, Origin)> {
        let option = || Some((self.options.0.get(declaration.name)?.as_str(), Origin::CommandLine));
        let variable = || {
            let name = declaration.variable();
            let value = self.environment.get(&name).filter(|value| !value.is_empty())?;
            Some((value.as_str(), Origin::Variable(name)))
        };
        option().or_else(variable).or_else(|| self.file.get(declaration.name))
    }

    /// Resolves a knob.
    ///
    /// # Errors
    /// Fails if its text has no meaning.
    pub fn resolve<T>(&self, declaration: &Declaration, knob: Knob<T>) -> Result<Resolved<T>, CliError> {
        let read = |text, origin: Origin| match (knob.read)(text, &self.machine) {
            Ok(value) => Ok(Resolved { value, origin }),
            Err(source) => {
                Err(CliError::Setting { name: declaration.name, origin: origin.to_string(), source: Box::new(source) })
            }
        };
        match (self.text(declaration), knob.unset) {
            (Some((text, origin)), _) => read(text, origin),
            (None, Unset::Reads(text)) => read(text, Origin::Default),
            (None, Unset::Is(_, value)) => Ok(Resolved { value: value(), origin: Origin::Default }),
        }
    }
}

/// The options of a run that were given, as texts by the names of their knobs.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Options(BTreeMap<&'static str, String>);

#[cfg(test)]
impl From<BTreeMap<&'static str, String>> for Options {
    fn from(given: BTreeMap<&'static str, String>) -> Options {
        Options(given)
    }
}

impl clap::FromArgMatches for Options {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Options, clap::Error> {
        let declared = crate::settings::DECLARATIONS.iter();
        Ok(Options(declared.filter_map(|declared| Some((declared.name, declared.given(matches)?))).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.extend(Options::from_arg_matches(matches)?.0);
        Ok(())
    }
}

impl clap::Args for Options {
    fn augment_args(command: Command) -> Command {
        command.args(crate::settings::DECLARATIONS.iter().filter_map(Declaration::option))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Options::augment_args(command)
    }
}

/// Declares the knobs of a run: the struct `Settings` with a field for each, and `DECLARATIONS`.
/// The documentation of a knob is the help text of its option.
macro_rules! knobs {
    ($( $(#[doc = $help:literal])+ $name:ident: $type:ty = $knob:expr; )+) => {
        /// The settings of a run, each with its origin.
        #[derive(Debug)]
        pub struct Settings {
            $( $name: $crate::knob::Resolved<$type>, )+
        }

        /// The declarations without the types of the values, in the order of the help.
        pub const DECLARATIONS: &[$crate::knob::Declaration] = &[$( {
            const KNOB: $crate::knob::Knob<$type> = $knob;
            $crate::knob::Declaration {
                name: stringify!($name),
                help: &[$($help),+],
                form: KNOB.form,
                values: KNOB.values,
                default: KNOB.unset.default(),
            }
        }, )+];

        impl Settings {
            /// Resolves all settings.
            ///
            /// # Errors
            /// Fails if a value has no meaning.
            pub fn of(sources: &$crate::knob::Sources) -> Result<Settings, $crate::error::CliError> {
                let mut declarations = DECLARATIONS.iter();
                let mut next = || match declarations.next() {
                    Some(declaration) => declaration,
                    None => unreachable!("there is one for each field"),
                };
                Ok(Settings { $( $name: sources.resolve(next(), $knob)?, )+ })
            }

            /// Writes the settings into the configuration that the agents of a run read.
            fn configure(&self, configuration: &mut foliomem_types::settings::Configuration) {
                $( {
                    const KNOB: $crate::knob::Knob<$type> = $knob;
                    (KNOB.configure)(&self.$name.value, configuration);
                } )+
            }

            /// Formats all settings as lines of TOML, each with its origin.
            pub fn describe(&self) -> String {
                let mut text = String::new();
                $( {
                    const KNOB: $crate::knob::Knob<$type> = $knob;
                    let line = match (KNOB.show)(&self.$name.value) {
                        Some(value) => format!("{} = {value}", stringify!($name)),
                        None => format!("#{} = {:?}", stringify!($name), "not set"),
                    };
                    // Writing to a string does not fail.
                    let _ = std::fmt::Write::write_fmt(
                        &mut text,
                        format_args!("{line:<32} # {}\n", self.$name.origin),
                    );
                } )+
                text
            }
        }
    };
}

pub(crate) use knobs;
