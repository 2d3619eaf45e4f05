//! Schedules of the whole engine: threads of a program that fault on pages of one folio and of
//! neighbouring folios, threads that reclaim, and one that changes the mappings. Each page is
//! written by one thread, which knows what it must read. A faulting thread sleeps until it is
//! woken, so a run that loses a wake-up ends with all threads asleep, and fails. `check()` walks
//! the engine at the end.
#![cfg(feature = "shuttle")]

#[allow(dead_code, reason = "the model needs more of it")]
mod double;
mod schedules;

use double::{Double, State, Worker};
use foliomem_core::cluster::Strategy;
use foliomem_core::engine::{BackingConfig, Engine, EngineConfig, Served};
use foliomem_core::pacing::Pacing;
use foliomem_core::sync::{Mutex, MutexGuard};
use foliomem_types::counters::FaultKind;
use foliomem_types::discard::Discard;
use foliomem_types::size_policy::{Advice, SizePolicy};
use foliomem_types::units::{CLUSTER_SLOTS, Order, OrderSet, PageNumber};
use schedules::explore;
use shuttle::sync::Arc;
use shuttle::thread;
use std::ops::Range;

/// Two blocks; a few pages at their border are mapped.
const BASE: u64 = 512 * 1000 - 4;
const PAGES: u64 = 8;
/// Mapped pages for a stream of faults, and for a stream of first touches.
const MORE_PAGES: u64 = 24;
const MANY_PAGES: u64 = 160;
/// The target of moves. Its alignment differs, so that folios are split.
const ELSEWHERE: u64 = BASE + MANY_PAGES + 25;

/// A limit at which no fault has to reclaim.
const ROOMY: i64 = 1000;
/// A limit below the program's need: faults reclaim, fall back and exceed it.
const TIGHT: i64 = 6;

struct World {
    engine: Engine<Double>,
    /// The handler that notifies the engine of the last change. One thread at a time changes
    /// mappings.
    hearing: Mutex<Option<thread::JoinHandle<()>>>,
}

impl World {
    fn new(limit_pages: i64) -> Arc<World> {
        World::with_backing(limit_pages, None)
    }

    fn with_backing(limit_pages: i64, backing: Option<BackingConfig>) -> Arc<World> {
        let config = EngineConfig {
            granule: Order::new(1).unwrap(),
            arena_frames: 1024,
            swap_slots: 1024,
            strategy: Strategy::default(),
            swap_in: Default::default(),
            no_room: Default::default(),
            whole_out: OrderSet::ALL,
            keep_copies: true,
            make_ahead: true,
            pacing: Pacing::Watermarks,
            compaction: Default::default(),
            cpus: 1,
            protected_pages: 0,
            backing,
            recompress_idle_ns: None,
        };
        let world = World { engine: Engine::new(Double::new(limit_pages), config), hearing: Mutex::default() };
        world.state().sizes = SizePolicy::always(OrderSet::from_bits(0b111));
        world.state().mappings.push((BASE..BASE + PAGES, Advice::None));
        Arc::new(world)
    }

    /// Makes a world whose first `pages` pages hold their own numbers and are swapped out, in the
    /// largest possible folios.
    fn all_out(limit_pages: i64, pages: u64) -> Arc<World> {
        let world = World::new(limit_pages);
        world.state().mappings = vec![(BASE..BASE + pages, Advice::None)];
        let mut thread = Thread { world: Arc::clone(&world), worker: Worker::default(), next_content: 0 };
        (BASE..BASE + pages).for_each(|page| thread.touch(page, |now| *now = page));
        world.engine.page_out(&mut thread.worker, numbers(&(BASE..BASE + pages)));
        assert_eq!(world.engine.swapped_pages(), pages);
        world
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.engine.ports().state.lock()
    }

