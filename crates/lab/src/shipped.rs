//! The scenarios that come with foliomem (`scenarios/` of its source).

/// A scenario by its name.
#[derive(Clone, Copy, Debug)]
pub struct Shipped {
    /// Name of the file, without `.toml`.
    pub name: &'static str,
    /// What the file says.
    pub text: &'static str,
}

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        /// All of them.
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

/// The shipped scenario of that name.
pub fn find(name: &str) -> Option<&'static Shipped> {
    SHIPPED.iter().find(|shipped| shipped.name == name)
}
