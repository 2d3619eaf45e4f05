//! Cluster ownership: which processes of a run hold which clusters of the swap file.
//!
//! The table lies in the control segment. A process that uses the file has a *row*: a bit for each
//! cluster that it holds. Each cluster counts its holders; after a fork it can have several. A
//! process that claims a cluster without holders raises the count from 0 to 1, then sets its bit. A
//! fork raises the count of all clusters of the parent before the child exists.
//!
//! A process can be killed at any instruction. Its row then still shows the clusters that it held.
//! The next process that finds the owner of the row dead decrements the counts of these clusters.
//! If the owner was killed between raising a count and setting the bit, the run does not use that
//! cluster again.
//!
//! In a shared store ([`crate::shared_pieces`]) a process may also *join* a cluster that others
//! hold, for a piece that one of them has published. The word of the cluster's holders has a
//! *generation*, which rises whenever the content of slots may change from then on: with each
//! claim, and when the only holder *fences* the cluster because it uses freed slots again. Each
//! is one exchange of that word: either a process joins first, and the fence fails, or the fence
//! is first, and nobody joins by what was published before it.
//!
//! A holder discards a cluster in which no holder has data. The supervisor discards clusters that
//! nobody has held for long enough, and holds them meanwhile.
//!
//! Orderings: the count of holders hands over the content of a cluster. A process that releases a
//! cluster publishes its reads and writes of the cluster; a process that claims the cluster
//! acquires them. The owner of a row hands over the row in the same way.
//!
//! The table also holds the key and the counter of nonces. All processes share them, so the child
//! of a fork can read the data that its parent has written, and no two processes use one nonce.
//! There is no lock.

use crate::process_table::MAX_PROCESSES;
use crate::shared_pieces::SharedPieces;
use crate::swap_file::{self, Created, IoMode, KEY_BYTES, Medium};
use foliomem_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use foliomem_sys::shared_words;
use foliomem_sys::swap_discard;
use foliomem_types::discard::Discard;
use foliomem_types::units::{CLUSTER_BYTES, ClusterNumber};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::Errno;
use std::fmt;

/// Maximum number of clusters of a swap file: 128 GiB. (A row has 8 KiB, of which only the pages in
/// use take memory.)
const MAX_CLUSTERS: usize = if cfg!(feature = "shuttle") { 64 } else { 1 << 16 };
/// Maximum number of simultaneous processes that use the file.
const ROWS: usize = if cfg!(feature = "shuttle") { 4 } else { MAX_PROCESSES };
const WORDS: usize = MAX_CLUSTERS / 64;
/// Maximum number of clusters that the supervisor discards in one call.
const MAX_DISCARDS: usize = 64;
/// Flag of a row's owner: this process is about to fork the process that the row is for.
const PENDING: u64 = 1 << 32;
/// The number of holders in a cluster's word: the low 16 bits. The generation is above.
const HOLDERS: u64 = (1 << GENERATION_SHIFT) - 1;
const GENERATION_SHIFT: u32 = 16;
const GENERATION: u64 = 1 << GENERATION_SHIFT;
/// Flag of a row's owner: the previous owner has ended, and this process decrements the counts of
/// its clusters.
const REAPING: u64 = 1 << 33;

shared_words! {
    /// The clusters of one process: a bit for each cluster.
    struct Row {
        words: [AtomicU64; WORDS],
    }
}

/// Events of a swap file that the user learns about, each once in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Event {
    /// The swap file is full.
    Full = 1,
    /// A write to the swap file failed.
    Write = 2,
    /// A read of the swap file failed.
    Read = 4,
    /// A process cannot open the swap file.
    Open = 8,
    /// The content of some memory is lost.
    Lost = 16,
    /// The arena is full.
    ArenaFull = 32,
}

