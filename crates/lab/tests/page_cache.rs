//! Cases of vm-scalability on a small machine: the checks hold, every run gives equal results, and
//! compaction has the effects that the series claims.

#![allow(missing_docs)]

use foliomem_lab::costs::Costs;
use foliomem_lab::outcome::Outcome;
use foliomem_lab::scenario::Scenario;
use foliomem_lab::shipped;
use foliomem_lab::sweep::{Run, sweep};

const CASES: [&str; 19] = [
    "mmap-xread-seq-mt",
    "mmap-pread-seq",
    "mmap-pread-seq-mt",
    "lru-file-readtwice",
    "lru-file-mmap-read",
    "lru-file-mmap-read-rand",
    "anon-wx-seq-mt",
    "anon-w-seq-mt",
    "anon-wx-rand-mt",
    "anon-w-rand",
    "anon-w-rand-mt",
    "anon-cow-rand",
    "anon-cow-rand-mt",
    "shm-xread-seq",
    "shm-xread-seq-mt",
    "shm-pread-seq",
    "msync",
    "msync-mt",
    "truncate",
];

fn small(varied: &[(&str, &[&str])], threads: usize) -> Vec<Run> {
    let fixed = [("machine.limit_mib", ["128"].as_slice()), ("workload.vm-scalability.memories", &["2"])];
    let settings: Vec<_> = fixed
        .iter()
        .chain(varied)
        .map(|&(key, values)| (key.to_owned(), values.iter().map(|&value| value.to_owned()).collect()))
        .collect();
    let text = shipped::find("vm-scalability").unwrap().text;
    sweep("vm-scalability", text, &settings, Costs::reference(), threads, &|_, _| {}).unwrap()
}

#[test]
fn each_case_passes_its_checks_and_repeats() {
    let text = shipped::find("vm-scalability").unwrap().text;
    let cases: (&str, &[&str]) = ("workload.vm-scalability.case", &CASES);
    let variants: (&str, &[&str]) = ("workload.vm-scalability.compaction", &["base", "+sort-sources"]);
    for run in small(&[cases, variants], 2) {
        let checked = Scenario::parse_with("vm-scalability", text, &run.set).unwrap().run(Some(1)).unwrap();
        assert_eq!(checked, run.outcome, "{:?}: checks or threads changed the outcome", run.set);
        let cache = checked.page_cache.unwrap();
        assert!(cache.modelled_throughput > 0.0 && cache.counters.allocated.iter().sum::<u64>() > 0, "{:?}", run.set);
    }
}

/// Returns the failed allocations of large folios and the migrated pages.
fn came_to(outcome: &Outcome) -> (u64, u64) {
    let cache = outcome.page_cache.as_ref().unwrap();
    (cache.counters.fallbacks[1..].iter().sum(), cache.pgmigrate_success)
}

#[test]
fn large_folio_allocations_succeed_when_compaction_moves_large_folios() {
    let case: (&str, &[&str]) = ("workload.vm-scalability.case", &["lru-file-mmap-read"]);
    let long: (&str, &[&str]) = ("workload.vm-scalability.memories", &["30"]);
    let seeds: (&str, &[&str]) = ("seed", &["1", "2", "3", "4"]);
    let variants: (&str, &[&str]) = (
        "workload.vm-scalability.compaction",
        &["base", "split-folios", "migrate-whole", "+free-split", "+sort-sources"],
    );
    let runs = small(&[case, long, variants, seeds], 2);
    let sums: Vec<(u64, u64)> = runs
        .chunks(seeds.1.len())
        .map(|runs| runs.iter().map(|run| came_to(&run.outcome)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1)))
        .collect();
    let [base, split, whole, cut, sorted] = sums[..] else { unreachable!() };
    assert!([split, cut, sorted].iter().all(|variant| variant.0 < base.0 / 50), "{sums:?}");
    assert!(
        split.0.max(cut.0) < whole.0 && whole.0 < base.0 / 20,
        "runs of exactly the order are not always free: {sums:?}"
    );
    assert!(
        base.1 < sorted.1 && sorted.1 < split.1.min(whole.1).min(cut.1),
        "the last variant moves the least: {sums:?}"
    );
}

#[test]
fn a_too_small_machine_or_too_many_cpus_are_refused() {
    let text = shipped::find("vm-scalability").unwrap().text;
    for (key, value, fits) in [
        ("machine.cpus", "17", false),
        ("machine.cpus", "16", true),
        ("machine.limit_mib", "31", false),
        ("machine.limit_mib", "32", true),
    ] {
        let settings = [(key.to_owned(), value.to_owned()), ("machine.limit_mib".to_owned(), "64".to_owned())];
        let settings = if key == "machine.cpus" { &settings[..] } else { &settings[..1] };
        for case in ["anon-w-rand", "msync", "lru-file-readtwice", "truncate"] {
            let case = ("workload.vm-scalability.case".to_owned(), case.to_owned());
            let came = Scenario::parse_with("s", text, &[settings, &[case]].concat()).unwrap().run(None);
            match came {
                Ok(_) => assert!(fits, "{key}={value}"),
                Err(error) => assert!(!fits && error.to_string().starts_with("vm-scalability needs "), "{error}"),
            }
        }
    }
}

#[test]
fn an_unknown_compaction_variant_is_refused() {
    let settings = [("workload.vm-scalability.compaction".to_owned(), "best".to_owned())];
    let refused = Scenario::parse_with("s", shipped::find("vm-scalability").unwrap().text, &settings).unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains("unknown variant of compaction \"best\"") && refused.ends_with("or base"), "{refused}");
}
