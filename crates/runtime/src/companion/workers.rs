//! The pool of the companion's threads: their stacks, and the parking of handlers.
//!
//! The monitor starts threads when it activates, before anything else: the system may have no room
//! for them. They wait until the agent manages the program's memory. In the child of a fork the
//! monitor starts them again on the same stacks. The lock of the stacks is a leaf, and only the
//! monitor takes it.

use crate::companion::context::Context;
use crate::companion::error::RuntimeError;
use foliomem_sync::Mutex;
use foliomem_sys::clock::timespec;
use foliomem_sys::cpus;
use foliomem_sys::region::Region;
use foliomem_sys::seccomp::{self, Call};
use foliomem_sys::thread::{self, Kind, Spec};
use rustix::thread::futex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

/// Maximum number of handlers: waking more of them for each fault costs more than it gains.
pub(crate) const MAX_HANDLERS: usize = 16;
/// Stack size of the agent's threads, in bytes. Only used pages are resident.
pub(crate) const STACK_BYTES: usize = 512 << 10;
/// Maximum sleep of a parked handler.
const PARK: Duration = Duration::from_millis(10);

/// The stack of a worker, and its thread's id.
#[derive(Debug)]
pub(crate) struct WorkerStack {
    region: Region,
    id: &'static AtomicU32,
}

/// The threads of a companion, except its monitor.
#[derive(Default)]
pub(crate) struct Workers {
    pub(crate) stacks: Mutex<Vec<WorkerStack>>,
    /// Number of stacks in use, which are the first ones.
    pub(crate) stacks_used: AtomicU32,
    /// 1 once the threads may work. A futex word.
    pub(crate) is_released: AtomicU32,
    /// Number of handlers.
    pub(crate) handlers: AtomicU32,
    /// A page with which the first handler of the first activating process measures the cost of an
    /// interrupt.
    pub(crate) measured: OnceLock<Region>,
    /// Number of handlers that sleep without listening.
    pub(crate) parked: AtomicU32,
    /// Incremented to wake a parked handler.
    pub(crate) unpark: AtomicU32,
    /// The program's own nice value.
    pub(crate) program_nice: AtomicI32,
}

impl Workers {
    /// Forgets the parent's threads, in the child of a fork.
    pub(crate) fn reset(&self) {
        let Workers {
            // Kept: reused. Only the monitor locks them.
            stacks: _,
            stacks_used,
            is_released,
            // Written by `release`.
            handlers: _,
            parked: _,
            // Kept: a page.
            measured: _,
            // Kept: a counter.
            unpark: _,
            // Written when the monitor starts.
            program_nice: _,
        } = self;
        stacks_used.store(0, Ordering::Relaxed);
        is_released.store(0, Ordering::Relaxed);
    }

    /// Returns how many threads have started.
    pub(crate) fn started(&self) -> usize {
        self.stacks_used.load(Ordering::Relaxed) as usize
    }

    /// Lets the threads work after the agent has activated. `handlers` of them are handlers.
    pub(crate) fn release(&self, handlers: u32) {
        self.parked.store(0, Ordering::Relaxed);
        self.handlers.store(handlers, Ordering::Relaxed);
        // Release pairs with the Acquire in `wait_until_released`.
        self.is_released.store(1, Ordering::Release);
        let _ = futex::wake(&self.is_released, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    /// Waits until the calling new thread may work.
    pub(crate) fn wait_until_released(&self) {
        // Acquire pairs with the Release in `release`: the agent has activated.
        while self.is_released.load(Ordering::Acquire) == 0 {
            let _ = futex::wait(&self.is_released, futex::Flags::PRIVATE, 0, None);
        }
    }

    /// Starts a thread in `entry` on the next stack, on `cpu` if given. `entry` gets the address of
    /// `start`, which is never freed. Fails if there is no memory or the system refuses.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        context: &Context,
        entry: extern "C" fn(*mut u8),
        start: T,
        cpu: Option<usize>,
    ) -> Result<(), RuntimeError> {
        let index = self.started();
        let mut stacks = self.stacks.lock();
        if index == stacks.len() {
            stacks.push(WorkerStack { region: context.reserve(STACK_BYTES)?, id: Box::leak(Box::default()) });
        }
        let WorkerStack { region, id } = &stacks[index];
        let spec = Spec { kind: Kind::Thread, stack: region, cpu, id };
        let start = Box::into_raw(Box::new(start));
        // SAFETY: the stack lives as long as the memory and belongs to this thread alone. In the
        // child of a fork, the parent's threads do not exist, and their stacks are reused in the
        // same order.
        if let Err(errno) = unsafe { thread::spawn(&spec, entry, start.cast()) } {
            // SAFETY: no thread has started, so nobody else has the address.
            drop(unsafe { Box::from_raw(start) });
            return Err(RuntimeError::Thread(errno));
        }
        self.stacks_used.store(index as u32 + 1, Ordering::Relaxed);
        Ok(())
    }

    /// Waits until the threads of an ended companion are gone, at most until `until_ns` of the
    /// monotonic clock. A thread of the program calls this.
    pub(crate) fn wait_for_end(&self, until_ns: u64) {
        // A companion that was killed may have held the lock.
        let Some(stacks) = self.stacks.try_lock() else { return };
        stacks.iter().for_each(|stack| thread::wait_until_cleared(stack.id, Some(until_ns)));
    }

    /// Gives the calling new thread the program's priority instead of the monitor's. The thread
    /// does this itself, so that the monitor never waits for a CPU meanwhile.
    pub(crate) fn take_program_priority(&self) {
        set_nice(self.program_nice.load(Ordering::Relaxed));
    }

    /// Sleeps without listening, if another handler still listens.
    pub(crate) fn park(&self) {
        if self.parked.fetch_add(1, Ordering::Relaxed) + 1 < self.handlers.load(Ordering::Relaxed) {
            let time = timespec(PARK);
            let unpark = self.unpark.load(Ordering::Relaxed);
            let _ = futex::wait(&self.unpark, futex::Flags::PRIVATE, unpark, Some(&time));
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }

    /// Wakes a parked handler, if there is one.
    pub(crate) fn unpark_one(&self) {
        if self.parked.load(Ordering::Relaxed) > 0 {
            self.unpark.fetch_add(1, Ordering::Relaxed);
            let _ = futex::wake(&self.unpark, futex::Flags::PRIVATE, 1);
        }
    }
}

/// Returns the CPUs on which handlers run. There are at least two entries, of the same CPU if need
/// be: one handler may wait for a mapping event that the other one receives.
pub(crate) fn handler_cpus() -> Vec<usize> {
    let allowed = cpus::allowed_cpus();
    let mut cpus: Vec<usize> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).take(MAX_HANDLERS).collect();
    if cpus.len() < 2 {
        cpus.extend(cpus.first().copied().or(Some(0)));
    }
    cpus
}

/// Sets the nice value of the calling thread. Returns whether the system allows that. On a busy
/// machine, a program grows by a hundred MiB while a monitor of normal priority waits for a CPU.
pub(crate) fn set_nice(nice: i32) -> bool {
    seccomp::allow(Call::Setpriority) && rustix::process::setpriority_process(None, nice).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parked_handler_is_woken_if_there_is_one() {
        let workers = Workers::default();
        workers.unpark_one();
        assert_eq!(workers.unpark.load(Ordering::Relaxed), 0, "nobody is parked");
        workers.handlers.store(2, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let parked = scope.spawn(|| workers.park());
            while !parked.is_finished() {
                workers.unpark_one();
                foliomem_sync::back_off();
            }
        });
        assert_eq!(workers.parked.into_inner(), 0);
    }
}
