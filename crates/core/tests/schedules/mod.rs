//! How the tests `schedule_*` look for an order of steps that breaks something: many small runs, each under
//! another schedule, half of them random and half with few, well-placed preemptions (PCT), which finds what
//! needs one thread to sleep for long. A schedule that fails is printed, for `shuttle::replay`.
//! `FOLIOMEM_SCHEDULES=n` tries n times as many.

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};

/// The engine keeps arrays of a block's pages on its stack.
const STACK_BYTES: usize = 256 << 10;
/// Preemptions that PCT places in a run: a race of two threads needs one or two.
const PREEMPTIONS: usize = 3;

/// Runs `body` under `schedules` schedules. Everything that `body` starts it must wait for.
pub fn explore(schedules: usize, body: impl Fn() + Clone + Send + Sync + 'static) {
    let times = std::env::var("FOLIOMEM_SCHEDULES").map_or(1, |times| times.parse().expect("a number of times"));
    let schedules = schedules * times;
    run(RandomScheduler::new(schedules.div_ceil(2)), body.clone());
    run(PctScheduler::new(PREEMPTIONS, schedules / 2), body);
}

fn run(scheduler: impl Scheduler + 'static, body: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    // Orderings are not what is explored here.
    config.silence_warnings = true;
    config.ungraceful_shutdown_config.immediately_return_on_panic = true;
    Runner::new(scheduler, config).run(body);
}
