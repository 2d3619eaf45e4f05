//! The settings of a run, declared with [`knobs`], and what their texts mean.
//!
//! The command line overrides the environment, which overrides the configuration file, which
//! overrides the defaults.

use crate::args::RunArgs;
use crate::config_file::ConfigFile;
use crate::container_limit::{CONTAINER, Container, MIN_LIMIT_BYTES};
use crate::error::{BadValue, CliError};
use crate::knob::{Environment, Form, Knob, Machine, Sources, Unset, knobs};
use crate::metrics_target::MetricsSetting;
use crate::policy::{change_policy, format_policy, initial};
use foliomem_types::codec::Codec;
use foliomem_types::settings::{Configuration, Limit};
use foliomem_types::size::{DEFAULT_SIZES, format_bytes, format_order, parse_bytes, parse_order};
use foliomem_types::size_policy::SizePolicy;
use foliomem_types::units::Order;
use std::fmt;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Prefix of a limit that is a share of the program's need.
const OF_NEED: &str = "need/";
/// Largest N of a limit `need/N`.
const MAX_DIVISOR: u32 = 16;
/// Initial value, in bytes, of a limit that is a share of the need. With less, a growing program
/// would be short of memory before it has much.
const FIRST_LIMIT_BYTES: u64 = 64 << 20;
/// Codec of memory that stays compressed for long.
const IDLE_CODEC: Codec = Codec::Zstd { level: 3, dictionary: false };
/// Shortest time after which a process counts as idle: the supervisor reads CPU times once a
/// second.
const MIN_IDLE: Duration = Duration::from_secs(1);

