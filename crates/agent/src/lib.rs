//! The agent's library, which `foliomem run` preloads into a program.
//!
//! It exports only hooks (a test checks the built library), and does nothing unless
//! `FOLIOMEM_CONTROL` names the control segment of a run. Its constructor claims a slot in the
//! segment, reports that it has started, and starts the companion (`foliomem_runtime::companion`).
//! From then on the library's code runs in the companion, around forks, and in hooks.
//!
//! Rules for code in this library: it never calls the program's malloc (`foliomem_sys::heap`), has
//! no thread-local storage, writes nothing to stdout, keeps `errno`, and binds no symbol lazily.

mod c_library;
mod hooks;
mod objects;
mod real;
mod start;
mod valgrind;

#[global_allocator]
static HEAP: foliomem_sys::heap::AgentHeap = foliomem_sys::heap::AgentHeap::new();
