//! Trace tables: traces as Parquet files with one row for each event, in the order of the trace.
//!
//! | column | kinds | content |
//! |---|---|---|
//! | `time_us` | all | time, by a clock with an arbitrary start |
//! | `process` | all | number of the process, in the order of their starts |
//! | `kind` | all | the kind of the event |
//! | `first_page`, `pages` | events about pages | first address divided by 4096, number of pages |
//! | `to_page` | `remap` | first page of the new range |
//! | `pid` | `start` | process id |
//! | `pages` | `limit`, `unmanaged` | number of pages |
//! | `compressed_bytes` | `compressed` | bytes of the piece; 0 if all pages repeat one word |
//! | `lost_events` | `lost` | number of lost events |
//! | `value_1`, `value_2`, `value_3` | events about the whole run | their numbers, in order |
//!
//! Events about pages are `map`, `unmap`, `discard`, `remap`, `fill`, `stage`, `refault`,
//! `activate`, `along` and `compressed`. Events about the whole run are `faults`, `took`,
//! `delayed`, `moved` and `machine`.

use crate::columns::{Cells, Column, signed};
use crate::error::LabError;
use crate::parquet_file::ParquetFile;
use foliomem_trace::{Record, TraceError, TraceReader};
use foliomem_types::trace_event::Event;
use foliomem_types::units::{PAGE_BYTES, PageNumber};
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

/// Rows written at a time: 70 MiB of columns.
const GROUP_ROWS: usize = 1 << 19;

/// The values of an event in the columns after `kind`, in their order.
#[derive(Default)]
struct Numbers {
    first_page: Option<u64>,
    pages: Option<u64>,
    to_page: Option<u64>,
    pid: Option<u64>,
    compressed_bytes: Option<u64>,
    lost_events: Option<u64>,
    values: [Option<u64>; 3],
}

/// The names of the columns after `kind`.
const NUMBERS: [&str; 9] =
    ["first_page", "pages", "to_page", "pid", "compressed_bytes", "lost_events", "value_1", "value_2", "value_3"];

impl Numbers {
    fn of_pages(pages: &Range<PageNumber>) -> Numbers {
        let (first, end) = (pages.start.0, pages.end.0);
        Numbers { first_page: Some(first), pages: Some(end - first), ..Numbers::default() }
    }

    fn of_page(page: PageNumber) -> Numbers {
        Numbers { first_page: Some(page.0), pages: Some(1), ..Numbers::default() }
    }

    /// Returns the numbers of an event about the whole run.
    fn of_run(event: &Event) -> Numbers {
        Numbers { values: event.encode().1.map(Some), ..Numbers::default() }
    }

    fn array(&self) -> [Option<u64>; NUMBERS.len()] {
        let Numbers { first_page, pages, to_page, pid, compressed_bytes, lost_events, values: [a, b, c] } = *self;
        [first_page, pages, to_page, pid, compressed_bytes, lost_events, a, b, c]
    }
}

/// Returns the kind of an event and its numbers.
fn cells(event: &Event) -> (&'static str, Numbers) {
    let none = Numbers::default;
    match event {
        Event::Start { pid } => ("start", Numbers { pid: Some(u64::from(*pid)), ..none() }),
        Event::End => ("end", none()),
        Event::Map(pages) => ("map", Numbers::of_pages(pages)),
        Event::Unmap(pages) => ("unmap", Numbers::of_pages(pages)),
        Event::Discard(pages) => ("discard", Numbers::of_pages(pages)),
        Event::Remap(pages, to) => ("remap", Numbers { to_page: Some(to.0), ..Numbers::of_pages(pages) }),
        Event::Fill(pages) => ("fill", Numbers::of_pages(pages)),
        Event::Stage(pages) => ("stage", Numbers::of_pages(pages)),
        Event::Refault(pages) => ("refault", Numbers::of_pages(pages)),
        Event::Activate(page) => ("activate", Numbers::of_page(*page)),
        Event::Along(pages) => ("along", Numbers::of_pages(pages)),
        Event::Compressed { pages, len_bytes } => {
            ("compressed", Numbers { compressed_bytes: Some((*len_bytes).into()), ..Numbers::of_pages(pages) })
        }
        Event::Limit(pages) => ("limit", Numbers { pages: Some(*pages), ..none() }),
        Event::Unmanaged(pages) => ("unmanaged", Numbers { pages: Some(u64::from(*pages)), ..none() }),
        Event::Lost(events) => ("lost", Numbers { lost_events: Some(*events), ..none() }),
        Event::Faults { .. } => ("faults", Numbers::of_run(event)),
        Event::Took { .. } => ("took", Numbers::of_run(event)),
        Event::Computed { .. } => ("computed", Numbers::of_run(event)),
        Event::Delayed { .. } => ("delayed", Numbers::of_run(event)),
        Event::Moved { .. } => ("moved", Numbers::of_run(event)),
        Event::Machine { .. } => ("machine", Numbers::of_run(event)),
    }
}

fn columns(records: &[Record]) -> Vec<Column> {
    let column = |name: &str, cells| Column { name: name.to_owned(), cells };
    let integers = |value: &dyn Fn(&Record) -> u64| {
        Cells::Integers(records.iter().map(|record| Some(signed(value(record)))).collect())
    };
    let (kinds, numbers): (Vec<_>, Vec<_>) = records.iter().map(|record| cells(&record.event)).unzip();
    let numbers: Vec<_> = numbers.iter().map(Numbers::array).collect();
    let mut columns = vec![
        column("time_us", integers(&|record| record.time_us)),
        column("process", integers(&|record| u64::from(record.process))),
        column("kind", Cells::Texts(kinds.into_iter().map(|kind| Some(kind.to_owned())).collect())),
    ];
    columns.extend(NUMBERS.iter().enumerate().map(|(at, name)| {
        column(name, Cells::Integers(numbers.iter().map(|numbers| numbers[at].map(signed)).collect()))
    }));
    columns
}