knobs! {
    /// Memory limit for the program and its children together: 512M, 2G, 25% (of RAM, or of the
    /// container's memory), at least 16M; or need/2: half of their peak need so far, as if
    /// uncompressed, and at least 64M; or container: what the cgroups around the run leave for it,
    /// followed as that changes. [default of `run`: container, if there is such a cgroup; of
    /// `record`: need/2]
    limit: Option<Limit> = Knob {
        form: Form::Size("SIZE"),
        values: "`512M`, `2G`, `25%`, `need/2` to `need/16`, `container`; at least 16M",
        unset: Unset::Is("`container` in a cgroup with a limit, else must be given; with `--idle` the machine's memory; `record`: `need/2`", || None),
        read: |text, machine| parse_limit(text, machine).map(Some),
        show: |limit| limit.map(|limit| format_limit(limit).into()),
        configure: |limit, configuration| {
            if let Some(limit) = limit {
                configuration.limit = *limit;
            }
        },
    };
    /// Folio sizes beside 4K, from 8K to 2M: 16K,64K,2M. "none" for 4K alone. A size may have a
    /// value, as in the kernel: 64K=madvise, 2M=inherit; "enabled=" (always, madvise, never) sets
    /// the value that sizes inherit.
    sizes: SizePolicy = Knob {
        form: Form::Value("LIST"),
        values: "folio sizes 8K to 2M, each with `=always`, `=madvise`, `=inherit` or `=never`; `enabled=`; `none`",
        unset: Unset::Reads(DEFAULT_SIZES),
        read: |text, _| Ok(change_policy(initial(), text)?),
        show: |&sizes| Some(format_policy(sizes).into()),
        configure: |&sizes, configuration| configuration.sizes = sizes,
    };
    /// Codec of the compressed memory: lz4, zstd or zstd:LEVEL (1 to 19), or one of these with
    /// +dict, which compresses small pieces with a dictionary of the program's own content.
    codec: Codec = Knob {
        form: Form::Value("CODEC"),
        values: "`lz4`, `zstd`, `zstd:1` to `zstd:19`; `zstd+dict`, `zstd:5+dict`",
        unset: Unset::Reads("lz4"),
        read: |text, _| Ok(text.parse()?),
        show: |codec: &Codec| Some(codec.to_string().into()),
        configure: |&codec, configuration| configuration.codec = codec,
    };
    /// While CPUs are idle, compress memory that has not been touched for some seconds again: zstd
    /// or zstd:LEVEL, or "off". [default: zstd:3 with --idle, else off]
    recompress: Recompress = Knob {
        form: Form::Value("CODEC"),
        values: "`zstd`, `zstd:1` to `zstd:19`, `off`",
        unset: Unset::Is("`zstd:3` with `--idle`, else `off`", || Recompress::WithIdle),
        read: |text, _| Recompress::parse(text),
        show: |recompress| recompress.shown().map(Into::into),
        configure: |_, _| {},
    };
    /// Size of the largest piece that is compressed as one, 4K to 2M.
    granule: Order = Knob {
        form: Form::Size("SIZE"),
        values: "`4K` to `2M`; the most that is compressed as one piece",
        unset: Unset::Reads("64K"),
        read: |text, _| Ok(parse_order(text)?),
        show: |&granule| Some(format_order(granule).into()),
        configure: |&granule, configuration| configuration.granule = granule,
    };
    /// Encrypted swap for memory that does not fit into the limit even compressed: a file that does
    /// not exist yet and vanishes with the run, or a block device that nothing else uses, whose
    /// content is lost. [default size of a file: 8 times the limit, but at most half of the free
    /// space]
    swap: Option<SwapSetting> = Knob {
        form: Form::Value("FILE[:SIZE]"),
        values: "a file that does not exist, or a block device",
        unset: Unset::Is("none", || None),
        read: |text, _| SwapSetting::parse(text).map(Some),
        show: |swap| swap.as_ref().map(|swap| swap.to_string().into()),
        configure: |_, _| {},
    };
    /// Compress all memory of a process that has used no CPU for this long: 30s, 5m; and what a
    /// process that works has not used for about twice as long. The memory comes back as it is
    /// used. Without --limit, only such memory is compressed, and the limit is the memory of the
    /// machine or the container. [default: not]
    idle: Option<Duration> = Knob {
        form: Form::Value("TIME"),
        values: "`30s`, `5m`, `1h`; at least 1s",
        unset: Unset::Is("off", || None),
        read: |text, _| parse_idle(text).map(Some),
        show: |idle| idle.map(|idle| humantime::format_duration(idle).to_string().into()),
        configure: |_, _| {},
    };
    /// If the run thrashes, let as many of its processes run as fit, while the others wait,
    /// compressed, for their turn: on or off. While a run is recorded, all run all the time.
    turns: TakeTurns = Knob {
        form: Form::Value("WHETHER"),
        values: "`on`, `off`",
        unset: Unset::Reads("on"),
        read: |text, _| TakeTurns::parse(text),
        show: |turns| Some(turns.shown().to_owned().into()),
        configure: |_, _| {},
    };
    /// Stop the program (exit code 137) if its data does not compress into the limit, instead of
    /// exceeding the limit.
    hard: bool = Knob {
        form: Form::Switch,
        values: "`1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`; in the file also `true` or `false` without quotes",
        unset: Unset::Reads("no"),
        read: |text, _| parse_switch(text),
        show: |&hard| Some(hard.into()),
        configure: |&hard, configuration| configuration.hard = hard,
    };
    /// Write counters as JSON to FILE at exit; "-" for stderr.
    stats: Option<String> = Knob {
        form: Form::Value("FILE"),
        values: "a file, or `-` for stderr",
        unset: Unset::Is("none", || None),
        read: |text, _| Ok(Some(text.to_owned())),
        show: |stats| stats.clone().map(Into::into),
        configure: |_, _| {},
    };
    /// Publish the figures as OpenMetrics text while the run goes on: in a file that is rewritten
    /// every 5 seconds, over a Unix socket (a path that ends with .sock), or at a port of this
    /// machine (127.0.0.1:9400).
    metrics: Option<MetricsSetting> = Knob {
        form: Form::Value("FILE|SOCKET|PORT"),
        values: "a file, a path that ends with `.sock`, or `127.0.0.1:PORT`",
        unset: Unset::Is("none", || None),
        read: |text, _| MetricsSetting::parse(text).map(Some),
        show: |metrics| metrics.as_ref().map(|metrics| metrics.to_string().into()),
        configure: |_, _| {},
    };
    /// Write a page about the run to FILE at exit: its memory over time, its faults, sizes and
    /// processes, and advice. It is HTML and needs no network.
    report: Option<String> = Knob {
        form: Form::Value("FILE"),
        values: "a file, such as `run.html`",
        unset: Unset::Is("none", || None),
        read: |text, _| Ok(Some(text.to_owned())),
        show: |report| report.clone().map(Into::into),
        configure: |_, _| {},
    };
    /// Print no summary at exit.
    quiet: bool = Knob {
        form: Form::Switch,
        values: "as `--hard`",
        unset: Unset::Reads("no"),
        read: |text, _| parse_switch(text),
        show: |&quiet| Some(quiet.into()),
        configure: |_, _| {},
    };
    /// For tests of foliomem: evict as much as possible all the time.
    torture: bool = Knob {
        form: Form::NoOption,
        values: "for tests of foliomem: evict as much as possible all the time",
        unset: Unset::Reads("no"),
        read: |text, _| parse_switch(text),
        show: |&torture| Some(torture.into()),
        configure: |&torture, configuration| configuration.torture = torture,
    };
}

