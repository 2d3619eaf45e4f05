//! `foliomem top`: shows the runs and their processes, live, and changes limits.
//!
//! - `model` is the state, and what keys do to it; `prompt` the line that asks for a limit;
//! - `history` keeps what a run had in the last minutes;
//! - `view` draws the state with `plot` and `help`, as `looks` allow;
//! - `screen` takes the terminal and gives it back.
//!
//! The main thread samples and draws. Other threads send to it: one reads keys, one receives
//! signals, and one for each changed limit waits until it holds.

mod help;
mod history;
mod looks;
mod model;
mod plot;
mod prompt;
#[cfg(test)]
mod samples;
mod screen;
mod view;

use crate::args::TopArgs;
use crate::columns::Column;
use crate::error::CliError;
use crate::live_limit;
use crate::ps::{INTERVAL, table, warn_if_none, width};
use crate::sampler::{Detail, RunId, RunSample, Sampler};
use foliomem_session::find_run;
use foliomem_session::segment::Control;
use foliomem_types::size::format_mib;
use looks::Looks;
use model::{Action, Chooser, Model, Tree};
use ratatui::crossterm::event::{self, KeyEvent};
use rustix::process::{Signal, getpid, kill_process};
use screen::{Screen, give_back};
use serde_json::Value;
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use view::{View, program_cell};

/// Time between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(500);
/// How long a lower limit may need to hold, as that of `ctl`.
const LIMIT_TIMEOUT: Duration = Duration::from_secs(30);
/// Exit code of a program that a signal has ended, without the signal's number.
const SIGNAL_EXIT_CODE: i32 = 128;

/// What other threads report.
enum Event {
    Key(KeyEvent),
    Resized,
    Signal(i32),
    /// How the change of a limit has ended.
    LimitChanged(String),
    /// There will be no more keys.
    NoInput(io::Error),
}

/// Shows the runs, or the run of one process.
pub fn top(args: &TopArgs) -> Result<u8, CliError> {
    let segment_of = |pid| find_run::visit_run_of(pid).map(|(segment, _control)| segment);
    let only = args.pid.map(segment_of).transpose()?;
    let mut sampler = Sampler::new(Detail::Processes, only);
    let (tree, chooser) =
        if only.is_some() { (Tree::Unfolded, Chooser::User) } else { (Tree::Folded, Chooser::Nobody) };
    let is_dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    if args.json {
        let runs = sampler.sample_twice(INTERVAL);
        warn_if_none(&runs);
        print(&format!("{:#}\n", runs.iter().map(RunSample::json_with_processes).collect::<Value>()))?;
    } else if args.once || is_dumb || !io::stdout().is_terminal() {
        let runs = sampler.sample_twice(INTERVAL);
        warn_if_none(&runs);
        print(&picture(runs))?;
    } else {
        return Live::start(sampler, tree, chooser).map_err(terminal_failed)?.show();
    }
    Ok(0)
}

fn terminal_failed(error: io::Error) -> CliError {
    CliError::System("use the terminal", error)
}

/// Prints `text`. The reader may close the pipe before the end.
fn print(text: &str) -> Result<(), CliError> {
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(CliError::System("print the runs", error)),
        _ => Ok(()),
    }
}

/// Returns a table of runs and their processes.
fn picture(runs: Vec<RunSample>) -> String {
    let (now, looks, width) = (Instant::now(), Looks::of_environment(), width());
    let mut model = Model::new(Chooser::Nobody, now);
    model.update(runs, Tree::Unfolded, now);
    let (numbers, _program) = Column::ALL.split_at(Column::ALL.len() - 1);
    let line = |row: &model::Row| {
        let numbers: String = numbers.iter().map(|column| column.cell(&row.entry)).collect();
        let program = program_cell(row, "", width.saturating_sub(numbers.len()), looks);
        numbers + &program
    };
    table(model.rows().iter().map(line), width)
}

/// The picture that changes.
struct Live {
    sampler: Sampler,
    model: Model,
    view: View,
    /// How new runs are shown.
    tree: Tree,
    screen: Screen,
    is_suspended: bool,
    sender: Sender<Event>,
    receiver: Receiver<Event>,
}

/// What the loop does next.
enum Next {
    GoOn,
    Exit(u8),
}