    /// Changes the mappings as the kernel does and notifies the engine. From the change until a
    /// handler reads the event no page can move, and the thread that made the change waits. The
    /// handler holds off guards while it notifies the engine, but the program continues meanwhile.
    fn change(
        self: &Arc<World>,
        kernel: impl FnOnce(&mut State),
        notify: impl FnOnce(&Engine<Double>) + Send + 'static,
    ) {
        {
            let mut state = self.state();
            state.changes += 1;
            kernel(&mut state);
        }
        self.wait_for_hearing();
        loop {
            let mut state = self.state();
            if state.steady == 0 {
                state.is_hearing = true;
                receive_change(&mut state);
                break;
            }
            drop(state);
            thread::yield_now();
        }
        let world = Arc::clone(self);
        *self.hearing.lock() = Some(thread::spawn(move || {
            notify(&world.engine);
            world.state().is_hearing = false;
        }));
    }

    fn wait_for_hearing(&self) {
        let hearing = self.hearing.lock().take();
        if let Some(hearing) = hearing {
            hearing.join().unwrap();
        }
    }

    /// Checks that everything is accounted for, and that nothing is left after unmapping.
    fn verify_end(self: &Arc<World>) {
        self.wait_for_hearing();
        self.verify_accounts();
        assert!(self.state().poisoned.is_empty(), "corrupted");
        for range in [BASE..BASE + MANY_PAGES, ELSEWHERE..ELSEWHERE + PAGES] {
            let unmapped = numbers(&range);
            self.change(|state| state.unmap(range), |engine| engine.unmapped(unmapped));
        }
        self.wait_for_hearing();
        self.verify_accounts();
        assert_eq!((self.engine.resident_pages(), self.engine.staged_pages(), self.engine.swapped_pages()), (0, 0, 0));
    }

    fn verify_accounts(&self) {
        self.engine.check();
        let state = self.state();
        assert_eq!(
            state.charged,
            (state.homes.len() + state.program.len()) as i64,
            "the charge equals the pages present"
        );
    }
}

/// Receives the oldest mapping change: pages move again.
fn receive_change(state: &mut State) {
    state.changes -= 1;
    let Some((from, to)) = state.in_progress.pop_front() else { return };
    let moved: Vec<u64> = state.unmarked.range(from.clone()).copied().collect();
    state.unmarked.retain(|page| !from.contains(page));
    if let Some(to) = to {
        state.unmarked.extend(moved.iter().map(|page| page - from.start + to));
    }
}

/// A thread of the program, and the handler that serves its faults.
struct Thread {
    world: Arc<World>,
    worker: Worker,
    next_content: u64,
}

impl Thread {
    fn touch<T>(&mut self, page: u64, act: impl Fn(&mut u64) -> T) -> T {
        loop {
            {
                let mut state = self.world.state();
                assert!(!state.poisoned.contains(&page), "page {page:x} is corrupted");
                if let Some(content) = state.program.get_mut(&page) {
                    return act(content);
                }
                let asleep = thread::current();
                state.waiting.push((page, Box::new(move || asleep.unpark())));
            }
            self.handle(PageNumber(page));
            thread::park();
        }
    }

    fn handle(&mut self, page: PageNumber) {
        let engine = &self.world.engine;
        let kind = loop {
            match engine.fault(&mut self.worker, page) {
                Served::Done(kind) => break kind,
                Served::Again => thread::yield_now(),
            }
        };
        if matches!(kind, FaultKind::SwapIn | FaultKind::Spurious | FaultKind::FirstTouch) {
            while engine
                .claim_ahead(page)
                .is_some_and(|(ahead, order)| engine.read_ahead(&mut self.worker, ahead, order))
            {}
        }
    }

    /// Writes a new content and returns it, for a check after other threads ran.
    fn write(&mut self, page: u64) -> u64 {
        self.next_content += 1;
        let content = self.next_content;
        self.touch(page, |now| *now = content);
        content
    }

    fn verify(&mut self, page: u64, content: u64) {
        assert_eq!(self.touch(page, |now| *now), content, "content of page {page:x}");
    }

    fn write_and_verify(&mut self, pages: &[u64]) {
        let contents: Vec<_> = pages.iter().map(|&page| self.write(BASE + page)).collect();
        for (page, content) in pages.iter().zip(contents) {
            self.verify(BASE + page, content);
        }
    }