/// Returns the variables of this process whose names and values are text.
pub fn environment() -> Environment {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
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
        self.bytes.map_or(Ok(()), |bytes| write!(f, ":{}", format_bytes(bytes)))
    }
}

/// Parses a size, a share of the machine's memory, `need/N`, or `container`.
pub fn parse_limit(text: &str, machine: &Machine) -> Result<Limit, BadValue> {
    if text == CONTAINER {
        return machine.container.map(limit_of).ok_or(BadValue::NoContainer);
    }
    let Some(divisor) = text.strip_prefix(OF_NEED) else {
        let bytes = parse_bytes(text, Some(machine.memory_bytes))?;
        if bytes >= MIN_LIMIT_BYTES {
            return Ok(Limit::Bytes(bytes));
        }
        // A user who writes a number alone means mebibytes.
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let is_meant = is_number && (MIN_LIMIT_BYTES >> 20..=machine.memory_bytes >> 20).contains(&bytes);
        let meant = if is_meant { format!(": did you mean {text}M?") } else { String::new() };
        let least_mib = MIN_LIMIT_BYTES >> 20;
        return Err(BadValue::LimitTooSmall { given: text.to_owned(), bytes, least_mib, meant });
    };
    let divisor = divisor.parse().ok().filter(|&divisor: &NonZeroU32| divisor.get() <= MAX_DIVISOR);
    divisor.map(|divisor| of_need(divisor, machine.memory_bytes)).ok_or_else(|| BadValue::OfNeed(text.to_owned()))
}

/// Returns the limit `need/divisor` on a machine with `memory_bytes`.
pub fn of_need(divisor: NonZeroU32, memory_bytes: u64) -> Limit {
    Limit::OfNeed { divisor, least_bytes: FIRST_LIMIT_BYTES, most_bytes: memory_bytes.max(FIRST_LIMIT_BYTES) }
}

fn limit_of(container: Container) -> Limit {
    Limit::Container { start_bytes: container.left_bytes, most_bytes: container.limit_bytes }
}

fn format_limit(limit: Limit) -> String {
    match limit {
        Limit::Bytes(bytes) => format_bytes(bytes),
        Limit::OfNeed { divisor, .. } => format!("{OF_NEED}{divisor}"),
        Limit::Container { .. } => CONTAINER.to_owned(),
    }
}

/// The setting of recompression.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recompress {
    /// Nothing is recompressed.
    Off,
    /// Recompression with [`IDLE_CODEC`] where idle memory is compressed.
    WithIdle,
    /// Recompression with this codec.
    With(Codec),
}

impl Recompress {
    /// Parses `zstd[:LEVEL]` or `off`.
    fn parse(text: &str) -> Result<Recompress, BadValue> {
        match text.parse() {
            Ok(codec @ Codec::Zstd { dictionary: false, .. }) => Ok(Recompress::With(codec)),
            _ if text == "off" => Ok(Recompress::Off),
            _ => Err(BadValue::Recompress(text.to_owned())),
        }
    }

    fn shown(self) -> Option<String> {
        match self {
            Recompress::Off => Some("off".to_owned()),
            Recompress::WithIdle => None,
            Recompress::With(codec) => Some(codec.to_string()),
        }
    }
}

