//! Getting started, before the program's own constructors and `main`.

use crate::hooks;
use foliomem_linux::control::Control;
use foliomem_linux::heap;
use foliomem_linux::own::OwnMemory;
use foliomem_linux::runtime::Runtime;
use std::ffi::CStr;
use std::sync::OnceLock;

/// The variable that names the control segment.
const CONTROL_VARIABLE: &CStr = c"FOLIOMEM_CONTROL";

static RUNTIME: OnceLock<&'static Runtime> = OnceLock::new();

/// The agent of this process, if it is part of a run.
pub fn runtime() -> Option<&'static Runtime> {
    RUNTIME.get().copied()
}

#[used]
// SAFETY: the section holds pointers to functions of this type, which the loader calls once.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    // The agent's threads have no thread-local storage of this library.
    #[cfg(feature = "lock-ranks")]
    foliomem_core::sync::ranks::identify_threads(|| rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned());
    hooks::resolve();
    // SAFETY: the program has one thread yet, so nobody changes the environment.
    let value = unsafe { libc::getenv(CONTROL_VARIABLE.as_ptr()) };
    if value.is_null() {
        return;
    }
    // SAFETY: getenv returned a string that ends in zero and stays while nobody changes the environment.
    let path = unsafe { CStr::from_ptr(value) };
    // A process of a run whose supervisor is gone goes on unmanaged: it outlived the run. The supervisor
    // itself notices a program that never says hello.
    let Ok(control) = Control::open(path) else { return };
    let Ok(slot) = control.claim_slot(rustix::process::getpid()) else { return };
    let own = OwnMemory::new(heap::ranges);
    own.add_libraries();
    match Runtime::start(control, slot, own) {
        Ok(runtime) => {
            let _ = RUNTIME.set(runtime);
            control.hello();
        }
        Err(error) => control.fail(format_args!("{error}")),
    }
}
