//! Tests of what is drawn, in a terminal that is a buffer.

use super::*;
use crate::figures::{Figures, Rates};
use crate::sampler::RunSample;
use crate::top::looks::{Colours, Letters};
use crate::top::model::Chooser;
use crate::top::samples::{process, run};
use foliomem_types::counters::Counters;
use proptest::prelude::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const UNICODE: Looks = Looks { letters: Letters::Unicode, colours: Colours::Palette };
const ASCII: Looks = Looks { letters: Letters::Ascii, colours: Colours::None };

/// A run that has memory in the store and the swap file.
fn busy(pid: u32) -> RunSample {
    let counters = Counters::default();
    counters.store.mem_used_total.set(104 * MIB);
    counters.store.orig_data_size.set(400 * MIB);
    counters.backing.bd_count.set(7680);
    RunSample {
        program: ["/usr/bin/python3", "analyse.py", "--all"].map(str::to_owned).into(),
        figures: Figures::new(495 * MIB, &counters),
        rates: Some(Rates { faults_per_s: 1840.0, waiting_percent: 71.0 }),
        processes: vec![process(11, 10, 40 * MIB), process(10, 1, 450 * MIB)],
        needed_bytes: 800 * MIB,
        ..run(pid, 0, 0.0)
    }
}

fn model(samples: &[RunSample], keys: &str) -> Model {
    let start = Instant::now();
    let mut model = Model::new(Chooser::Nobody, start);
    for second in 0..20 {
        model.update(samples.to_vec(), Tree::Folded, start + Duration::from_secs(second));
    }
    for letter in keys.chars() {
        model.press(KeyEvent::new(KeyCode::Char(letter), KeyModifiers::NONE), 5);
    }
    model
}

fn draw(model: &Model, looks: Looks, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let mut view = View::new(looks);
    terminal.draw(|frame| view.draw(frame, model)).unwrap();
    terminal.backend().buffer().clone()
}

fn lines(buffer: &Buffer) -> Vec<String> {
    let row = |y| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..buffer.area.height).map(row).collect()
}

fn style_of(buffer: &Buffer, text: &str) -> Style {
    let lines = lines(buffer);
    let y = lines.iter().position(|line| line.contains(text)).unwrap();
    let x = lines[y][..lines[y].find(text).unwrap()].chars().count();
    buffer[(x as u16, y as u16)].style()
}

#[test]
fn a_screen_of_80_by_24_has_the_table_the_plot_and_the_keys() {
    let shown = lines(&draw(&model(&[busy(41872), run(50000, 90 * MIB, 0.0)], " "), UNICODE, 80, 24));
    let expected = [
        "foliomem top  2 runs, 2 processes, 481M resident, 104M stored",
        "   ▲PID  LIMIT RESIDENT STORED RATIO   SWAP FAULTS/S WAIT%  PROGRAM",
        "  41872   512M     391M   104M   3.0  30.0M     1840    71  ▾ python3 analyse.p…",
        "     10            450M     0K     -     0K        0     0    part10",
        "     11           40.0M     0K     -     0K        0     0      part11",
        "  50000   512M    90.0M     0K     -     0K        0     0  ▸ program50000 --fa…",
    ];
    assert_eq!(shown[..6], expected.map(str::to_owned));
    assert_eq!(shown[6..15], [const { String::new() }; 9]);
    assert_eq!(shown[15], "41872 python3 analyse.py --all      limit 512M  needs 800M  2 processes  1:01:40");
    assert!(shown[16].starts_with("RESIDENT    391M ") && shown[16].ends_with("████"), "{shown:#?}");
    assert!(shown[17].starts_with(" at most    391M ") && shown[17].ends_with("████"), "{shown:#?}");
    assert!(shown[18].starts_with("STORED      104M") && shown[18].ends_with("M"), "{shown:#?}");
    assert!(shown[19].ends_with("▄▄▄▄"), "a quarter of what is resident: {shown:#?}");
    assert!(shown[20].starts_with("FAULTS/S    1840 ") && shown[20].ends_with("████"), "{shown:#?}");
    assert_eq!(shown[22], format!("{:17}63 s ago{:52}now", "", ""));
    assert!(
        shown[23].starts_with("↑↓ select  Enter processes  < > sort") && shown[23].ends_with("q quit"),
        "{shown:#?}"
    );
}

#[test]
fn ascii_is_enough_where_there_is_nothing_else() {
    let mut sample = busy(41872);
    sample.program[1] = "größe".to_owned();
    let buffer = draw(&model(&[sample], " "), ASCII, 80, 24);
    let shown = lines(&buffer);
    assert!(shown.iter().all(|line| line.is_ascii()), "{shown:#?}");
    assert!(
        shown[1].starts_with("   ^PID") && shown[2].contains("- python3 gr??e") && shown[16].ends_with("####"),
        "{shown:#?}"
    );
    let is_plain = |cell: &ratatui::buffer::Cell| cell.fg == Color::Reset && cell.bg == Color::Reset;
    assert!(buffer.content().iter().all(is_plain), "there is no colour");
}

#[test]
fn the_selected_line_is_reversed_and_much_waiting_stands_out() {
    let buffer = draw(&model(&[busy(1), run(2, 0, 0.0)], "j"), UNICODE, 80, 24);
    assert!(style_of(&buffer, "program2").add_modifier.contains(Modifier::REVERSED));
    assert!(!style_of(&buffer, "python3").add_modifier.contains(Modifier::REVERSED));
    assert_eq!(style_of(&buffer, "71  ").fg, Some(Color::Red));
}

