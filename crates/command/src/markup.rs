//! HTML that is also well-formed XML with any content: elements are closed where they were opened,
//! and all text is escaped.

use std::fmt::{Display, Write};

/// A part of a page.
#[derive(Default)]
pub struct Markup {
    text: String,
}

/// Attributes of an element, by name.
pub type Attributes<'a> = &'a [(&'a str, &'a dyn Display)];

impl Markup {
    /// Adds an element; `inside` fills it.
    pub fn element(&mut self, tag: &'static str, attributes: Attributes, inside: impl FnOnce(&mut Markup)) {
        self.text.push('<');
        self.text.push_str(tag);
        for (name, value) in attributes {
            self.text.push(' ');
            self.text.push_str(name);
            self.text.push_str("=\"");
            self.text(value);
            self.text.push('"');
        }
        self.text.push('>');
        inside(self);
        self.text.push_str("</");
        self.text.push_str(tag);
        self.text.push_str(">\n");
    }

    /// Adds an element that contains only text.
    pub fn leaf(&mut self, tag: &'static str, text: impl Display) {
        self.element(tag, &[], |inside| inside.text(text));
    }

    /// Adds an empty element without an end tag in HTML.
    pub fn void(&mut self, tag: &'static str, attributes: Attributes) {
        self.element(tag, attributes, |_| {});
        // The form that is valid in HTML and XML.
        let end = format!("></{tag}>\n");
        self.text.truncate(self.text.len() - end.len());
        self.text.push_str("/>\n");
    }

    /// Adds text.
    pub fn text(&mut self, text: impl Display) {
        let Ok(()) = write!(Escaped(&mut self.text), "{text}") else { unreachable!("writing to a string cannot fail") };
    }

    /// Returns the page.
    pub fn into_page(self) -> String {
        format!("<!DOCTYPE html>\n{}", self.text)
    }
}

struct Escaped<'a>(&'a mut String);

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for letter in text.chars() {
            match letter {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                // XML does not allow these characters.
                '\u{0}'..='\u{8}' | '\u{b}' | '\u{c}' | '\u{e}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => {
                    self.0.push(char::REPLACEMENT_CHARACTER);
                }
                letter => self.0.push(letter),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_text_becomes_markup(text in any::<String>(), noise in "[<>&\"'\\x00-\\x1f]{0,20}") {
            let mut markup = Markup::default();
            let hostile = format!("{text}{noise}");
            markup.element("p", &[("title", &hostile)], |inside| {
                inside.void("br", &[("class", &hostile)]);
                inside.leaf("b", &hostile);
            });
            let page = markup.into_page();
            let document = roxmltree::Document::parse_with_options(
                &page,
                roxmltree::ParsingOptions { allow_dtd: true, ..roxmltree::ParsingOptions::default() },
            );
            let document = document.unwrap();
            let tags: Vec<&str> =
                document.descendants().filter(|node| node.is_element()).map(|node| node.tag_name().name()).collect();
            prop_assert_eq!(tags, ["p", "br", "b"]);
            // Apart from line ends and characters that XML does not allow, the text is unchanged.
            let plain = |text: &str| text.chars().filter(|letter| !letter.is_control()).collect::<String>();
            let shown = document.descendants().find(|node| node.has_tag_name("b")).unwrap().text().unwrap_or_default();
            prop_assert_eq!(
                plain(shown).replace(char::REPLACEMENT_CHARACTER, ""),
                plain(&hostile).replace(['\u{fffe}', '\u{ffff}', char::REPLACEMENT_CHARACTER], "")
            );
        }
    }
}
