#![no_main]
#![allow(dead_code)]
// The command has no library.
#[path = "../../crates/cli/src/policy.rs"]
mod policy;
libfuzzer_sys::fuzz_target!(|data: &[u8]| policy::fuzz(data));
