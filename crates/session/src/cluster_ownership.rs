//! Cluster ownership: which processes of a run hold which clusters of the swap file.
//!
//! The table lies in the control segment. A process that uses the file has a *row*: a bit for each
//! cluster that it holds. Each cluster counts its holders; it has several after a fork. A process
//! that claims a cluster without holders raises the count from 0 to 1, then sets its bit. A fork
//! raises the count of all clusters of the parent before the child exists.
//!
//! A process can be killed at any instruction. Its row says what it held, and a process that finds
//! it dead counts that down. If it was killed between count and bit, the cluster is not used again
//! in this run.
//!
//! A holder discards a cluster in which no holder has anything. The supervisor discards clusters
//! that no process held for long enough, and holds them meanwhile.
//!
//! Orderings: the count of holders hands over the content of a cluster. A process that lets go of a
//! cluster releases what it read and wrote there, and a process that claims the cluster acquires
//! that. A row's owner hands over the row in the same way.
//!
//! The key and the counter of nonces are here, too: one of each for all processes, so a child of a
//! fork reads what its parent has written, and no two processes use one nonce. There is no lock.

use crate::process_table::MOST_PROCESSES;
use crate::swap_file::{self, Created, KEY_BYTES};
use foliomem_sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use foliomem_sys::shared_words;
use foliomem_sys::swap_discard;
use foliomem_types::discard::Discard;
use foliomem_types::units::{CLUSTER_BYTES, ClusterNumber};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::Errno;
use std::fmt;

/// Clusters of the largest file: 128 GiB. (Rows of 8 KiB, of which only the pages that are used exist.)
const MOST_CLUSTERS: usize = if cfg!(feature = "shuttle") { 64 } else { 1 << 16 };
/// Processes that can use the file at a time.
const ROWS: usize = if cfg!(feature = "shuttle") { 4 } else { MOST_PROCESSES };
const WORDS: usize = MOST_CLUSTERS / 64;
/// Clusters that the supervisor discards before it looks around again.
const DISCARDED_AT_ONCE: usize = 64;
/// In a row's owner: the process is about to be forked by this one.
const PENDING: u64 = 1 << 32;
/// In a row's owner: the owner before is gone, and this process counts down what it held.
const REAPING: u64 = 1 << 33;

shared_words! {
    /// A bit for each cluster.
    struct Row {
        words: [AtomicU64; WORDS],
    }
}

/// What there can be to tell, once in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Event {
    /// It is full.
    Full = 1,
    /// It cannot be written.
    Write = 2,
    /// It cannot be read.
    Read = 4,
    /// It cannot be opened by a process.
    Open = 8,
    /// Some memory is lost.
    Lost = 16,
    /// The arena is full.
    ArenaFull = 32,
}

shared_words! {
    /// The part of the control segment that is about the swap file.
    pub struct SwapSpace {
        /// 0 where there is no swap file.
        clusters: AtomicU32,
        direct: AtomicU32,
        /// A [`Discard`].
        discard: AtomicU32,
        /// Where it is open: process, descriptor.
        pid: AtomicU32,
        descriptor: AtomicU32,
        device: AtomicU64,
        number: AtomicU64,
        key: [AtomicU64; KEY_BYTES / 8],
        nonces: AtomicU64,
        /// [`Event`]s that were told.
        told: AtomicU32,
        holders: [AtomicU16; MOST_CLUSTERS],
        /// Clusters that were claimed, and not discarded since.
        undiscarded: Row,
        /// Whose rows these are: a pid, perhaps with [`PENDING`] or [`REAPING`]; 0 while nobody has the
        /// row. Apart from the rows, so that
        /// looking for one makes no pages for all of them.
        owners: [AtomicU64; ROWS],
        rows: [Row; ROWS],
    }
}

/// A row of the table of who holds what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowIndex(u32);

impl RowIndex {
    /// Its number.
    pub fn get(self) -> u32 {
        self.0
    }

    /// Row number `index`, if there is one.
    pub fn new(index: u32) -> Option<RowIndex> {
        ((index as usize) < ROWS).then_some(RowIndex(index))
    }
}

