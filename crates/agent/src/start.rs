//! The start of the agent, before the program's constructors and `main`. There is no lock.

use crate::{hooks, valgrind};
use foliomem_runtime::companion;
use foliomem_runtime::runtime::Runtime;
use foliomem_session::segment::Control;
use foliomem_sys::agent_memory::AgentMemory;
use foliomem_sys::heap;
use foliomem_sys::interception::exec_environment::{CARRIED, CONTROL, carry, take_out, variables};
use foliomem_sys::interception::patches::{self, COVERED};
use foliomem_sys::loader;
use libc::{c_char, c_int};
use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

/// The variables that name the control segment, by precedence: a run inside a run has set the first
/// one.
const CONTROL_VARIABLES: [&[u8]; 2] = [CONTROL, CARRIED];

static RUNTIME: OnceLock<&'static Runtime> = OnceLock::new();

/// Returns the agent's runtime if this process is part of a run and the agent is not off.
pub fn runtime() -> Option<&'static Runtime> {
    RUNTIME.get().copied().filter(|runtime| !runtime.is_off())
}

/// Returns the name of the control segment in `variables`, which end with zero.
fn find_control<'a>(variables: impl Iterator<Item = &'a [u8]> + Clone) -> Option<&'a CStr> {
    let value = |name: &[u8]| variables.clone().find_map(|variable| variable.strip_prefix(name));
    CONTROL_VARIABLES.iter().find_map(|name| value(name)).and_then(|value| CStr::from_bytes_with_nul(value).ok())
}

/// Returns the name of the control segment in the environment with which the process was started:
/// musl passes nothing to constructors.
fn initial_control_path() -> Option<&'static CStr> {
    let environment = std::fs::read("/proc/self/environ").ok()?.leak();
    find_control(environment.split_inclusive(|&byte| byte == 0))
}

#[used]
// SAFETY: the section holds pointers to functions of this type; the loader calls each once.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = constructor;

/// Starts the agent. glibc passes constructors the arguments of `main`, so no `getenv` is
/// needed, which the program may define.
extern "C" fn constructor(_count: c_int, _arguments: *const *const c_char, environment: *const *const c_char) {
    // The agent's threads have no thread-local storage of this library.
    #[cfg(feature = "lock-ranks")]
    foliomem_sync::ranks::identify_threads(|| rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned());
    hooks::resolve();
    let path = if loader::has_musl() {
        initial_control_path()
    } else {
        // SAFETY: glibc passes the environment. The program has only this thread yet, so nobody
        // changes it.
        find_control(unsafe { variables(environment) }.map(CStr::to_bytes_with_nul))
    };
    let Some(path) = path else { return };
    // A process whose supervisor has ended goes on unmanaged: it outlived the run. If no agent of a
    // run ever starts, the supervisor notices.
    let Ok((control, device)) = Control::find(path) else { return };
    if valgrind::is_running() {
        // Valgrind makes each access itself, knows only threads of the C library, and cannot have
        // its memory moved.
        control.hello();
        control.notice(format_args!(
            "process {} runs inside valgrind, which cannot run the agent: its memory is not managed, the limit \
             does not hold for it",
            rustix::process::getpid().as_raw_nonzero()
        ));
        return;
    }
    control.learn_pid_namespace();
    let Ok(slot) = control.claim_slot(rustix::process::getpid()) else { return };
    let own = AgentMemory::new(heap::ranges);
    own.add_libraries();
    // Install the patches before any thread of the agent runs code of the C library.
    patches::install();
    if let Some(agent) = loader::own_path().filter(|_| COVERED.load(Ordering::Relaxed)) {
        carry(agent, path);
        // SAFETY: glibc passes the environment, and the program has only this thread yet.
        unsafe { take_out(environment.cast_mut().cast(), agent) };
    }
    match companion::start(control, slot, own, device) {
        Ok(runtime) => {
            patches::activate(runtime);
            let _ = RUNTIME.set(runtime);
            control.hello();
        }
        Err(error) => control.fail(format_args!("{error}")),
    }
}