impl Live {
    fn start(sampler: Sampler, tree: Tree, chooser: Chooser) -> io::Result<Live> {
        let (sender, receiver) = channel();
        // From here on this process receives signals, so a signal cannot leave the terminal in raw
        // mode.
        receive_signals(sender.clone())?;
        let screen = Screen::take()?;
        read_keys(sender.clone())?;
        let (model, view) = (Model::new(chooser, Instant::now()), View::new(Looks::of_environment()));
        Ok(Live { sampler, model, view, tree, screen, is_suspended: false, sender, receiver })
    }

    /// Shows the runs until the end.
    fn show(mut self) -> Result<u8, CliError> {
        self.sample();
        let mut next_sample = Instant::now() + INTERVAL;
        loop {
            if !self.is_suspended {
                self.draw().map_err(terminal_failed)?;
            }
            let event = self.receiver.recv_timeout(next_sample.saturating_duration_since(Instant::now()));
            match event {
                Ok(event) => {
                    if let Next::Exit(code) = self.handle(event)? {
                        return Ok(code);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.sample();
                    next_sample = Instant::now() + SAMPLE_INTERVAL;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(0),
            }
        }
    }

    fn sample(&mut self) {
        let samples = self.sampler.sample();
        self.model.update(samples, self.tree, Instant::now());
    }

    fn draw(&mut self) -> io::Result<()> {
        self.screen.terminal.draw(|frame| self.view.draw(frame, &self.model)).map(drop)
    }

    fn handle(&mut self, event: Event) -> Result<Next, CliError> {
        match event {
            Event::Key(key) => match self.model.press(key, self.view.page_rows) {
                Action::None => {}
                Action::Quit => return Ok(Next::Exit(0)),
                Action::Suspend => self.suspend(),
                Action::Redraw => self.screen.clear().map_err(terminal_failed)?,
                Action::ChangeLimit { run, pid, text } => self.change_limit(run, pid, text)?,
            },
            // The next drawing reads the new size.
            Event::Resized => {}
            Event::Signal(SIGTSTP) => self.suspend(),
            Event::Signal(SIGCONT) => {
                self.screen.take_again().map_err(terminal_failed)?;
                self.is_suspended = false;
            }
            Event::Signal(signal) => return Ok(Next::Exit((SIGNAL_EXIT_CODE + signal) as u8)),
            Event::LimitChanged(notice) => self.model.notice = Some(notice),
            Event::NoInput(error) => return Err(terminal_failed(error)),
        }
        Ok(Next::GoOn)
    }

    /// Gives the terminal back and stops this process. This process receives SIGCONT when it
    /// continues.
    fn suspend(&mut self) {
        give_back();
        self.is_suspended = true;
        // A process may always send itself a signal: this does not fail.
        let _ = kill_process(getpid(), Signal::STOP);
    }

    /// Changes the limit of a run in another thread.
    fn change_limit(&mut self, run: RunId, pid: u32, text: String) -> Result<(), CliError> {
        let Some(control) = self.sampler.control_of(run) else {
            self.model.notice = Some(format!("run {pid} has ended"));
            return Ok(());
        };
        let sender = self.sender.clone();
        let change = move || {
            let notice = change_limit(&control, pid, &text);
            // At the end of this process nobody receives any more.
            let _ = sender.send(Event::LimitChanged(format!("run {pid}: {notice}")));
        };
        spawn(change).map_err(|error| CliError::System("start a thread", error))
    }
}

/// Changes the limit of a run, and returns the message about the result.
fn change_limit(control: &Control, pid: u32, text: &str) -> String {
    let waiting = match live_limit::ask(control, pid, text) {
        Ok(waiting) => waiting,
        Err(error) => return error.to_string(),
    };
    match waiting.wait(LIMIT_TIMEOUT) {
        Ok(taken_bytes) => {
            format!("the limit is {}, and the run takes {}", format_mib(control.limit_bytes()), format_mib(taken_bytes))
        }
        Err(error) => error.to_string(),
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().spawn(work).map(drop)
}

/// Sends the keys that are pressed.
fn read_keys(sender: Sender<Event>) -> io::Result<()> {
    spawn(move || {
        loop {
            let event = match event::read() {
                Ok(event::Event::Key(key)) if key.is_press() => Event::Key(key),
                Ok(event::Event::Resize(..)) => Event::Resized,
                Ok(_) => continue,
                Err(error) => Event::NoInput(error),
            };
            let is_last = matches!(event, Event::NoInput(_));
            if sender.send(event).is_err() || is_last {
                return;
            }
        }
    })
}

/// Sends the signals that end, stop or continue this process.
fn receive_signals(sender: Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGCONT])?;
    spawn(move || {
        for signal in signals.forever() {
            if sender.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    })
}
