//! Finding the program's memory and taking it over.
//!
//! The agent manages private anonymous memory that may be read and written and not executed,
//! wherever it comes from (malloc, mmap, a run time's heap). Exceptions are the main stack, thread
//! stacks, the agent's own memory, and the static data of the libraries the program started with,
//! which the agent's threads may use.
//!
//! An inaccessible mapping right above a managed one may be a *reserve*, into which the managed one
//! grows step by step (the heap of one of malloc's arenas, or of a run time). Its lowest part, the
//! *window*, is not registered, so that small steps cost no more than without the agent. The rest
//! is registered. When the mapping grows beyond the window, a fault follows: the window, by then
//! full, is adopted, and the next one opened.
//!
//! A mapping is adopted in this order:
//! 1. The list of mappings is read.
//! 2. All pending mapping events are received: a range that was unmapped and mapped anew must not
//!    be dropped later.
//! 3. The range is registered, so that first touches fault.
//! 4. The registered part is looked up: the program may have unmapped a part before, and mapped
//!    something else there since.
//! 5. The resident pages become folios.
//!
//! Lock order: inside the gate; takes the lock of the mappings, then the engine's.

use crate::address_space::allocation_notice::Paused;
use crate::address_space::mapping_events::{MappingEvents, PendingFaults};
use crate::address_space::ranges::{Ranges, pages};
use crate::companion::placement::APART_WHILE_GROWING_NS;
use crate::ports::machine::LinuxMachine;
use crate::ports::pieces::Worker;
use foliomem_core::machine::Machine;
use foliomem_sys::maps::{self, Kind, Mapping};
use foliomem_sys::pagemap;
use foliomem_sys::thread_control_block;
use foliomem_sys::userfaultfd;
use foliomem_types::trace_event::Event;
use foliomem_types::units::{PAGE_BYTES, PageNumber};
use std::ops::Range;

/// A mapping of at most this many bytes that forbids all access, right below another of at most
/// `STACK_MAX_BYTES`, may be the guard of a thread's stack. Twice what `ulimit -s` mostly is:
/// allocators have guards, too.
const GUARD_MAX_BYTES: usize = 64 << 10;
const STACK_MAX_BYTES: usize = 16 << 20;
/// Where the C library puts a heap of a thread's arena, right above what is left of the heap below
/// it.
const HEAP_ALIGN_BYTES: usize = 64 << 20;

/// The window of a reserve is this share of the limit (1/2^8), and so large at least: a program
/// that fills it takes no more before somebody notices.
const WINDOW_SHIFT: u32 = 8;
const WINDOW_MIN_PAGES: i64 = (256 << 10) / PAGE_BYTES as i64;

fn window_bytes(events: MappingEvents) -> usize {
    (events.context.budget.limit_pages() >> WINDOW_SHIFT).max(WINDOW_MIN_PAGES) as usize * PAGE_BYTES
}

/// Adopts every unmanaged mapping; whether there was one.
pub(crate) fn adopt_mappings(events: MappingEvents) -> bool {
    let advices = events.activated.engine.machine().advices();
    let mapped = advices.has_waiting().then(Ranges::default);
    // Threads that map all the time would keep the kernel's lock of the mappings, and what they map
    // between the look and the registration would be missed.
    let paused = events.allocations.pause();
    let found = find(events, &EVERYTHING, mapped.as_ref());
    mapped.iter().for_each(|mapped| advices.forget_unmapped(mapped));
    adopt(events, paused, found, || {})
}

/// Adopts what is not managed yet of `within`, and calls `registered` before it looks for pages
/// there that have been touched: those that are touched from then on fault. Whether there was
/// anything.
pub(crate) fn adopt_part(events: MappingEvents, within: &Range<usize>, registered: impl FnOnce()) -> bool {
    let paused = events.allocations.pause();
    let mut found = find(events, within, None);
    found.parts.retain(|part| part.start < within.end && within.start < part.end);
    adopt(events, paused, found, registered)
}

/// `page`, where nothing is known, is registered, and somebody waits for it: adopts what a mapping
/// has grown by, and waits until there is room for the next window.
pub(crate) fn adopt_growth(events: MappingEvents, worker: &mut Worker, page: PageNumber) {
    let (address, window) = (page.address() as usize, window_bytes(events));
    adopt_part(events, &(address.saturating_sub(window)..address + window), || {});
    let machine = events.activated.engine.machine();
    if machine.ranges().containing(address).is_some() {
        return events.activated.engine.charge_copies(worker, (window / PAGE_BYTES) as u32);
    }
    let Some(_steady) = machine.steady() else { return };
    if machine.ranges().containing(address).is_none() {
        // It has become something that is not managed, or it would be asked for again and again.
        let _ = machine.zero_in(page);
    }
}

