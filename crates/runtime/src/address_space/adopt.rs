//! Adoption: finds the program's memory, registers it, and makes its pages managed.
//!
//! The agent manages private anonymous memory that is readable, writable and not executable,
//! whatever allocates it (malloc, mmap, a run time's heap). Exceptions are the main stack, thread
//! stacks, agent memory, and the static data of the libraries that the program started with, which
//! the agent's threads may use.
//!
//! An inaccessible mapping right above a managed one may be a *reserve*, into which the managed one
//! grows step by step (the heap of a malloc arena, or of a run time). Its lowest part, the
//! *window*, is not registered, so that small steps cost no more than without the agent. The rest
//! is registered. When the mapping grows beyond the window, a fault follows. The agent then adopts
//! the full window and opens the next one.
//!
//! A mapping is adopted in this order:
//! 1. The list of mappings is read.
//! 2. All pending mapping events are received: a range that was unmapped and mapped again must not
//!    be dropped later.
//! 3. The range is registered, so that first touches fault.
//! 4. The registered part is looked up: the program may have unmapped a part before, and may have
//!    mapped something else there since.
//! 5. The resident pages become folios.
//!
//! Lock order: inside the gate; takes the lock of the mappings, then the engine's.

use crate::address_space::allocation_notice::Paused;
use crate::address_space::mapping_events::{MappingEvents, PendingFaults};
use crate::address_space::ranges::{Ranges, pages};
use crate::companion::placement::SEPARATE_WHILE_GROWING_NS;
use crate::ports::address_space::AddressSpace;
use crate::ports::attachment::Descriptors;
use crate::ports::pieces::Worker;
use foliomem_core::ports::AddressSpace as _;
use foliomem_sys::maps::{self, Kind, Mapping};
use foliomem_sys::pagemap;
use foliomem_sys::thread_control_block;
use foliomem_sys::userfaultfd;
use foliomem_types::trace_event::Event;
use foliomem_types::units::{PAGE_BYTES, PageNumber};
use std::ops::Range;

/// Maximum size of a stack's guard, in bytes: an inaccessible mapping right below one of at most
/// `STACK_MAX_BYTES`. The latter is twice the usual `ulimit -s`; larger mappings above a guard
/// belong to allocators.
const GUARD_MAX_BYTES: usize = 64 << 10;
const STACK_MAX_BYTES: usize = 16 << 20;
/// Alignment of the heaps of malloc arenas, in bytes: such a heap begins right above the unused
/// rest of the heap below it.
const HEAP_ALIGN_BYTES: usize = 64 << 20;

/// Size of a window as a shift of the limit (1/2^10), and its minimum: a program that fills a
/// window takes no more memory before the agent notices. Sixteen threads have sixteen windows.
const WINDOW_SHIFT: u32 = 10;
const WINDOW_MIN_PAGES: i64 = (64 << 10) / PAGE_BYTES as i64;

fn window_bytes(events: MappingEvents) -> usize {
    (events.context.budget.limit_pages() >> WINDOW_SHIFT).max(WINDOW_MIN_PAGES) as usize * PAGE_BYTES
}

/// Adopts every unmanaged mapping. Returns whether there was one.
pub(crate) fn adopt_mappings(events: MappingEvents) -> bool {
    adopt_all(events, || {})
}

/// Adopts every mapping, when the agent activates. The program grows until its memory is
/// registered, so `learn_advice` is called only then.
pub(crate) fn adopt_first(events: MappingEvents, learn_advice: impl FnOnce()) {
    adopt_all(events, learn_advice);
}