    fn page_out(&mut self) {
        self.world.engine.page_out(&mut self.worker, numbers(&(BASE..BASE + PAGES)));
    }

    /// Compacts for every small order, so that the frames of folios change.
    fn compact(&mut self) {
        for order in [3, 1, 2, 4] {
            self.world.engine.compact(Order::new(order).unwrap());
        }
    }

    fn reclaim(&mut self) {
        let engine = &self.world.engine;
        engine.stage_oldest(2);
        engine.reclaim(&mut self.worker, 4);
        engine.shrink(2, 4);
        engine.maintain();
    }

    fn discard(&mut self, pages: Range<u64>) {
        // The notice precedes the discard.
        let discarded = numbers(&pages);
        self.world.change(|_| {}, |engine| engine.discarded(discarded));
        let mut state = self.world.state();
        pages.for_each(|page| state.drop_page(page));
    }

    fn map(&mut self, pages: Range<u64>) {
        self.world.state().mappings.push((pages, Advice::None));
    }

    fn unmap(&mut self, pages: Range<u64>) {
        let unmapped = numbers(&pages);
        self.world.change(|state| state.unmap(pages), |engine| engine.unmapped(unmapped));
    }

    fn remap(&mut self, pages: Range<u64>, to: u64) {
        let from = numbers(&pages);
        self.world.change(
            |state| state.remap(pages, to),
            move |engine| engine.remapped(from.start, PageNumber(to), (from.end.0 - from.start.0) as u32),
        );
    }
}

fn numbers(pages: &Range<u64>) -> Range<PageNumber> {
    PageNumber(pages.start)..PageNumber(pages.end)
}

/// Threads that run concurrently.
struct Threads {
    world: Arc<World>,
    running: Vec<thread::JoinHandle<()>>,
}

impl Threads {
    fn of(world: &Arc<World>) -> Threads {
        Threads { world: Arc::clone(world), running: Vec::new() }
    }

    fn with(mut self, act: impl FnOnce(&mut Thread) + Send + 'static) -> Threads {
        // The contents of each thread are distinct.
        let next_content = 1000 * (self.running.len() as u64 + 1);
        let mut thread = Thread { world: Arc::clone(&self.world), worker: Worker::default(), next_content };
        self.running.push(thread::spawn(move || act(&mut thread)));
        self
    }

    fn join(self) {
        self.running.into_iter().for_each(|thread| thread.join().unwrap());
        self.world.verify_end();
    }
}

/// Starts two threads that share every folio.
fn share_folios(world: &Arc<World>) -> Threads {
    Threads::of(world)
        .with(|thread| (0..2).for_each(|_| thread.write_and_verify(&[4, 6, 1])))
        .with(|thread| (0..2).for_each(|_| thread.write_and_verify(&[5, 7, 3])))
}

#[test]
fn faults_wait_for_pages_being_read_ahead() {
    explore(600, || {
        Threads::of(&World::all_out(ROOMY, MORE_PAGES))
            .with(|thread| (0..MORE_PAGES).step_by(4).for_each(|page| thread.verify(BASE + page, BASE + page)))
            .with(|thread| [18, 14, 23].into_iter().for_each(|page| thread.verify(BASE + page, BASE + page)))
            .join();
    });
}

#[test]
fn mapping_changes_while_folios_are_fetched() {
    explore(1500, || {
        Threads::of(&World::all_out(ROOMY, PAGES))
            .with(|thread| [4, 0, 2].into_iter().for_each(|page| thread.verify(BASE + page, BASE + page)))
            .with(|thread| {
                let [a, b, c] = [BASE + 5, BASE + 6, BASE + 7];
                thread.remap(c..c + 1, ELSEWHERE);
                thread.unmap(a..b);
                thread.map(a..b);
                thread.verify(a, 0);
                thread.verify(ELSEWHERE, c);
                thread.verify(b, b);
                thread.discard(b..c);
                thread.verify(b, 0);
            })
            .with(|thread| thread.page_out())
            .join();
    });
}

