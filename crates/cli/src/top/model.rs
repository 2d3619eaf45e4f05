//! The state of `foliomem top`: which runs there are, which line is selected, and what keys do.
//!
//! The model does not access the terminal, and callers pass the time.

use crate::columns::{Column, Entry};
use crate::sampler::{ProcessSample, RunId, RunSample};
use crate::top::history::History;
use crate::top::prompt::{Prompt, PromptKey};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long an ended run stays in the list. An ended run that the user has selected stays until
/// another row is selected.
const ENDED_LIFETIME: Duration = Duration::from_secs(10);

/// The state.
pub struct Model {
    /// The moment of the model's creation, which plot columns are counted from.
    origin: Instant,
    runs: BTreeMap<RunId, RunState>,
    selected: Option<RowId>,
    /// The number of the selected row. If that row vanishes, the row that takes this number is
    /// selected.
    selected_index: usize,
    chooser: Chooser,
    /// The column that rows are sorted by.
    sort: Column,
    order: Order,
    /// The part of the screen that receives keys.
    pub focus: Focus,
    /// The last message to the user.
    pub notice: Option<String>,
}

/// A run.
pub struct RunState {
    /// The last sample.
    pub sample: RunSample,
    /// The figures of the run over the last minutes.
    pub history: History,
    tree: Tree,
    ended_at: Option<Instant>,
}

/// Whether the processes of a run are shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tree {
    /// They are not.
    Folded,
    /// They are.
    Unfolded,
}

/// The order of rows by a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// The least first.
    Ascending,
    /// The most first.
    Descending,
}

/// Whether the user has selected the row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Chooser {
    /// Nobody: the first row is selected by default.
    Nobody,
    /// The user, by a key or by the pid of the command line.
    User,
}

/// The part of the screen that receives keys.
#[derive(PartialEq, Eq, Debug)]
pub enum Focus {
    /// The table.
    Table,
    /// The help, which any key closes.
    Help,
    /// The new limit of a run.
    Prompt(Prompt),
}

/// The identity of a row: a run, or a process of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowId {
    /// The run.
    pub run: RunId,
    /// The pid of the process.
    pub process: Option<u32>,
}

/// A row of the table.
pub struct Row<'a> {
    /// Its identity.
    pub id: RowId,
    /// The data in the columns of the row.
    pub entry: Entry<'a>,
    /// What kind of row it is.
    pub kind: RowKind,
}

/// What a row is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowKind {
    /// A run.
    Run(Tree),
    /// A run that has ended.
    EndedRun,
    /// A process, and the number of its ancestors in the run.
    Process(usize),
}

/// What the caller does about a key.
#[derive(PartialEq, Eq, Debug)]
pub enum Action {
    /// Nothing.
    None,
    /// End.
    Quit,
    /// Stop, as Ctrl-Z stops other programs.
    Suspend,
    /// Draw everything again.
    Redraw,
    /// Change the limit of a run.
    ChangeLimit {
        /// The run.
        run: RunId,
        /// The pid of its supervisor.
        pid: u32,
        /// The limit, as the user typed it.
        text: String,
    },
}

impl Order {
    fn reverse(self) -> Order {
        match self {
            Order::Ascending => Order::Descending,
            Order::Descending => Order::Ascending,
        }
    }

    fn of(self, ordering: Ordering) -> Ordering {
        match self {
            Order::Ascending => ordering,
            Order::Descending => ordering.reverse(),
        }
    }
}

impl Tree {
    fn toggle(self) -> Tree {
        match self {
            Tree::Folded => Tree::Unfolded,
            Tree::Unfolded => Tree::Folded,
        }
    }
}

impl RunState {
    /// Returns whether the run has ended.
    pub fn has_ended(&self) -> bool {
        self.ended_at.is_some()
    }
}

impl ProcessSample {
    fn entry(&self) -> Entry<'_> {
        let (figures, rates, program) = (&self.figures, self.rates, &self.name.program);
        Entry { pid: self.pid, limit_bytes: None, figures, rates, program }
    }
}

impl Model {
    /// Returns a model without runs. `chooser` counts as having selected the first row.
    pub fn new(chooser: Chooser, now: Instant) -> Model {
        Model {
            origin: now,
            runs: BTreeMap::new(),
            selected: None,
            selected_index: 0,
            chooser,
            sort: Column::Pid,
            order: Order::Ascending,
            focus: Focus::Table,
            notice: None,
        }
    }