fn adopt_all(events: MappingEvents, registered: impl FnOnce()) -> bool {
    events.context.budget.counters().vm.mapping_searches.inc();
    let advices = events.activated.engine.ports().space.advices();
    let mapped = advices.has_waiting().then(Ranges::default);
    // Threads that map all the time would keep the kernel's lock of the mappings. Memory that they
    // map between the search and the registration would be missed.
    let paused = events.allocations.pause();
    let found = find(events, &EVERYTHING, mapped.as_ref());
    mapped.iter().for_each(|mapped| advices.forget_unmapped(mapped));
    adopt(events, paused, &EVERYTHING, found, Registered { at_once: registered, adopting: || {} })
}

/// Adopts the unmanaged memory in `within`. Calls `registered` when further touches fault, before
/// it searches for pages that have been touched already. Returns whether there was unmanaged
/// memory.
pub(crate) fn adopt_part(events: MappingEvents, within: &Range<usize>, registered: impl FnOnce()) -> bool {
    let paused = events.allocations.pause();
    let found = find(events, within, None);
    adopt(events, paused, within, found, Registered { at_once: || {}, adopting: registered })
}

/// Handles a fault at `page` in a registered reserve: adopts the memory by which the mapping has
/// grown, and waits until there is room for the next window.
pub(crate) fn adopt_growth(events: MappingEvents, worker: &mut Worker, page: PageNumber) {
    let (address, window) = (page.address() as usize, window_bytes(events));
    adopt_part(events, &(address.saturating_sub(window)..address + window), || {});
    let space = &events.activated.engine.ports().space;
    if space.ranges().containing(address).is_some() {
        return events.activated.engine.charge_copies(worker, (window / PAGE_BYTES) as u32);
    }
    let Some(steady) = space.steady() else { return };
    if space.ranges().containing(address).is_none() {
        // The page is in memory that is not managed. Without a zero page the thread would fault
        // again and again.
        let _ = space.map_zeros(&steady, page);
    }
}

/// Unregisters the reserves at `range`, so that the kernel merges the mappings that registering has
/// split. Without reserves, the mapping has grown while its beginning was being registered; then
/// all of it is adopted.
pub(crate) fn join_mappings(events: MappingEvents, range: &Range<usize>) {
    let mut pending = PendingFaults::default();
    let space = &events.activated.engine.ports().space;
    if space.reserved(range.clone()).is_empty() {
        adopt_part(events, range, || {});
        return;
    }
    {
        let _received = events.receive_changes(&mut pending);
        space.reserved(range.clone()).into_iter().for_each(|part| space.unregister(part));
    }
    pending.raise_again(space);
}

/// The mappings whose registration differs from what it must be, in ascending order.
#[derive(Default)]
struct Found {
    /// Mappings that can be managed and have unmanaged parts where memory is adopted.
    mappings: Vec<Range<usize>>,
    /// Reserves without their windows that are not registered.
    reserves: Vec<Range<usize>>,
    /// Registered memory that must be unregistered: windows, and reserves that have become
    /// unmanageable.
    others: Vec<Range<usize>>,
}

/// The whole address space.
const EVERYTHING: Range<usize> = 0..usize::MAX;

/// The callbacks of an adoption: `at_once` runs when further touches fault, `adopting` when the
/// ranges are also known as managed.
struct Registered<A: FnOnce(), B: FnOnce()> {
    at_once: A,
    adopting: B,
}

/// Returns the unmanaged parts of a mapping that overlap `within`.
fn unmanaged_in(ranges: &Ranges, mapping: &Range<usize>, within: &Range<usize>) -> Vec<Range<usize>> {
    let mut parts = ranges.missing(mapping.clone());
    parts.retain(|part| part.start < within.end && within.start < part.end);
    parts
}

