//! `foliomem record`: fetches the events of a run from its agents, and writes them to a trace.

use crate::error::CliError;
use foliomem_session::segment::Control;
use foliomem_trace::{Event, Record, TraceWriter};
use foliomem_types::size::format_mib;
use std::path::{Path, PathBuf};

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
    /// Records that are fetched but not yet written.
    fetched: Vec<Record>,
}

impl Recorder {
    /// Creates a trace at `path`.
    pub fn create(path: &Path) -> Result<Recorder, CliError> {
        let writer = TraceWriter::create(path).map_err(|error| CliError::Trace(path.to_owned(), error))?;
        Ok(Recorder {
            path: path.to_owned(),
            writer,
            processes: Vec::new(),
            started: 0,
            events: 0,
            lost: 0,
            last_us: 0,
            fetched: Vec::new(),
        })
    }

    /// Fetches all new events, and writes them in the order of their times.
    pub fn fetch(&mut self, control: &Control) -> Result<(), CliError> {
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

    /// Finishes the file and returns a summary line.
    pub fn finish(self) -> Result<String, CliError> {
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
