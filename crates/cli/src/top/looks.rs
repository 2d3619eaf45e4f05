//! What the terminal can show: colours, and letters beyond ASCII.

use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::{bar, border};
use std::env::var_os;

/// Letters that draw bars from bottom to top where there is ASCII alone: a cell is empty, half or
/// full.
const ASCII_BARS: bar::Set = bar::Set {
    full: "#",
    seven_eighths: "#",
    three_quarters: "#",
    five_eighths: "#",
    half: ".",
    three_eighths: ".",
    one_quarter: ".",
    one_eighth: ".",
    empty: " ",
};
/// Letters that draw a frame where there is ASCII alone.
const ASCII_BORDER: border::Set = border::Set {
    top_left: "+",
    top_right: "+",
    bottom_left: "+",
    bottom_right: "+",
    vertical_left: "|",
    vertical_right: "|",
    horizontal_top: "-",
    horizontal_bottom: "-",
};

/// The letters that a terminal can show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Letters {
    /// ASCII alone.
    Ascii,
    /// All of Unicode.
    Unicode,
}

/// The colours that a terminal can show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Colours {
    /// None, but bold and reverse letters.
    None,
    /// The eight colours of the terminal's palette.
    Palette,
}

/// How things look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Looks {
    /// The letters.
    pub letters: Letters,
    /// The colours.
    pub colours: Colours,
}

impl Looks {
    /// Returns the abilities of the terminal that the environment describes.
    pub fn of_environment() -> Looks {
        let variable = |name: &str| var_os(name).map(|value| value.to_string_lossy().into_owned());
        Looks::of(variable)
    }

    /// Returns the abilities that the variables of the environment describe.
    fn of(variable: impl Fn(&str) -> Option<String>) -> Looks {
        let is_set = |name: &&str| variable(name).is_some_and(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].iter().find(|name| is_set(name)).and_then(|name| variable(name));
        let is_utf8 = locale.is_some_and(|locale| {
            let locale = locale.to_ascii_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        });
        let terminal = variable("TERM").unwrap_or_default();
        // Terminals of which terminfo knows no colours.
        let is_mono = terminal.starts_with("vt") || terminal.ends_with("-m") || terminal.ends_with("-mono");
        Looks {
            letters: if is_utf8 { Letters::Unicode } else { Letters::Ascii },
            colours: if is_set(&"NO_COLOR") || is_mono { Colours::None } else { Colours::Palette },
        }
    }

    /// Returns the one of two texts that the terminal can show.
    pub fn pick<'a>(self, unicode: &'a str, ascii: &'a str) -> &'a str {
        match self.letters {
            Letters::Unicode => unicode,
            Letters::Ascii => ascii,
        }
    }

    /// Replaces the letters that the terminal cannot show.
    pub fn show(self, text: &str) -> String {
        let is_shown = |letter: &char| self.letters == Letters::Unicode || letter.is_ascii();
        text.chars().map(|letter| if is_shown(&letter) { letter } else { '?' }).collect()
    }

    /// Returns the style of text in `colour`.
    pub fn colour(self, colour: Color) -> Style {
        match self.colours {
            Colours::Palette => Style::new().fg(colour),
            Colours::None => Style::new(),
        }
    }

    /// Returns the style of a text that needs attention.
    pub fn alarm(self) -> Style {
        match self.colours {
            Colours::Palette => Style::new().fg(Color::Red),
            Colours::None => Style::new().add_modifier(Modifier::BOLD),
        }
    }

    /// Returns the letters of bars.
    pub fn bars(self) -> bar::Set<'static> {
        match self.letters {
            Letters::Unicode => bar::NINE_LEVELS,
            Letters::Ascii => ASCII_BARS,
        }
    }

    /// Returns the letters of frames.
    pub fn border(self) -> border::Set<'static> {
        match self.letters {
            Letters::Unicode => border::PLAIN,
            Letters::Ascii => ASCII_BORDER,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(variables: &[(&str, &str)]) -> Looks {
        Looks::of(|name| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_first_variable_of_the_locale_tells_the_letters() {
        for (variables, letters) in [
            (&[][..], Letters::Ascii),
            (&[("LANG", "en_US.UTF-8")], Letters::Unicode),
            (&[("LANG", "C.utf8")], Letters::Unicode),
            (&[("LANG", "de_DE@euro")], Letters::Ascii),
            (&[("LANG", "en_US.UTF-8"), ("LC_ALL", "C")], Letters::Ascii),
            (&[("LANG", "C"), ("LC_CTYPE", "C.UTF-8"), ("LC_ALL", "")], Letters::Unicode),
        ] {
            assert_eq!(looks(variables).letters, letters, "{variables:?}");
        }
    }

    #[test]
    fn colours_are_left_out_where_nobody_wants_or_sees_them() {
        for (variables, colours) in [
            (&[("TERM", "xterm-256color")][..], Colours::Palette),
            (&[("TERM", "xterm-256color"), ("NO_COLOR", "")], Colours::Palette),
            (&[("TERM", "xterm-256color"), ("NO_COLOR", "1")], Colours::None),
            (&[("TERM", "vt100")], Colours::None),
            (&[("TERM", "linux-m")], Colours::None),
        ] {
            assert_eq!(looks(variables).colours, colours, "{variables:?}");
        }
    }
}
