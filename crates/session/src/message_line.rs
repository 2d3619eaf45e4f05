//! Message lines, formatted without allocating: the agent may not call the program's malloc. There
//! is no lock.

use std::fmt::{self, Write};

/// One line of at most 512 bytes; longer text is cut.
struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // The last byte is reserved for the end of the line.
        let room = self.bytes.len() - 1 - self.len;
        let text = &text.as_bytes()[..text.len().min(room)];
        self.bytes[self.len..self.len + text.len()].copy_from_slice(text);
        self.len += text.len();
        Ok(())
    }
}

/// Formats `message` into a line that begins with `foliomem: `, and passes the line to `act`.
pub fn with_line<R>(message: fmt::Arguments<'_>, act: impl FnOnce(&[u8]) -> R) -> R {
    let mut line = Line { bytes: [0; 512], len: 0 };
    // Writing to a line cannot fail: it cuts the text.
    let _ = line.write_str("foliomem: ");
    let _ = line.write_fmt(message);
    line.bytes[line.len] = b'\n';
    act(&line.bytes[..=line.len])
}
