//! `--vary` of the lab: settings and their values.

use std::str::FromStr;

/// Words for settings that are often varied, with the key and all useful values.
const WORDS: [(&str, &str, &[&str]); 3] = [
    ("codec", "swap.store", &["lz4", "zstd"]),
    ("granule", "swap.granule_kib", &["4", "16", "64"]),
    ("strategy", "swap.strategy", &["per-cpu-linear", "cluster-lists", "one-fragment", "nonfull-first"]),
];

/// Settings with their values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Varied(Vec<(String, Vec<String>)>);

impl Varied {
    /// Returns the settings of several options.
    pub fn all(of: &[Varied]) -> Vec<(String, Vec<String>)> {
        of.iter().flat_map(|varied| varied.0.iter().cloned()).collect()
    }
}

impl FromStr for Varied {
    type Err = String;

    fn from_str(text: &str) -> Result<Varied, String> {
        if let Some((key, values)) = text.split_once('=') {
            return Ok(Varied(vec![(key.to_owned(), values.split(',').map(str::to_owned).collect())]));
        }
        let setting = |word: &str| {
            let (_, key, values) = WORDS.into_iter().find(|&(known, ..)| known == word)?;
            Some((key.to_owned(), values.iter().map(|&value| value.to_owned()).collect()))
        };
        let settings = text.split(',').map(setting).collect::<Option<_>>().map(Varied);
        settings.ok_or_else(|| {
            let words = WORDS.map(|(word, ..)| word).join(", ");
            format!("KEY=VALUE is wanted, as in swap.strategy=nonfull-first, or some of {words}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_lab::scenario::Scenario;
    use foliomem_lab::shipped;

    fn varied(text: &str) -> Vec<(String, Vec<String>)> {
        Varied::all(&[text.parse().unwrap()])
    }

    #[test]
    fn an_option_is_a_key_with_values_or_known_words() {
        let owned = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect::<Vec<_>>();
        assert_eq!(varied("a.b=1,,x"), [("a.b".to_owned(), owned(&["1", "", "x"]))]);
        let [codec, granule] = &varied("codec,granule")[..] else { panic!("two settings") };
        assert_eq!((&codec.0[..], &granule.0[..]), ("swap.store", "swap.granule_kib"));
        for bad in ["", "codecs", "codec,", "a.b"] {
            assert!(bad.parse::<Varied>().unwrap_err().contains("codec, granule, strategy"), "{bad}");
        }
    }

    #[test]
    fn words_stand_for_valid_settings_of_a_scenario() {
        let text = shipped::find("kernel-build-64k").unwrap().text;
        for (key, values) in varied("codec,granule,strategy") {
            for value in values {
                Scenario::parse_with("kernel-build-64k", text, &[(key.clone(), value)]).unwrap();
            }
        }
    }
}