#[test]
fn the_column_of_the_order_has_an_arrow_and_titles_stay_where_they_are() {
    let plain = "    PID  LIMIT RESIDENT STORED RATIO   SWAP FAULTS/S WAIT%  PROGRAM";
    let mut keys = String::new();
    for column in Column::ALL {
        let model = model(&[], &keys);
        assert_eq!(model.sort().0, column);
        let head = lines(&draw(&model, UNICODE, 80, 24)).swap_remove(1);
        assert_eq!(head.replace(['▲', '▼'], " "), plain);
        assert!(head.contains(&format!("▼{}", column.title().trim_start())) || head.contains('▲'));
        keys.push('>');
    }
}

#[test]
fn no_runs_are_said() {
    let shown = lines(&draw(&model(&[], ""), UNICODE, 80, 24)).join("\n");
    assert!(shown.contains("There are no runs") && shown.contains("foliomem run --limit 1G -- PROGRAM"), "{shown}");
}

#[test]
fn the_prompt_says_which_run_and_what_to_type() {
    let shown = lines(&draw(&model(&[busy(41872)], "l256M"), UNICODE, 80, 24));
    assert_eq!(shown[23], "new limit of run 41872: 256M         512M 25% +256M -256M need/2, Esc: no change");
    let narrow = lines(&draw(&model(&[busy(41872)], "l256M"), UNICODE, 40, 24));
    assert_eq!(narrow[23], "new limit of run 41872: 256M");
}

#[test]
fn a_process_that_waits_for_its_turn_is_shown_as_held() {
    let mut sample = busy(41872);
    sample.processes[0].figures.held_processes = 1;
    sample.figures.held_processes = 1;
    let shown = lines(&draw(&model(&[sample], " "), UNICODE, 80, 24));
    let expected = [
        "  41872   512M     391M   104M   3.0  30.0M     1840    71  ▾ python3 analyse.p…",
        "     10            450M     0K     -     0K        0     0    part10",
        "     11           40.0M     0K     -     0K        0  held      part11",
    ];
    assert_eq!(shown[2..5], expected.map(str::to_owned));
}

#[test]
fn a_long_notice_is_broken_between_words() {
    let mut model = model(&[busy(1)], "");
    model.notice = Some("the limit does not hold yet ".repeat(6));
    let shown = lines(&draw(&model, UNICODE, 80, 24));
    assert_eq!(shown[21..24].join(" "), model.notice.unwrap().trim());
}

#[test]
fn the_help_lies_over_the_table() {
    for looks in [UNICODE, ASCII] {
        let shown = lines(&draw(&model(&[busy(1)], "?"), looks, 80, 24));
        for (name, meaning) in [("Enter, Space", "show or hide"), ("WAIT%", "time that threads wait")] {
            let line = shown.iter().find(|line| line.contains(meaning)).unwrap();
            assert!(line.contains(name) && line.trim_end().ends_with(looks.border().vertical_right), "{line}");
        }
    }
}

#[test]
fn an_ended_run_is_dim_and_says_so() {
    let start = Instant::now();
    let mut model = model(&[busy(7)], " ");
    model.update(Vec::new(), Tree::Folded, start + Duration::from_secs(30));
    let buffer = draw(&model, UNICODE, 80, 24);
    assert!(style_of(&buffer, "(ended) python3").add_modifier.contains(Modifier::DIM));
    let shown = lines(&buffer);
    assert_eq!(shown[2], "      7   512M     391M   104M   3.0  30.0M        -     -    (ended) python3 a…");
    assert!(shown[15].ends_with("ended after 1:01:40"), "{shown:#?}");
}

#[test]
fn a_selected_line_far_down_is_in_sight() {
    let tree = (0..200).map(|index| process(100 + index, 99 + index, 0)).collect();
    let mut model = model(&[RunSample { processes: tree, ..busy(7) }], " ");
    model.press(KeyEvent::new(KeyCode::End, KeyModifiers::NONE), 5);
    let shown = lines(&draw(&model, UNICODE, 80, 24));
    let last = shown.iter().find(|line| line.trim_start().starts_with("299 ")).unwrap();
    assert!(last.ends_with(" part299"), "its name is in sight, too: {last}");
}

#[test]
fn text_is_cut_at_columns_not_at_letters() {
    assert_eq!(cut("abcdef", 6, UNICODE), "abcdef");
    assert_eq!(cut("abcdefg", 6, UNICODE), "abcde…");
    assert_eq!(cut("日本語日本語", 6, UNICODE), "日本…");
    assert_eq!((cut("abc", 2, ASCII), cut("abc", 0, ASCII)), ("a~".to_owned(), String::new()));
}

#[test]
fn durations_are_short() {
    assert_eq!([0, 61, 3600, 172_800].map(duration), ["0:00", "1:01", "1:00:00", "2 days"].map(str::to_owned));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_size_can_be_drawn(width in 1u16..200, height in 1u16..80, runs in 0u32..30, keys in "[ja?l >]{0,6}") {
        let samples: Vec<_> = (0..runs).map(|pid| busy(pid + 1)).collect();
        let model = model(&samples, &keys);
        for looks in [UNICODE, ASCII] {
            draw(&model, looks, width, height);
        }
    }
}
