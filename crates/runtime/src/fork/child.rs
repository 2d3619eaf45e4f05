//! The child's side of a fork: its thread starts a companion, which takes over the engine.
//!
//! The engine, the arena and the store are the child's own consistent copies. The functions run
//! before the child's thread returns to the program, while no other thread of the child exists:
//! they take locks in any order.

use crate::address_space::ranges::{Ranges, pages};
use crate::companion::activate::{open_descriptors, start_workers, wait_for_custody};
use crate::companion::activated::Activated;
use crate::companion::context::{open_in, open_proc};
use crate::companion::end::fail_in_program;
use crate::companion::error::RuntimeError;
use crate::companion::guard::start_guard;
use crate::companion::start::start_companion;
use crate::ports::attachment::Descriptors;
use crate::ports::swap::Swap;
use crate::runtime::Runtime;
use foliomem_sys::companion_process::Children;
use foliomem_sys::maps;
use foliomem_sys::seccomp::{self, Call};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::Pid;
use std::sync::atomic::Ordering;

/// Starts the companion of the child of a fork, which has the pid `own`. If a system call filter
/// kills the companion, starts it again without the calls that do. Fails as [`start_companion`]
/// does.
pub(crate) fn start_childs_companion(runtime: &'static Runtime, own: Pid) -> Result<(), RuntimeError> {
    match start_companion(runtime, own, Children::None) {
        Err(RuntimeError::CompanionKilled) if seccomp::rehearse(&runtime.companion) => {
            start_companion(runtime, own, Children::None)
        }
        started => started,
    }
}

/// Maps in all memory of the child of a fork that has no companion. The child goes on without the
/// agent and without the limit.
pub(crate) fn go_on_alone(runtime: &'static Runtime, own: Pid, error: &RuntimeError) {
    let control = runtime.context.budget.control();
    if let Some(activated) = runtime.activation.activated.get() {
        let ports = activated.engine.ports();
        if activated.engine.file_slots() > 0 && runtime.fork.swap_file.descriptor().is_none() {
            fail_in_program(runtime, &RuntimeError::SwapFile(Errno::NOENT));
        }
        runtime.fork.restore_huge_pages();
        // SAFETY: the companion has ended, and the fork has copied only this thread.
        unsafe { ports.detach(runtime.fork.swap_file.descriptor()) };
        // SAFETY: a descriptor that was handed over is open until the end of the fork.
        let handed = runtime.fork.proc.descriptor().map(|proc| unsafe { BorrowedFd::borrow_raw(proc) });
        let open = || match handed {
            Some(proc) => open_in(proc, "self/maps"),
            None => open_proc().and_then(|proc| open_in(&proc, "self/maps")),
        };
        if let Some(Ok(maps)) = seccomp::allow(Call::Openat).then(open) {
            forget_unmapped(activated, &maps);
        }
        activated
            .engine
            .bring_all_in(&mut ports.codec.worker(runtime.context.settings.codec, runtime.context.settings.recompress));
        ports.swap.iter().for_each(Swap::leave);
        ports.arena.give_back();
    }
    control.process(runtime.context.budget.slot()).mark_ended();
    // Release pairs with the Acquire of the hooks: all memory is resident.
    runtime.fork.is_off.store(true, Ordering::Release);
    control
        .notice(format_args!("process {process} goes on without the limit: {error}", process = own.as_raw_nonzero()));
}

/// Takes over the engine, with descriptors of the child's own. The child's monitor calls this.
/// Fails if the child cannot reach its memory or start its threads.
pub(crate) fn take_over_engine(runtime: &'static Runtime) -> Result<(), RuntimeError> {
    let Some(activated) = runtime.activation.get() else { unreachable!("the parent had activated") };
    let descriptors = open_descriptors(runtime)?;
    if let Some(swap) = &activated.engine.ports().swap {
        take_over_swap_file(activated, swap, &descriptors)?;
    }
    forget_unmapped(activated, &descriptors.maps);
    forget_wiped(runtime, activated)?;
    // SAFETY: the forking thread waits for this monitor; no other thread of the agent exists.
    unsafe { activated.engine.ports().rearm(descriptors)? };
    // From here on only the agent fills pages.
    activated.engine.remove_strays()?;
    runtime.fork.restore_huge_pages();
    activated.engine.mark_all();
    activated.engine.ports().space.forbid_forks();
    runtime.sharing.throttle.forks(&runtime.context.budget, &activated.engine, &runtime.fork.quiesce.needed());
    start_guard(runtime)?;
    let handlers = start_workers(runtime)?;
    runtime.workers.release(handlers);
    // The child's thread still waits.
    wait_for_custody(runtime);
    Ok(())
}

/// Forgets memory that the parent has unmapped at the last moment.
fn forget_unmapped(activated: &Activated, maps: &OwnedFd) {
    let space = &activated.engine.ports().space;
    let mapped = Ranges::default();
    maps::for_each(maps, &mut |mapping| mapped.insert(mapping.start..mapping.end));
    for gone in space.ranges().snapshot().into_iter().flat_map(|range| mapped.missing(range)) {
        space.unmapped(gone.clone());
        activated.engine.unmapped(pages(&gone));
    }
}

/// Forgets memory that the kernel has wiped in the child (MADV_WIPEONFORK), resident or swapped
/// out. The program may have made the call with an inline system call, so only `smaps` shows it.
/// Resident pages are known to be absent; reading `smaps` for the others takes about as long as
/// copying the page tables.
fn forget_wiped(runtime: &'static Runtime, activated: &Activated) -> Result<(), RuntimeError> {
    if activated.engine.has_content_out() {
        maps::for_each_flagged(&runtime.context.open("self/smaps")?, &mut |range, flags| {
            if flags.split(|&byte| byte == b' ').any(|flag| flag == b"wf") {
                activated.engine.unmapped(pages(&range));
            }
        });
    }
    Ok(())
}

/// Makes the child the owner of its share of the swap file. Fails if the child needs the file and
/// cannot reach it.
fn take_over_swap_file(activated: &Activated, swap: &Swap, descriptors: &Descriptors) -> Result<(), RuntimeError> {
    let engine = &activated.engine;
    engine.borrow_file();
    let is_adopted = swap.adopt();
    let is_needed = engine.file_slots() > 0;
    if is_needed && (descriptors.swap_file.is_none() || !is_adopted) {
        return Err(RuntimeError::SwapFile(Errno::NOENT));
    }
    Ok(())
}
