//! Finding the program's memory and taking it over.
//!
//! Managed is private anonymous memory that may be read and written and not executed, wherever it comes
//! from (malloc, mmap, a run time's heap), except the main stack, thread stacks, the agent's own memory,
//! and the static data of the libraries the program started with, which the agent's threads may use.
//!
//! A mapping is taken over in this order: the list of mappings is read; every change that was under way
//! by then is heard (a range that was unmapped and mapped anew must not be dropped later for its past);
//! the range is registered, so that first touches come to the handlers; what of it is registered indeed is looked up
//! (the program may have unmapped a part before, and mapped something else there since); then the pages
//! it has already become folios.

use crate::machine::LinuxMachine;
use crate::maps::{self, Kind, Mapping};
use crate::pagemap;
use crate::placement::APART_WHILE_GROWING_NS;
use crate::ranges::{Ranges, pages};
use crate::runtime::{Engaged, Pending, Runtime};
use crate::uffd;
use foliomem_core::trace::Event;
use rustix::mm::{Advice, madvise};
use std::ops::Range;

/// A mapping of at most this many bytes that forbids all access, right below another of at most `STACK_MAX_BYTES`, is the
/// guard of a thread's stack. Twice what `ulimit -s` mostly is: allocators have guards, too, and no flag tells them apart.
const GUARD_MAX_BYTES: usize = 64 << 10;
const STACK_MAX_BYTES: usize = 16 << 20;
/// Where the C library puts a heap of a thread's arena, right above what is left of the heap below it.
const HEAP_ALIGN_BYTES: usize = 64 << 20;

/// Adopts every mapping that is not managed yet; whether there was one.
pub(crate) fn adopt_mappings(runtime: &Runtime, engaged: &Engaged) -> bool {
    let mapped = Ranges::default();
    let found = find(runtime, engaged, &EVERYTHING, &mapped);
    engaged.engine.machine().advices().forget_unmapped(&mapped);
    adopt(runtime, engaged, &EVERYTHING, &found, || {})
}

/// Adopts what is not managed yet of `within`, and calls `registered` before it looks for pages there that have been touched:
/// those that are touched from then on fault. Whether there was anything.
pub(crate) fn adopt_part(
    runtime: &Runtime,
    engaged: &Engaged,
    within: &Range<usize>,
    registered: impl FnOnce(),
) -> bool {
    let ranges = engaged.engine.machine().ranges();
    let mut found = Vec::new();
    if !ranges.missing(within.clone()).is_empty() {
        let parts = find(runtime, engaged, within, &Ranges::default()).into_iter();
        found.extend(parts.filter(|part| part.start < within.end && within.start < part.end));
    }
    adopt(runtime, engaged, within, &found, registered)
}

/// All there is.
const EVERYTHING: Range<usize> = 0..usize::MAX;

/// Calls `found` with the mappings that have a part of `within`, and with the one right below them.
fn for_each_around(runtime: &Runtime, within: &Range<usize>, found: &mut dyn FnMut(&Mapping)) {
    let Some(files) = &*runtime.files else { unreachable!("opened before engaging") };
    if *within == EVERYTHING {
        maps::for_each(&files.maps, found);
    } else {
        maps::for_each_around(&files.maps, within, found);
    }
}

fn adopt(
    runtime: &Runtime,
    engaged: &Engaged,
    within: &Range<usize>,
    candidates: &[Range<usize>],
    told: impl FnOnce(),
) -> bool {
    if candidates.is_empty() {
        told();
        return false;
    }
    // While the program grows, nobody waits for a follower that it keeps from its CPU.
    runtime.placement.come_apart(APART_WHILE_GROWING_NS);
    let mut pending = Pending::default();
    let machine = engaged.engine.machine();
    {
        let _hearing = runtime.hear_changes(engaged, &mut pending);
        for range in candidates {
            // A failure leaves the range to the next look.
            let _ = machine.descriptors().program.register(range.start, range.end - range.start, uffd::Mode::Faults);
        }
    }
    let registered = insert_registered(runtime, engaged, within, candidates, &mut pending);
    told();
    for range in registered {
        if runtime.tracer.is_on() {
            tell_present(runtime, machine, &range);
        }
        let mut rest = pages(&range);
        while let Err(left) = engaged.engine.adopt(rest) {
            drop(runtime.hear_changes(engaged, &mut pending));
            rest = left;
        }
    }
    // Faults that were heard on the way are raised again by the threads that wait for them.
    while let Some(fault) = pending.pop() {
        machine.fault_again(fault.page);
    }
    true
}