fn adopt(
    events: MappingEvents,
    paused: Paused<'_>,
    within: &Range<usize>,
    Found { mappings, reserves, others }: Found,
    registered: Registered<impl FnOnce(), impl FnOnce()>,
) -> bool {
    if mappings.is_empty() && reserves.is_empty() && others.is_empty() {
        (registered.at_once)();
        (registered.adopting)();
        return false;
    }
    // While the program grows, its faults must not wait for a pinned handler that the program keeps
    // from its CPU.
    events.placement.separate(SEPARATE_WHILE_GROWING_NS);
    let mut pending = PendingFaults::default();
    let space = &events.activated.engine.ports().space;
    let mut parts: Vec<Range<usize>>;
    {
        let _received = events.receive_changes(&mut pending);
        // A mapping is registered as a whole. When it was found, its address may still have counted
        // as managed, because of an earlier mapping there. If only the rest were registered now,
        // the kernel would keep two mappings where the program has made one.
        parts = mappings.iter().flat_map(|mapping| unmanaged_in(space.ranges(), mapping, within)).collect();
        // The program may have registered a part with its own userfaultfd, which serves it. After
        // any other failure, the next search finds the range again.
        let program = &space.descriptors().program;
        parts.retain(|range| program.register(range.start, range.end - range.start, userfaultfd::Mode::Faults).is_ok());
        reserves.into_iter().for_each(|range| space.reserve(range));
        others.into_iter().for_each(|range| space.unregister(range));
    }
    (registered.at_once)();
    let adopted = insert_registered(events, &parts, &mut pending);
    (registered.adopting)();
    for range in adopted {
        if events.context.tracer.is_on() {
            trace_present(events, space, &range);
        }
        let mut rest = pages(&range);
        while let Err(left) = events.activated.engine.adopt(rest) {
            drop(events.receive_changes(&mut pending));
            rest = left;
        }
    }
    // Each call of the kernel above would wait 4 ms for threads that map and unmap all the time,
    // and the program would fill what they map meanwhile.
    drop(paused);
    pending.raise_again(space);
    true
}

/// Adds the registered parts of `candidates` to the managed ranges, and returns them.
fn insert_registered(
    events: MappingEvents,
    candidates: &[Range<usize>],
    pending: &mut PendingFaults,
) -> Vec<Range<usize>> {
    let space = &events.activated.engine.ports().space;
    let (uffd, maps) = (&space.descriptors().program, &space.descriptors().maps);
    loop {
        let _received = events.receive_changes(pending);
        let mut registered = Vec::new();
        space.advices().receive(space.ranges());
        maps::for_each_in(maps, candidates, &mut |mapping| {
            let after = candidates.partition_point(|range| range.end <= mapping.start);
            for range in candidates[after..].iter().take_while(|range| range.start < mapping.end) {
                let part = range.start.max(mapping.start)..range.end.min(mapping.end);
                if is_private_anonymous(mapping) && space.is_registered(part.start) {
                    registered.push((part, mapping.clone()));
                }
            }
        });
        // If a mapping event is pending, `registered` may be stale: receive the event and search
        // again.
        if uffd.mapping_is_changing() {
            continue;
        }
        for (part, mapping) in &registered {
            if mapping.kind == Kind::Heap {
                events.allocations.note_managed_heap(part.end);
            }
            space.adopt_range(part.clone(), mapping.start..mapping.end);
            space.prepare_for_huge(part.clone());
            events.context.tracer.record(&events.context.budget, || Event::Map(pages(part)));
        }
        return registered.into_iter().map(|(part, _)| part).collect();
    }
}

/// Records the pages that were resident before they became managed.
fn trace_present(events: MappingEvents, space: &AddressSpace, range: &Range<usize>) {
    pagemap::present(&space.descriptors().pagemap, range.start, range.end, &mut |run| {
        events.context.tracer.filled(&events.context.budget, pages(&run));
    });
}

