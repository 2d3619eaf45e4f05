//! The plot of a run: what it had resident and stored, and its faults, over the last minutes.

use crate::columns::{printable, short};
use crate::top::history::PlotColumn;
use crate::top::looks::Looks;
use crate::top::model::RunState;
use crate::top::view::{cut, run_facts};
use foliomem_types::size::format_short;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Sparkline, SparklineBar};
use std::time::Duration;

/// Width of what stands left of the bars.
const LABEL_WIDTH: u16 = 17;

/// A part of the plot: bars of one figure.
struct Strip {
    title: &'static str,
    colour: Color,
    bars: Vec<Option<u64>>,
    /// The value of the highest bar that fits.
    max: u64,
    format: fn(u64) -> String,
}

/// Draws the plot of `run`, below a line that names it.
pub fn draw(frame: &mut Frame, area: Rect, run: &RunState, looks: Looks) {
    if area.is_empty() {
        return;
    }
    let plot = run.history.plot(usize::from(area.width.saturating_sub(LABEL_WIDTH)));
    let [title, resident, stored, faults, axis] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Fill(1),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(title_line(run, usize::from(area.width), looks), title);
    let values = |value: fn(PlotColumn) -> u64| plot.columns.iter().map(|column| column.map(value)).collect();
    let strip = |title, colour, bars: Vec<Option<u64>>, format| {
        let max = bars.iter().flatten().copied().max().unwrap_or(0);
        Strip { title, colour, bars, max, format }
    };
    let resident_strip = strip("RESIDENT", Color::Green, values(|column| column.resident_bytes), format_short);
    let stored_strip = strip("STORED", Color::Blue, values(|column| column.stored_bytes), format_short);
    let faults_strip = strip("FAULTS/S", Color::Yellow, values(|column| column.faults_per_s as u64), count);
    // Both are bytes, so they have one scale.
    let most_bytes = resident_strip.max.max(stored_strip.max);
    draw_strip(frame, resident, &resident_strip, most_bytes, looks);
    draw_strip(frame, stored, &stored_strip, most_bytes, looks);
    draw_strip(frame, faults, &faults_strip, faults_strip.max, looks);
    draw_axis(frame, axis, plot.step * plot.columns.len() as u32);
}

fn count(number: u64) -> String {
    number.to_string()
}

fn title_line(run: &RunState, width: usize, looks: Looks) -> Line<'static> {
    let facts = run_facts(run);
    let name = format!("{} {}", run.sample.pid, looks.show(&printable(&short(&run.sample.program))));
    let name = cut(&name, width.saturating_sub(facts.len() + 2), looks);
    let gap = width.saturating_sub(Span::raw(name.as_str()).width() + facts.len());
    let style = looks.colour(Color::Cyan).add_modifier(Modifier::UNDERLINED);
    Line::from(vec![Span::styled(name, Modifier::BOLD), Span::raw(" ".repeat(gap)), Span::raw(facts)]).style(style)
}

/// Draws bars; one as high as the strip stands for `scale`. Left of them are the last value and, if
/// there is room, the highest.
fn draw_strip(frame: &mut Frame, area: Rect, strip: &Strip, scale: u64, looks: Looks) {
    let [label, bars] = Layout::horizontal([Constraint::Length(LABEL_WIDTH), Constraint::Fill(1)]).areas(area);
    let last = strip.bars.iter().rev().flatten().next().copied();
    let text = |value: Option<u64>| value.map_or("-".to_owned(), strip.format);
    let lines = vec![
        Line::from(format!("{:<9}{:>7}", strip.title, text(last))),
        Line::from(format!("{:<9}{:>7}", " at most", text(last.map(|_| strip.max)))).style(Modifier::DIM),
    ];
    frame.render_widget(ratatui::text::Text::from(lines), label);
    let widget = Sparkline::default()
        .data(strip.bars.iter().map(|&bar| SparklineBar::from(bar)))
        .max(scale.max(1))
        .bar_set(looks.bars())
        .absent_value_symbol(" ")
        .style(looks.colour(strip.colour));
    frame.render_widget(widget, bars);
}

/// Draws the line below the bars, which shows how long ago they begin.
fn draw_axis(frame: &mut Frame, area: Rect, span: Duration) {
    let [_label, bars] = Layout::horizontal([Constraint::Length(LABEL_WIDTH), Constraint::Fill(1)]).areas(area);
    let seconds = span.as_secs();
    let begin = match seconds {
        0..120 => format!("{seconds} s ago"),
        _ => format!("{:.1} min ago", seconds as f64 / 60.0),
    };
    let gap = usize::from(bars.width).saturating_sub(begin.len() + "now".len());
    let line = format!("{begin}{}now", " ".repeat(gap));
    frame.render_widget(Span::styled(line, Style::new().add_modifier(Modifier::DIM)), bars);
}
