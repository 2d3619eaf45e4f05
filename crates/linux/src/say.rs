//! What the agent has to say, on the program's stderr: whole lines, in one write, without allocating.

use foliomem_core::units::PageNumber;
use std::fmt::{self, Write};

/// One line of at most 512 bytes; what does not fit is cut.
struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // One byte is kept for the end of the line.
        let room = self.bytes.len() - 1 - self.len;
        let text = &text.as_bytes()[..text.len().min(room)];
        self.bytes[self.len..self.len + text.len()].copy_from_slice(text);
        self.len += text.len();
        Ok(())
    }
}

/// Formats `message` and hands the line to `act`.
pub fn with_line<R>(message: fmt::Arguments<'_>, act: impl FnOnce(&[u8]) -> R) -> R {
    let mut line = Line { bytes: [0; 512], len: 0 };
    // Writing to a line never fails: it cuts.
    let _ = line.write_str("foliomem: ");
    let _ = line.write_fmt(message);
    line.bytes[line.len] = b'\n';
    act(&line.bytes[..=line.len])
}

/// Says one line.
pub fn say_fmt(message: fmt::Arguments<'_>) {
    // Where nobody reads stderr nobody can be told.
    // SAFETY: descriptor 2 is only written to; where the program has closed or reused it, the line goes
    // where any library's last words would go.
    let stderr = unsafe { rustix::stdio::stderr() };
    with_line(message, |line| {
        let _ = rustix::io::write(stderr, line);
    });
}

/// Says one line.
pub fn say(message: &str) {
    say_fmt(format_args!("{message}"));
}

/// Says something about a page.
pub fn say_page(message: &str, page: PageNumber, why: &dyn fmt::Display) {
    say_fmt(format_args!("{message} (address {:#x}): {why}", page.address()));
}