/// Whether the processes of a run that thrashes take turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TakeTurns {
    /// They do.
    On,
    /// All run all the time.
    Off,
}

impl TakeTurns {
    fn parse(text: &str) -> Result<TakeTurns, BadValue> {
        match text {
            "on" => Ok(TakeTurns::On),
            "off" => Ok(TakeTurns::Off),
            _ => Err(BadValue::Turns(text.to_owned())),
        }
    }

    fn shown(self) -> &'static str {
        match self {
            TakeTurns::On => "on",
            TakeTurns::Off => "off",
        }
    }
}

/// Parses a time after which a process counts as idle.
fn parse_idle(text: &str) -> Result<Duration, BadValue> {
    let time = humantime::parse_duration(text).ok().filter(|&time| time >= MIN_IDLE);
    time.ok_or_else(|| BadValue::Idle(text.to_owned()))
}

/// Parses the value of a switch.
fn parse_switch(text: &str) -> Result<bool, BadValue> {
    match text {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        other => Err(BadValue::Flag(other.to_owned())),
    }
}

/// Whether the run is recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recording {
    /// The run is not recorded.
    Off,
    /// The run is recorded, by default at half of the program's need.
    On,
}

impl Settings {
    /// Resolves all settings of a command line on this machine.
    ///
    /// # Errors
    /// Fails if a value has no meaning, or if the configuration file cannot be read.
    pub fn resolve(args: &RunArgs, environment: &Environment, machine: Machine) -> Result<Settings, CliError> {
        let file = ConfigFile::find(args.config.as_deref(), environment)?;
        Settings::of(&Sources { options: &args.options, environment, file: &file, machine })
    }

    /// Returns the swap file for memory that does not fit into the limit.
    pub fn swap(&self) -> Option<&SwapSetting> {
        self.swap.value.as_ref()
    }

    /// Returns the file for the counters.
    pub fn stats(&self) -> Option<&str> {
        self.stats.value.as_deref()
    }

    /// Returns the file, socket or port for the metrics.
    pub fn metrics(&self) -> Option<&MetricsSetting> {
        self.metrics.value.as_ref()
    }

    /// Returns the file for the page about the run.
    pub fn report(&self) -> Option<&str> {
        self.report.value.as_deref()
    }

    /// Returns the time after which an idle process is compressed, if it is.
    pub fn idle(&self) -> Option<Duration> {
        self.idle.value
    }

    /// Returns whether the processes of a run that thrashes take turns.
    pub fn turns(&self) -> TakeTurns {
        self.turns.value
    }

    /// Returns whether the summary is omitted.
    pub fn quiet(&self) -> bool {
        self.quiet.value
    }

