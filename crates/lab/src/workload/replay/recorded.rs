//! The totals of the whole recorded run, from the last events of its trace.

use foliomem_types::counters::FaultKind;
use foliomem_types::trace_event::Event;

/// The faults of one kind of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultSum {
    /// Their number.
    pub faults: u64,
    /// The time that the program waited for them.
    pub waited_ns: u64,
}

/// What a recorded run took. All figures are measured.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Recorded {
    /// The duration of the run.
    pub elapsed_us: u64,
    /// CPU time of the program and of its children.
    pub program_cpu_us: u64,
    /// User time of the program and of its children, which is a part of their CPU time.
    pub program_user_us: u64,
    /// CPU time of the companions.
    pub companion_cpu_us: u64,
    /// Time that runnable threads of the program waited for a CPU.
    pub program_delay_us: u64,
    /// Time that runnable threads of the companions waited for a CPU.
    pub companion_delay_us: u64,
    /// CPU time that other programs of the machine used meanwhile.
    pub others_cpu_us: u64,
    /// Pages of folios that were allocated at first touches.
    pub allocated_pages: u64,
    /// Pages that were swapped in.
    pub swpin_pages: u64,
    /// Pages that were swapped out.
    pub swpout_pages: u64,
    /// The number of CPUs of the machine.
    pub cpus: u64,
    /// CPU time of a fault that does nothing but move a page in.
    pub round_trip_ns: u64,
    /// CPU time in which the kernel allocates and zeroes a page.
    pub populate_page_ns: u64,
    faults: [FaultSum; FaultKind::ALL.len()],
}

impl Recorded {
    /// Returns the faults of a kind.
    pub fn faults(&self, kind: FaultKind) -> FaultSum {
        self.faults[kind as usize]
    }

    /// Takes an event of a trace into account.
    pub fn note(&mut self, event: &Event) {
        match *event {
            Event::Faults { kind, faults, waited_ns } => self.faults[kind as usize] = FaultSum { faults, waited_ns },
            Event::Took { elapsed_us, program_cpu_us, companion_cpu_us } => {
                *self = Recorded { elapsed_us, program_cpu_us, companion_cpu_us, ..self.clone() };
            }
            Event::Computed { user_us: program_user_us } => {
                *self = Recorded { program_user_us, ..self.clone() };
            }
            Event::Delayed { program_us: program_delay_us, companion_us: companion_delay_us, others_cpu_us } => {
                *self = Recorded { program_delay_us, companion_delay_us, others_cpu_us, ..self.clone() };
            }
            Event::Moved { allocated_pages, swpin_pages, swpout_pages } => {
                *self = Recorded { allocated_pages, swpin_pages, swpout_pages, ..self.clone() };
            }
            Event::Machine { cpus, round_trip_ns, populate_page_ns } => {
                *self = Recorded { cpus, round_trip_ns, populate_page_ns, ..self.clone() };
            }
            _ => {}
        }
    }
}
