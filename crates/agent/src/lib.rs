//! The library that `foliomem run` preloads into a program.
//!
//! It exports nothing but the hooks below (a test checks the built library) and does nothing unless
//! `FOLIOMEM_CONTROL` names the control segment of a run. Its constructor claims a slot there, says
//! hello, and starts the companion (`foliomem_runtime::companion`). From then on everything happens
//! in the companion, around forks, and in hooks.
//!
//! Rules for code in this library: no allocation from the program's malloc (see
//! `foliomem_sys::heap`), no thread-local storage, no output to stdout, `errno` kept, no symbol
//! bound lazily.

mod c_library;
mod hooks;
mod objects;
mod real;
mod start;
mod valgrind;

#[global_allocator]
static HEAP: foliomem_sys::heap::AgentHeap = foliomem_sys::heap::AgentHeap::new();
