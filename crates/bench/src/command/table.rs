//! Tables of benchmarks: printed row by row, as JSON, or as Markdown for `docs/benchmarks.md`.
//!
//! A benchmark declares its columns once ([`TableRow`]); all forms follow from them.

use super::error::CommandError;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The part that a column has where a table is folded: rows that differ only in their keys become
/// one row, with a column for each key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The column tells rows apart, or belongs to all rows with the same labels.
    Label,
    /// The text becomes the heading of a column.
    Key,
    /// The text goes into the column of the row's key.
    Figure,
}

/// How a command prints its table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Columns below their headings, row by row.
    Text,
    /// One JSON array.
    Json,
}

/// The side of a column on which texts begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Left,
    Right,
}

/// A column of a table with rows of type `R`.
pub struct Column<R> {
    heading: &'static str,
    /// Width in characters of a printed text; a heading may be wider.
    width: usize,
    side: Side,
    #[cfg_attr(not(test), expect(dead_code, reason = "a test writes the docs"))]
    role: Role,
    text: fn(&R) -> String,
}

impl<R> Column<R> {
    /// A column of names.
    pub const fn name(heading: &'static str, width: usize, text: fn(&R) -> String) -> Self {
        Column { heading, width, side: Side::Left, role: Role::Label, text }
    }

    /// A column of names, the texts of which are headings where the table is folded.
    pub const fn key(heading: &'static str, width: usize, text: fn(&R) -> String) -> Self {
        Column { heading, width, side: Side::Left, role: Role::Key, text }
    }

    /// A column of figures.
    pub const fn figure(heading: &'static str, text: fn(&R) -> String) -> Self {
        Column { heading, width: 8, side: Side::Right, role: Role::Label, text }
    }

    /// A column of figures that belong to the row's key.
    pub const fn keyed_figure(heading: &'static str, text: fn(&R) -> String) -> Self {
        Column { heading, width: 8, side: Side::Right, role: Role::Figure, text }
    }

    /// Returns a text of the column, padded.
    fn pad(&self, text: &str) -> String {
        let width = self.width.max(self.heading.chars().count());
        match self.side {
            Side::Left => format!("{text:<width$}"),
            Side::Right => format!("{text:>width$}"),
        }
    }
}

/// A row of a benchmark's table.
pub trait TableRow: Serialize + DeserializeOwned + Sized + 'static {
    /// The columns, from left to right.
    const COLUMNS: &'static [Column<Self>];
}

/// Measures with `run`, which calls its argument with each row, and prints the rows: as soon as
/// they are there, or all of them as a JSON array.
pub fn print<R: TableRow>(
    form: Form,
    run: impl FnOnce(&mut dyn FnMut(&R)) -> Result<Vec<R>, foliomem_bench::Error>,
) -> Result<u8, CommandError> {
    match form {
        Form::Json => println!("{}", serde_json::json!(run(&mut |_| {})?)),
        Form::Text => {
            println!("{}", line(R::COLUMNS, |column| column.heading.to_owned()));
            run(&mut |row| println!("{}", line(R::COLUMNS, |column| (column.text)(row))))?;
        }
    }
    Ok(0)
}

fn line<R>(columns: &[Column<R>], text: impl Fn(&Column<R>) -> String) -> String {
    let texts: Vec<String> = columns.iter().map(|column| column.pad(&text(column))).collect();
    texts.join(" ").trim_end().to_owned()
}

/// Returns the figure with that many digits, or `-` for an unknown one.
pub fn known(figure: Option<f64>, digits: usize) -> String {
    figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.digits$}"))
}

