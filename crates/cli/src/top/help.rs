//! What `foliomem top` says about its keys and columns.

use crate::top::looks::Looks;
use ratatui::Frame;
use ratatui::layout::Constraint;
use ratatui::style::Modifier;
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Clear, Padding, Paragraph};

/// The keys, and what they do.
const KEYS: [(&str, &str); 9] = [
    ("Up, Down", "select a line; also PgUp, PgDn, Home, End, k and j"),
    ("Enter, Space", "show or hide the processes of the run; also Left and Right"),
    ("a", "show or hide the processes of all runs"),
    ("< >", "sort by the column to the left, to the right"),
    ("r", "reverse the order"),
    ("l", "change the limit of the run, as foliomem ctl PID limit does"),
    ("Ctrl-L", "draw everything again"),
    ("?", "this help, which any key closes"),
    ("q", "quit"),
];

/// The columns, and what they mean.
const COLUMNS: [(&str, &str); 7] = [
    ("LIMIT", "the limit now"),
    ("RESIDENT", "what all processes of the run take, apart from the store"),
    ("STORED", "the compressed store; with RESIDENT what the limit counts"),
    ("RATIO", "how many times larger the stored content is than its room"),
    ("SWAP", "what lies in the swap file"),
    ("FAULTS/S", "page faults that foliomem serves in a second"),
    ("WAIT%", "time that threads wait for them (two: 200); held: until its turn"),
];

/// Width of the names of keys and columns.
const NAME_WIDTH: usize = 14;

/// Returns the keys that are used most, in a line.
pub fn keys_line(looks: Looks) -> Line<'static> {
    let keys = [
        (looks.pick("↑↓", "Up Down"), "select"),
        ("Enter", "processes"),
        ("< >", "sort"),
        ("r", "reverse"),
        ("l", "limit"),
        ("?", "help"),
        ("q", "quit"),
    ];
    let spans = keys.into_iter().flat_map(|(key, what)| {
        [Span::styled(key.to_owned(), Modifier::BOLD), Span::styled(format!(" {what}  "), Modifier::DIM)]
    });
    Line::from(spans.collect::<Vec<_>>())
}

/// Draws the help in place of everything else.
pub fn draw(frame: &mut Frame, looks: Looks) {
    let lines = |entries: &[(&str, &str)]| {
        let line = |(name, meaning): &(&str, &str)| {
            Line::from(vec![
                Span::styled(format!("{name:<NAME_WIDTH$}"), Modifier::BOLD),
                Span::raw((*meaning).to_owned()),
            ])
        };
        entries.iter().map(line).collect::<Vec<_>>()
    };
    let mut all = lines(&KEYS);
    all.push(Line::default());
    all.extend(lines(&COLUMNS));
    let text = Text::from(all);
    let (width, height) = (text.width() as u16 + 4, text.height() as u16 + 2);
    let area = frame.area().centered(Constraint::Length(width), Constraint::Length(height));
    let block = Block::bordered().border_set(looks.border()).padding(Padding::horizontal(1)).title(" foliomem top ");
    frame.render_widget(Clear, frame.area());
    frame.render_widget(Paragraph::new(text).block(block), area);
}
