//! What the child of a fork does: its thread starts a companion, which takes over the engine.
//!
//! The engine, the arena and the store are the child's own consistent copies. The functions run
//! before the child's thread returns to the program, and while no other thread of the child exists:
//! they take locks in any order.

use crate::address_space::ranges::{Ranges, pages};
use crate::companion::activate::{open_descriptors, start_workers, wait_for_custody};
use crate::companion::activated::Activated;
use crate::companion::context::{open_in, open_proc};
use crate::companion::end::fail_in_program;
use crate::companion::error::RuntimeError;
use crate::companion::guard::start_guard;
use crate::companion::start::start_companion;
use crate::ports::machine::Descriptors;
use crate::runtime::Runtime;
use foliomem_sys::companion_process::Adoption;
use foliomem_sys::filters;
use foliomem_sys::maps;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// In the child of a fork: starts its companion. If a filter for system calls kills that, it is
/// started without the calls that do.
pub(crate) fn start_childs_companion(runtime: &'static Runtime) -> Result<(), RuntimeError> {
    match start_companion(runtime, Adoption::ByOthers) {
        Err(RuntimeError::CompanionKilled) if filters::rehearse(&runtime.companion) => {
            start_companion(runtime, Adoption::ByOthers)
        }
        started => started,
    }
}

/// In the child of a fork, which has no companion: maps all its memory in, and goes on without the
/// agent and without the limit.
pub(crate) fn go_on_alone(runtime: &'static Runtime, error: &RuntimeError) {
    let (control, process) = (runtime.context.budget.control(), rustix::process::getpid());
    if let Some(activated) = runtime.activation.activated.get() {
        let machine = activated.engine.machine();
        if activated.engine.file_slots() > 0 && runtime.fork.swap_file.descriptor().is_none() {
            fail_in_program(runtime, &RuntimeError::SwapFile(Errno::NOENT));
        }
        // SAFETY: the companion has ended, and only this thread has come along in the fork.
        unsafe { machine.detach(runtime.fork.swap_file.descriptor()) };
        // SAFETY: what has been handed over is open until the end of the fork.
        let handed = runtime.fork.proc.descriptor().map(|proc| unsafe { BorrowedFd::borrow_raw(proc) });
        let maps = match handed {
            Some(proc) => open_in(proc, "self/maps"),
            None => open_proc().and_then(|proc| open_in(&proc, "self/maps")),
        };
        if let Ok(maps) = maps {
            forget_unmapped(activated, &maps);
        }
        activated
            .engine
            .bring_all_in(&mut machine.worker(runtime.context.settings.codec, runtime.context.settings.recompress));
        machine.leave_swap_file();
        machine.give_arena_back();
    }
    control.process(runtime.context.budget.slot()).mark_ended();
    // Release pairs with the Acquire of the hooks: all memory is back.
    runtime.fork.is_off.store(true, Ordering::Release);
    control.notice(format_args!(
        "process {process} goes on without the limit: {error}",
        process = process.as_raw_nonzero()
    ));
}

/// The child's monitor: takes over the engine, with descriptors of the child's own.
pub(crate) fn take_over_engine(runtime: &'static Runtime) -> Result<(), RuntimeError> {
    let Some(activated) = runtime.activation.get() else { unreachable!("the parent had activated") };
    let descriptors = open_descriptors(runtime)?;
    if activated.engine.machine().has_swap_file() {
        take_over_swap_file(activated, &descriptors)?;
    }
    forget_unmapped(activated, &descriptors.maps);
    forget_wiped(runtime, activated)?;
    // SAFETY: the forking thread waits for this monitor; no other thread of the agent exists.
    unsafe { activated.engine.machine().rearm(descriptors)? };
    activated.engine.mark_all();
    activated.engine.machine().allow_forks(false);
    start_guard(runtime)?;
    start_workers(runtime)?;
    // The child's thread still waits.
    wait_for_custody(runtime);
    Ok(())
}

/// In the child of a fork: forgets what the parent has unmapped at the last instant.
fn forget_unmapped(activated: &Activated, maps: &OwnedFd) {
    let ranges = activated.engine.machine().ranges();
    let mapped = Ranges::default();
    maps::for_each(maps, &mut |mapping| mapped.insert(mapping.start..mapping.end));
    for gone in ranges.snapshot().into_iter().flat_map(|range| mapped.missing(range)) {
        activated.engine.machine().unmapped(gone.clone());
        activated.engine.unmapped(pages(&gone));
    }
}

/// In the child of a fork: forgets what the kernel has wiped (MADV_WIPEONFORK), wherever it was.
/// The program may have advised that by an inline system call, so only the kernel knows what it is.
/// What was resident is known to be absent; to ask about the rest takes about as long as the kernel
/// takes to copy the page tables.
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

/// In the child of a fork: what the parent had in the swap file is the child's, too.
fn take_over_swap_file(activated: &Activated, descriptors: &Descriptors) -> Result<(), RuntimeError> {
    let engine = &activated.engine;
    engine.borrow_file();
    let is_adopted = engine.machine().adopt_swap_file();
    let is_needed = engine.file_slots() > 0;
    if is_needed && (descriptors.swap_file.is_none() || !is_adopted) {
        return Err(RuntimeError::SwapFile(Errno::NOENT));
    }
    Ok(())
}