shared_words! {
    /// The part of the control segment that is about the swap file.
    pub struct SwapSpace {
        /// Number of clusters of the swap file; 0 without a swap file.
        clusters: AtomicU32,
        direct: AtomicU32,
        /// The number of a [`Discard`].
        discard: AtomicU32,
        /// The process that has the file open, and its descriptor there.
        pid: AtomicU32,
        descriptor: AtomicU32,
        device: AtomicU64,
        number: AtomicU64,
        key: [AtomicU64; KEY_BYTES / 8],
        nonces: AtomicU64,
        /// The [`Event`]s that were reported, as a bit set.
        reported: AtomicU32,
        /// The number of a [`Medium`].
        medium: AtomicU32,
        /// What processes have published, if this is a shared store.
        pub shared: SharedPieces,
        /// The number of holders of each cluster, and its generation.
        holders: [AtomicU64; MAX_CLUSTERS],
        /// Clusters that were claimed and not discarded since then.
        undiscarded: Row,
        /// The owner of each row: a pid, perhaps with [`PENDING`] or [`REAPING`]; 0 if the row is
        /// free. The words lie apart from the rows, so that a search for a free row does not
        /// populate the rows' pages.
        owners: [AtomicU64; ROWS],
        rows: [Row; ROWS],
    }
}

/// The index of a row in the table of holders.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowIndex(u32);

impl RowIndex {
    /// Returns the row's number.
    pub fn get(self) -> u32 {
        self.0
    }

    /// Returns the row with number `index`, if there is one.
    pub fn new(index: u32) -> Option<RowIndex> {
        ((index as usize) < ROWS).then_some(RowIndex(index))
    }
}

#[cfg(all(test, feature = "shuttle"))]
impl SwapSpace {
    /// Creates the space of a file of `clusters` clusters. (The explorer's atomics cannot be zeroed
    /// memory.)
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
            reported: half(),
            medium: half(),
            shared: SharedPieces::for_schedules(),
            holders: std::array::from_fn(|_| word()),
            undiscarded: row(),
            owners: std::array::from_fn(|_| word()),
            rows: std::array::from_fn(|_| row()),
        }
    }
}

impl SwapSpace {
    /// Maximum size of a swap file, in bytes.
    pub const MAX_BYTES: u64 = MAX_CLUSTERS as u64 * CLUSTER_BYTES;