    /// Takes over a sample of all runs, which was taken at `now`. New runs are shown folded or
    /// unfolded, as `tree` says.
    pub fn update(&mut self, samples: Vec<RunSample>, tree: Tree, now: Instant) {
        let present: BTreeSet<RunId> = samples.iter().map(|sample| sample.id).collect();
        for sample in samples {
            let new = || (History::new(self.origin), tree);
            let (mut history, tree) =
                self.runs.remove(&sample.id).map_or_else(new, |known| (known.history, known.tree));
            history.push(&sample, now);
            self.runs.insert(sample.id, RunState { sample, history, tree, ended_at: None });
        }
        for (_, run) in self.runs.iter_mut().filter(|(id, _)| !present.contains(id)) {
            run.ended_at.get_or_insert(now);
            (run.sample.rates, run.tree) = (None, Tree::Folded);
            run.sample.processes.clear();
        }
        let selected = self.selected.filter(|_| self.chooser == Chooser::User).map(|row| row.run);
        self.runs.retain(|id, run| {
            Some(*id) == selected || run.ended_at.is_none_or(|ended_at| now - ended_at < ENDED_LIFETIME)
        });
        self.keep_selection();
    }

    /// Returns the rows, in their order.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let mut runs: Vec<(RunId, &RunState)> = self.runs.iter().map(|(&id, run)| (id, run)).collect();
        runs.sort_by(|(_, one), (_, other)| self.compare(&one.sample.entry(), &other.sample.entry()));
        let mut rows = Vec::new();
        for (run, state) in runs {
            let kind = if state.has_ended() { RowKind::EndedRun } else { RowKind::Run(state.tree) };
            rows.push(Row { id: RowId { run, process: None }, entry: state.sample.entry(), kind });
            if state.tree == Tree::Unfolded {
                for (process, depth) in self.tree_of(&state.sample.processes) {
                    let id = RowId { run, process: Some(process.pid) };
                    rows.push(Row { id, entry: process.entry(), kind: RowKind::Process(depth) });
                }
            }
        }
        rows
    }

    /// Returns processes in the order of their tree, and how many ancestors each has there.
    fn tree_of<'a>(&self, processes: &'a [ProcessSample]) -> Vec<(&'a ProcessSample, usize)> {
        let mut sorted: Vec<&ProcessSample> = processes.iter().collect();
        // The loop below pops from the end, so the order is reversed.
        sorted.sort_by(|one, other| self.compare(&one.entry(), &other.entry()).reverse());
        let pids: BTreeSet<u32> = processes.iter().map(|process| process.pid).collect();
        let mut children: BTreeMap<Option<u32>, Vec<&ProcessSample>> = BTreeMap::new();
        for process in sorted {
            let parent = Some(process.name.parent_pid).filter(|pid| pids.contains(pid) && *pid != process.pid);
            children.entry(parent).or_default().push(process);
        }
        let mut rows = Vec::with_capacity(processes.len());
        // Parents were read at different moments, so they may seem to form a circle.
        while let Some(roots) = children.remove(&None).or_else(|| children.pop_first().map(|(_, rest)| rest)) {
            let mut left: Vec<_> = roots.into_iter().map(|process| (process, 0)).collect();
            while let Some((process, depth)) = left.pop() {
                rows.push((process, depth));
                let below = children.remove(&Some(process.pid)).unwrap_or_default();
                left.extend(below.into_iter().map(|child| (child, depth + 1)));
            }
        }
        rows
    }

    fn compare(&self, one: &Entry, other: &Entry) -> Ordering {
        self.order.of(self.sort.compare(one, other)).then(one.pid.cmp(&other.pid))
    }

    /// Returns the column that rows are sorted by, and their order.
    pub fn sort(&self) -> (Column, Order) {
        (self.sort, self.order)
    }

    /// Returns the number of the selected row; `None` if there are no rows.
    pub fn selected_index(&self) -> Option<usize> {
        self.selected.map(|_| self.selected_index)
    }

    /// Returns the run of the selected row.
    pub fn selected_run(&self) -> Option<&RunState> {
        self.runs.get(&self.selected?.run)
    }

    /// Returns all runs.
    pub fn runs(&self) -> impl Iterator<Item = &RunState> {
        self.runs.values()
    }

    /// Finds the selected row again, after rows have moved. If it has vanished, the row in its
    /// place is selected.
    fn keep_selection(&mut self) {
        let ids: Vec<RowId> = self.rows().iter().map(|row| row.id).collect();
        let found = ids.iter().position(|&id| Some(id) == self.selected);
        self.selected_index = found.unwrap_or(self.selected_index.min(ids.len().saturating_sub(1)));
        self.selected = ids.get(self.selected_index).copied();
    }

    fn select(&mut self, index: usize) {
        self.selected = None;
        self.selected_index = index;
        self.keep_selection();
    }

    /// Handles a pressed key. A page of the table has `page_rows` rows.
    pub fn press(&mut self, key: KeyEvent, page_rows: usize) -> Action {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match (&mut self.focus, key.code) {
            (_, KeyCode::Char('z')) if is_control => Action::Suspend,
            (_, KeyCode::Char('l')) if is_control => Action::Redraw,
            (Focus::Prompt(prompt), _) => match prompt.press(key) {
                PromptKey::Edited => Action::None,
                PromptKey::Cancelled => self.focus_table(),
                PromptKey::Entered { run, pid, text } => {
                    self.notice = Some(format!("run {pid}: changing the limit: {text}"));
                    self.focus = Focus::Table;
                    Action::ChangeLimit { run, pid, text }
                }
            },
            (_, KeyCode::Char('c')) if is_control => Action::Quit,
            (Focus::Help, _) => self.focus_table(),
            (Focus::Table, code) => {
                self.notice = None;
                self.press_in_table(code, page_rows)
            }
        }
    }

    fn focus_table(&mut self) -> Action {
        self.focus = Focus::Table;
        Action::None
    }

    fn press_in_table(&mut self, code: KeyCode, page_rows: usize) -> Action {
        self.chooser = Chooser::User;
        let (index, last) = (self.selected_index, self.rows().len().saturating_sub(1));
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return Action::Quit,
            KeyCode::Char('?' | 'h') => self.focus = Focus::Help,
            KeyCode::Up | KeyCode::Char('k') => self.select(index.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select((index + 1).min(last)),
            KeyCode::PageUp => self.select(index.saturating_sub(page_rows)),
            KeyCode::PageDown => self.select((index + page_rows).min(last)),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(last),
            KeyCode::Enter | KeyCode::Char(' ') => self.fold(Tree::toggle),
            KeyCode::Left => self.fold(|_| Tree::Folded),
            KeyCode::Right => self.fold(|_| Tree::Unfolded),
            KeyCode::Char('a') => self.fold_all(),
            KeyCode::Char('<') => self.sort_by(-1),
            KeyCode::Char('>') => self.sort_by(1),
            KeyCode::Char('r') => {
                self.order = self.order.reverse();
                self.keep_selection();
            }
            KeyCode::Char('l') => self.open_prompt(),
            _ => {}
        }
        Action::None
    }

    /// Folds or unfolds the run of the selected row. A run that is folded becomes the selected row.
    fn fold(&mut self, change: impl Fn(Tree) -> Tree) {
        let Some(run) = self.selected.map(|row| row.run) else { return };
        let Some(state) = self.runs.get_mut(&run).filter(|state| state.ended_at.is_none()) else { return };
        let before = state.tree;
        state.tree = change(before);
        if state.tree == Tree::Folded && before == Tree::Unfolded {
            self.selected = Some(RowId { run, process: None });
        }
        self.keep_selection();
    }

    /// Unfolds all runs; folds them if none was folded.
    fn fold_all(&mut self) {
        let living = |run: &&mut RunState| run.ended_at.is_none();
        let any_folded = self.runs.values().any(|run| run.ended_at.is_none() && run.tree == Tree::Folded);
        let tree = if any_folded { Tree::Unfolded } else { Tree::Folded };
        self.runs.values_mut().filter(living).for_each(|run| run.tree = tree);
        if tree == Tree::Folded {
            self.selected = self.selected.map(|row| RowId { process: None, ..row });
        }
        self.keep_selection();
    }

    /// Sorts by the column that lies `offset` columns to the right.
    fn sort_by(&mut self, offset: isize) {
        let at = Column::ALL.iter().position(|&column| column == self.sort).unwrap_or(0) as isize;
        self.sort = Column::ALL[(at + offset).rem_euclid(Column::ALL.len() as isize) as usize];
        self.order = match self.sort {
            Column::Pid | Column::Program => Order::Ascending,
            _ => Order::Descending,
        };
        self.keep_selection();
    }

    fn open_prompt(&mut self) {
        let Some(run) = self.selected_run() else { return };
        if run.has_ended() {
            self.notice = Some(format!("run {} has ended", run.sample.pid));
        } else {
            self.focus = Focus::Prompt(Prompt::new(run.sample.id, run.sample.pid));
        }
    }
}

#[cfg(test)]
mod tests;