#[test]
fn faults_on_one_folio_while_it_is_paged_out() {
    explore(1000, || {
        share_folios(&World::new(ROOMY)).with(|thread| (0..3).for_each(|_| thread.page_out())).join();
    });
}

#[test]
fn faults_on_one_folio_while_it_is_paged_out_and_migrated() {
    for limit_pages in [ROOMY, TIGHT] {
        explore(250, move || {
            share_folios(&World::new(limit_pages))
                .with(|thread| (0..2).for_each(|_| thread.page_out()))
                .with(|thread| (0..2).for_each(|_| thread.compact()))
                .with(|thread| thread.compact())
                .join();
        });
    }
}

#[test]
fn pages_being_read_ahead_are_moved_meanwhile() {
    explore(300, || {
        Threads::of(&World::all_out(ROOMY, MORE_PAGES))
            .with(|thread| (0..MORE_PAGES).step_by(4).for_each(|page| thread.verify(BASE + page, BASE + page)))
            .with(|thread| (0..3).for_each(|_| thread.compact()))
            .with(|thread| {
                thread.remap(BASE + 9..BASE + 10, ELSEWHERE);
                thread.verify(ELSEWHERE, BASE + 9);
            })
            .join();
    });
}

#[test]
fn faults_reclaim_concurrently() {
    explore(600, || {
        share_folios(&World::new(TIGHT)).with(|thread| (0..2).for_each(|_| thread.reclaim())).join();
    });
}

#[test]
fn pages_shared_by_a_fork_or_lent_to_the_kernel() {
    explore(600, || {
        let world = World::new(ROOMY);
        world.state().frames_escape = true;
        share_folios(&world)
            .with(|thread| {
                for _ in 0..2 {
                    {
                        let mut state = thread.world.state();
                        state.shared = state.program.keys().copied().collect();
                    }
                    thread.page_out();
                }
            })
            .join();
    });
}

#[test]
fn mapping_changes_among_faults_and_reclaim() {
    explore(1200, || {
        Threads::of(&World::new(ROOMY))
            .with(|thread| (0..3).for_each(|_| thread.write_and_verify(&[4, 3])))
            .with(|thread| {
                let [a, b, c] = [BASE + 5, BASE + 6, BASE + 7];
                for page in [a, b, c] {
                    thread.write(page);
                }
                thread.discard(a..c);
                thread.verify(a, 0);
                let content = [b, c].map(|page| thread.write(page));
                thread.remap(b..c + 1, ELSEWHERE);
                thread.verify(ELSEWHERE, content[0]);
                thread.verify(ELSEWHERE + 1, content[1]);
                thread.unmap(a..b);
                thread.map(a..b);
                thread.verify(a, 0);
            })
            .with(|thread| (0..3).for_each(|_| thread.page_out()))
            .with(|thread| thread.reclaim())
            .join();
    });
}

#[test]
fn a_folio_loses_parts_while_it_is_swapped_out_and_migrated() {
    explore(600, || {
        Threads::of(&World::new(ROOMY))
            .with(|thread| (0..3).for_each(|_| thread.write_and_verify(&[4, 7])))
            .with(|thread| {
                let [a, b, c] = [BASE + 5, BASE + 6, BASE + 7];
                for _ in 0..2 {
                    thread.write(a);
                    let content = thread.write(b);
                    thread.discard(a..b);
                    thread.verify(b, content);
                    thread.verify(a, 0);
                    thread.unmap(b..c);
                    thread.map(b..c);
                    thread.verify(b, 0);
                }
            })
            .with(|thread| {
                thread.page_out();
                thread.reclaim();
            })
            .with(|thread| thread.compact())
            .join();
    });
}

