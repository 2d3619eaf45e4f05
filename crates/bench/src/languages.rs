//! Times one small program in each of many languages without a limit, under the kernel's limit with
//! zram swap, and under foliomem's limit, at [equal total](equal_total) memory.
//!
//! All programs but the one for pandas do the same work, so all print the same number for the same
//! arguments. They keep a table of records: a name, eight counts and their sum. Each round replaces
//! a quarter of the records in a row, splits and joins the old names, and reads a sixteenth of the
//! records at random. Replaced records are garbage, of which a run produces several times its live
//! set: the collector walks the heap again and again. Each record that is replaced, and at the end
//! each of them, is verified against its sum. The program for pandas replaces a quarter of the rows
//! of a frame, and groups, joins and sorts them.
//!
//! Numbers of records and rounds differ by language, for a need of 100 to 300 MiB and some seconds.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::equal_total::{self, Answer, GroupLimit, Limited, Patience, Subject, Words};
use crate::{Error, python};

/// The names of all languages, as the command line takes them.
pub const NAMES: &str = "lua, luajit, perl, guile, ruby, ocaml, erlang, pandas, node, java-g1, java-zgc";
/// The default of [`Options::percent`].
pub const PERCENT: u64 = 50;
/// The default of [`Options::scale`].
pub const SCALE: u64 = 100;
/// Timeout of a run: ten times the first run, but at least two minutes.
const PATIENCE: Patience = Patience { least: Duration::from_secs(120), times_first: 10.0 };
/// Smallest number of records: a round reads a sixteenth of them.
const MIN_RECORDS: u64 = 64;
/// Options of Java without the collector: a fixed heap of about one and a half times the live set.
const JAVA_HEAP: [&str; 2] = ["-Xms200m", "-Xmx200m"];

/// A language, or one of its implementations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Language {
    /// Lua 5.4: `lua5.4`.
    Lua,
    /// Lua, compiled at run time: `luajit`.
    Luajit,
    /// Perl, which counts references.
    Perl,
    /// Guile 3.0, whose collector (Boehm's) does not know which words are pointers.
    Guile,
    /// Ruby.
    Ruby,
    /// OCaml, compiled to machine code: `ocamlopt`.
    Ocaml,
    /// Erlang: `escript`. Its collector copies the heap.
    Erlang,
    /// Python with pandas: `FOLIOMEM_PYTHON`, or `python3`.
    Pandas,
    /// JavaScript: `node`.
    Node,
    /// Java with its usual collector, G1.
    JavaG1,
    /// Java with the collector ZGC, whose heap is shared memory: foliomem does not limit that.
    JavaZgc,
}

impl Language {
    /// All languages.
    pub const ALL: [Self; 11] = [
        Self::Lua,
        Self::Luajit,
        Self::Perl,
        Self::Guile,
        Self::Ruby,
        Self::Ocaml,
        Self::Erlang,
        Self::Pandas,
        Self::Node,
        Self::JavaG1,
        Self::JavaZgc,
    ];

    /// Returns the number of records and rounds.
    fn size(self) -> (u64, u64) {
        match self {
            Self::Lua => (200_000, 8),
            Self::Luajit => (180_000, 12),
            Self::Perl => (240_000, 12),
            Self::Guile => (400_000, 10),
            Self::Ruby => (400_000, 10),
            Self::Ocaml => (400_000, 24),
            Self::Erlang => (90_000, 16),
            Self::Pandas => (600_000, 10),
            Self::Node => (160_000, 20),
            Self::JavaG1 | Self::JavaZgc => (500_000, 24),
        }
    }

    /// Returns name and text of the source.
    fn source(self) -> (&'static str, &'static str) {
        match self {
            Self::Lua | Self::Luajit => ("records.lua", include_str!("programs/records.lua")),
            Self::Perl => ("records.pl", include_str!("programs/records.pl")),
            Self::Guile => ("records.scm", include_str!("programs/records.scm")),
            Self::Ruby => ("records.rb", include_str!("programs/records.rb")),
            Self::Ocaml => ("records.ml", include_str!("programs/records.ml")),
            Self::Erlang => ("records.erl", include_str!("programs/records.erl")),
            Self::Pandas => ("frames.py", include_str!("programs/frames.py")),
            Self::Node => ("records.js", include_str!("programs/records.js")),
            Self::JavaG1 | Self::JavaZgc => ("Records.java", include_str!("programs/Records.java")),
        }
    }

    /// Returns the commands that show that the language is there, and compile where that is not
    /// part of the run.
    fn preparations(self) -> Vec<Words> {
        let check = match self {
            Self::Lua => Words::new("lua5.4", &["-v"]),
            Self::Luajit => Words::new("luajit", &["-v"]),
            Self::Perl => Words::new("perl", &["-c", "records.pl"]),
            Self::Guile => Words::new("guile", &["--no-auto-compile", "-c", GUILE_COMPILE]),
            Self::Ruby => Words::new("ruby", &["-c", "records.rb"]),
            Self::Ocaml => Words::new("ocamlopt", &["-o", "records", "records.ml"]),
            Self::Erlang => Words::new("escript", &["-s", "records.erl"]),
            Self::Pandas => Words::new(python(), &["-c", "import pandas"]),
            Self::Node => Words::new("node", &["--check", "records.js"]),
            Self::JavaG1 => Words::new("javac", &["Records.java"]),
            Self::JavaZgc => {
                let supported = Words::new("java", &["-XX:+UseZGC", "-version"]);
                return vec![supported, Words::new("javac", &["Records.java"])];
            }
        };
        vec![check]
    }