    /// Returns the configuration that the agents of the run read from the control segment.
    ///
    /// # Errors
    /// Fails if there is no limit, no cgroup has one, and no idle process is compressed.
    pub fn configuration(&self, recording: Recording, machine: Machine) -> Result<Configuration, CliError> {
        const HALF: NonZeroU32 = NonZeroU32::new(2).unwrap();
        let limit = match (self.limit.value, recording) {
            (Some(limit), _) => limit,
            (None, Recording::On) => of_need(HALF, machine.memory_bytes),
            (None, Recording::Off) => match machine.container {
                Some(container) => limit_of(container),
                None if self.idle.value.is_some() => Limit::Bytes(machine.memory_bytes),
                None => return Err(CliError::NoLimit),
            },
        };
        let mut configuration =
            Configuration { sizes: initial(), records: recording == Recording::On, ..Configuration::plain(limit) };
        self.configure(&mut configuration);
        configuration.recompress = match self.recompress.value {
            Recompress::With(codec) => Some(codec),
            Recompress::WithIdle => self.idle.value.map(|_| IDLE_CODEC),
            Recompress::Off => None,
        };
        Ok(configuration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knob::Options;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

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

    const NAMES: [&str; 11] =
        ["limit", "sizes", "codec", "recompress", "granule", "idle", "turns", "hard", "stats", "quiet", "torture"];
    const SWITCHES: [&str; 3] = ["hard", "quiet", "torture"];
    const MACHINE: Machine = Machine { memory_bytes: 1 << 30, container: None };
    const GROUP: Container = Container { limit_bytes: 1 << 28, left_bytes: 200 << 20 };
    const IN_GROUP: Machine = Machine { memory_bytes: 1 << 28, container: Some(GROUP) };

    /// Generates a value for the setting `name`, most often a valid one.
    fn value_of(name: &'static str) -> BoxedStrategy<String> {
        let right = match name {
            "limit" => "[1-9][0-9]{0,2}[MG]|[1-9][0-9]?%|need/[1-9]|container",
            "sizes" => "none|16K,64K|2M,8k|64K=madvise,2M=inherit|8K=never,enabled=always",
            "codec" => "lz4|zstd(:[1-9])?",
            "recompress" => "zstd(:[1-9])?|off",
            "granule" => "4K|64K|2M",
            "idle" => "[1-9][0-9]?(s|m|h|min)|1500ms|1h 30m",
            "turns" => "on|off",
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
            CliError::Config { .. } | CliError::UnreadableConfig(..) => text.contains(path.to_str().unwrap()),
            _ => false,
        }
    }

    fn file_strings(values: &BTreeMap<&str, String>) -> String {
        let line = |(name, value): (&&str, &String)| format!("{name} = {}\n", toml::Value::String(value.clone()));
        values.iter().map(line).collect()
    }

    /// Returns a command line with these options.
    fn given<const N: usize>(options: [(&'static str, &str); N]) -> RunArgs {
        let options = options.map(|(name, text)| (name, text.to_owned()));
        RunArgs { options: Options::from(BTreeMap::from(options)), ..RunArgs::default() }
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
            let hard = on.map_or(String::new(), |on| format!("hard = {on}\n"));
            if on.is_some() {
                file.remove("hard");
            }
            std::fs::write(&path, file_strings(&file) + &hard).unwrap();
            let mut given = flags;
            given.retain(|name, _| !SWITCHES.contains(name));
            let flags = Options::from(given);
            let args = RunArgs { options: flags, ..RunArgs::default() };
            let mut environment: Environment =
                variables.into_iter().map(|(name, value)| (format!("FOLIOMEM_{}", name.to_uppercase()), value)).collect();
            environment.insert("FOLIOMEM_CONFIG".to_owned(), path.to_str().unwrap().to_owned());
            match Settings::resolve(&args, &environment, IN_GROUP) {
                Err(error) => prop_assert!(names_what_failed(&error, &path), "{error}"),
                Ok(settings) => {
                    let described = settings.describe();
                    std::fs::write(&path, &described).unwrap();
                    let only_file = RunArgs { config: Some(path.clone()), ..RunArgs::default() };
                    let again = Settings::resolve(&only_file, &Environment::new(), Machine { memory_bytes: 1, ..IN_GROUP }).unwrap();
                    let limit = |settings: &Settings| settings.limit.value.map(format_limit);
                    prop_assert_eq!(limit(&again), limit(&settings), "{}", described);
                    prop_assert_eq!(again.sizes.value, settings.sizes.value);
                    prop_assert_eq!(again.codec.value, settings.codec.value);
                    prop_assert_eq!(again.recompress.value, settings.recompress.value);
                    prop_assert_eq!(again.granule.value, settings.granule.value);
                    prop_assert_eq!(again.idle(), settings.idle());
                    prop_assert_eq!(again.stats(), settings.stats());
                    let switches = |settings: &Settings| (settings.hard.value, settings.quiet(), settings.torture.value);
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
                if let Err(error) = Settings::resolve(&args, &Environment::new(), MACHINE) {
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
        let args = given([("codec", "lz4")]);
        let settings = Settings::resolve(&args, &variables, MACHINE).unwrap();
        assert_eq!(settings.limit.value, Some(Limit::Bytes(1 << 29)));
        assert_eq!(settings.codec.value, Codec::Lz4);
        assert_eq!(settings.granule.value, Order::new(2).unwrap());
        assert_eq!(format_policy(settings.sizes.value), DEFAULT_SIZES);
        assert!(settings.quiet() && settings.torture.value && !settings.hard.value);
        let described = settings.describe();
        for origin in ["command line", "FOLIOMEM_LIMIT", "config.toml", "default"] {
            assert!(described.contains(origin), "{described}");
        }
        // The description parses back.
        std::fs::write(&path, &described).unwrap();
        let variables = environment(&[("FOLIOMEM_CONFIG", path.to_str().unwrap())]);
        let again = Settings::resolve(&RunArgs::default(), &variables, MACHINE);
        assert_eq!(again.unwrap().codec.value, Codec::Lz4);
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
        let args = given([("swap", "s:1M")]);
        let settings = Settings::resolve(&args, &environment(&[("FOLIOMEM_SWAP", "other")]), MACHINE).unwrap();
        assert_eq!(settings.swap().unwrap().path, Path::new("s"));
        assert!(settings.describe().contains("swap = \"s:1M\""), "{}", settings.describe());
    }

    #[test]
    fn idle_memory_is_recompressed_unless_that_is_off() {
        let codec = |idle: &'static str, recompress: &'static str| {
            let options = [("limit", "64M"), ("idle", idle), ("recompress", recompress)];
            let named = options.into_iter().filter(|(_, text)| !text.is_empty());
            let options = Options::from(named.map(|(name, text)| (name, text.to_owned())).collect::<BTreeMap<_, _>>());
            let args = RunArgs { options, ..RunArgs::default() };
            let settings = Settings::resolve(&args, &Environment::new(), MACHINE).unwrap();
            settings.configuration(Recording::Off, MACHINE).unwrap().recompress
        };
        let nine = Codec::Zstd { level: 9, dictionary: false };
        assert_eq!([codec("", ""), codec("5s", "")], [None, Some(IDLE_CODEC)]);
        assert_eq!([codec("", "off"), codec("5s", "off")], [None, None]);
        assert_eq!([codec("", "zstd:9"), codec("5s", "zstd:9")], [Some(nine), Some(nine)]);
    }

    #[test]
    fn a_limit_may_be_a_share_of_the_need() {
        let settings = |limit: Option<&str>| {
            let args = limit.map_or_else(RunArgs::default, |limit| given([("limit", limit)]));
            Settings::resolve(&args, &Environment::new(), MACHINE)
        };
        let recorded = |limit| settings(limit).unwrap().configuration(Recording::On, MACHINE).unwrap().limit;
        let third =
            Limit::OfNeed { divisor: NonZeroU32::new(3).unwrap(), least_bytes: FIRST_LIMIT_BYTES, most_bytes: 1 << 30 };
        assert_eq!(settings(Some("need/3")).unwrap().limit.value, Some(third));
        assert_eq!(recorded(Some("need/3")), third);
        assert_eq!(recorded(Some("1G")), Limit::Bytes(1 << 30));
        assert_eq!(format_limit(recorded(None)), "need/2");
        for bad in ["need/", "need/0", "need/17", "need/2x", "need/-1", "need/99999999999"] {
            let said = settings(Some(bad)).unwrap_err().to_string();
            assert!(said.contains("limit") && said.contains(&format!("{bad:?}")), "{said}");
        }
    }

    #[test]
    fn in_a_cgroup_with_a_limit_the_limit_is_what_that_leaves() {
        let limit = |text: Option<&str>, recording, machine| {
            let args = text.map_or_else(RunArgs::default, |text| given([("limit", text)]));
            let settings = Settings::resolve(&args, &Environment::new(), machine)?;
            settings.configuration(recording, machine).map(|configuration| configuration.limit)
        };
        let container = Limit::Container { start_bytes: 200 << 20, most_bytes: 1 << 28 };
        assert_eq!(limit(None, Recording::Off, IN_GROUP).unwrap(), container);
        assert_eq!(limit(Some("container"), Recording::On, IN_GROUP).unwrap(), container);
        assert_eq!(limit(Some("50%"), Recording::Off, IN_GROUP).unwrap(), Limit::Bytes(1 << 27));
        assert_eq!(format_limit(limit(None, Recording::On, IN_GROUP).unwrap()), "need/2");
        let refused = limit(Some("container"), Recording::Off, MACHINE).unwrap_err().to_string();
        assert!(refused.contains("no cgroup"), "{refused}");
    }

    #[test]
    fn errors_of_bad_values_name_setting_and_origin() {
        let none = Environment::new();
        let error = |args: RunArgs, variables: &Environment| {
            let resolved = Settings::resolve(&args, variables, MACHINE);
            resolved.and_then(|settings| settings.configuration(Recording::Off, MACHINE)).unwrap_err().to_string()
        };
        assert!(error(RunArgs::default(), &none).contains("--limit"));
        let bad = environment(&[("FOLIOMEM_GRANULE", "5K")]);
        let text = error(RunArgs::default(), &bad);
        assert!(text.contains("FOLIOMEM_GRANULE") && text.contains("5K"), "{text}");
        let text = error(given([("recompress", "lz4")]), &none);
        assert!(text.contains("recompress") && text.contains("zstd:LEVEL"), "{text}");
        let missing = RunArgs { config: Some("/nonexistent.toml".into()), ..RunArgs::default() };
        assert!(error(missing, &none).contains("/nonexistent.toml"));
    }

    #[test]
    fn a_limit_that_is_too_small_or_has_a_sign_comes_with_a_suggestion() {
        let error = |limit| Settings::resolve(&given([("limit", limit)]), &Environment::new(), MACHINE).unwrap_err();
        for (limit, said) in [
            ("512", "at least 16 MiB are needed: did you mean 512M?"),
            ("1M", "1M is 1048576 bytes, too small for a limit: at least 16 MiB are needed"),
            ("-64M", "sizes have no sign; did you mean 64M?"),
            ("1%", "at least 16 MiB"),
        ] {
            let text = error(limit).to_string();
            assert!(text.starts_with("limit (from command line): ") && text.contains(said), "{text}");
        }
        assert!(!error("1M").to_string().contains("did you mean"));
    }

    #[test]
    fn a_switch_reads_one_way_everywhere() {
        let scratch = Scratch::new("switch");
        let path = scratch.0.join("config.toml");
        let args = RunArgs { config: Some(path.clone()), ..RunArgs::default() };
        let hard = |line: &str, variables: &[(&str, &str)]| {
            std::fs::write(&path, line).unwrap();
            Settings::resolve(&args, &environment(variables), MACHINE).map(|settings| settings.hard.value)
        };
        for (word, on) in [("yes", true), ("on", true), ("1", true), ("true", true), ("no", false), ("0", false)] {
            assert_eq!(hard(&format!("hard = {word:?}"), &[]).unwrap(), on, "{word}");
            assert_eq!(hard("", &[("FOLIOMEM_HARD", word)]).unwrap(), on, "{word}");
        }
        assert!(hard("hard = true", &[]).unwrap() && !hard("hard = false", &[]).unwrap());
        assert!(
            hard("hard = \"maybe\"", &[]).unwrap_err().to_string().contains("config.toml:1): \"maybe\" is neither")
        );
    }

    #[test]
    fn errors_of_the_file_name_line_and_key() {
        let scratch = Scratch::new("file-errors");
        let path = scratch.0.join("config.toml");
        let args = RunArgs { config: Some(path.clone()), ..RunArgs::default() };
        for (text, said) in [
            ("limit = \"64M\"\n\nlimt = \"1G\"\n", ":3: there is no setting \"limt\": did you mean limit?"),
            ("# x\nlimit = 512\n", ":2: limit = 512 has no unit: write a text, such as limit = \"512M\""),
            ("limit = [1]\n", ":1: limit must be a text in quotes, not array"),
            ("codec = \"lz4\"\nlimit = \"5Q\"\n", ":2): \"5Q\" is not a size"),
            ("codec = \"lz4\"\nlimit = \n", ":2: "),
            ("codec = \"lz4\"\ncodec = \"lz4\"\n", ":2: "),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = Settings::resolve(&args, &Environment::new(), MACHINE).unwrap_err().to_string();
            assert!(error.contains(&format!("config.toml{said}")), "{error}");
        }
    }

    #[test]
    fn the_reference_has_all_settings() {
        let rows: Vec<String> = DECLARATIONS.iter().map(|declaration| declaration.row()).collect();
        let head = "| option | variable | key in the file | values | default |\n|---|---|---|---|---|";
        let table = format!("{head}\n{}\n", rows.join("\n"));
        foliomem_command::docs::keep_part("reference/settings.md", "settings", &table);
    }
}
