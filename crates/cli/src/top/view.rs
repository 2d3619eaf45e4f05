//! How `foliomem top` draws its state: the table, the plot of the selected run, the line of keys.

use crate::columns::{Column, printable, short};
use crate::ps::no_runs;
use crate::top::help;
use crate::top::looks::Looks;
use crate::top::model::{Focus, Model, Order, Row, RowKind, RunState, Tree};
use crate::top::plot;
use crate::top::prompt::Prompt;
use foliomem_types::size::format_short;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Position, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{List, ListState, Paragraph};

/// Maximum number of lines of a notice.
const MAX_NOTICE_ROWS: usize = 4;
/// A thread that waits so long for faults needs attention, in per cent.
const ALARMING_WAIT: f64 = 50.0;
/// Least number of rows of the table beside the plot.
const MIN_TABLE_ROWS: u16 = 4;

/// Knowledge that is kept from one picture to the next.
pub struct View {
    looks: Looks,
    list: ListState,
    /// The number of rows that the table had in the last picture.
    pub page_rows: usize,
}

impl View {
    /// Creates a view that draws with the letters and colours of `looks`.
    pub fn new(looks: Looks) -> View {
        View { looks, list: ListState::default(), page_rows: 1 }
    }

    /// Draws `model`.
    pub fn draw(&mut self, frame: &mut Frame, model: &Model) {
        let footer = self.footer(model, usize::from(frame.area().width));
        let footer_rows = footer.height() as u16;
        let plot_rows = plot_rows(frame.area().height.saturating_sub(footer_rows), model);
        let [title, head, table, plot, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Fill(1),
            Constraint::Length(plot_rows),
            Constraint::Length(footer_rows),
        ])
        .areas(frame.area());
        frame.render_widget(title_line(model), title);
        frame.render_widget(self.head_line(model), head);
        self.draw_table(frame, table, model);
        if let Some(run) = model.selected_run() {
            plot::draw(frame, plot, run, self.looks);
        }
        frame.render_widget(footer, foot);
        match &model.focus {
            Focus::Table => {}
            Focus::Help => help::draw(frame, self.looks),
            Focus::Prompt(prompt) => place_cursor(frame, foot, prompt),
        }
    }

    /// Returns the titles of the columns; an arrow marks the column that rows are sorted by.
    fn head_line(&self, model: &Model) -> Line<'static> {
        let (sort, order) = model.sort();
        let arrow = match order {
            Order::Ascending => self.looks.pick("▲", "^"),
            Order::Descending => self.looks.pick("▼", "v"),
        };
        let spans = Column::ALL.iter().flat_map(|column| {
            let title = column.title();
            let text = title.trim_start();
            if *column != sort {
                return [Span::raw(title), Span::raw("")];
            }
            // All titles begin with a space, in which the arrow has room.
            let gap = " ".repeat(title.len() - text.len() - 1);
            [Span::raw(gap), Span::styled(format!("{arrow}{text}"), Modifier::REVERSED)]
        });
        let spans: Vec<Span> = spans.collect();
        Line::from(spans).style(self.looks.colour(Color::Cyan).add_modifier(Modifier::UNDERLINED))
    }

    fn draw_table(&mut self, frame: &mut Frame, area: Rect, model: &Model) {
        self.page_rows = usize::from(area.height).max(1);
        let rows = model.rows();
        if rows.is_empty() {
            let text = format!("{}\n\nfoliomem run --limit 1G -- PROGRAM starts one", capitalised(&no_runs()));
            let middle = area.centered_vertically(Constraint::Length(3));
            return frame.render_widget(Paragraph::new(text).centered(), middle);
        }
        let lines = rows.iter().map(|row| self.row_line(row, usize::from(area.width)));
        let list = List::new(lines).highlight_style(Modifier::REVERSED);
        self.list.select(model.selected_index());
        frame.render_stateful_widget(list, area, &mut self.list);
    }

    fn row_line(&self, row: &Row, width: usize) -> Line<'static> {
        let entry = &row.entry;
        let cell = |column: &Column| {
            let is_alarming = entry.rates.is_some_and(|rates| rates.waiting_percent >= ALARMING_WAIT);
            let style = if *column == Column::Wait && is_alarming { self.looks.alarm() } else { Style::new() };
            Span::styled(column.cell(entry), style)
        };
        let (numbers, _program) = Column::ALL.split_at(Column::ALL.len() - 1);
        let mut spans: Vec<Span> = numbers.iter().map(cell).collect();
        let left = width.saturating_sub(spans.iter().map(Span::width).sum());
        let mark = match row.kind {
            RowKind::Run(Tree::Folded) => self.looks.pick("▸ ", "+ "),
            RowKind::Run(Tree::Unfolded) => self.looks.pick("▾ ", "- "),
            RowKind::EndedRun | RowKind::Process(_) => "  ",
        };
        spans.push(Span::raw(cut(&program_cell(row, mark, left, self.looks), left, self.looks)));
        Line::from(spans).style(match row.kind {
            RowKind::Run(_) => Style::new().add_modifier(Modifier::BOLD),
            RowKind::EndedRun => Style::new().add_modifier(Modifier::DIM),
            RowKind::Process(_) => Style::new(),
        })
    }

    /// Returns the last lines: the prompt, or the last message, or the most used keys.
    fn footer(&self, model: &Model, width: usize) -> Text<'static> {
        match (&model.focus, &model.notice) {
            (Focus::Prompt(prompt), _) => Text::from(prompt_line(prompt, width)),
            (_, Some(notice)) => {
                let lines = wrap(&self.looks.show(&printable(notice)), width);
                Text::from(lines.into_iter().take(MAX_NOTICE_ROWS).map(Line::from).collect::<Vec<_>>())
                    .style(Modifier::BOLD)
            }
            (_, None) => Text::from(help::keys_line(self.looks)),
        }
    }
}

