//! The state of `foliomem top`, by cases and under random keys and samples.

use super::*;
use crate::top::samples::{process, run};
use proptest::prelude::*;

const PAGE_ROWS: usize = 5;

/// A model and its clock.
struct Scene {
    model: Model,
    now: Instant,
}

impl Scene {
    fn new(samples: Vec<RunSample>) -> Scene {
        let now = Instant::now();
        let mut scene = Scene { model: Model::new(Chooser::Nobody, now), now };
        scene.update(samples, 0);
        scene
    }

    fn update(&mut self, samples: Vec<RunSample>, later_s: u64) {
        self.now += Duration::from_secs(later_s);
        self.model.update(samples, Tree::Folded, self.now);
    }

    fn press(&mut self, code: KeyCode) -> Action {
        self.model.press(KeyEvent::new(code, KeyModifiers::NONE), PAGE_ROWS)
    }

    fn type_in(&mut self, text: &str) {
        for letter in text.chars() {
            assert_eq!(self.press(KeyCode::Char(letter)), Action::None);
        }
    }

    fn pids(&self) -> Vec<u32> {
        self.model.rows().iter().map(|row| row.entry.pid).collect()
    }

    fn selected(&self) -> Option<u32> {
        let index = self.model.selected_index()?;
        Some(self.model.rows()[index].entry.pid)
    }
}

/// A run with a tree: 11 and 12 below 10, 13 below 11, and 14, whose parent is none of them.
fn family() -> RunSample {
    let each = [(14, 1, 5), (12, 10, 300), (10, 1, 10), (13, 11, 20), (11, 10, 200)];
    RunSample { processes: each.map(|(pid, parent, bytes)| process(pid, parent, bytes)).into(), ..run(1, 1000, 0.0) }
}

#[test]
fn rows_are_sorted_by_any_column_in_both_orders() {
    let mut scene = Scene::new(vec![run(3, 10, 5.0), run(1, 20, 7.0), run(2, 30, 6.0)]);
    assert_eq!(scene.pids(), [1, 2, 3]);
    scene.type_in(">>");
    assert_eq!(scene.model.sort(), (Column::Resident, Order::Descending));
    assert_eq!(scene.pids(), [2, 1, 3]);
    scene.type_in(">>>>");
    assert_eq!((scene.model.sort().0, scene.pids()), (Column::Faults, vec![1, 2, 3]));
    scene.type_in("r");
    assert_eq!(scene.pids(), [3, 2, 1]);
    scene.type_in(">>");
    assert_eq!(scene.model.sort(), (Column::Program, Order::Ascending));
    scene.type_in(">");
    assert_eq!(scene.model.sort().0, Column::Pid, "behind the last column is the first");
    scene.type_in("<");
    assert_eq!(scene.model.sort().0, Column::Program);
}

#[test]
fn the_selected_run_stays_selected_where_rows_move() {
    let mut scene = Scene::new(vec![run(1, 10, 0.0), run(2, 20, 0.0), run(3, 30, 0.0)]);
    scene.press(KeyCode::Down);
    scene.type_in(">>");
    assert_eq!((scene.selected(), scene.pids()), (Some(2), vec![3, 2, 1]));
    scene.update(vec![run(1, 90, 0.0), run(2, 80, 0.0), run(3, 30, 0.0)], 1);
    assert_eq!((scene.selected(), scene.pids()), (Some(2), vec![1, 2, 3]));
    scene.update(vec![run(1, 90, 0.0), run(2, 100, 0.0), run(3, 30, 0.0)], 1);
    assert_eq!((scene.selected(), scene.pids()), (Some(2), vec![2, 1, 3]));
}

#[test]
fn a_tree_is_shown_below_its_run_and_sorted_at_each_level() {
    let mut scene = Scene::new(vec![family(), run(2, 5, 0.0)]);
    assert_eq!(scene.pids(), [1, 2]);
    scene.press(KeyCode::Enter);
    assert_eq!(scene.pids(), [1, 10, 11, 13, 12, 14, 2]);
    let depths: Vec<_> = scene.model.rows().iter().map(|row| row.kind).collect();
    assert_eq!(depths[1..5], [0, 1, 2, 1].map(RowKind::Process));
    scene.type_in(">>");
    assert_eq!(scene.pids(), [1, 10, 12, 11, 13, 14, 2]);
    scene.press(KeyCode::End);
    scene.press(KeyCode::Up);
    assert_eq!(scene.selected(), Some(14));
    scene.press(KeyCode::Left);
    assert_eq!((scene.selected(), scene.pids()), (Some(1), vec![1, 2]), "its run is selected then");
    scene.type_in("a");
    assert_eq!(scene.pids().len(), 7);
    scene.type_in("a");
    assert_eq!(scene.pids(), [1, 2]);
}

