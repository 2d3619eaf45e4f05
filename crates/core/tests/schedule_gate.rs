//! Schedules of the gate: nobody is inside while it is closed, and nobody sleeps for ever (a run whose threads
//! all sleep fails).
#![cfg(feature = "shuttle")]

mod schedules;

use foliomem_core::gate::{Gate, WordWait};
use foliomem_core::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use schedules::explore;
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

const WORKERS: usize = 3;
const ROUNDS: usize = 2;

/// What the kernel does for a futex: it compares and goes to sleep in one step.
#[derive(Default)]
struct Futex {
    bucket: Mutex<()>,
    woken: Condvar,
}

impl WordWait for Futex {
    fn wait(&self, word: &AtomicU32, now: u32) {
        let bucket = self.bucket.lock().unwrap();
        if word.load(SeqCst) == now {
            drop(self.woken.wait(bucket));
        }
    }

    fn wake_all(&self, _word: &AtomicU32) {
        let _bucket = self.bucket.lock().unwrap();
        self.woken.notify_all();
    }
}

#[derive(Default)]
struct World {
    gate: Gate<Futex>,
    inside: AtomicU32,
    held: AtomicBool,
}

impl World {
    fn work(&self) {
        for _ in 0..ROUNDS {
            let _inside = self.gate.enter();
            self.inside.fetch_add(1, SeqCst);
            assert!(!self.held.load(SeqCst), "inside a closed gate");
            self.inside.fetch_sub(1, SeqCst);
        }
    }

    fn hold_still(&self) {
        self.gate.close();
        self.held.store(true, SeqCst);
        assert_eq!(self.inside.load(SeqCst), 0, "closed, and somebody is inside");
        self.held.store(false, SeqCst);
        self.gate.open();
    }

    fn run(self: &Arc<World>, meanwhile: impl FnOnce(&World)) {
        let worker = || {
            let world = Arc::clone(self);
            thread::spawn(move || world.work())
        };
        let workers: Vec<_> = (0..WORKERS).map(|_| worker()).collect();
        meanwhile(self);
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    }

    fn hold_still_often(&self) {
        (0..ROUNDS).for_each(|_| self.hold_still());
    }
}

#[test]
fn nobody_is_inside_while_it_is_closed() {
    explore(6000, || Arc::new(World::default()).run(World::hold_still_often));
}

/// The child begins with what the word said while the gate was closed, and with nobody who would open it.
#[test]
fn it_works_in_the_child_of_a_fork() {
    explore(2000, || {
        let world = Arc::new(World::default());
        world.gate.close();
        world.gate.reset();
        world.run(|_| {});
        world.run(World::hold_still_often);
    });
}