/// Returns the name that a value has in JSON and on the command line.
pub fn name(value: &impl Serialize) -> String {
    serde_json::json!(value).as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
pub mod markdown {
    //! Markdown tables, which a test keeps in the docs.

    use super::{Column, Role, TableRow};

    /// Rows with the same labels: those, and a figure by key.
    struct Folded {
        labels: Vec<String>,
        figures: Vec<(String, String)>,
    }

    /// Returns the table of rows, folded by the roles of its columns.
    pub fn table<R: TableRow>(rows: &[R]) -> String {
        let texts =
            |row: &R, role| -> Vec<String> { of_role(role).map(|column: &Column<R>| (column.text)(row)).collect() };
        let is_folded = of_role::<R>(Role::Key).next().is_some();
        let mut keys: Vec<String> = Vec::new();
        let mut folded: Vec<Folded> = Vec::new();
        for row in rows {
            let (labels, key) = (texts(row, Role::Label), texts(row, Role::Key).concat());
            if is_folded && !keys.contains(&key) {
                keys.push(key.clone());
            }
            let figure = (key, texts(row, Role::Figure).join(" / "));
            match folded.iter_mut().find(|known| is_folded && known.labels == labels) {
                Some(known) => known.figures.push(figure),
                None => folded.push(Folded { labels, figures: vec![figure] }),
            }
        }
        let labels = of_role::<R>(Role::Label).map(|column| column.heading.to_owned());
        let headings: Vec<String> = labels.chain(keys.iter().cloned()).collect();
        let mut text = format!("{}|{}\n", line(&headings), "---|".repeat(headings.len()));
        for Folded { mut labels, figures } in folded {
            labels.extend(keys.iter().map(|key| {
                let figure = figures.iter().find(|(known, _)| known == key);
                figure.map_or_else(|| "-".to_owned(), |(_, figure)| figure.clone())
            }));
            text += &line(&labels);
        }
        text
    }

    /// Returns what the figures of a folded table are: `ns per pair / scanned`.
    pub fn figures<R: TableRow>() -> String {
        of_role::<R>(Role::Figure).map(|column| column.heading).collect::<Vec<_>>().join(" / ")
    }

    fn of_role<R: TableRow>(role: Role) -> impl Iterator<Item = &'static Column<R>> {
        R::COLUMNS.iter().filter(move |column| column.role == role)
    }

    fn line(cells: &[String]) -> String {
        format!("| {} |\n", cells.join(" | "))
    }
}

#[cfg(test)]
mod tests {
    use super::{Column, TableRow, line, markdown};
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize)]
    struct Row {
        limit: u32,
        size: String,
        seconds: f64,
        kernel: f64,
    }

    impl TableRow for Row {
        const COLUMNS: &'static [Column<Row>] = &[
            Column::name("limit", 7, |row| row.limit.to_string()),
            Column::key("size", 4, |row| row.size.clone()),
            Column::keyed_figure("s", |row| format!("{:.1}", row.seconds)),
            Column::figure("kernel", |row| format!("{:.1}", row.kernel)),
        ];
    }

    fn rows() -> Vec<Row> {
        let row = |limit, size: &str, seconds, kernel| Row { limit, size: size.to_owned(), seconds, kernel };
        vec![row(75, "4K", 0.5, 0.9), row(75, "64K", 0.4, 0.9), row(50, "64K", 0.7, 1.2)]
    }

    #[test]
    fn printed_rows_stand_below_their_headings() {
        assert_eq!(line(Row::COLUMNS, |column| column.heading.to_owned()), "limit   size        s   kernel");
        assert_eq!(line(Row::COLUMNS, |column| (column.text)(&rows()[0])), "75      4K        0.5      0.9");
    }

    #[test]
    fn rows_that_differ_in_their_key_fold() {
        let expected =
            "| limit | kernel | 4K | 64K |\n|---|---|---|---|\n| 75 | 0.9 | 0.5 | 0.4 |\n| 50 | 1.2 | - | 0.7 |\n";
        assert_eq!(markdown::table(&rows()), expected);
        assert_eq!(markdown::figures::<Row>(), "s");
    }

    #[derive(Serialize, Deserialize)]
    struct Plain(u32);

    impl TableRow for Plain {
        const COLUMNS: &'static [Column<Plain>] = &[Column::figure("runs", |row| row.0.to_string())];
    }

    #[test]
    fn a_table_without_keys_keeps_each_row() {
        assert_eq!(markdown::table(&[Plain(1), Plain(1), Plain(2)]), "| runs |\n|---|\n| 1 |\n| 1 |\n| 2 |\n");
    }
}