#[test]
fn a_process_that_ends_leaves_the_row_in_its_place_selected() {
    let mut scene = Scene::new(vec![family()]);
    scene.press(KeyCode::Right);
    scene.press(KeyCode::PageDown);
    assert_eq!(scene.selected(), Some(14));
    let mut fewer = family();
    fewer.processes.retain(|process| process.pid != 14);
    scene.update(vec![fewer], 1);
    assert_eq!(scene.selected(), Some(12));
}

#[test]
fn parents_that_go_round_in_a_circle_hide_no_process() {
    let circle = [process(5, 6, 0), process(6, 5, 0), process(7, 7, 0)];
    let mut scene = Scene::new(vec![RunSample { processes: circle.into(), ..run(1, 0, 0.0) }]);
    scene.press(KeyCode::Enter);
    let mut pids = scene.pids();
    pids.sort_unstable();
    assert_eq!(pids, [1, 5, 6, 7]);
}

#[test]
fn an_ended_run_is_said_to_have_ended_and_vanishes_later() {
    let mut scene = Scene::new(vec![family(), run(2, 5, 0.0)]);
    scene.type_in("a");
    scene.update(vec![run(2, 5, 0.0)], 1);
    assert_eq!((scene.pids(), scene.selected()), (vec![1, 2], Some(1)));
    assert_eq!(scene.model.rows()[0].kind, RowKind::EndedRun);
    assert!(scene.model.rows()[0].entry.rates.is_none());
    scene.type_in("l ");
    assert_eq!((scene.model.notice.as_deref(), &scene.model.focus), (None, &Focus::Table), "the next key clears it");
    scene.update(vec![run(2, 5, 0.0)], 3600);
    assert_eq!(scene.pids(), [1, 2], "it is selected");
    scene.press(KeyCode::Down);
    scene.update(vec![run(2, 5, 0.0)], 1);
    assert_eq!((scene.pids(), scene.selected()), (vec![2], Some(2)));
    scene.update(vec![run(3, 5, 0.0)], 1);
    scene.press(KeyCode::Down);
    scene.update(vec![run(3, 5, 0.0)], 9 - 1);
    assert_eq!(scene.pids(), [2, 3]);
    scene.update(vec![run(3, 5, 0.0)], 2);
    assert_eq!(scene.pids(), [3]);
}

#[test]
fn an_ended_run_that_nobody_has_selected_does_not_stay() {
    for (chooser, left) in [(Chooser::Nobody, vec![2]), (Chooser::User, vec![1, 2])] {
        let now = Instant::now();
        let mut scene = Scene { model: Model::new(chooser, now), now };
        scene.update(vec![run(1, 5, 0.0), run(2, 5, 0.0)], 0);
        scene.update(vec![run(2, 5, 0.0)], 1);
        assert_eq!(scene.pids(), [1, 2]);
        scene.update(vec![run(2, 5, 0.0)], 10);
        assert_eq!(scene.pids(), left);
    }
}

#[test]
fn a_limit_is_asked_for_and_passed_on() {
    let mut scene = Scene::new(vec![family()]);
    scene.type_in("al");
    scene.type_in("256N");
    scene.press(KeyCode::Backspace);
    scene.type_in("M");
    let change = Action::ChangeLimit { run: RunId(1), pid: 1, text: "256M".to_owned() };
    assert_eq!(scene.press(KeyCode::Enter), change);
    assert_eq!(scene.model.focus, Focus::Table);
    assert_eq!(scene.model.notice.as_deref(), Some("run 1: changing the limit: 256M"));
    for last in [KeyCode::Esc, KeyCode::Enter] {
        scene.type_in("l ");
        assert_eq!((scene.press(last), &scene.model.focus), (Action::None, &Focus::Table), "nothing is changed");
    }
    scene.type_in(&"l9".repeat(30));
    let Focus::Prompt(prompt) = &scene.model.focus else { panic!("no prompt") };
    assert_eq!(prompt.text.len(), 24);
}

