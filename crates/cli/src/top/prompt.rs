//! The line that asks for a new limit.

use crate::sampler::RunId;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Maximum length of what is typed, in characters: no limit is longer.
const MAX_LENGTH: usize = 24;

/// A line that is being typed.
#[derive(PartialEq, Eq, Debug)]
pub struct Prompt {
    run: RunId,
    /// The pid of the run's supervisor.
    pub pid: u32,
    /// What was typed so far.
    pub text: String,
}

/// What a key has done to a line.
#[derive(PartialEq, Eq, Debug)]
pub enum PromptKey {
    /// The line goes on.
    Edited,
    /// Nothing is to be done.
    Cancelled,
    /// The line is complete.
    Entered {
        /// The run.
        run: RunId,
        /// The pid of its supervisor.
        pid: u32,
        /// What was typed.
        text: String,
    },
}

impl Prompt {
    /// Returns an empty line.
    pub fn new(run: RunId, pid: u32) -> Prompt {
        Prompt { run, pid, text: String::new() }
    }

    /// Does what a key says.
    pub fn press(&mut self, key: KeyEvent) -> PromptKey {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Esc => return PromptKey::Cancelled,
            KeyCode::Char('c' | 'g') if is_control => return PromptKey::Cancelled,
            KeyCode::Enter if self.text.trim().is_empty() => return PromptKey::Cancelled,
            KeyCode::Enter => {
                let text = self.text.trim().to_owned();
                return PromptKey::Entered { run: self.run, pid: self.pid, text };
            }
            KeyCode::Backspace => drop(self.text.pop()),
            KeyCode::Char('h') if is_control => drop(self.text.pop()),
            KeyCode::Char('u' | 'w') if is_control => self.text.clear(),
            KeyCode::Char(letter) if !is_control && self.text.chars().count() < MAX_LENGTH => self.text.push(letter),
            _ => {}
        }
        PromptKey::Edited
    }
}
