//! The settings of a run. The command line overrides the environment, which overrides the
//! configuration file, which overrides the defaults.

use crate::args::RunArgs;
use crate::error::{BadValue, CliError};
use crate::policy::{change_policy, format_policy, initial};
use crate::size::{format_order, parse_bytes, parse_order};
use foliomem_types::codec::Codec;
use foliomem_types::settings::Limit;
use foliomem_types::size_policy::SizePolicy;
use foliomem_types::units::Order;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

/// Smallest limit in bytes. Below it, the protected minimum of resident pages and the agent's own
/// memory take most of the limit.
const LEAST_LIMIT_BYTES: u64 = 16 << 20;
/// Prefix of a limit that is a share of the program's need.
const OF_NEED: &str = "need/";
/// Largest divisor of such a limit.
const MAX_DIVISOR: u32 = 16;
/// Initial value, in bytes, of a limit that is a share of the need. With less, a growing program
/// would be short of memory before it has much.
const FIRST_LIMIT_BYTES: u64 = 64 << 20;
/// Folio sizes beside 4K, of `run` and of replays.
pub const DEFAULT_SIZES: &str = "16K,32K,64K,256K";
/// Codec of `run`.
const DEFAULT_CODEC: &str = "lz4";
/// Granule of `run`.
const DEFAULT_GRANULE: &str = "64K";

/// Environment variables, by name.
pub type Environment = BTreeMap<String, String>;

/// Returns the variables of this process whose names and values are text.
pub fn environment() -> Environment {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

/// The origin of a value.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Origin {
    CommandLine,
    Variable(String),
    File(PathBuf),
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::CommandLine => f.write_str("command line"),
            Origin::Variable(name) => f.write_str(name),
            Origin::File(path) => write!(f, "{}", path.display()),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// The configuration file.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    limit: Option<String>,
    sizes: Option<String>,
    codec: Option<String>,
    recompress: Option<String>,
    granule: Option<String>,
    swap: Option<String>,
    hard: Option<bool>,
    stats: Option<String>,
    quiet: Option<bool>,
    torture: Option<bool>,
}

/// The setting of the swap file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SwapSetting {
    /// The file, or a block device.
    pub path: PathBuf,
    /// The size in bytes, if the setting has one.
    pub bytes: Option<u64>,
}

impl SwapSetting {
    /// Parses `FILE[:SIZE]`. The text after the last colon is part of the name if it does not begin
    /// like a size, or if the whole text names an existing file: devices have names such as
    /// `pci-0000:00:01.0`.
    fn parse(text: &str) -> Result<SwapSetting, BadValue> {
        let (path, bytes) = match text.rsplit_once(':') {
            Some((path, size))
                if size.starts_with(|first: char| first.is_ascii_digit())
                    && !size.contains('/')
                    && !Path::new(text).exists() =>
            {
                (path, Some(parse_bytes(size, None)?))
            }
            _ => (text, None),
        };
        if path.is_empty() {
            return Err(BadValue::SwapFile(text.to_owned()));
        }
        Ok(SwapSetting { path: path.into(), bytes })
    }
}

impl fmt::Display for SwapSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.bytes.map_or(Ok(()), |bytes| write!(f, ":{bytes}"))
    }
}

/// A value and its origin.
#[derive(Clone, Debug)]
struct Set<T> {
    value: T,
    origin: Origin,
}

/// Parses a size, a share of `memory_bytes`, or `need/N`.
fn parse_limit(text: &str, memory_bytes: u64) -> Result<Limit, BadValue> {
    let Some(divisor) = text.strip_prefix(OF_NEED) else {
        return Ok(Limit::Bytes(parse_bytes(text, Some(memory_bytes))?));
    };
    let divisor = divisor.parse().ok().filter(|&divisor: &NonZeroU32| divisor.get() <= MAX_DIVISOR);
    divisor.map(|divisor| of_need(divisor, memory_bytes)).ok_or_else(|| BadValue::OfNeed(text.to_owned()))
}

fn of_need(divisor: NonZeroU32, memory_bytes: u64) -> Limit {
    Limit::OfNeed { divisor, least_bytes: FIRST_LIMIT_BYTES, most_bytes: memory_bytes.max(FIRST_LIMIT_BYTES) }
}

