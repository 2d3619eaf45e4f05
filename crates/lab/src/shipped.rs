//! The scenarios shipped with foliomem (`scenarios/` of the source).

/// A shipped scenario.
#[derive(Clone, Copy, Debug)]
pub struct Shipped {
    /// The file's name without `.toml`.
    pub name: &'static str,
    /// The text of the file.
    pub text: &'static str,
}

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        /// All shipped scenarios.
        pub const SHIPPED: &[Shipped] =
            &[$(Shipped { name: $name, text: include_str!(concat!("../../../scenarios/", $name, ".toml")) }),*];
    };
}

shipped![
    "swap-allocator",
    "kernel-build-64k",
    "kernel-build-all-sizes",
    "kernel-build-roomy",
    "usemem",
    "swap-bandwidth",
    "vm-scalability"
];

/// Returns the shipped scenario `name`.
pub fn find(name: &str) -> Option<&'static Shipped> {
    SHIPPED.iter().find(|shipped| shipped.name == name)
}