#[test]
fn pieces_go_to_a_file_and_back_while_its_clusters_are_discarded() {
    explore(600, || {
        // The whole store goes to the file.
        let backing = BackingConfig { slots: 2 * CLUSTER_SLOTS, discard: Discard::ForRoom, store_pages: 0 };
        let world = World::with_backing(ROOMY, Some(backing));
        share_folios(&world)
            .with(|thread| {
                for _ in 0..3 {
                    thread.page_out();
                    thread.reclaim();
                }
            })
            .with(|thread| (0..3).for_each(|_| while thread.world.engine.discard_one() {}))
            .join();
        while world.engine.discard_one() {}
        assert!(world.state().clusters.is_empty(), "an empty file holds no clusters");
    });
}

/// Makes a world whose first 64 of many pages were written in order, with free populated frames for
/// the next ones.
fn in_a_stream_of_new_memory() -> Arc<World> {
    const BEFORE: Range<u64> = BASE + 300..BASE + 580;
    let world = World::new(ROOMY);
    world.state().mappings = vec![(BASE..BASE + MANY_PAGES, Advice::None), (BEFORE, Advice::None)];
    let mut thread = Thread { world: Arc::clone(&world), worker: Worker::default(), next_content: 0 };
    BEFORE.for_each(|page| thread.touch(page, |now| *now = 7));
    world.engine.page_out(&mut thread.worker, numbers(&BEFORE));
    world.state().unmap(BEFORE);
    world.engine.unmapped(numbers(&BEFORE));
    assert!(world.engine.free_frames() > 100);
    for page in BASE..BASE + 64 {
        // A handler would read ahead here.
        while !world.state().program.contains_key(&page) {
            assert!(matches!(world.engine.fault(&mut thread.worker, PageNumber(page)), Served::Done(_)));
        }
    }
    world
}

#[test]
fn the_next_touch_continues_a_stream() {
    explore(2, || {
        let world = in_a_stream_of_new_memory();
        let mut thread = Thread { world: Arc::clone(&world), worker: Worker::default(), next_content: 0 };
        thread.write(BASE + 64);
        let made = (64..MANY_PAGES).filter(|page| world.state().program.contains_key(&(BASE + page))).count();
        assert!(made > 8, "{made}");
        world.verify_end();
    });
}

#[test]
fn new_memory_is_made_ahead_while_mappings_change() {
    explore(400, || {
        let world = in_a_stream_of_new_memory();
        Threads::of(&world)
            .with(|thread| thread.write_and_verify(&[64, 65, 66, 67, 68, 69, 70, 71, 80, 81, 82, 83]))
            .with(|thread| {
                let [a, b, c] = [BASE + 72, BASE + 74, BASE + 77];
                thread.write(a);
                let content = thread.write(b);
                thread.discard(a..b);
                thread.verify(a, 0);
                thread.verify(b, content);
                thread.remap(b..c, ELSEWHERE);
                thread.verify(ELSEWHERE, content);
                thread.unmap(a..a + 1);
                thread.map(a..a + 1);
                thread.verify(a, 0);
            })
            .with(|thread| {
                thread.world.engine.page_out(&mut thread.worker, numbers(&(BASE + 60..BASE + 90)));
                thread.world.engine.stage_oldest(30);
                thread.reclaim();
            })
            .with(|thread| thread.compact())
            .join();
    });
}

#[test]
fn adjacent_folios_are_staged_while_they_are_touched_and_moved() {
    explore(400, || {
        let world = in_a_stream_of_new_memory();
        Threads::of(&world)
            .with(|thread| (0..2).for_each(|_| thread.write_and_verify(&[0, 20, 40, 41, 63])))
            .with(|thread| (0..2).for_each(|_| thread.write_and_verify(&[2, 21, 43, 62])))
            .with(|thread| {
                let content = thread.write(BASE + 30);
                thread.discard(BASE + 24..BASE + 30);
                thread.remap(BASE + 30..BASE + 34, ELSEWHERE);
                thread.verify(ELSEWHERE, content);
            })
            .with(|thread| {
                thread.world.engine.stage_oldest(64);
                thread.world.engine.page_out(&mut thread.worker, numbers(&(BASE..BASE + 64)));
            })
            .with(|thread| {
                thread.world.engine.stage_oldest(64);
                thread.reclaim();
                thread.compact();
            })
            .join();
    });
}