#[test]
fn the_help_is_closed_by_any_key_and_q_quits() {
    let mut scene = Scene::new(Vec::new());
    scene.type_in("?q");
    assert_eq!(scene.model.focus, Focus::Table);
    scene.type_in("l");
    assert_eq!(scene.model.focus, Focus::Table, "there is no run");
    let control = |letter| KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL);
    assert_eq!(scene.model.press(control('z'), 1), Action::Suspend);
    assert_eq!(scene.model.press(control('l'), 1), Action::Redraw);
    assert_eq!(scene.model.press(control('c'), 1), Action::Quit);
    assert_eq!((scene.press(KeyCode::Char('q')), scene.press(KeyCode::Esc)), (Action::Quit, Action::Quit));
}

/// Generates keys that a user may press.
fn keys() -> impl Strategy<Value = KeyCode> {
    let special = [KeyCode::Up, KeyCode::Down, KeyCode::PageUp, KeyCode::PageDown, KeyCode::Home, KeyCode::End];
    let others = [KeyCode::Enter, KeyCode::Left, KeyCode::Right, KeyCode::Esc, KeyCode::Backspace, KeyCode::Tab];
    let letters = "a<>rljk?h 1".chars().map(KeyCode::Char);
    prop::sample::select(special.into_iter().chain(others).chain(letters).collect::<Vec<_>>())
}

/// The processes of a run with their parents and sizes, what the run takes, and its rate of faults.
type Generated = (BTreeMap<u32, (u32, u64)>, u32, Option<f64>);

/// Generates samples of up to four runs with processes of any parents.
fn many() -> impl Strategy<Value = Vec<RunSample>> {
    let processes = prop::collection::btree_map(10u32..30, (1u32..30, 0u64..1 << 30), 0..12);
    let one = (processes, any::<u32>(), prop::option::of(0.0..1e6));
    prop::collection::btree_map(1u32..8, one, 0..4).prop_map(|runs| {
        let sample = |(pid, (processes, taken, faults)): (u32, Generated)| RunSample {
            processes: processes.into_iter().map(|(pid, (parent, bytes))| process(pid, parent, bytes)).collect(),
            rates: run(pid, 0, faults.unwrap_or(0.0)).rates.filter(|_| faults.is_some()),
            ..run(pid, taken.into(), 0.0)
        };
        runs.into_iter().map(sample).collect()
    })
}

proptest! {
    #[test]
    fn rows_and_the_selection_always_fit(
        steps in prop::collection::vec((prop::collection::vec(keys(), 0..12), many(), 0u64..8), 1..12),
    ) {
        let mut scene = Scene::new(Vec::new());
        for (keys, samples, later_s) in steps {
            let living: BTreeSet<u32> = samples.iter().map(|sample| sample.pid).collect();
            let all: BTreeMap<u32, usize> = samples.iter().map(|run| (run.pid, run.processes.len())).collect();
            scene.update(samples, later_s);
            for key in keys {
                let action = scene.press(key);
                let is_change = matches!(action, Action::ChangeLimit { .. });
                prop_assert!(action == Action::None || is_change || action == Action::Quit);
                let rows = scene.model.rows();
                // Each living run has a row, and either none or all of its processes do.
                let runs: BTreeSet<u32> = rows.iter().filter(|row| row.id.process.is_none()).map(|row| row.entry.pid).collect();
                prop_assert!(living.is_subset(&runs));
                for (&pid, &count) in &all {
                    let shown = rows.iter().filter(|row| row.id.run == RunId(pid.into()) && row.id.process.is_some()).count();
                    prop_assert!(shown == 0 || shown == count, "{} of {}", shown, count);
                }
                prop_assert_eq!(scene.model.selected_index().is_none(), rows.is_empty());
                prop_assert!(scene.model.selected_index().is_none_or(|index| index < rows.len()));
                prop_assert_eq!(scene.model.selected_run().is_none(), rows.is_empty());
            }
        }
    }
}
