//! Linker options of the agent.

/// Functions that the agent exports as hooks, and that std or a C library inside the agent calls.
/// The linker redirects such a call to `__wrap_NAME` of `src/c_library.rs`. Otherwise it would
/// reach a definition of the program.
const WRAPPED: [&str; 9] =
    ["syscall", "prctl", "mmap", "mmap64", "madvise", "malloc", "calloc", "realloc", "dl_iterate_phdr"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/c_library/memory.s");
    for name in WRAPPED {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
}
