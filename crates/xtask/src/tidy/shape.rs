//! The rules about the length of files and functions, and about boolean parameters.

use super::Finding;
use super::source::Source;
use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, FnArg, Signature, Type, Visibility};

/// Maximum lines of a file.
const MAX_FILE_LINES: usize = 800;
/// Maximum lines of a function, from `fn` to its last brace.
const MAX_FUNCTION_LINES: usize = 70;

/// Refuses files over [`MAX_FILE_LINES`] and functions over [`MAX_FUNCTION_LINES`].
pub fn check_length(source: &Source, findings: &mut Vec<Finding>) {
    let lines = source.text.lines().count();
    if lines > MAX_FILE_LINES {
        let reason = format!("the file has {lines} lines, more than {MAX_FILE_LINES}");
        findings.push(Finding { rule: "file-length", path: source.path.clone(), line: 1, reason });
    }
    for function in functions(source) {
        let Some(block) = function.block else { continue };
        let first = function.signature.fn_token.span.start().line;
        let lines = block.brace_token.span.close().end().line + 1 - first;
        if lines > MAX_FUNCTION_LINES {
            let name = &function.signature.ident;
            let reason = format!("`{name}` has {lines} lines, more than {MAX_FUNCTION_LINES}");
            findings.push(Finding { rule: "function-length", path: source.path.clone(), line: first, reason });
        }
    }
}

/// Refuses boolean parameters of public functions: an enum names both cases.
pub fn check_bool_parameters(source: &Source, findings: &mut Vec<Finding>) {
    for function in functions(source).iter().filter(|function| function.is_public) {
        for span in bool_parameters(function.signature) {
            let name = &function.signature.ident;
            let reason = format!("`{name}` is public and has a boolean parameter: an enum names both cases");
            let line = span.start().line;
            findings.push(Finding { rule: "bool-parameter", path: source.path.clone(), line, reason });
        }
    }
}

fn bool_parameters(signature: &Signature) -> impl Iterator<Item = Span> {
    signature.inputs.iter().filter_map(|input| match input {
        FnArg::Typed(parameter) => match &*parameter.ty {
            Type::Path(path) if path.path.is_ident("bool") => Some(parameter.span()),
            _ => None,
        },
        FnArg::Receiver(_) => None,
    })
}

struct Function<'ast> {
    is_public: bool,
    signature: &'ast Signature,
    block: Option<&'ast Block>,
}

/// Returns the functions and methods of a file, without those inside macros.
fn functions(source: &Source) -> Vec<Function<'_>> {
    let mut functions = Functions { all: Vec::new(), is_trait_public: false };
    functions.visit_file(&source.file);
    functions.all
}

struct Functions<'ast> {
    all: Vec<Function<'ast>>,
    /// Whether the trait that is being visited is public, and so are its methods.
    is_trait_public: bool,
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

impl<'ast> Visit<'ast> for Functions<'ast> {
    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        let (is_public, signature) = (is_public(&function.vis), &function.sig);
        self.all.push(Function { is_public, signature, block: Some(&function.block) });
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        let (is_public, signature) = (is_public(&function.vis), &function.sig);
        self.all.push(Function { is_public, signature, block: Some(&function.block) });
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        let before = std::mem::replace(&mut self.is_trait_public, is_public(&item.vis));
        visit::visit_item_trait(self, item);
        self.is_trait_public = before;
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        let (is_public, signature) = (self.is_trait_public, &function.sig);
        self.all.push(Function { is_public, signature, block: function.default.as_ref() });
        visit::visit_trait_item_fn(self, function);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_bad, assert_good};
    use super::*;

    #[test]
    fn long_files_are_refused() {
        assert_bad(check_length, &"const A: u8 = 1;\n".repeat(MAX_FILE_LINES + 1), &[1]);
        assert_good(check_length, &"const A: u8 = 1;\n".repeat(MAX_FILE_LINES));
    }

    #[test]
    fn long_functions_are_refused() {
        let function = |lines: usize| format!("/// Doc.\n#[inline]\nfn f() {{\n{}}}\n", "    g();\n".repeat(lines - 2));
        assert_bad(check_length, &function(MAX_FUNCTION_LINES + 1), &[3]);
        assert_good(check_length, &function(MAX_FUNCTION_LINES));
        let method = function(MAX_FUNCTION_LINES + 1);
        assert_bad(check_length, &format!("impl A {{\n{method}}}\ntrait B {{\n{method}}}\n"), &[4, 79]);
    }

    #[test]
    fn boolean_parameters_of_public_functions_are_refused() {
        assert_bad(check_bool_parameters, "pub fn f(a: u8, is_b: bool) {}\n", &[1]);
        assert_bad(check_bool_parameters, "impl A {\n    pub fn f(&self, is_b: bool) {}\n}\n", &[2]);
        assert_bad(check_bool_parameters, "pub trait A {\n    fn f(&self, is_b: bool);\n}\n", &[2]);
        assert_good(check_bool_parameters, "fn f(is_b: bool) {}\npub(crate) fn g(is_b: bool) {}\n");
        assert_good(check_bool_parameters, "pub fn f(kind: Kind) -> bool {}\ntrait A {\n    fn f(is_b: bool);\n}\n");
    }
}
