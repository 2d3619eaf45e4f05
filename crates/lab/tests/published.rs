//! The swap allocator test reproduces its published results, number by number where chance has no
//! part.

#![allow(missing_docs)]

use foliomem_lab::outcome::Outcome;
use foliomem_lab::scenario::Scenario;
use foliomem_lab::shipped;

fn swap_allocator(settings: &[(&str, &str)]) -> Outcome {
    let settings: Vec<_> = settings.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    let text = shipped::find("swap-allocator").unwrap().text;
    Scenario::parse_with("swap-allocator", text, &settings).unwrap().run(None).unwrap()
}

/// Returns the number of swap-outs that needed contiguous slots, by round. It is equal in every run
/// of the test.
fn wanted(outcome: &Outcome) -> Vec<u64> {
    outcome.rounds.iter().map(|round| round.swpout + round.swpout_fallback).collect()
}

#[test]
fn by_pages_nearly_everything_falls_back_after_eight_rounds() {
    for strategy in ["cluster-lists", "one-fragment", "nonfull-first"] {
        let outcome = swap_allocator(&[("swap.swap_in", "page"), ("swap.strategy", strategy)]);
        assert_eq!(wanted(&outcome)[..4], [233, 232, 226, 223]);
        let percent: Vec<f64> = outcome.rounds.iter().filter_map(|round| round.percent()).collect();
        assert!(percent[0] < 1.0 && percent[7] > 90.0, "{strategy}: {percent:?}");
        assert!(percent[8..].iter().all(|&percent| percent > 80.0), "{strategy}: {percent:?}");
    }
}

#[test]
fn the_first_rounds_by_pages_are_near_the_published_ones() {
    let outcome = swap_allocator(&[("swap.swap_in", "page"), ("swap.strategy", "cluster-lists")]);
    let published = [0.0, 43.53, 68.58, 75.34, 84.51, 88.84, 90.91, 96.05];
    for (round, published) in outcome.rounds.iter().zip(published) {
        let percent = round.percent().unwrap();
        assert!((percent - published).abs() < 10.0, "{percent}%, published {published}%");
    }
    let counts = (outcome.rounds[0].swpout_fallback, outcome.rounds[1].swpout_fallback);
    assert_eq!(counts, (0, 109), "published: 0 and 101");
}

#[test]
fn by_folios_nothing_falls_back() {
    for strategy in ["cluster-lists", "one-fragment", "nonfull-first"] {
        let outcome = swap_allocator(&[("swap.swap_in", "whole"), ("swap.strategy", strategy)]);
        assert_eq!(wanted(&outcome)[..4], [948, 953, 950, 952]);
        assert!(outcome.rounds.iter().all(|round| round.swpout_fallback == 0), "{strategy}");
    }
}

#[test]
fn a_second_area_of_small_folios_changes_nothing() {
    for aligned in ["false", "true"] {
        let outcome = swap_allocator(&[
            ("swap.swap_in", "whole"),
            ("swap.strategy", "nonfull-first"),
            ("workload.swap-allocator.small_area_mib", "4"),
            ("workload.swap-allocator.aligned", aligned),
        ]);
        assert!(outcome.rounds.iter().all(|round| round.swpout_fallback == 0), "aligned: {aligned}");
        assert!(outcome.rounds.iter().all(|round| round.swpout > 300));
    }
}
