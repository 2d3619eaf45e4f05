#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| foliomem_sys::fuzz::fork_arguments(data));