#[cfg(all(test, feature = "shuttle"))]
impl SwapSpace {
    /// Of a file of `clusters` clusters. (Zeros are no atomics of the explorer's.)
    pub(crate) fn for_schedules(clusters: u32) -> SwapSpace {
        let (half, word) = (|| AtomicU32::new(0), || AtomicU64::new(0));
        let row = || Row { words: std::array::from_fn(|_| word()) };
        SwapSpace {
            clusters: AtomicU32::new(clusters),
            direct: half(),
            discard: half(),
            pid: half(),
            descriptor: half(),
            device: word(),
            number: word(),
            key: std::array::from_fn(|_| word()),
            nonces: word(),
            told: half(),
            holders: std::array::from_fn(|_| AtomicU16::new(0)),
            undiscarded: row(),
            owners: std::array::from_fn(|_| word()),
            rows: std::array::from_fn(|_| row()),
        }
    }
}

impl SwapSpace {
    /// The largest file.
    pub const MOST_BYTES: u64 = MOST_CLUSTERS as u64 * CLUSTER_BYTES;

    /// Announces the file of a run, with a new key. It must stay open where it is as long as processes may start.
    pub fn announce(&self, created: &Created) -> Result<(), Errno> {
        let mut key = [0; KEY_BYTES];
        let mut filled = 0;
        while filled < key.len() {
            filled += rustix::rand::getrandom(&mut key[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        for (word, bytes) in self.key.iter().zip(key.as_chunks::<8>().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        let (device, number) = swap_file::identity_of(&created.file)?;
        self.device.store(device, Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
        self.direct.store(u32::from(created.direct), Ordering::Relaxed);
        self.discard.store(created.discard as u32, Ordering::Relaxed);
        self.pid.store(std::process::id(), Ordering::Relaxed);
        self.descriptor.store(created.file.as_raw_fd() as u32, Ordering::Relaxed);
        // Release pairs with the Acquire in `clusters`: the rest of the announcement is there.
        self.clusters.store((created.bytes / CLUSTER_BYTES) as u32, Ordering::Release);
        Ok(())
    }

    /// Clusters of the file; 0 where there is none.
    pub fn clusters(&self) -> u32 {
        // Acquire pairs with the Release in `announce`.
        self.clusters.load(Ordering::Acquire)
    }

    /// How what is free there is given back.
    pub fn discard(&self) -> Discard {
        let number = self.discard.load(Ordering::Relaxed);
        [Discard::ForRoom, Discard::ForDevice].into_iter().find(|&how| how as u32 == number).unwrap_or_default()
    }

    /// The run's key.
    pub fn key(&self) -> [u8; KEY_BYTES] {
        let mut key = [0; KEY_BYTES];
        for (bytes, word) in key.as_chunks_mut::<8>().0.iter_mut().zip(&self.key) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        key
    }

    /// The run's counter of nonces.
    pub fn nonces(&self) -> &AtomicU64 {
        &self.nonces
    }

    /// Opens the file anew, from where the supervisor has it open.
    pub fn open(&self) -> Result<OwnedFd, Errno> {
        let identity = (self.device.load(Ordering::Relaxed), self.number.load(Ordering::Relaxed));
        let direct = self.direct.load(Ordering::Relaxed) != 0;
        swap_file::reopen(self.pid.load(Ordering::Relaxed), self.descriptor.load(Ordering::Relaxed), direct, identity)
    }

    /// Whether this is the first time in the run that `event` is to be told.
    pub fn is_news(&self, event: Event) -> bool {
        self.told.fetch_or(event as u32, Ordering::Relaxed) & event as u32 == 0
    }

    /// Whether `event` has been told.
    pub fn was_told(&self, event: Event) -> bool {
        self.told.load(Ordering::Relaxed) & event as u32 != 0
    }

    fn held(&self, row: RowIndex) -> &[AtomicU64; WORDS] {
        &self.rows[row.0 as usize].words
    }

    fn owner(&self, row: RowIndex) -> &AtomicU64 {
        &self.owners[row.0 as usize]
    }

    fn rows(&self) -> impl Iterator<Item = RowIndex> {
        (0..ROWS as u32).map(RowIndex)
    }

    fn words(&self) -> usize {
        (self.clusters() as usize).div_ceil(64)
    }

    fn claim_row(&self, owner: u64) -> Option<RowIndex> {
        // Acquire pairs with the Release in `leave`: the row is empty.
        let free =
            |&row: &RowIndex| self.owner(row).compare_exchange(0, owner, Ordering::Acquire, Ordering::Relaxed).is_ok();
        self.rows().find(free).or_else(|| {
            self.reap();
            self.rows().find(free)
        })
    }

    /// A row for process `pid`.
    pub fn enter(&self, pid: u32) -> Option<RowIndex> {
        self.claim_row(u64::from(pid))
    }

    /// Counts down what the row holds, and frees it.
    pub fn leave(&self, row: RowIndex) {
        for (index, word) in self.held(row).iter().enumerate().take(self.words()) {
            // Acquire pairs with the Release of `claim` and `share` in this row: the count was
            // raised before the bit was set.
            for cluster in clusters_in(index, word.swap(0, Ordering::Acquire)) {
                // Release pairs with the Acquire of who claims it next.
                self.holders[cluster].fetch_sub(1, Ordering::Release);
            }
        }
        // Release pairs with the Acquire in `claim_row`.
        self.owner(row).store(0, Ordering::Release);
    }

    /// Frees the rows of processes that are gone. Of several that find one gone, one frees its row:
    /// another that did so more slowly would take what the row's next owner holds.
    pub fn reap(&self) {
        let reaper = REAPING | u64::from(std::process::id());
        for row in self.rows() {
            // Relaxed, as is the change: `leave` acquires each word of the row.
            let owner = self.owner(row).load(Ordering::Relaxed);
            let is_gone = owner != 0 && !foliomem_sys::identity::is_alive(owner as u32);
            let is_ours =
                || self.owner(row).compare_exchange(owner, reaper, Ordering::Relaxed, Ordering::Relaxed).is_ok();
            if is_gone && is_ours() {
                self.leave(row);
            }
        }
    }

    /// Makes the owner of `row` the holder of a cluster that has none.
    pub fn claim(&self, row: RowIndex, cluster: ClusterNumber) -> bool {
        let holders = &self.holders[cluster.0 as usize];
        // Acquire pairs with the Release of who held it last (`leave`, `release`, `discard_left`).
        if holders.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        let (word, bit) = word_and_bit(cluster);
        // Relaxed: it is looked at again by who holds the cluster (`discard_left`).
        self.undiscarded.words[word].fetch_or(bit, Ordering::Relaxed);
        // Release pairs with the Acquire in `leave` and `release`: the count is 1 by then.
        self.held(row)[word].fetch_or(bit, Ordering::Release);
        true
    }

    /// A process that holds the cluster has discarded it.
    pub fn discarded(&self, cluster: ClusterNumber) {
        let (word, bit) = word_and_bit(cluster);
        // Relaxed: called by a holder, whose letting go releases it.
        self.undiscarded.words[word].fetch_and(!bit, Ordering::Relaxed);
    }

    /// Discards what has been left as it was, by processes that have ended or shared it. What the supervisor does now and then.
    pub fn discard_left(&self, file: &OwnedFd) {
        let how = self.discard();
        if how == Discard::Never {
            return;
        }
        self.reap();
        let words = self.undiscarded.words.iter().enumerate().take(self.words());
        // Relaxed: a hint, until the cluster is claimed.
        let left = words.flat_map(|(index, word)| clusters_in(index, word.load(Ordering::Relaxed)));
        // Acquire pairs with the Release of who held it last, as in `claim`.
        let claimed =
            |&number: &usize| self.holders[number].compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        for number in left.filter(claimed).take(DISCARDED_AT_ONCE) {
            let cluster = ClusterNumber(number as u32);
            self.discarded(cluster);
            let _ = swap_discard::discard(file, how, cluster);
            // Release pairs with the Acquire in `claim`: nothing is written before it is discarded.
            self.holders[number].fetch_sub(1, Ordering::Release);
        }
    }

    /// The owner of `row` holds the cluster no more.
    pub fn release(&self, row: RowIndex, cluster: ClusterNumber) {
        let (word, bit) = word_and_bit(cluster);
        // Acquire pairs with the Release of `claim` and `share` in this row.
        if self.held(row)[word].fetch_and(!bit, Ordering::Acquire) & bit != 0 {
            // Release pairs with the Acquire of who claims it next, and with that of
            // `has_one_holder`.
            self.holders[cluster.0 as usize].fetch_sub(1, Ordering::Release);
        }
    }

    /// Whether one process alone holds the cluster.
    pub fn has_one_holder(&self, cluster: ClusterNumber) -> bool {
        // Acquire pairs with the Release of those that held it, too: they read it no more.
        self.holders[cluster.0 as usize].load(Ordering::Acquire) == 1
    }

    /// Before process `pid` forks: a row for its child, which holds all that `row` does.
    pub fn share(&self, row: RowIndex, pid: u32) -> Option<RowIndex> {
        let child = self.claim_row(u64::from(pid) | PENDING)?;
        let words = self.held(row).iter().zip(self.held(child)).take(self.words());
        for (index, (from, to)) in words.enumerate() {
            // Relaxed: the row is this process's, and everything in it is still.
            let held = from.load(Ordering::Relaxed);
            for cluster in clusters_in(index, held) {
                self.holders[cluster].fetch_add(1, Ordering::Relaxed);
            }
            if held != 0 {
                // Release pairs with the Acquire in `leave` and `release`: the counts are raised by
                // then.
                to.store(held, Ordering::Release);
            }
        }
        Some(child)
    }

    /// In the child of a fork by `parent`: the row is its own. False where it was taken for a dead process's.
    pub fn adopt(&self, row: RowIndex, parent: u32, pid: u32) -> bool {
        let owner = &self.owner(row);
        // Relaxed: the fork has ordered what the parent wrote before it.
        owner
            .compare_exchange(u64::from(parent) | PENDING, u64::from(pid), Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }
}

/// Where a row says whether its owner holds a cluster.
fn word_and_bit(cluster: ClusterNumber) -> (usize, u64) {
    (cluster.0 as usize / 64, 1 << (cluster.0 % 64))
}

/// The indices of the clusters that the word at `index` of a row names.
fn clusters_in(index: usize, mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = (word != 0).then(|| word.trailing_zeros() as usize)?;
        word &= word - 1;
        Some(index * 64 + at)
    })
}

impl fmt::Debug for SwapSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapSpace").field("clusters", &self.clusters()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn space(clusters: u32) -> Box<SwapSpace> {
        let space = foliomem_sys::shared_memory::zeroed::<SwapSpace>();
        space.clusters.store(clusters, Ordering::Relaxed);
        space
    }

    #[test]
    fn a_cluster_is_free_when_its_last_holder_lets_go_or_is_dead() {
        let space = space(200);
        let (near, far) = (ClusterNumber(3), ClusterNumber(130));
        let me = std::process::id();
        let mine = space.enter(me).unwrap();
        assert!(space.claim(mine, near) && space.claim(mine, far));
        assert!(!space.claim(mine, near));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pending = space.share(mine, me).unwrap();
        assert!(!space.has_one_holder(near));
        assert!(!space.adopt(pending, me + 1, child.id()));
        assert!(space.adopt(pending, me, child.id()));
        child.wait().unwrap();
        space.release(mine, near);
        assert!(!space.claim(mine, near), "the child holds it");
        space.reap();
        assert!(space.claim(mine, near));
        assert!(space.has_one_holder(far));
        // What is not held is discarded once.
        space.discard.store(Discard::ForRoom as u32, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("foliomem-left-{me}"));
        let file = std::fs::File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; CLUSTER_BYTES as usize], 3 * CLUSTER_BYTES).unwrap();
        let file = OwnedFd::from(file);
        let blocks = || rustix::fs::fstat(&file).unwrap().st_blocks;
        space.discard_left(&file);
        assert!(blocks() > 0, "it is held");
        space.release(mine, near);
        space.discard_left(&file);
        assert_eq!((blocks(), space.undiscarded.words[0].load(Ordering::Relaxed)), (0, 0));
        assert!(space.claim(mine, near) && !space.claim(mine, far));
        // A process that ends gives up all that it holds.
        space.leave(mine);
        let again = space.enter(me).unwrap();
        assert!(space.claim(again, near) && space.claim(again, far));
    }

    #[test]
    fn what_happens_often_is_told_once() {
        let space = space(1);
        assert!(space.is_news(Event::Full) && !space.is_news(Event::Full) && space.is_news(Event::Read));
        assert!(space.was_told(Event::Full) && !space.was_told(Event::Open));
    }
}
