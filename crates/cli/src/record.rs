//! `foliomem record`: fetches the events of a run from its agents, and writes them to a trace.

use crate::error::CliError;
use crate::machine_load::busy_time;
use crate::run_delay::RunDelay;
use foliomem_session::segment::Control;
use foliomem_sys::fault_costs;
use foliomem_sys::supervised_program::{CpuTime, reaped_cpu_time};
use foliomem_trace::{Event, Record, TraceWriter};
use foliomem_types::counters::FaultKind;
use foliomem_types::size::format_mib;
use foliomem_types::units::Order;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where a trace is written to.
#[derive(Debug)]
pub enum Target<'a> {
    /// A file with this path.
    Path(&'a Path),
    /// An empty file without a name.
    Unnamed(File),
}

/// Writes the trace of a run.
pub struct Recorder {
    path: PathBuf,
    writer: TraceWriter,
    /// Number of the process that uses a slot, by slot.
    processes: Vec<Option<u32>>,
    started: u32,
    events: u64,
    lost: u64,
    last_us: u64,
    run_delay: RunDelay,
    /// CPU time of the whole machine when the run began, if it is known.
    busy_before: Option<Duration>,
    /// Records that are fetched but not yet written.
    fetched: Vec<Record>,
}

impl Recorder {
    /// Creates a trace.
    pub fn create(target: Target<'_>) -> Result<Recorder, CliError> {
        let (path, writer) = match target {
            Target::Path(path) => (path, TraceWriter::create(path)),
            Target::Unnamed(file) => (Path::new("a temporary file"), TraceWriter::to_file(file)),
        };
        Ok(Recorder {
            path: path.to_owned(),
            writer: writer.map_err(|error| CliError::Trace(path.to_owned(), error))?,
            processes: Vec::new(),
            started: 0,
            events: 0,
            lost: 0,
            last_us: 0,
            run_delay: RunDelay::default(),
            busy_before: busy_time(),
            fetched: Vec::new(),
        })
    }

    /// Fetches all new events, and writes them in the order of their times.
    pub fn fetch(&mut self, control: &Control) -> Result<(), CliError> {
        self.run_delay.sample_if_due(control);
        for (slot, lives) in control.each_slot() {
            let index = slot.get() as usize;
            if self.processes.len() <= index {
                self.processes.resize(index + 1, None);
            }
            control.trace(slot).take(&mut |time_us, event| {
                self.last_us = self.last_us.max(time_us);
                if let Event::Start { .. } = event {
                    self.end(index, time_us);
                    self.processes[index] = Some(self.started);
                    self.started += 1;
                }
                match self.processes[index] {
                    Some(process) => self.fetched.push(Record { process, time_us, event }),
                    None => self.lost += 1,
                }
            });
            if !lives {
                self.end(index, self.last_us);
            }
        }
        self.fetched.sort_by_key(|record| record.time_us);
        for record in self.fetched.drain(..) {
            if let Event::Lost(events) = record.event {
                self.lost += events;
            }
            self.events += 1;
            self.writer.write(&record).map_err(|error| CliError::Trace(self.path.clone(), error))?;
        }
        Ok(())
    }

    fn end(&mut self, index: usize, time_us: u64) {
        if let Some(process) = self.processes[index].take() {
            self.fetched.push(Record { process, time_us, event: Event::End });
        }
    }

    /// Writes what the whole run took. `program` is the CPU time of the program and of its
    /// children.
    fn write_totals(&mut self, control: &Control, program: CpuTime) -> Result<(), CliError> {
        let counters = control.sum();
        let us = |time: Duration| time.as_micros() as u64;
        // A companion may end a moment after its program, and be reaped too late to count.
        let program_cpu = program.total();
        let reaped = reaped_cpu_time().total().saturating_sub(program_cpu);
        let companion_cpu = reaped.max(self.run_delay.cpu_time_of_companions());
        let busy = busy_time().zip(self.busy_before).map(|(now, before)| now.saturating_sub(before));
        let others_cpu = busy.unwrap_or_default().saturating_sub(program_cpu + companion_cpu);
        let mut events: Vec<Event> = FaultKind::ALL
            .into_iter()
            .map(|kind| {
                let faults = counters.faults(kind);
                Event::Faults { kind, faults: faults.count(), waited_ns: faults.sum_ns.get() }
            })
            .collect();
        events.push(Event::Took {
            elapsed_us: us(control.elapsed()),
            program_cpu_us: us(program_cpu),
            companion_cpu_us: us(companion_cpu),
        });
        events.push(Event::Computed { user_us: us(program.user) });
        events.push(Event::Delayed {
            program_us: us(self.run_delay.of_program(program_cpu)),
            companion_us: us(self.run_delay.of_companions(companion_cpu)),
            others_cpu_us: us(others_cpu),
        });
        events.push(Event::Moved {
            allocated_pages: Order::all().map(|order| counters.of(order).anon_fault_alloc.get() << order.get()).sum(),
            swpin_pages: counters.vm.pswpin.get(),
            swpout_pages: counters.vm.pswpout.get(),
        });
        // A machine that has let the program run lets this process move pages, too. If it does not,
        // the trace has no costs, and no time can be predicted.
        if let Ok(costs) = fault_costs::measure() {
            events.push(Event::Machine {
                cpus: std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64),
                round_trip_ns: costs.round_trip_ns,
                populate_page_ns: costs.populate_page_ns,
            });
        }
        for event in events {
            let record = Record { process: 0, time_us: self.last_us, event };
            self.writer.write(&record).map_err(|error| CliError::Trace(self.path.clone(), error))?;
            self.events += 1;
        }
        Ok(())
    }

    /// Finishes the file of the run that has ended and returns a summary line. `program` is the CPU
    /// time of the program and of its children.
    pub fn finish(mut self, control: &Control, program: CpuTime) -> Result<String, CliError> {
        self.write_totals(control, program)?;
        let bytes = self.writer.finish().map_err(|error| CliError::Trace(self.path.clone(), error))?;
        let lost = if self.lost > 0 { format!(", {} lost", self.lost) } else { String::new() };
        Ok(format!(
            "recorded {} events{lost} of {} processes in {} ({})",
            self.events,
            self.started,
            self.path.display(),
            format_mib(bytes)
        ))
    }
}