/// Adds to the managed ranges what of `candidates` is registered, and returns it.
fn insert_registered(
    runtime: &Runtime,
    engaged: &Engaged,
    within: &Range<usize>,
    candidates: &[Range<usize>],
    pending: &mut Pending,
) -> Vec<Range<usize>> {
    let machine = engaged.engine.machine();
    let uffd = &machine.descriptors().program;
    loop {
        let _hearing = runtime.hear_changes(engaged, pending);
        let mut registered = Vec::new();
        machine.advices().hear(machine.ranges());
        for_each_around(runtime, within, &mut |mapping| {
            let after = candidates.partition_point(|range| range.end <= mapping.start);
            for range in candidates[after..].iter().take_while(|range| range.start < mapping.end) {
                let part = range.start.max(mapping.start)..range.end.min(mapping.end);
                if uffd.is_registered(part.start) {
                    registered.push((part, mapping.start..mapping.end));
                }
            }
        });
        // A change that has begun meanwhile cannot end before it is heard.
        if uffd.mapping_is_changing() {
            continue;
        }
        for (part, mapping) in &registered {
            machine.advices().adopt(machine.ranges(), part.clone(), mapping.clone());
            machine.prepare_for_huge(part.clone());
            runtime.tracer.tell(&runtime.budget, || Event::Map(pages(part)));
            let (start, len) = (std::ptr::with_exposed_provenance_mut(part.start), part.end - part.start);
            // SAFETY: only what a fork copies changes; see `LinuxMachine::allow_forks`.
            let _ = unsafe { madvise(start, len, Advice::LinuxDontFork) };
        }
        return registered.into_iter().map(|(part, _)| part).collect();
    }
}

/// Tells for the record what was there before it was managed.
fn tell_present(runtime: &Runtime, machine: &LinuxMachine, range: &Range<usize>) {
    pagemap::present(&machine.descriptors().pagemap, range.start, range.end, &mut |run| {
        runtime.tracer.tell(&runtime.budget, || Event::Fill(pages(&run)));
    });
}

/// The ranges that can be managed and are not, of mappings that have a part of `within`; `mapped` gets all of these.
fn find(runtime: &Runtime, engaged: &Engaged, within: &Range<usize>, mapped: &Ranges) -> Vec<Range<usize>> {
    let machine = engaged.engine.machine();
    let mut found = Vec::new();
    let mut before: Option<Mapping> = None;
    for_each_around(runtime, within, &mut |mapping| {
        mapped.insert(mapping.start..mapping.end);
        let guard = before.as_ref().filter(|before| before.end == mapping.start);
        // The kernel registers a mapping as a whole: what has grown is managed whatever lies below it now.
        let is_registered = is_private_anonymous(mapping) && machine.descriptors().program.is_registered(mapping.start);
        if is_registered || is_manageable(mapping, guard) {
            for part in runtime.own.outside(mapping.start..mapping.end) {
                found.extend(machine.ranges().missing(part));
            }
        }
        before = Some(mapping.clone());
    });
    found
}

fn is_private_anonymous(mapping: &Mapping) -> bool {
    matches!(mapping.kind, Kind::Anonymous | Kind::Heap) && !mapping.shared
}

fn is_manageable(mapping: &Mapping, below: Option<&Mapping>) -> bool {
    if !is_private_anonymous(mapping) || !mapping.readable || !mapping.writable || mapping.executable {
        return false;
    }
    let Some(below) = below else { return true };
    let is_guard = !below.readable && !below.writable && below.end - below.start <= GUARD_MAX_BYTES;
    let may_be_stack =
        mapping.end - mapping.start <= STACK_MAX_BYTES && !mapping.start.is_multiple_of(HEAP_ALIGN_BYTES);
    !(is_guard && may_be_stack)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_above_a_guard_is_a_stack_if_it_can_be_one() {
        let is_stack = |line: &[u8], below: &[u8]| {
            !is_manageable(&maps::parse_line(line).unwrap(), maps::parse_line(below).as_ref())
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
