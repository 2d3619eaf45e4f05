//! Measures the memory of a running process tree.

use foliomem_session::swap_file::SHARED_STORE_NAME;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval of the samples. It is short against the seconds of a run; one sample takes about 50 us
/// for each process.
const EVERY: Duration = Duration::from_millis(20);

/// Samples the resident anonymous memory of a tree until stopped. Pages shared after `fork` count
/// once for each process.
#[derive(Debug)]
pub(crate) struct Sampler {
    stop: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Starts sampling the tree below `pid`.
    pub(crate) fn start(pid: u32) -> Self {
        let (stop, peak) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, highest) = (Arc::clone(&stop), Arc::clone(&peak));
        let thread = std::thread::spawn(move || {
            // Relaxed: the flag and the number order nothing else; `join` orders the last sample.
            while !stopped.load(Ordering::Relaxed) {
                highest.fetch_max(anonymous(pid), Ordering::Relaxed);
                std::thread::sleep(EVERY);
            }
        });
        Self { stop, peak, thread: Some(thread) }
    }

    /// Stops and returns the highest sample in bytes.
    pub(crate) fn stop(mut self) -> u64 {
        self.end();
        self.peak.load(Ordering::Relaxed)
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; if it did, its samples until then would stand.
            let _ = thread.join();
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the proportional bytes (`Pss`) of `pid` and all its descendants: a page that several
/// processes share counts in parts. The shared store of a run counts, too. Processes that have
/// exited count 0.
pub(crate) fn proportional_bytes(pid: u32) -> u64 {
    let dir = PathBuf::from(format!("/proc/{pid}"));
    let name = std::fs::read_to_string(dir.join("comm")).unwrap_or_default();
    let executable = std::fs::read_link(dir.join("exe")).unwrap_or_default();
    // A companion and its guard have the memory of their program, which counts once.
    let is_agents = matches!(name.trim_end(), "foliomem" | "foliomem-guard");
    let has_programs_memory = is_agents && !executable.ends_with("foliomem");
    let sizes = || std::fs::read_to_string(dir.join("smaps_rollup")).unwrap_or_default();
    let own_bytes = if has_programs_memory { None } else { status_bytes(&sizes(), "Pss:") };
    let shared_bytes = if is_agents && !has_programs_memory { shared_store_bytes(&dir) } else { 0 };
    own_bytes.unwrap_or(0) + shared_bytes + children(pid).into_iter().map(proportional_bytes).sum::<u64>()
}

/// Returns the memory of the shared store that the supervisor has open whose directory in /proc is
/// `dir`. No process maps it.
fn shared_store_bytes(dir: &Path) -> u64 {
    let descriptors = std::fs::read_dir(dir.join("fd")).into_iter().flatten().flatten();
    let is_store =
        |path: &PathBuf| std::fs::read_link(path).is_ok_and(|file| file.to_string_lossy().contains(SHARED_STORE_NAME));
    let store = descriptors.map(|descriptor| descriptor.path()).find(is_store);
    store.and_then(|path| std::fs::metadata(path).ok()).map_or(0, |file| file.blocks() * 512)
}

/// Returns the resident anonymous bytes of `pid` and all its descendants; processes that have
/// exited count 0.
fn anonymous(pid: u32) -> u64 {
    let dir = PathBuf::from(format!("/proc/{pid}"));
    let status = std::fs::read_to_string(dir.join("status")).unwrap_or_default();
    let own = status_bytes(&status, "RssAnon:");
    own.unwrap_or(0) + children(pid).into_iter().map(anonymous).sum::<u64>()
}

/// Returns the children of all threads of process `pid`.
fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|text| text.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<u32>>())
        .collect()
}

/// Returns the value of the line `name` of a `/proc/PID/status`, in bytes.
pub(crate) fn status_bytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::FileExt;

    proptest! {
        #[test]
        fn a_status_line_parses_back(kib in 0u64..1 << 50, before in "[A-Za-z]{1,8}:\t[a-z0-9 ]{0,20}\n") {
            let status = format!("{before}VmSwap:\t{kib:>8} kB\nThreads:\t1\n");
            prop_assert_eq!(status_bytes(&status, "VmSwap:"), Some(kib * 1024));
            prop_assert_eq!(status_bytes(&status, "RssAnon:"), None);
        }

        #[test]
        fn strange_statuses_do_not_panic(noise: String, digits in "[0-9]{0,25}") {
            status_bytes(&noise, "VmSwap:");
            status_bytes(&format!("VmSwap:{noise}"), "VmSwap:");
            let bytes = status_bytes(&format!("VmSwap: {digits} kB"), "VmSwap:");
            let kib = digits.parse::<u64>().ok();
            prop_assert_eq!(bytes, kib.and_then(|kib| kib.checked_mul(1024)));
        }
    }

    #[test]
    fn a_sample_counts_the_process_and_its_children() {
        let own = anonymous(std::process::id());
        assert!(own > 0);
        let memory = vec![1_u8; 64 << 20];
        assert!(anonymous(std::process::id()) >= own.min(32 << 20) + (32 << 20), "{}", memory.len());
        assert_eq!(anonymous(u32::MAX), 0);
        let proportional_bytes = proportional_bytes(std::process::id());
        assert!(proportional_bytes >= 64 << 20, "{}", memory.len());
    }

    #[test]
    fn the_shared_store_of_a_supervisor_is_found() {
        let own = Path::new("/proc/self");
        assert_eq!(shared_store_bytes(own), 0);
        let store = foliomem_session::swap_file::create_shared(4 << 20).unwrap();
        std::fs::File::from(store.file.try_clone().unwrap()).write_all_at(&[1; 10_000], 1 << 20).unwrap();
        assert_eq!(shared_store_bytes(own), 12 << 10);
    }
}
