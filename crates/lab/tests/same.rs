//! Tests that a run depends only on its scenario.

#![allow(missing_docs)]

use foliomem_lab::costs::Costs;
use foliomem_lab::scenario::Scenario;
use foliomem_lab::shipped;
use foliomem_lab::sweep::{Run, sweep};

/// A build small enough for a test, with all events of a large one: 8 CPUs, too little memory, a
/// nearly full device.
const SMALL: [(&str, &str); 13] = [
    ("machine.cpus", "8"),
    ("machine.limit_mib", "16"),
    ("swap.size_mib", "46"),
    ("workload.kernel-build.jobs", "12"),
    ("workload.kernel-build.units", "40"),
    ("workload.kernel-build.compiler_mib", "5"),
    ("workload.kernel-build.directories", "3"),
    ("workload.kernel-build.parent_makes", "2"),
    ("workload.kernel-build.make_kib", "96"),
    ("workload.kernel-build.tree_mib", "6"),
    ("workload.kernel-build.headers_kib", "256"),
    ("workload.kernel-build.object_kib", "8"),
    ("swap.strategy", "cluster-lists"),
];

fn small_build(more: &[(&str, &[&str])], threads: usize) -> Vec<Run> {
    let fixed = SMALL.iter().map(|&(key, value)| (key.to_owned(), vec![value.to_owned()]));
    let varied = more.iter().map(|&(key, values)| (key.to_owned(), values.iter().map(|&v| v.to_owned()).collect()));
    let text = shipped::find("kernel-build-64k").unwrap().text;
    let settings: Vec<_> = fixed.chain(varied).collect();
    sweep("kernel-build-64k", text, &settings, Costs::reference(), threads, &|_, _| {}).unwrap()
}

fn digests(runs: &[Run]) -> Vec<&str> {
    runs.iter().map(|run| run.outcome.digest.as_str()).collect()
}

#[test]
fn a_seed_gives_one_digest_with_any_number_of_threads() {
    let varied: [(&str, &[&str]); 2] =
        [("swap.strategy", &["cluster-lists", "one-fragment", "nonfull-first"]), ("seed", &["1", "2"])];
    let alone = small_build(&varied, 1);
    assert_eq!(digests(&alone), digests(&small_build(&varied, 4)));
    let mut different = digests(&alone);
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), 6, "each strategy and each seed gives another digest");
    let outcome = &alone[0].outcome;
    assert!(outcome.sizes[0].swpin > 0 && outcome.sizes[1].swpin > 0 && outcome.sizes[1].swpout_fallback > 0);
    // This digest must not depend on the compiler or the machine; an engine change that alters it
    // changes results.
    let swap = shipped::find("swap-allocator").unwrap();
    assert_eq!(Scenario::parse(swap.name, swap.text).unwrap().run(None).unwrap().digest, "f91033a9031d7301");
}

#[test]
fn the_engine_passes_its_checks_during_a_build() {
    let settings: Vec<_> = SMALL.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    for more in [vec![], vec![("machine.sizes_kib", "16+64+256+2048"), ("swap.strategy", "nonfull-first")]] {
        let more = more.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned()));
        let settings: Vec<_> = settings.iter().cloned().chain(more).collect();
        let text = shipped::find("kernel-build-64k").unwrap().text;
        let scenario = Scenario::parse_with("kernel-build-64k", text, &settings).unwrap();
        let outcome = scenario.run(Some(1999)).unwrap();
        assert!(outcome.faults > 3 * 1999, "{outcome:?}");
        assert_eq!(outcome, scenario.run(None).unwrap(), "checks changed the outcome");
    }
}

#[test]
fn a_program_that_fits_nowhere_is_out_of_memory() {
    let compressed = [("swap.store", "lz4"), ("swap.swap_in", "adaptive"), ("machine.no_room", "reclaim")];
    let settings: Vec<_> =
        SMALL.iter().chain(&compressed).map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    let text = shipped::find("kernel-build-64k").unwrap().text;
    let run = |limit_mib: &str| {
        let limit = ("machine.limit_mib".to_owned(), limit_mib.to_owned());
        Scenario::parse_with("kernel-build-64k", text, &[settings.as_slice(), &[limit]].concat()).unwrap().run(None)
    };
    let refused = run("16").unwrap_err().to_string();
    assert!(refused.starts_with("out of memory after ") && refused.contains("machine.limit_mib is 16"), "{refused}");
    assert!(run("48").unwrap().peak_pages < 49 << 8, "a program that fits stays within the limit");
}
