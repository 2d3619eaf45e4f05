//! The guard: a process that stops the program if the companion is killed.
//!
//! It runs from activation on, with the companion's descriptors, so it holds the userfaultfd open.
//! It takes no lock and does not allocate: the companion may have been killed while it held the
//! heap's lock, or another.

use crate::companion::end::stop_program;
use crate::companion::error::RuntimeError;
use crate::companion::memory_users;
use crate::companion::start::set_name;
use crate::runtime::Runtime;
use foliomem_sys::pagemap;
use foliomem_sys::signals;
use foliomem_sys::thread;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

extern "C" fn guard_entry(argument: *mut u8) {
    // SAFETY: `start_guard` passes the runtime, which lives as long as the memory.
    let runtime: &'static Runtime = unsafe { &*argument.cast::<Runtime>() };
    set_name(c"foliomem-guard");
    guard(runtime);
}

/// Waits until the companion ends. If the companion was killed, the program must not go on: its
/// swapped-out memory is lost, and would read as zeros when the last userfaultfd is closed.
fn guard(runtime: &'static Runtime) -> ! {
    // On a busy machine, the companion may end before its guard gets a CPU.
    match runtime.companion.process().map(memory_users::open_pidfd) {
        Some(Ok(Some(pidfd))) => {
            let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
            let mut polled = poll(&mut ended, None);
            while polled == Err(Errno::INTR) {
                polled = poll(&mut ended, None);
            }
            if polled.is_err() {
                // The program may have unmapped this stack: a retry would fail for ever. The access
                // to other memory of the agent ends this process then.
                runtime.companion.wait_for_end();
            }
        }
        Some(Ok(None)) => runtime.companion.wait_for_end(),
        None | Some(Err(_)) => {}
    }
    if !runtime.companion.ends_by_itself() {
        if has_crashed(runtime) {
            // The supervisor reports the reason.
            stop_program(runtime);
        } else {
            stop_lost_program(runtime);
        }
    }
    thread::exit_process(0)
}

/// Returns whether the companion, which has ended, has crashed because the program has unmapped or
/// discarded agent memory. Then only the program is stopped, and not the run: without the agent the
/// program would crash, too.
fn has_crashed(runtime: &'static Runtime) -> bool {
    let Some(files) = &*runtime.context.files else { return false };
    let companion = runtime.companion.number();
    let stat = memory_users::open_in(&files.proc, format_args!("{companion}/stat"));
    // The supervisor marks the crash before it reaps the companion.
    let status = stat.and_then(pagemap::exit_status).filter(|&status| status != 0);
    let control = runtime.context.budget.control();
    status.map_or_else(
        || control.process(runtime.context.budget.slot()).has_crashed(),
        |status| signals::is_crash(status & 0x7f),
    )
}

fn stop_lost_program(runtime: &'static Runtime) -> ! {
    runtime.context.budget.control().fail(format_args!(
        "the companion process of process {} was killed: stopped, because only that can bring back swapped-out memory",
        runtime.companion.program().as_raw_nonzero()
    ));
    stop_program(runtime);
    thread::exit_process(0)
}

/// Starts the guard. The monitor calls this if there is no guard. Fails if the process cannot be
/// created.
pub(crate) fn start_guard(runtime: &'static Runtime) -> Result<(), RuntimeError> {
    let argument = std::ptr::from_ref(runtime).cast_mut().cast();
    // SAFETY: the runtime lives as long as the memory. Only the monitor starts the guard, and only
    // if there is none.
    unsafe { runtime.companion.start_guard(guard_entry, argument) }.map_err(RuntimeError::Companion)
}