/// Writes the trace at `trace` as a Parquet file at `to`; returns the number of events.
pub fn export(trace: &Path, to: &Path) -> Result<u64, LabError> {
    let records = TraceReader::open(trace)?;
    if to.canonicalize().is_ok_and(|to| trace.canonicalize().is_ok_and(|trace| to == trace)) {
        return Err(LabError::OntoItself(to.to_owned()));
    }
    let unwritable = |error| LabError::Unwritable(to.to_owned(), error);
    write(records, File::create(to).map_err(unwritable)?, unwritable)
}

fn write<W: Write + Send>(
    mut records: impl Iterator<Item = Result<Record, TraceError>>,
    to: W,
    unwritable: impl Fn(std::io::Error) -> LabError,
) -> Result<u64, LabError> {
    let facts = [("page_bytes", PAGE_BYTES.to_string())];
    let mut file = ParquetFile::new(to, &columns(&[]), &facts).map_err(&unwritable)?;
    let mut events = 0;
    loop {
        let group = records.by_ref().take(GROUP_ROWS).collect::<Result<Vec<_>, _>>()?;
        if group.is_empty() {
            file.finish().map_err(&unwritable)?;
            return Ok(events);
        }
        events += group.len() as u64;
        file.write(&columns(&group)).map_err(&unwritable)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_types::counters::FaultKind;
    use parquet::file::reader::{FileReader, SerializedFileReader};

    fn read(bytes: Vec<u8>) -> Vec<String> {
        let reader = SerializedFileReader::new(bytes::Bytes::from(bytes)).unwrap();
        let row = |row: parquet::errors::Result<parquet::record::Row>| {
            let columns = row.unwrap().into_columns();
            columns.iter().map(|(_, field)| field.to_string()).collect::<Vec<_>>().join(" ")
        };
        reader.get_row_iter(None).unwrap().map(row).collect()
    }

    #[test]
    fn every_kind_of_event_has_a_row() {
        let pages = |start, end| PageNumber(start)..PageNumber(end);
        let events = [
            Event::Start { pid: 77 },
            Event::Map(pages(1 << 40, (1 << 40) + 512)),
            Event::Fill(pages(16, 32)),
            Event::Stage(pages(18, 30)),
            Event::Refault(pages(18, 19)),
            Event::Activate(PageNumber(19)),
            Event::Along(pages(16, 20)),
            Event::Discard(pages(20, 21)),
            Event::Remap(pages(16, 20), PageNumber(64)),
            Event::Compressed { pages: pages(16, 32), len_bytes: 30_000 },
            Event::Limit(4096),
            Event::Unmanaged(300),
            Event::Lost(u64::MAX),
            Event::Unmap(pages(1, 2)),
            Event::End,
            Event::Faults { kind: FaultKind::SwapIn, faults: 4, waited_ns: 5 },
            Event::Took { elapsed_us: 6, program_cpu_us: 7, companion_cpu_us: 8 },
            Event::Computed { user_us: 15 },
            Event::Delayed { program_us: 12, companion_us: 13, others_cpu_us: 14 },
            Event::Moved { allocated_pages: 9, swpin_pages: 10, swpout_pages: 11 },
            Event::Machine { cpus: 2, round_trip_ns: 5000, populate_page_ns: 300 },
        ];
        let record = |(at, event): (u64, &Event)| Ok(Record { process: 3, time_us: at, event: event.clone() });
        let mut bytes = Vec::new();
        let unwritable = |error| LabError::Unwritable("x".into(), error);
        let wanted = [
            "start\" null null null 77 null null",
            "map\" 1099511627776 512 null null null null",
            "fill\" 16 16 null null null null",
            "stage\" 18 12 null null null null",
            "refault\" 18 1 null null null null",
            "activate\" 19 1 null null null null",
            "along\" 16 4 null null null null",
            "discard\" 20 1 null null null null",
            "remap\" 16 4 64 null null null",
            "compressed\" 16 16 null null 30000 null",
            "limit\" null 4096 null null null null",
            "unmanaged\" null 300 null null null null",
            "lost\" null null null null null 9223372036854775807",
            "unmap\" 1 1 null null null null",
            "end\" null null null null null null",
            "faults\" null null null null null null 2 4 5",
            "took\" null null null null null null 6 7 8",
            "computed\" null null null null null null 15 0 0",
            "delayed\" null null null null null null 12 13 14",
            "moved\" null null null null null null 9 10 11",
            "machine\" null null null null null null 2 5000 300",
        ];
        // More rows than one group.
        let times = GROUP_ROWS / events.len() + 2;
        let all = events.iter().cycle().take(times * events.len());
        assert_eq!(write((0..).zip(all).map(record), &mut bytes, unwritable).unwrap(), (times * events.len()) as u64);
        let rows = read(bytes);
        assert_eq!(rows.len(), times * events.len());
        for (at, row) in rows.iter().enumerate() {
            let wanted = wanted[at % events.len()];
            // Events about pages have none of the last values.
            let nulls = if wanted.split(' ').count() == NUMBERS.len() + 1 { "" } else { " null null null" };
            assert_eq!(*row, format!("{at} 3 \"{wanted}{nulls}"));
        }
    }
}
