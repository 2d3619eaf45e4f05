#![no_main]
#![allow(dead_code, unused_imports)]
#[path = "../../crates/core/tests/engine_model/main.rs"]
mod engine_model;
libfuzzer_sys::fuzz_target!(|data: &[u8]| engine_model::fuzz(data));