/// Returns the number of rows for the plot of the selected run: bars are higher in a larger
/// terminal, and there is no plot if too little would be left for the table.
fn plot_rows(height: u16, model: &Model) -> u16 {
    let (head_rows, left) = (2, height.saturating_sub(2 + MIN_TABLE_ROWS));
    let bar_rows = match height {
        0..18 => 1,
        18..32 => 2,
        32..46 => 3,
        _ => 4,
    };
    let rows = head_rows + 3 * bar_rows;
    if model.selected_run().is_some() && rows <= left { rows } else { 0 }
}

/// Returns the line with the sums of all runs.
fn title_line(model: &Model) -> Line<'static> {
    let running = || model.runs().filter(|run| !run.has_ended()).map(|run| &run.sample);
    let processes: usize = running().map(|run| run.processes.len()).sum();
    let sum = |bytes: fn(&crate::figures::Figures) -> u64| {
        let all = running().fold(0u64, |sum, run| sum.saturating_add(bytes(&run.figures)));
        format_short(all)
    };
    let (resident, stored) = (sum(|figures| figures.resident_bytes()), sum(|figures| figures.stored_bytes));
    let text = format!(
        "  {}, {}, {resident} resident, {stored} stored",
        counted(running().count(), "run", "runs"),
        counted(processes, "process", "processes"),
    );
    Line::from(vec![Span::styled("foliomem top", Modifier::BOLD), Span::raw(text)])
}

/// Returns a number and what is counted.
pub fn counted(count: usize, one: &str, more: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { more })
}

/// Returns the cell of the program: after `mark` for a run, further right for its processes. In a
/// narrow column the names of deep processes begin no further right than in its middle.
pub fn program_cell(row: &Row, mark: &str, width: usize, looks: Looks) -> String {
    let program = looks.show(&printable(&short(row.entry.program)));
    match row.kind {
        RowKind::Run(_) => format!("  {mark}{program}"),
        RowKind::EndedRun => format!("  {mark}(ended) {program}"),
        RowKind::Process(depth) => format!("  {:indent$}{program}", "", indent = (2 * depth + 2).min(width / 2)),
    }
}

/// Shortens `text` to at most `width` columns, and shows that.
pub fn cut(text: &str, width: usize, looks: Looks) -> String {
    if Span::raw(text).width() <= width {
        return text.to_owned();
    }
    let Some(mut left) = width.checked_sub(1) else { return String::new() };
    let mut short = String::new();
    for letter in text.chars() {
        let columns = Span::raw(letter.to_string()).width();
        if columns > left {
            break;
        }
        left -= columns;
        short.push(letter);
    }
    short + looks.pick("…", "~")
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// Breaks `text` between words into lines of at most `width` columns. A longer word is cut off.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        if line.is_empty() {
            line.push_str(word);
        } else if Span::raw(line.as_str()).width() + 1 + Span::raw(word).width() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

fn prompt_question(prompt: &Prompt) -> String {
    format!("new limit of run {}: ", prompt.pid)
}

fn prompt_line(prompt: &Prompt, width: usize) -> Line<'static> {
    const EXAMPLES: &str = "512M 25% +256M -256M need/2, Esc: no change";
    let asked = prompt_question(prompt) + &prompt.text;
    let gap = width.saturating_sub(asked.chars().count() + EXAMPLES.len());
    let mut spans = vec![Span::styled(asked, Modifier::BOLD)];
    // A gap of one column would leave no room for the cursor.
    if gap > 1 {
        spans.push(Span::raw(" ".repeat(gap)));
        spans.push(Span::styled(EXAMPLES, Modifier::DIM));
    }
    Line::from(spans)
}

fn place_cursor(frame: &mut Frame, foot: Rect, prompt: &Prompt) {
    let typed = prompt_question(prompt) + &prompt.text;
    let column = (Span::raw(typed).width() as u16).min(foot.width.saturating_sub(1));
    frame.set_cursor_position(Position::new(foot.x + column, foot.y));
}

/// Returns what the plot says about a run above it.
pub fn run_facts(run: &RunState) -> String {
    let sample = &run.sample;
    if run.has_ended() {
        return format!("ended after {}", duration(sample.elapsed.as_secs()));
    }
    format!(
        "limit {}  needs {}  {}  {}",
        format_short(sample.limit_bytes),
        format_short(sample.needed_bytes),
        counted(sample.processes.len(), "process", "processes"),
        duration(sample.elapsed.as_secs()),
    )
}

/// Formats a duration as `M:SS`, `H:MM:SS`, or in days.
fn duration(seconds: u64) -> String {
    let (minutes, hours) = (seconds / 60 % 60, seconds / 3600);
    match hours {
        0 => format!("{minutes}:{:02}", seconds % 60),
        1..48 => format!("{hours}:{minutes:02}:{:02}", seconds % 60),
        _ => format!("{} days", hours / 24),
    }
}

#[cfg(test)]
mod tests;