/// Searches the mappings around the unmanaged parts of `within`. Adds all of them, and all managed
/// ranges, to `mapped`.
fn find(events: MappingEvents, within: &Range<usize>, mapped: Option<&Ranges>) -> Found {
    let space = &events.activated.engine.ports().space;
    let window = window_bytes(events);
    let is_agents = |page: usize| events.context.agent_memory.outside(page..page + PAGE_BYTES).is_empty();
    // `AddressSpace::is_registered` registers the page; a page of the arena would fault from then
    // on.
    let is_registered = |mapping: &Mapping| {
        !is_agents(mapping.start) && space.steady().is_some_and(|_steady| space.is_registered(mapping.start))
    };
    let is_reserved =
        |mapping: &Mapping| space.registered().containing(mapping.start).is_some() && is_registered(mapping);
    // A part of the arena is a mapping of its own for a moment. The read would fill a frame from
    // which a page moves just then.
    let is_stack = |mapping: &Mapping| {
        let Descriptors { memory, pagemap, .. } = space.descriptors();
        !is_agents(mapping.end - PAGE_BYTES)
            && thread_control_block::is_at_top(memory, pagemap, &(mapping.start..mapping.end))
    };
    let mut found = Found::default();
    let mut before: Option<(Mapping, bool)> = None;
    // Managed ranges need no search, whatever kind of mapping the kernel shows.
    mapped.iter().for_each(|mapped| mapped.insert_all(space.ranges()));
    let unknown = space.ranges().missing(within.clone());
    maps::for_each_around(&space.descriptors().maps, &unknown, &mut |mapping| {
        mapped.iter().for_each(|mapped| mapped.insert(mapping.start..mapping.end));
        let below = before.as_ref().filter(|(below, _)| below.end == mapping.start);
        // The kernel registers a mapping as a whole, so memory by which it has grown is managed,
        // whatever lies below it now.
        let is_managed = may_be_managed(mapping)
            && (!below.is_some_and(|(below, _)| may_be_stack(mapping, below))
                || space.ranges().missing(mapping.start..mapping.end).is_empty()
                || is_registered(mapping)
                || !is_stack(mapping));
        if is_managed {
            let parts = events.context.agent_memory.outside(mapping.start..mapping.end).into_iter();
            found.mappings.extend(parts.filter(|part| !unmanaged_in(space.ranges(), part, within).is_empty()));
        } else if is_private_anonymous(mapping) {
            let is_accessible = mapping.readable || mapping.writable || mapping.executable;
            let window_end = mapping.end.min(mapping.start + window);
            match below {
                _ if is_accessible && is_registered(mapping) => {
                    found.others.extend(space.ranges().missing(mapping.start..mapping.end));
                }
                Some((_, true)) if !is_accessible && is_reserved(mapping) => {
                    found.others.extend(space.ranges().missing(mapping.start..window_end));
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

/// Returns whether `mapping`, which is inaccessible and right above a managed one, is a reserve of
/// that one. A thread's stack is inaccessible for a moment while it is created, but it is smaller,
/// and does not end where the heap of a malloc arena does.
fn is_reserve(mapping: &Mapping, below: &Mapping) -> bool {
    let is_rest_of_heap = mapping.end.is_multiple_of(HEAP_ALIGN_BYTES) && below.start <= mapping.end - HEAP_ALIGN_BYTES;
    is_rest_of_heap || mapping.end - mapping.start > STACK_MAX_BYTES
}

fn is_private_anonymous(mapping: &Mapping) -> bool {
    matches!(mapping.kind, Kind::Anonymous | Kind::Heap) && !mapping.shared
}

/// Returns whether `mapping` can be managed, unless it is a stack or agent memory.
fn may_be_managed(mapping: &Mapping) -> bool {
    is_private_anonymous(mapping) && mapping.readable && mapping.writable && !mapping.executable
}

/// Returns whether `mapping` is a stack if a control block lies at its top.
fn may_be_stack(mapping: &Mapping, below: &Mapping) -> bool {
    let is_guard = !below.readable && !below.writable && below.end - below.start <= GUARD_MAX_BYTES;
    is_guard && mapping.end - mapping.start <= STACK_MAX_BYTES && !mapping.start.is_multiple_of(HEAP_ALIGN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_above_a_guard_may_be_a_stack() {
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
