#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| foliomem_session::fuzz::shared_segment(data));