    /// Returns the command, without the numbers of records and rounds.
    fn command(self) -> Words {
        match self {
            Self::Lua => Words::new("lua5.4", &["records.lua"]),
            Self::Luajit => Words::new("luajit", &["records.lua"]),
            Self::Perl => Words::new("perl", &["records.pl"]),
            Self::Guile => Words::new("guile", &["--no-auto-compile", "-c", GUILE_RUN]),
            Self::Ruby => Words::new("ruby", &["records.rb"]),
            Self::Ocaml => Words::new("./records", &[]),
            Self::Erlang => Words::new("escript", &["records.erl"]),
            Self::Pandas => Words::new(python(), &["frames.py"]),
            Self::Node => Words::new("node", &["records.js"]),
            Self::JavaG1 => java("-XX:+UseG1GC"),
            Self::JavaZgc => java("-XX:+UseZGC"),
        }
    }
}

/// Compiles the program for Guile, which would otherwise write into the user's cache.
const GUILE_COMPILE: &str = r#"((@ (system base compile) compile-file) "records.scm" #:output-file "records.go")"#;
/// Runs the compiled program for Guile. A relative path would be searched in Guile's load path.
const GUILE_RUN: &str = r#"(load-compiled (string-append (getcwd) "/records.go"))"#;

fn java(collector: &str) -> Words {
    Words::new("java", &[collector, JAVA_HEAP[0], JAVA_HEAP[1], "Records"])
}

/// One row of the benchmark.
pub type Row = equal_total::Row<Language>;
/// The result of the benchmark.
pub type Report = equal_total::Report<Language>;

/// The selection of runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The languages.
    pub languages: Vec<Language>,
    /// The settings.
    pub settings: equal_total::Options,
    /// The limit of the kernel's group in per cent of the need.
    pub percent: u64,
    /// The number of records in per cent of the usual one.
    pub scale: u64,
}

/// Runs the benchmark and calls `progress` with each row.
///
/// # Errors
/// Fails if the machine cannot be set up. A missing language is skipped; a failing program is a row
/// that is not ok.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Row)) -> Result<Report, Error> {
    let mut report = Report::default();
    let settings = options.settings.resolved()?;
    for &language in &options.languages {
        let subject = subject(language, options.percent, options.scale);
        equal_total::compare(subject, &settings, progress, &mut report)?;
    }
    Ok(report)
}

/// Describes the program of a language.
fn subject(language: Language, percent: u64, scale: u64) -> Subject<'static, Language> {
    let (records, rounds) = language.size();
    let records = (records * scale / 100).max(MIN_RECORDS);
    let Words(exe, mut arguments) = language.command();
    arguments.extend([records, rounds].map(|number| number.to_string().into()));
    let (name, text) = language.source();
    Subject {
        name: language,
        files: vec![(name, text.to_owned())],
        preparations: language.preparations(),
        command: Words(exe, arguments),
        leaves: &[],
        answer: Answer::File("stdout"),
        limited: if language == Language::JavaZgc { Limited::No } else { Limited::Yes },
        group_limit: GroupLimit::Percent(percent),
        patience: PATIENCE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::process::Command;

    #[test]
    fn a_scaled_program_has_fewer_records_but_all_rounds() {
        let arguments = |scale| subject(Language::Perl, 50, scale).command.1;
        assert_eq!(arguments(100), ["records.pl", "240000", "12"]);
        assert_eq!(arguments(5), ["records.pl", "12000", "12"]);
    }

    #[test]
    fn json_rows_name_languages_as_the_command_line_does() {
        let names: Vec<String> = Language::ALL.iter().map(|language| serde_json::json!(language).to_string()).collect();
        assert_eq!(names.join(", ").replace('"', ""), NAMES);
    }

    /// Returns what the program of a language prints, or `None` where the language is missing.
    fn total(language: Language, records: u64, rounds: u64) -> Option<String> {
        let dir = Scratch::new(&format!("language-{language:?}")).unwrap();
        let (name, text) = language.source();
        std::fs::write(dir.path().join(name), text).unwrap();
        let run = |words: &Words, numbers: &[String]| {
            let output = Command::new(&words.0).args(&words.1).args(numbers).current_dir(dir.path()).output().ok()?;
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        };
        language.preparations().iter().try_for_each(|words| run(words, &[]).map(drop))?;
        let printed = run(&language.command(), &[records.to_string(), rounds.to_string()]);
        Some(printed.unwrap_or_else(|| panic!("{language:?} fails")))
    }

    #[test]
    fn every_language_does_the_same_work() {
        let records = Language::ALL.into_iter().filter(|&language| language != Language::Pandas);
        let totals: Vec<_> = records.filter_map(|language| Some((language, total(language, 1000, 3)?))).collect();
        for (language, printed) in &totals {
            assert_eq!(printed, "749391783\n", "{language:?}");
        }
    }
}