    /// Announces the swap file of a run, with a new key. The descriptor must stay open as long as
    /// processes may start. Fails if the system has no random bytes or the file has no identity.
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
        self.direct.store(created.io_mode as u32, Ordering::Relaxed);
        self.discard.store(created.discard as u32, Ordering::Relaxed);
        self.medium.store(created.medium as u32, Ordering::Relaxed);
        self.pid.store(std::process::id(), Ordering::Relaxed);
        self.descriptor.store(created.file.as_raw_fd() as u32, Ordering::Relaxed);
        // Release pairs with the Acquire in `clusters`: the rest of the announcement is complete.
        self.clusters.store((created.bytes / CLUSTER_BYTES) as u32, Ordering::Release);
        Ok(())
    }

    /// Returns the number of clusters of the swap file; 0 without a swap file.
    pub fn clusters(&self) -> u32 {
        // Acquire pairs with the Release in `announce`.
        self.clusters.load(Ordering::Acquire)
    }

    /// Returns where the content of the file lies.
    pub fn medium(&self) -> Medium {
        Medium::from_word(self.medium.load(Ordering::Relaxed))
    }

    /// Returns how the file's free clusters are discarded.
    pub fn discard(&self) -> Discard {
        let number = self.discard.load(Ordering::Relaxed);
        [Discard::ForRoom, Discard::ForDevice].into_iter().find(|&how| how as u32 == number).unwrap_or_default()
    }

    /// Returns the run's encryption key.
    pub fn key(&self) -> [u8; KEY_BYTES] {
        let mut key = [0; KEY_BYTES];
        for (bytes, word) in key.as_chunks_mut::<8>().0.iter_mut().zip(&self.key) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        key
    }

    /// Returns the run's counter of nonces.
    pub fn nonces(&self) -> &AtomicU64 {
        &self.nonces
    }

    /// Reopens the swap file through the supervisor's descriptor. Fails if the process may not open
    /// it, or with `ESTALE` if the descriptor names another file.
    pub fn open(&self) -> Result<OwnedFd, Errno> {
        let identity = (self.device.load(Ordering::Relaxed), self.number.load(Ordering::Relaxed));
        let io_mode = IoMode::from_word(self.direct.load(Ordering::Relaxed));
        swap_file::reopen(self.pid.load(Ordering::Relaxed), self.descriptor.load(Ordering::Relaxed), io_mode, identity)
    }

    /// Marks `event` as reported. Returns whether this is the first time in the run.
    pub fn is_news(&self, event: Event) -> bool {
        self.reported.fetch_or(event as u32, Ordering::Relaxed) & event as u32 == 0
    }

    /// Returns whether `event` was reported in this run.
    pub fn was_reported(&self, event: Event) -> bool {
        self.reported.load(Ordering::Relaxed) & event as u32 != 0
    }

    /// Returns the words of the clusters that the owner of `row` holds.
    fn held(&self, row: RowIndex) -> &[AtomicU64; WORDS] {
        &self.rows[row.0 as usize].words
    }

    fn owner(&self, row: RowIndex) -> &AtomicU64 {
        &self.owners[row.0 as usize]
    }

    fn rows(&self) -> impl Iterator<Item = RowIndex> {
        (0..ROWS as u32).map(RowIndex)
    }

    /// Returns the number of words of a row that the file's clusters need.
    fn words(&self) -> usize {
        (self.clusters() as usize).div_ceil(64)
    }

    /// Claims a free row for `owner`: a pid, perhaps with a flag.
    fn claim_row(&self, owner: u64) -> Option<RowIndex> {
        // Acquire pairs with the Release in `leave`: the row has no bits.
        let free =
            |&row: &RowIndex| self.owner(row).compare_exchange(0, owner, Ordering::Acquire, Ordering::Relaxed).is_ok();
        self.rows().find(free).or_else(|| {
            self.reap();
            self.rows().find(free)
        })
    }

    /// Claims a row for process `pid`; `None` if living processes have all rows.
    pub fn enter(&self, pid: u32) -> Option<RowIndex> {
        self.claim_row(u64::from(pid))
    }

    /// Decrements the counts of the clusters that the row's owner holds, and frees the row.
    pub fn leave(&self, row: RowIndex) {
        for (index, word) in self.held(row).iter().enumerate().take(self.words()) {
            // Acquire pairs with the Release of `claim` and `share` in this row: the count was
            // raised before the bit was set.
            for cluster in clusters_in(index, word.swap(0, Ordering::Acquire)) {
                // Release pairs with the Acquire of the process that claims the cluster next.
                self.holders[cluster].fetch_sub(1, Ordering::Release);
            }
        }
        // Release pairs with the Acquire in `claim_row`.
        self.owner(row).store(0, Ordering::Release);
    }

    /// Frees the rows of ended processes. If several processes find a row's owner dead, only one
    /// frees the row: a slower one would otherwise clear the row of the next owner.
    pub fn reap(&self) {
        let reaper = REAPING | u64::from(std::process::id());
        for row in self.rows() {
            // Relaxed, as is the exchange: `leave` acquires each word of the row.
            let owner = self.owner(row).load(Ordering::Relaxed);
            let is_gone = owner != 0 && !foliomem_sys::identity::is_alive(owner as u32);
            let is_ours =
                || self.owner(row).compare_exchange(owner, reaper, Ordering::Relaxed, Ordering::Relaxed).is_ok();
            if is_gone && is_ours() {
                self.leave(row);
            }
        }
    }

    /// Makes the owner of `row` the holder of a cluster that has no holder. Returns whether it is
    /// the holder now.
    pub fn claim(&self, row: RowIndex, cluster: ClusterNumber) -> bool {
        if !self.hold_free(cluster.0 as usize) {
            return false;
        }
        let (word, bit) = word_and_bit(cluster);
        // Relaxed: a holder of the cluster reads the bit again (`discard_left`).
        self.undiscarded.words[word].fetch_or(bit, Ordering::Relaxed);
        // Release pairs with the Acquire in `leave` and `release`: the count is 1 before the bit is
        // set.
        self.held(row)[word].fetch_or(bit, Ordering::Release);
        true
    }

    /// Raises the count of a cluster without holders to 1, and begins a generation. Returns whether
    /// it had none.
    fn hold_free(&self, cluster: usize) -> bool {
        let hold = |word: u64| (word & HOLDERS == 0).then(|| word.wrapping_add(GENERATION) + 1);
        // Acquire pairs with the Release of the last holder (`leave`, `release`, `discard_left`).
        self.holders[cluster].fetch_update(Ordering::Acquire, Ordering::Relaxed, hold).is_ok()
    }

    /// Begins a generation of a cluster that the caller holds, if nobody else holds it. Returns
    /// whether that is so.
    pub fn fence(&self, cluster: ClusterNumber) -> bool {
        let fence = |word: u64| (word & HOLDERS == 1).then(|| word.wrapping_add(GENERATION));
        // Acquire pairs with the Release of former holders: they have finished their reads.
        self.holders[cluster.0 as usize].fetch_update(Ordering::Acquire, Ordering::Relaxed, fence).is_ok()
    }

    /// Returns the generation of a cluster that the caller holds.
    pub fn generation(&self, cluster: ClusterNumber) -> u64 {
        self.holders[cluster.0 as usize].load(Ordering::Relaxed) >> GENERATION_SHIFT
    }

    /// Makes the owner of `row` a holder of a cluster that has holders, while its generation is
    /// `generation`. Returns whether it is a holder, and the generation is that one. Only one
    /// thread of the owner calls this at a time.
    pub fn join(&self, row: RowIndex, cluster: ClusterNumber, generation: u64) -> bool {
        let (word, bit) = word_and_bit(cluster);
        let (holders, held) = (&self.holders[cluster.0 as usize], &self.held(row)[word]);
        // Relaxed: only the owner of the row changes its bits.
        if held.load(Ordering::Relaxed) & bit != 0 {
            return holders.load(Ordering::Relaxed) >> GENERATION_SHIFT == generation;
        }
        let join = |word: u64| (word & HOLDERS > 0 && word >> GENERATION_SHIFT == generation).then(|| word + 1);
        // Acquire pairs with the Release of former holders, as in `fence`.
        if holders.fetch_update(Ordering::Acquire, Ordering::Relaxed, join).is_err() {
            return false;
        }
        // Release pairs with the Acquire in `leave` and `release`, as in `claim`.
        held.fetch_or(bit, Ordering::Release);
        true
    }

    /// Notes that a holder of the cluster has discarded it.
    pub fn discarded(&self, cluster: ClusterNumber) {
        let (word, bit) = word_and_bit(cluster);
        // Relaxed: the caller is a holder, and publishes the store when it releases the cluster.
        self.undiscarded.words[word].fetch_and(!bit, Ordering::Relaxed);
    }

    /// Discards clusters without holders that their last holders, which ended or shared them, did
    /// not discard. The supervisor calls this from time to time.
    pub fn discard_left(&self, file: &OwnedFd) {
        let how = self.discard();
        if how == Discard::Never {
            return;
        }
        self.reap();
        let words = self.undiscarded.words.iter().enumerate().take(self.words());
        // Relaxed: the bit is a hint until the cluster is claimed.
        let left = words.flat_map(|(index, word)| clusters_in(index, word.load(Ordering::Relaxed)));
        for number in left.filter(|&number| self.hold_free(number)).take(MAX_DISCARDS) {
            let cluster = ClusterNumber(number as u32);
            self.discarded(cluster);
            let _ = swap_discard::discard(file, how, cluster);
            // Release pairs with the Acquire in `claim`: the next holder writes after the discard.
            self.holders[number].fetch_sub(1, Ordering::Release);
        }
    }

    /// Removes the owner of `row` from the cluster's holders.
    pub fn release(&self, row: RowIndex, cluster: ClusterNumber) {
        let (word, bit) = word_and_bit(cluster);
        // Acquire pairs with the Release of `claim` and `share` in this row.
        if self.held(row)[word].fetch_and(!bit, Ordering::Acquire) & bit != 0 {
            // Release pairs with the Acquire of the process that claims the cluster next, and with
            // that of `fence`.
            self.holders[cluster.0 as usize].fetch_sub(1, Ordering::Release);
        }
    }

    /// Claims a row for the child that process `pid` is about to fork. The row holds every cluster
    /// that `row` holds. Returns `None` if living processes have all rows.
    pub fn share(&self, row: RowIndex, pid: u32) -> Option<RowIndex> {
        let child = self.claim_row(u64::from(pid) | PENDING)?;
        let words = self.held(row).iter().zip(self.held(child)).take(self.words());
        for (index, (from, to)) in words.enumerate() {
            // Relaxed: the row belongs to this process, and its threads are quiesced.
            let held = from.load(Ordering::Relaxed);
            for cluster in clusters_in(index, held) {
                self.holders[cluster].fetch_add(1, Ordering::Relaxed);
            }
            if held != 0 {
                // Release pairs with the Acquire in `leave` and `release`: the counts are raised
                // before the bits are set.
                to.store(held, Ordering::Release);
            }
        }
        Some(child)
    }

    /// Makes the row the child's own, after `parent` has forked `pid`. Returns `false` if another
    /// process has reaped the row as a dead process's.
    pub fn adopt(&self, row: RowIndex, parent: u32, pid: u32) -> bool {
        let owner = &self.owner(row);
        // Relaxed: the fork orders the parent's writes before it.
        owner
            .compare_exchange(u64::from(parent) | PENDING, u64::from(pid), Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }
}

