//! The rules about the names that a file defines.

use super::Finding;
use super::source::Source;
use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// Words of the glossary's left column, joined by `_`, and their replacements.
///
/// The table has no words with another, ordinary meaning (home, own, walk, line): these stay a
/// matter of review.
const GLOSSARY: [(&str, &str); 37] = [
    ("keeper", "monitor"),
    ("engage", "activate"),
    ("engages", "activate"),
    ("engaged", "active"),
    ("engaging", "activating"),
    ("hold_still", "quiesce"),
    ("holds_still", "quiesce"),
    ("held_still", "quiesced"),
    ("tend", "maintain"),
    ("tends", "maintain"),
    ("tended", "maintained"),
    ("tending", "maintaining"),
    ("carve", "split"),
    ("carves", "split"),
    ("carved", "split"),
    ("take_apart", "explode"),
    ("taken_apart", "exploded"),
    ("bring_in", "map in"),
    ("brings_in", "map in"),
    ("brought_in", "mapped in"),
    ("take_home", "unmap"),
    ("taken_home", "unmapped"),
    ("at_home", "staged"),
    ("in_reach", "resident"),
    ("shed", "drop swap cache"),
    ("sheds", "drop swap cache"),
    ("rescue", "retry"),
    ("rescues", "retry"),
    ("rescued", "retried"),
    ("hear", "receive"),
    ("hears", "receive"),
    ("heard", "received"),
    ("hearer", "receiver"),
    ("told", "notice"),
    ("judgement", "cost estimate"),
    ("follower", "pinned handler"),
    ("floor", "protected minimum"),
];

/// Refuses names of bounds that begin with `MOST`.
pub fn check_bounds(source: &Source, findings: &mut Vec<Finding>) {
    for name in defined_names(source) {
        let text = name.to_string();
        if text == "MOST" || text.starts_with("MOST_") {
            let max = text.replacen("MOST", "MAX", 1);
            findings.push(finding(source, "bound", &name, format!("`{text}` is a bound: name it `{max}`")));
        }
    }
}

/// Refuses names with a word of the glossary's left column.
pub fn check_glossary(source: &Source, findings: &mut Vec<Finding>) {
    for name in defined_names(source) {
        let text = name.to_string();
        let words = words(&text);
        let found = GLOSSARY.iter().find(|(phrase, _)| {
            let phrase: Vec<&str> = phrase.split('_').collect();
            words.windows(phrase.len()).any(|window| window == phrase)
        });
        if let Some((phrase, instead)) = found {
            let phrase = phrase.replace('_', " ");
            let reason = format!("`{text}`: the glossary replaces \"{phrase}\" by \"{instead}\"");
            findings.push(finding(source, "glossary", &name, reason));
        }
    }
}

fn finding(source: &Source, rule: &'static str, name: &Ident, reason: String) -> Finding {
    Finding { rule, path: source.path.clone(), line: name.span().start().line, reason }
}

/// Splits a name into its lower-case words, at underscores and at humps.
fn words(name: &str) -> Vec<String> {
    let is_constant = !name.contains(|char: char| char.is_lowercase());
    let mut words = vec![String::new()];
    for char in name.chars() {
        let begins = char == '_' || (char.is_uppercase() && !is_constant);
        if begins && words.last().is_some_and(|word| !word.is_empty()) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| char != '_') {
            word.extend(char.to_lowercase());
        }
    }
    words
}

/// Returns the names that a file defines, without those of uses of other items.
fn defined_names(source: &Source) -> Vec<Ident> {
    let mut names = Names(Vec::new());
    names.visit_file(&source.file);
    names.0
}

struct Names(Vec<Ident>);

impl Names {
    fn add(&mut self, name: &Ident) {
        self.0.push(name.clone());
    }

    /// Adds the functions that the tokens of a macro define.
    fn add_functions(&mut self, tokens: TokenStream) {
        let mut is_after_fn = false;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if is_after_fn {
                        self.add(&name);
                    }
                    is_after_fn = name == "fn";
                }
                TokenTree::Group(group) => self.add_functions(group.stream()),
                TokenTree::Punct(_) | TokenTree::Literal(_) => is_after_fn = false,
            }
        }
    }
}

macro_rules! add_names {
    ($($visit:ident: $node:ident => $($name:ident).+;)*) => {
        $(
            fn $visit(&mut self, node: &'ast syn::$node) {
                self.add(&node.$($name).+);
                visit::$visit(self, node);
            }
        )*
    };
}

impl<'ast> Visit<'ast> for Names {
    add_names! {
        visit_item_const: ItemConst => ident;
        visit_item_static: ItemStatic => ident;
        visit_item_struct: ItemStruct => ident;
        visit_item_enum: ItemEnum => ident;
        visit_item_union: ItemUnion => ident;
        visit_item_trait: ItemTrait => ident;
        visit_item_type: ItemType => ident;
        visit_item_mod: ItemMod => ident;
        visit_impl_item_const: ImplItemConst => ident;
        visit_trait_item_const: TraitItemConst => ident;
        visit_variant: Variant => ident;
        visit_pat_ident: PatIdent => ident;
        visit_signature: Signature => ident;
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if let Some(name) = &field.ident {
            self.add(name);
        }
        visit::visit_field(self, field);
    }

    fn visit_macro(&mut self, macro_call: &'ast syn::Macro) {
        self.add_functions(macro_call.tokens.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_bad, assert_good};
    use super::*;

    #[test]
    fn bounds_named_most_are_refused() {
        assert_bad(check_bounds, "const MOST_PAGES: u8 = 1;\nimpl A {\n    const MOST: u8 = 1;\n}\n", &[1, 3]);
        assert_good(check_bounds, "const MAX_PAGES: u8 = other::MOST_PAGES;\nfn f(most: u8) {}\n");
    }

    #[test]
    fn words_of_the_left_column_are_refused() {
        assert_bad(check_glossary, "fn hold_still() {\n    let is_engaged = 1;\n}\n", &[1, 2]);
        assert_bad(check_glossary, "struct KeeperThread {\n    carved: u8,\n}\nenum E { Shed }\n", &[1, 2, 4]);
        assert_bad(check_glossary, "proptest! {\n    fn pages_in_reach_stay(x: u8) {}\n}\n", &[2]);
        assert_good(check_glossary, "struct Housekeeper;\nfn monitor() {\n    other.tend();\n    still();\n}\n");
    }

    #[test]
    fn names_split_at_underscores_and_humps() {
        assert_eq!(words("MAX_OF_4K"), ["max", "of", "4k"]);
        assert_eq!(words("takeApart_Now"), ["take", "apart", "now"]);
        assert_eq!(words("_x"), ["x"]);
    }
}