/// Leaves the reserves at `range` to the kernel, which joins what registering has set apart. Where
/// there are none, it has grown while its beginning was being registered: then all of it is.
pub(crate) fn join_mappings(events: MappingEvents, range: &Range<usize>) {
    let mut pending = PendingFaults::default();
    let machine = events.activated.engine.machine();
    if machine.reserved(range.clone()).is_empty() {
        adopt_part(events, range, || {});
        return;
    }
    {
        let _received = events.receive_changes(&mut pending);
        machine.reserved(range.clone()).into_iter().for_each(|part| machine.let_go(part));
    }
    raise_again(machine, pending);
}

/// Has the threads that wait for received faults raise them again.
fn raise_again(machine: &LinuxMachine, mut pending: PendingFaults) {
    while let Some(fault) = pending.pop() {
        machine.fault_again(fault.page);
    }
}

/// What is not as it should be, in ascending order.
#[derive(Default)]
struct Found {
    /// What can be managed and is not.
    parts: Vec<Range<usize>>,
    /// Reserves without their windows, not registered yet.
    reserves: Vec<Range<usize>>,
    /// Registered yet: windows, and what reserves have become that cannot be managed.
    others: Vec<Range<usize>>,
}

/// All there is.
const EVERYTHING: Range<usize> = 0..usize::MAX;

fn adopt(
    events: MappingEvents,
    paused: Paused<'_>,
    Found { mut parts, reserves, others }: Found,
    registered_all: impl FnOnce(),
) -> bool {
    if parts.is_empty() && reserves.is_empty() && others.is_empty() {
        registered_all();
        return false;
    }
    // While the program grows, its faults must not wait for a follower that it keeps from its CPU.
    events.placement.come_apart(APART_WHILE_GROWING_NS);
    let mut pending = PendingFaults::default();
    let machine = events.activated.engine.machine();
    {
        let _received = events.receive_changes(&mut pending);
        // The program may have registered a part with a userfaultfd of its own, which serves it. After another
        // failure the next look finds the range again.
        let program = &machine.descriptors().program;
        parts.retain(|range| program.register(range.start, range.end - range.start, userfaultfd::Mode::Faults).is_ok());
        reserves.into_iter().for_each(|range| machine.reserve(range));
        others.into_iter().for_each(|range| machine.let_go(range));
    }
    let registered = insert_registered(events, &parts, &mut pending);
    registered_all();
    drop(paused);
    for range in registered {
        if events.context.tracer.is_on() {
            trace_present(events, machine, &range);
        }
        let mut rest = pages(&range);
        while let Err(left) = events.activated.engine.adopt(rest) {
            drop(events.receive_changes(&mut pending));
            rest = left;
        }
    }
    raise_again(machine, pending);
    true
}

/// Adds to the managed ranges what of `candidates` is registered, and returns it.
fn insert_registered(
    events: MappingEvents,
    candidates: &[Range<usize>],
    pending: &mut PendingFaults,
) -> Vec<Range<usize>> {
    let machine = events.activated.engine.machine();
    let (uffd, maps) = (&machine.descriptors().program, &machine.descriptors().maps);
    loop {
        let _received = events.receive_changes(pending);
        let mut registered = Vec::new();
        machine.advices().hear(machine.ranges());
        maps::for_each_around(maps, candidates, &mut |mapping| {
            let after = candidates.partition_point(|range| range.end <= mapping.start);
            for range in candidates[after..].iter().take_while(|range| range.start < mapping.end) {
                let part = range.start.max(mapping.start)..range.end.min(mapping.end);
                if uffd.is_registered(part.start) {
                    registered.push((part, mapping.clone()));
                }
            }
        });
        // A mapping event that is pending by now ends only after it is received.
        if uffd.mapping_is_changing() {
            continue;
        }
        for (part, mapping) in &registered {
            if mapping.kind == Kind::Heap {
                events.allocations.note_managed_heap(part.end);
            }
            machine.adopt_range(part.clone(), mapping.start..mapping.end);
            machine.prepare_for_huge(part.clone());
            events.context.tracer.tell(&events.context.budget, || Event::Map(pages(part)));
        }
        return registered.into_iter().map(|(part, _)| part).collect();
    }
}

/// Traces the pages that were resident before they were managed.
fn trace_present(events: MappingEvents, machine: &LinuxMachine, range: &Range<usize>) {
    pagemap::present(&machine.descriptors().pagemap, range.start, range.end, &mut |run| {
        events.context.tracer.filled(&events.context.budget, pages(&run));
    });
}