/// Returns the word and the bit of a row that stand for a cluster.
fn word_and_bit(cluster: ClusterNumber) -> (usize, u64) {
    (cluster.0 as usize / 64, 1 << (cluster.0 % 64))
}

/// Returns the numbers of the clusters whose bits are set in the word at `index` of a row.
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
    fn a_cluster_is_free_when_its_last_holder_releases_it_or_ends() {
        let space = space(200);
        let (near, far) = (ClusterNumber(3), ClusterNumber(130));
        let me = std::process::id();
        let mine = space.enter(me).unwrap();
        assert!(space.claim(mine, near) && space.claim(mine, far));
        assert!(!space.claim(mine, near));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pending = space.share(mine, me).unwrap();
        assert!(!space.fence(near));
        assert!(!space.adopt(pending, me + 1, child.id()));
        assert!(space.adopt(pending, me, child.id()));
        child.wait().unwrap();
        space.release(mine, near);
        assert!(!space.claim(mine, near), "the child holds it");
        space.reap();
        assert!(space.claim(mine, near));
        assert!(space.fence(far));
        // A cluster without holders is discarded once.
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
        // A process that ends releases every cluster that it holds.
        space.leave(mine);
        let again = space.enter(me).unwrap();
        assert!(space.claim(again, near) && space.claim(again, far));
    }

    #[test]
    fn a_repeated_event_is_reported_once() {
        let space = space(1);
        assert!(space.is_news(Event::Full) && !space.is_news(Event::Full) && space.is_news(Event::Read));
        assert!(space.was_reported(Event::Full) && !space.was_reported(Event::Open));
    }
}