fn format_limit(limit: Limit) -> String {
    match limit {
        Limit::Bytes(bytes) => bytes.to_string(),
        Limit::OfNeed { divisor, .. } => format!("{OF_NEED}{divisor}"),
    }
}

/// The settings of a run, each with its origin.
#[derive(Debug)]
pub struct Settings {
    limit: Option<Set<Limit>>,
    memory_bytes: u64,
    sizes: Set<SizePolicy>,
    codec: Set<Codec>,
    recompress: Option<Set<Codec>>,
    granule: Set<Order>,
    swap: Option<Set<SwapSetting>>,
    hard: Set<bool>,
    stats: Option<Set<String>>,
    quiet: Set<bool>,
    torture: Set<bool>,
}

/// Looks values up on the command line, in the environment and in the file, in this order.
struct Lookup<'a> {
    environment: &'a Environment,
    file: PathBuf,
}

impl Lookup<'_> {
    fn text(&self, name: &str, flag: Option<&String>, file: Option<&String>) -> Option<Set<String>> {
        let variable = format!("FOLIOMEM_{}", name.to_ascii_uppercase());
        let from_variable = self.environment.get(&variable).filter(|value| !value.is_empty());
        let found = |value: &String, origin| Some(Set { value: value.clone(), origin });
        match (flag, from_variable, file) {
            (Some(value), _, _) => found(value, Origin::CommandLine),
            (None, Some(value), _) => found(value, Origin::Variable(variable)),
            (None, None, Some(value)) => found(value, Origin::File(self.file.clone())),
            (None, None, None) => None,
        }
    }

    fn flag(&self, name: &'static str, flag: bool, file: Option<bool>) -> Result<Set<bool>, CliError> {
        let flag = flag.then(|| "1".to_owned());
        let file = file.map(|on| if on { "1" } else { "0" }.to_owned());
        let text = self.text(name, flag.as_ref(), file.as_ref());
        let text = text.unwrap_or(Set { value: "0".to_owned(), origin: Origin::Default });
        parsed(name, text, |text| match text {
            "1" | "true" | "yes" | "on" => Ok(true),
            "0" | "false" | "no" | "off" => Ok(false),
            other => Err(BadValue::Flag(other.to_owned())),
        })
    }
}

fn parsed<T>(
    name: &'static str,
    text: Set<String>,
    parse: impl FnOnce(&str) -> Result<T, BadValue>,
) -> Result<Set<T>, CliError> {
    match parse(&text.value) {
        Ok(value) => Ok(Set { value, origin: text.origin }),
        Err(source) => Err(CliError::Setting { name, origin: text.origin.to_string(), source }),
    }
}

fn or_default(found: Option<Set<String>>, default: &str) -> Set<String> {
    found.unwrap_or_else(|| Set { value: default.to_owned(), origin: Origin::Default })
}

/// Returns the path of the configuration file, and whether the user named it.
fn config_path(args: &RunArgs, environment: &Environment) -> Option<(PathBuf, bool)> {
    let named = args.config.clone().or_else(|| environment.get("FOLIOMEM_CONFIG").map(PathBuf::from));
    if let Some(path) = named {
        return Some((path, true));
    }
    let base = environment.get("XDG_CONFIG_HOME").map(PathBuf::from);
    let base = base.or_else(|| environment.get("HOME").map(|home| Path::new(home).join(".config")))?;
    Some((base.join("foliomem/config.toml"), false))
}