/// Of mappings of which a part of `within` is not managed; `mapped` gets all of these, and what is
/// managed.
fn find(events: MappingEvents, within: &Range<usize>, mapped: Option<&Ranges>) -> Found {
    let machine = events.activated.engine.machine();
    let window = window_bytes(events);
    // To ask registers the page, which must not happen to the arena: its pages would fault.
    let is_registered = |mapping: &Mapping| {
        let first = mapping.start..mapping.start + PAGE_BYTES;
        !events.context.agent_memory.outside(first).is_empty()
            && machine.descriptors().program.is_registered(mapping.start)
    };
    let mut found = Found::default();
    let mut before: Option<(Mapping, bool)> = None;
    // What is managed need not be looked at, whatever the kernel calls it.
    mapped.iter().for_each(|mapped| mapped.insert_all(machine.ranges()));
    let unknown = machine.ranges().missing(within.clone());
    maps::for_each_around(&machine.descriptors().maps, &unknown, &mut |mapping| {
        mapped.iter().for_each(|mapped| mapped.insert(mapping.start..mapping.end));
        let below = before.as_ref().filter(|(below, _)| below.end == mapping.start);
        // The kernel registers a mapping as a whole: what has grown is managed whatever lies below
        // it now.
        let is_managed = may_be_managed(mapping)
            && (!below.is_some_and(|(below, _)| may_be_stack(mapping, below))
                || is_registered(mapping)
                || !thread_control_block::is_at_top(&machine.descriptors().memory, &(mapping.start..mapping.end)));
        if is_managed {
            for part in events.context.agent_memory.outside(mapping.start..mapping.end) {
                found.parts.extend(machine.ranges().missing(part));
            }
        } else if is_private_anonymous(mapping) {
            let is_accessible = mapping.readable || mapping.writable || mapping.executable;
            let window_end = mapping.end.min(mapping.start + window);
            match below {
                _ if is_accessible && is_registered(mapping) => {
                    found.others.extend(machine.ranges().missing(mapping.start..mapping.end));
                }
                Some((_, true)) if !is_accessible && is_registered(mapping) => {
                    found.others.extend(machine.ranges().missing(mapping.start..window_end));
                }
                Some((below, true))
                    if !is_accessible && is_reserve(mapping, below) && mapping.end - window_end > window =>
                {
                    found.reserves.extend(events.context.agent_memory.outside(window_end..mapping.end));
                }
                _ => {}
            }
        }
        before = Some((mapping.clone(), is_managed));
    });
    found
}

/// Whether `mapping`, which forbids all access right above one that is managed, is for that to grow
/// into. A thread's stack, which forbids access for a moment when it is made, is smaller, and does
/// not end where an arena's heap does.
fn is_reserve(mapping: &Mapping, below: &Mapping) -> bool {
    let is_rest_of_heap = mapping.end.is_multiple_of(HEAP_ALIGN_BYTES) && below.start <= mapping.end - HEAP_ALIGN_BYTES;
    is_rest_of_heap || mapping.end - mapping.start > STACK_MAX_BYTES
}

fn is_private_anonymous(mapping: &Mapping) -> bool {
    matches!(mapping.kind, Kind::Anonymous | Kind::Heap) && !mapping.shared
}

/// Unless it is a stack, or the agent's.
fn may_be_managed(mapping: &Mapping) -> bool {
    is_private_anonymous(mapping) && mapping.readable && mapping.writable && !mapping.executable
}

/// Whether `mapping` is one if a control block lies at its top.
fn may_be_stack(mapping: &Mapping, below: &Mapping) -> bool {
    let is_guard = !below.readable && !below.writable && below.end - below.start <= GUARD_MAX_BYTES;
    is_guard && mapping.end - mapping.start <= STACK_MAX_BYTES && !mapping.start.is_multiple_of(HEAP_ALIGN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_above_a_guard_may_be_a_stack() {
        let is_stack = |line: &[u8], below: &[u8]| {
            may_be_stack(&maps::parse_line(line).unwrap(), &maps::parse_line(below).unwrap())
        };
        let page_of_guard = b"7f0000fff000-7f0001000000 ---p 00000000 00:00 0";
        assert!(is_stack(b"7f0001000000-7f0001800000 rw-p 00000000 00:00 0", page_of_guard));
        assert!(!is_stack(b"7f0001000000-7f0002001000 rw-p 00000000 00:00 0", page_of_guard), "too large");
        let heap_above_heap = b"7f0004000000-7f0004021000 rw-p 00000000 00:00 0";
        assert!(!is_stack(heap_above_heap, b"7f0003ff7000-7f0004000000 ---p 00000000 00:00 0"));
        let above_library = b"7f0001000000-7f0001800000 rw-p 00000000 00:00 0";
        assert!(!is_stack(above_library, b"7f0000fff000-7f0001000000 rw-p 0001d000 fe:00 1 /usr/lib/libz.so.1"));
    }
}
