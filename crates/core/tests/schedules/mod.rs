//! The schedule search of the `schedule_*` tests: many small runs, each under another schedule.
//! Half of the schedules are random; half have few, well-placed preemptions (PCT), which finds bugs
//! that need one thread to sleep long. A failing schedule is printed for `shuttle::replay`.
//! `FOLIOMEM_SCHEDULES=n` multiplies the number of schedules by n.

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};

/// Stack size of a thread in bytes: the engine keeps arrays of a block's pages on it.
const STACK_BYTES: usize = 256 << 10;
/// Number of preemptions that PCT places in a run: a race of two threads needs one or two.
const PREEMPTIONS: usize = 3;

/// Runs `body` under `schedules` schedules. `body` must wait for everything that it starts.
pub fn explore(schedules: usize, body: impl Fn() + Clone + Send + Sync + 'static) {
    let times = std::env::var("FOLIOMEM_SCHEDULES").map_or(1, |times| times.parse().expect("a number of times"));
    let schedules = schedules * times;
    run(RandomScheduler::new(schedules.div_ceil(2)), body.clone());
    run(PctScheduler::new(PREEMPTIONS, schedules / 2), body);
}

fn run(scheduler: impl Scheduler + 'static, body: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    // Shuttle does not explore memory orderings.
    config.silence_warnings = true;
    config.ungraceful_shutdown_config.immediately_return_on_panic = true;
    Runner::new(scheduler, config).run(body);
}