fn read_file(path: &Path, required: bool) -> Result<File, CliError> {
    let failed = |why: String| CliError::Config { path: path.to_owned(), why: why.trim().replace('\n', " ") };
    match std::fs::read_to_string(path) {
        Ok(text) => toml::from_str(&text).map_err(|error| failed(error.message().to_owned())),
        Err(error) if !required && error.kind() == std::io::ErrorKind::NotFound => Ok(File::default()),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Parses `zstd[:LEVEL]`.
fn parse_recompress(text: &str) -> Result<Codec, BadValue> {
    match text.parse() {
        Ok(codec @ Codec::Zstd { dictionary: false, .. }) => Ok(codec),
        _ => Err(BadValue::Recompress(text.to_owned())),
    }
}

impl Settings {
    /// Resolves all settings. A limit in per cent is a share of `memory_bytes`.
    pub fn resolve(args: &RunArgs, environment: &Environment, memory_bytes: u64) -> Result<Settings, CliError> {
        let (path, file) = match config_path(args, environment) {
            Some((path, required)) => (path.clone(), read_file(&path, required)?),
            None => (PathBuf::new(), File::default()),
        };
        let lookup = Lookup { environment, file: path };
        let limit = lookup.text("limit", args.limit.as_ref(), file.limit.as_ref());
        let sizes = lookup.text("sizes", args.sizes.as_ref(), file.sizes.as_ref());
        let codec = lookup.text("codec", args.codec.as_ref(), file.codec.as_ref());
        let recompress = lookup.text("recompress", args.recompress.as_ref(), file.recompress.as_ref());
        let granule = lookup.text("granule", args.granule.as_ref(), file.granule.as_ref());
        let swap = lookup.text("swap", args.swap.as_ref(), file.swap.as_ref());
        let limit = limit.map(|text| parsed("limit", text, |text| parse_limit(text, memory_bytes)));
        Ok(Settings {
            limit: limit.transpose()?,
            memory_bytes,
            sizes: parsed("sizes", or_default(sizes, DEFAULT_SIZES), |text| Ok(change_policy(initial(), text)?))?,
            codec: parsed("codec", or_default(codec, DEFAULT_CODEC), |text| Ok(text.parse()?))?,
            recompress: recompress.map(|text| parsed("recompress", text, parse_recompress)).transpose()?,
            granule: parsed("granule", or_default(granule, DEFAULT_GRANULE), |text| Ok(parse_order(text)?))?,
            swap: swap.map(|text| parsed("swap", text, SwapSetting::parse)).transpose()?,
            hard: lookup.flag("hard", args.hard, file.hard)?,
            stats: lookup.text("stats", args.stats.as_ref(), file.stats.as_ref()),
            quiet: lookup.flag("quiet", args.quiet, file.quiet)?,
            torture: lookup.flag("torture", false, file.torture)?,
        })
    }

    /// Returns the limit. Fails if it is missing or too small.
    pub fn limit(&self) -> Result<Limit, CliError> {
        match self.limit.as_ref().ok_or(CliError::NoLimit)?.value {
            Limit::Bytes(bytes) if bytes < LEAST_LIMIT_BYTES => {
                Err(CliError::LimitTooSmall { given_kib: bytes >> 10, least_mib: LEAST_LIMIT_BYTES >> 20 })
            }
            limit => Ok(limit),
        }
    }

    /// Returns the limit of a recorded run, which is half of the program's need by default.
    pub fn recorded_limit(&self) -> Result<Limit, CliError> {
        const HALF: NonZeroU32 = NonZeroU32::new(2).unwrap();
        if self.limit.is_some() { self.limit() } else { Ok(of_need(HALF, self.memory_bytes)) }
    }

    /// Returns the policy of folio sizes.
    pub fn sizes(&self) -> SizePolicy {
        self.sizes.value
    }

    /// Returns the codec.
    pub fn codec(&self) -> Codec {
        self.codec.value
    }

    /// Returns the codec that compresses idle memory again.
    pub fn recompress(&self) -> Option<Codec> {
        self.recompress.as_ref().map(|recompress| recompress.value)
    }

    /// Returns the largest piece that is compressed as one.
    pub fn granule(&self) -> Order {
        self.granule.value
    }

    /// Returns the swap file for memory that does not fit into the limit.
    pub fn swap(&self) -> Option<&SwapSetting> {
        self.swap.as_ref().map(|swap| &swap.value)
    }

    /// Returns whether the program is stopped rather than allowed to exceed the limit.
    pub fn hard(&self) -> bool {
        self.hard.value
    }

    /// Returns the file for the counters.
    pub fn stats(&self) -> Option<&str> {
        self.stats.as_ref().map(|stats| stats.value.as_str())
    }

    /// Returns whether the summary is omitted.
    pub fn quiet(&self) -> bool {
        self.quiet.value
    }

    /// Returns whether the run evicts as much as possible, all the time.
    pub fn torture(&self) -> bool {
        self.torture.value
    }

    /// Formats all settings as lines of TOML, each with its origin.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String, origin: &Origin| {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{:<32} # {origin}", format!("{name} = {value}"));
        };
        let quoted = |value: &dyn fmt::Display| format!("\"{value}\"");
        match &self.limit {
            Some(limit) => line("limit", quoted(&format_limit(limit.value)), &limit.origin),
            None => line("#limit", quoted(&"must be given"), &Origin::Default),
        }
        line("sizes", quoted(&format_policy(self.sizes.value)), &self.sizes.origin);
        line("codec", quoted(&self.codec.value), &self.codec.origin);
        if let Some(recompress) = &self.recompress {
            line("recompress", quoted(&recompress.value), &recompress.origin);
        }
        line("granule", quoted(&format_order(self.granule.value)), &self.granule.origin);
        if let Some(swap) = &self.swap {
            line("swap", format!("{:?}", swap.value.to_string()), &swap.origin);
        }
        line("hard", self.hard.value.to_string(), &self.hard.origin);
        if let Some(stats) = &self.stats {
            line("stats", toml::Value::String(stats.value.clone()).to_string(), &stats.origin);
        }
        line("quiet", self.quiet.value.to_string(), &self.quiet.origin);
        line("torture", self.torture.value.to_string(), &self.torture.origin);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A directory for one test. Dropping it removes the directory.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let directory = std::env::temp_dir().join(format!("foliomem-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&directory).unwrap();
            Scratch(directory)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const NAMES: [&str; 9] = ["limit", "sizes", "codec", "recompress", "granule", "hard", "stats", "quiet", "torture"];

    /// Generates a value for the setting `name`, most often a valid one.
    fn value_of(name: &'static str) -> BoxedStrategy<String> {
        let right = match name {
            "limit" => "[1-9][0-9]{0,2}[MG]|[1-9][0-9]?%|need/[1-9]",
            "sizes" => "none|16K,64K|2M,8k|64K=madvise,2M=inherit|8K=never,enabled=always",
            "codec" => "lz4|zstd(:[1-9])?",
            "recompress" => "zstd(:[1-9])?",
            "granule" => "4K|64K|2M",
            "stats" => "-|[a-z]{1,4}[.]json",
            _ => "0|1|no|yes|on|off|true|false",
        };
        let other: BoxedStrategy<String> = if name == "stats" {
            any::<String>().boxed()
        } else {
            prop_oneof!["[0-9KMGT%.,:a-z]{0,8}", any::<String>()].boxed()
        };
        prop_oneof![12 => right, 1 => other].boxed()
    }

    fn settings() -> impl Strategy<Value = BTreeMap<&'static str, String>> {
        let pair = prop::sample::select(NAMES.to_vec()).prop_flat_map(|name| (Just(name), value_of(name)));
        prop::collection::vec(pair, 0..4).prop_map(|pairs| pairs.into_iter().collect())
    }

    /// Returns whether an error names the setting or the file, as every refusal must.
    fn names_what_failed(error: &CliError, path: &Path) -> bool {
        let text = error.to_string();
        match error {
            CliError::Setting { name, .. } => NAMES.contains(name) && text.contains(name),
            CliError::Config { .. } => text.contains(path.to_str().unwrap()),
            _ => false,
        }
    }

    fn file_strings(values: &BTreeMap<&str, String>) -> String {
        let line = |(name, value): (&&str, &String)| format!("{name} = {}\n", toml::Value::String(value.clone()));
        values.iter().map(line).collect()
    }

    proptest! {
        #[test]
        fn settings_are_refused_by_name_or_their_description_parses_back(
            flags in settings(),
            variables in settings(),
            strings in settings(),
            on in prop::option::of(any::<bool>()),
        ) {
            let scratch = Scratch::new("any-settings");
            let path = scratch.0.join("config.toml");
            let mut file = strings;
            file.retain(|name, _| !["hard", "quiet", "torture"].contains(name));
            let hard = on.map_or(String::new(), |on| format!("hard = {on}\n"));
            std::fs::write(&path, file_strings(&file) + &hard).unwrap();
            let flag = |name: &str| flags.get(name).cloned();
            let args = RunArgs {
                limit: flag("limit"),
                sizes: flag("sizes"),
                codec: flag("codec"),
                recompress: flag("recompress"),
                granule: flag("granule"),
                stats: flag("stats"),
                ..RunArgs::default()
            };
            let mut environment: Environment =
                variables.into_iter().map(|(name, value)| (format!("FOLIOMEM_{}", name.to_uppercase()), value)).collect();
            environment.insert("FOLIOMEM_CONFIG".to_owned(), path.to_str().unwrap().to_owned());
            match Settings::resolve(&args, &environment, 1 << 30) {
                Err(error) => prop_assert!(names_what_failed(&error, &path), "{error}"),
                Ok(settings) => {
                    let described = settings.describe();
                    std::fs::write(&path, &described).unwrap();
                    let only_file = RunArgs { config: Some(path.clone()), ..RunArgs::default() };
                    let again = Settings::resolve(&only_file, &Environment::new(), 1).unwrap();
                    let limit = |settings: &Settings| settings.limit.as_ref().map(|limit| format_limit(limit.value));
                    prop_assert_eq!(limit(&again), limit(&settings), "{}", described);
                    prop_assert_eq!(again.sizes(), settings.sizes());
                    prop_assert_eq!(again.codec(), settings.codec());
                    prop_assert_eq!(again.recompress(), settings.recompress());
                    prop_assert_eq!(again.granule(), settings.granule());
                    prop_assert_eq!(again.stats(), settings.stats());
                    let switches = |settings: &Settings| (settings.hard(), settings.quiet(), settings.torture());
                    prop_assert_eq!(switches(&again), switches(&settings));
                }
            }
        }

        #[test]
        fn strange_files_are_refused_by_name(
            noise in prop::collection::vec(any::<u8>(), 0..200),
            values in settings(),
            at in any::<prop::sample::Index>(),
            byte: u8,
        ) {
            let scratch = Scratch::new("any-file");
            let path = scratch.0.join("config.toml");
            let args = RunArgs { config: Some(path.clone()), ..RunArgs::default() };
            let mut damaged = file_strings(&values).into_bytes();
            if !damaged.is_empty() {
                let len = damaged.len();
                damaged[at.index(len)] = byte;
            }
            for content in [noise, damaged] {
                std::fs::write(&path, content).unwrap();
                if let Err(error) = Settings::resolve(&args, &Environment::new(), 1 << 30) {
                    prop_assert!(names_what_failed(&error, &path), "{error}");
                }
            }
        }

        #[test]
        fn strange_command_lines_do_not_panic(
            words in prop::collection::vec(
                prop_oneof![
                    prop::sample::select(vec!["run", "doctor", "bench", "swap", "--limit", "--limit=1G", "--hard", "--", "sh"])
                        .prop_map(str::to_owned),
                    any::<String>(),
                ],
                0..8,
            )
        ) {
            let _ = <crate::args::Args as clap::Parser>::try_parse_from(words);
        }
    }

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_command_line_overrides_variables_the_file_and_defaults() {
        let directory = std::env::temp_dir().join(format!("foliomem-settings-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("config.toml");
        std::fs::write(&path, "limit = \"64M\"\ncodec = \"zstd\"\ngranule = \"16K\"\nquiet = true\n").unwrap();
        let variables = environment(&[
            ("FOLIOMEM_CONFIG", path.to_str().unwrap()),
            ("FOLIOMEM_LIMIT", "50%"),
            ("FOLIOMEM_CODEC", "zstd:9"),
            ("FOLIOMEM_TORTURE", "1"),
        ]);
        let args = RunArgs { codec: Some("lz4".to_owned()), ..RunArgs::default() };
        let settings = Settings::resolve(&args, &variables, 1 << 30).unwrap();
        assert_eq!(settings.limit().unwrap(), Limit::Bytes(1 << 29));
        assert_eq!(settings.codec(), Codec::Lz4);
        assert_eq!(settings.granule(), Order::new(2).unwrap());
        assert_eq!(format_policy(settings.sizes()), DEFAULT_SIZES);
        assert!(settings.quiet() && settings.torture() && !settings.hard());
        let described = settings.describe();
        for origin in ["command line", "FOLIOMEM_LIMIT", "config.toml", "default"] {
            assert!(described.contains(origin), "{described}");
        }
        // The description parses back.
        std::fs::write(&path, &described).unwrap();
        let again =
            Settings::resolve(&RunArgs::default(), &environment(&[("FOLIOMEM_CONFIG", path.to_str().unwrap())]), 1);
        assert_eq!(again.unwrap().codec(), Codec::Lz4);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_swap_file_has_a_name_and_an_optional_size() {
        let parse = |text: &str| SwapSetting::parse(text).map(|swap| (swap.path.display().to_string(), swap.bytes));
        assert_eq!(parse("/x/swap").unwrap(), ("/x/swap".to_owned(), None));
        assert_eq!(parse("/x/swap:4G").unwrap(), ("/x/swap".to_owned(), Some(4 << 30)));
        assert_eq!(parse("/x:1/swap").unwrap(), ("/x:1/swap".to_owned(), None));
        assert_eq!(parse("/x/a:b").unwrap(), ("/x/a:b".to_owned(), None));
        for bad in ["", ":4G", "/x:4Q", "/x:50%"] {
            assert!(SwapSetting::parse(bad).is_err(), "{bad}");
        }
        let args = RunArgs { swap: Some("s:1M".to_owned()), ..RunArgs::default() };
        let settings = Settings::resolve(&args, &environment(&[("FOLIOMEM_SWAP", "other")]), 1).unwrap();
        assert_eq!(settings.swap().unwrap().path, Path::new("s"));
        assert!(settings.describe().contains("swap = \"s:1048576\""), "{}", settings.describe());
    }

    #[test]
    fn a_limit_may_be_a_share_of_the_need() {
        let settings = |limit: Option<&str>| {
            let args = RunArgs { limit: limit.map(str::to_owned), ..RunArgs::default() };
            Settings::resolve(&args, &Environment::new(), 1 << 30)
        };
        let third =
            Limit::OfNeed { divisor: NonZeroU32::new(3).unwrap(), least_bytes: FIRST_LIMIT_BYTES, most_bytes: 1 << 30 };
        assert_eq!(settings(Some("need/3")).unwrap().limit().unwrap(), third);
        assert_eq!(settings(Some("need/3")).unwrap().recorded_limit().unwrap(), third);
        assert_eq!(settings(Some("1G")).unwrap().recorded_limit().unwrap(), Limit::Bytes(1 << 30));
        let half = settings(None).unwrap().recorded_limit().unwrap();
        assert_eq!(format_limit(half), "need/2");
        for bad in ["need/", "need/0", "need/17", "need/2x", "need/-1", "need/99999999999"] {
            let said = settings(Some(bad)).unwrap_err().to_string();
            assert!(said.contains("limit") && said.contains(&format!("{bad:?}")), "{said}");
        }
    }

    #[test]
    fn errors_of_bad_values_name_setting_and_origin() {
        let none = Environment::new();
        let error = |args: RunArgs, variables: &Environment| {
            Settings::resolve(&args, variables, 1 << 30).and_then(|s| s.limit()).unwrap_err().to_string()
        };
        assert!(error(RunArgs::default(), &none).contains("--limit"));
        let small = RunArgs { limit: Some("1M".to_owned()), ..RunArgs::default() };
        assert!(error(small, &none).contains("at least 16M"));
        let bad = environment(&[("FOLIOMEM_GRANULE", "5K")]);
        let text = error(RunArgs::default(), &bad);
        assert!(text.contains("FOLIOMEM_GRANULE") && text.contains("5K"), "{text}");
        let text = error(RunArgs { recompress: Some("lz4".to_owned()), ..RunArgs::default() }, &none);
        assert!(text.contains("recompress") && text.contains("zstd:LEVEL"), "{text}");
        let missing = RunArgs { config: Some("/nonexistent.toml".into()), ..RunArgs::default() };
        assert!(error(missing, &none).contains("/nonexistent.toml"));
    }
}
