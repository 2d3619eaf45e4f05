#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| foliomem_sys::fuzz::maps(data));
