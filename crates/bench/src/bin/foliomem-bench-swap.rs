//! The process that `foliomem bench swap` measures: the agent is a part of it, and so is the
//! agent's heap, because the agent's threads must not use that of the C library.
#![forbid(unsafe_code)]

use foliomem_sys::heap::AgentHeap;
use std::process::ExitCode;

#[global_allocator]
static HEAP: AgentHeap = AgentHeap::new();

fn main() -> ExitCode {
    foliomem_bench::swap_child::measure(std::env::args().skip(1))
}
