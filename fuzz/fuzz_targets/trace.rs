#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| foliomem_trace::fuzz::trace(data));
