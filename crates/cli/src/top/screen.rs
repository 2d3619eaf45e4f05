//! The terminal while `foliomem top` has it: raw mode and the alternate screen.
//!
//! It is given back as it was when [`Screen`] is dropped, and before the message of a panic.

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use std::io::{self, Stdout};
use std::panic;

/// The terminal.
pub struct Screen {
    /// The terminal that ratatui draws on.
    pub terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal.
    pub fn take() -> io::Result<Screen> {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |what| {
            give_back();
            before(what);
        }));
        let mut screen = Screen { terminal: blank()? };
        screen.take_again()?;
        Ok(screen)
    }

    /// Takes the terminal after [`give_back`], or after others have changed it.
    pub fn take_again(&mut self) -> io::Result<()> {
        // crossterm does not set raw mode again while it believes that raw mode is on.
        disable_raw_mode()?;
        enable_raw_mode()?;
        execute!(io::stdout(), EnterAlternateScreen, Hide)?;
        self.clear()
    }

    /// Forgets what stands on the screen, so that everything is drawn again.
    pub fn clear(&mut self) -> io::Result<()> {
        execute!(io::stdout(), Clear(ClearType::All))?;
        // `Terminal::clear` asks where the cursor is, and the reader of keys takes the answer.
        self.terminal = blank()?;
        Ok(())
    }
}

/// Returns a terminal that takes its screen for empty.
fn blank() -> io::Result<Terminal<CrosstermBackend<Stdout>>> {
    Terminal::new(CrosstermBackend::new(io::stdout()))
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// Gives the terminal back as it was. Errors are ignored: the terminal may be gone.
pub fn give_back() {
    let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}
