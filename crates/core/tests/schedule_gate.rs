//! Schedules of the gate: no thread is inside while it is closed, and no thread sleeps forever (a
//! run whose threads all sleep fails).
#![cfg(feature = "shuttle")]

mod schedules;

use foliomem_core::gate::{Gate, WordWait};
use foliomem_core::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use schedules::explore;
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

const WORKERS: usize = 3;
const ROUNDS: usize = 2;

/// A futex as the kernel implements it: the comparison and the sleep are one step.
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
    quiesced: AtomicBool,
}

impl World {
    fn work(&self) {
        for _ in 0..ROUNDS {
            let _inside = self.gate.enter();
            self.inside.fetch_add(1, SeqCst);
            assert!(!self.quiesced.load(SeqCst), "a thread entered a closed gate");
            self.inside.fetch_sub(1, SeqCst);
        }
    }

    fn quiesce(&self) {
        self.gate.close();
        self.quiesced.store(true, SeqCst);
        assert_eq!(self.inside.load(SeqCst), 0, "a thread is inside the closed gate");
        self.quiesced.store(false, SeqCst);
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

    fn quiesce_repeatedly(&self) {
        (0..ROUNDS).for_each(|_| self.quiesce());
    }
}

#[test]
fn no_thread_is_inside_a_closed_gate() {
    explore(6000, || Arc::new(World::default()).run(World::quiesce_repeatedly));
}

/// The child starts with the word of the closed gate, and without the thread that would open it.
#[test]
fn a_reset_gate_works_in_the_child_of_a_fork() {
    explore(2000, || {
        let world = Arc::new(World::default());
        world.gate.close();
        world.gate.reset();
        world.run(|_| {});
        world.run(World::quiesce_repeatedly);
    });
}
