//! Slots of the swap file: which are free, and how many pieces each holds bytes of.
//!
//! Slots come from this process's cluster allocator over the whole file. The processes of a run
//! share the file by whole clusters: a process *claims* a cluster before it uses the first slot,
//! and releases it when the last slot is free again ([`RunSource`]). Pieces are packed without
//! regard to slots, so a slot counts the pieces that have bytes in it.
//!
//! After a fork both processes hold the clusters that the parent held, and each frees slots that
//! the other may still need. So no slot of such a cluster is used again before one process is its
//! only holder.
//!
//! | holding | held | freed slots | allocation | left by |
//! |---|---|---|---|---|
//! | `Not` | no | there are none | after a claim | a claim that succeeds, or fails (withheld) |
//! | `Owned` | yes | free at once | yes | the last free; a fork (lent) |
//! | `Lent` | yes | stay dead | yes | the last free; sole holder; in the child (borrowed) |
//! | `Borrowed` | yes | stay dead | no | the last free; sole holder |
//! | `Withheld` | no | there are none | no: another process holds it | a claim that succeeds |
//! | `Emptied` | yes | there are none | no: discard first | its discard, or an allocation |
//!
//! The child of a fork does not know the free slots of a lent cluster, so the parent may use them.
//! In the child, slots allocated from a borrowed cluster are dead at once.
//!
//! If the file wants discards, a process that is the only holder of an emptied cluster keeps it
//! until its discard, so that no process writes there meanwhile. After a fork both processes may
//! have emptied a cluster and may discard it. Neither process writes to the cluster before it has
//! released the cluster and claimed it again.
//!
//! The allocator, which knows nothing of other processes, sees a dead slot as used. A dead slot
//! counts no piece.
//!
//! In a shared store ([`crate::ports::SharedStore`]) a process may *join* a cluster that another
//! one holds, for slots that it has not written. If it has no slots of its own there, it counts its
//! pieces in a table apart, of which the allocator knows nothing: such a cluster stays `Not` or
//! `Withheld`. Whoever holds a cluster alone *fences* it before it uses a freed slot again: nobody
//! joins by what was published before. If others have joined meanwhile, the cluster is lent.
//!
//! Locks: one lock protects everything here. The locks of the cluster allocator are taken under it.

use super::RunSource;
use crate::cluster::{NoSlots, PendingDiscard, SwapClusters};
use crate::sync::{Mutex, ranks};
use foliomem_types::units::{CLUSTER_SLOTS, ClusterNumber, CpuNumber, Order, Slot};
use std::collections::BTreeMap;
use std::ops::Range;

/// The CPU number of frees. One lock serialises all calls, so it does not matter.
const FREER: CpuNumber = CpuNumber(0);
/// The piece count of an unusable slot without pieces.
const DEAD: u8 = u8::MAX;
/// Alignment of pieces in bytes: it bounds the pieces of a slot, so that a byte can count them.
pub(super) const PIECE_ALIGN_BYTES: u32 = 32;

const _: () = assert!(foliomem_types::units::PAGE_BYTES as u32 / PIECE_ALIGN_BYTES + 2 < DEAD as u32);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Holding {
    #[default]
    Not,
    Owned,
    Lent,
    Borrowed,
    Withheld,
    Emptied,
}

#[derive(Clone, Debug, Default)]
struct Cluster {
    holding: Holding,
    /// Number of slots with pieces.
    live_slots: u16,
    /// The number of pieces in each slot, or [`DEAD`].
    pieces: Option<Box<PiecesBySlot>>,
}

type PiecesBySlot = [u8; CLUSTER_SLOTS as usize];

impl Cluster {
    fn pieces(&mut self) -> &mut PiecesBySlot {
        self.pieces.get_or_insert_with(empty_table)
    }
}

/// Counts one user less of `slots`, and discards those of which it was the last one. `slots`
/// ascend.
fn discard_unused(source: &dyn RunSource, slots: impl Iterator<Item = Slot>) {
    let mut unused: Range<u32> = 0..0;
    for slot in slots.filter(|&slot| source.drop_user(slot)) {
        if slot.0 != unused.end && !unused.is_empty() {
            source.discard_slots(std::mem::take(&mut unused));
        }
        unused = if unused.is_empty() { slot.0..slot.0 + 1 } else { unused.start..slot.0 + 1 };
    }
    if !unused.is_empty() {
        source.discard_slots(unused);
    }
}

fn empty_table() -> Box<PiecesBySlot> {
    Box::new([0; CLUSTER_SLOTS as usize])
}

#[derive(Debug)]
struct Space {
    clusters: Vec<Cluster>,
    /// Slots of clusters of others, without any of this process's own.
    joined: BTreeMap<ClusterNumber, Joined>,
    live_slots: u32,
    tables: usize,
}

/// A cluster that this process holds only for pieces of other processes.
#[derive(Debug)]
struct Joined {
    /// Number of slots with pieces.
    live_slots: u16,
    /// The number of pieces in each slot.
    pieces: Box<PiecesBySlot>,
}

impl Default for Joined {
    fn default() -> Joined {
        Joined { live_slots: 0, pieces: empty_table() }
    }
}

impl Space {
    /// Returns whether this process has pieces in slots of its own in the cluster.
    fn has_own(&self, cluster: ClusterNumber) -> bool {
        matches!(self.clusters[cluster.0 as usize].holding, Holding::Owned | Holding::Lent | Holding::Borrowed)
    }

    /// Returns whether one more piece, of another process, can be counted in a slot.
    fn can_join(&self, slot: Slot) -> bool {
        let (number, at) = indices(slot);
        let cluster = &self.clusters[number];
        let pieces = if self.has_own(slot.cluster()) {
            // This process may use a slot that is free in its allocator at any time.
            cluster.pieces.as_ref().map(|pieces| pieces[at]).filter(|&pieces| pieces > 0)
        } else {
            let joined = self.joined.get(&slot.cluster());
            (cluster.holding != Holding::Emptied).then(|| joined.map_or(0, |joined| joined.pieces[at]))
        };
        pieces.is_some_and(|pieces| pieces == DEAD || pieces < DEAD - 1)
    }

    /// Counts one more piece, of another process, in a slot of a cluster that this process holds.
    fn count_joined(&mut self, slot: Slot) {
        let (number, at) = indices(slot);
        let (pieces, live_slots) = if self.has_own(slot.cluster()) {
            let cluster = &mut self.clusters[number];
            (cluster.pieces.get_or_insert_with(empty_table), &mut cluster.live_slots)
        } else {
            let joined = self.joined.entry(slot.cluster()).or_default();
            (&mut joined.pieces, &mut joined.live_slots)
        };
        let is_first = matches!(pieces[at], 0 | DEAD);
        pieces[at] = if is_first { 1 } else { pieces[at] + 1 };
        *live_slots += u16::from(is_first);
        self.live_slots += u32::from(is_first);
    }

    /// Counts one piece less in a slot. Returns whether that was its last one.
    fn drop_one(&mut self, slot: Slot) -> bool {
        let pieces = self.pieces_mut(slot);
        debug_assert!(*pieces > 0 && *pieces < DEAD, "{slot:?} has {pieces} pieces");
        *pieces -= 1;
        let is_free = *pieces == 0;
        self.live_slots -= u32::from(is_free);
        is_free
    }

    /// Ends the hold on a joined cluster if the slot in which the last piece was dropped was its
    /// last one.
    fn drop_joined(&mut self, source: &dyn RunSource, cluster: ClusterNumber) {
        let Some(joined) = self.joined.get_mut(&cluster) else { return };
        joined.live_slots -= 1;
        if joined.live_slots == 0 {
            self.joined.remove(&cluster);
            source.release_cluster(cluster);
        }
    }

    /// Returns whether a slot has pieces.
    fn has_pieces(&self, slot: Slot) -> bool {
        let (number, at) = indices(slot);
        let table = match self.joined.get(&slot.cluster()) {
            Some(joined) => Some(&joined.pieces),
            None => self.clusters[number].pieces.as_ref(),
        };
        table.is_some_and(|pieces| !matches!(pieces[at], 0 | DEAD))
    }

    /// Calls `visit` for each slot with pieces.
    fn for_each_used(&self, mut visit: impl FnMut(Slot)) {
        let own = (0..).map(ClusterNumber).zip(&self.clusters);
        let own = own.filter_map(|(number, cluster)| Some((number, cluster.pieces.as_ref()?)));
        let joined = self.joined.iter().map(|(&number, joined)| (number, &joined.pieces));
        for (number, pieces) in own.chain(joined) {
            let used = pieces.iter().zip(number.slots().start.0..).filter(|(pieces, _)| !matches!(**pieces, 0 | DEAD));
            used.for_each(|(_, slot)| visit(Slot(slot)));
        }
    }

    /// Returns the number of pieces in a slot in use, or [`DEAD`].
    fn pieces_mut(&mut self, slot: Slot) -> &mut u8 {
        let (number, at) = indices(slot);
        match self.joined.get_mut(&slot.cluster()) {
            Some(joined) => &mut joined.pieces[at],
            None => &mut self.clusters[number].pieces()[at],
        }
    }
}

/// The slots of the swap file, as this process uses them.
pub(super) struct FileSlots {
    slots: SwapClusters,
    wants_discard: bool,
    space: Mutex<Space, ranks::FileSlots>,
}

impl std::fmt::Debug for FileSlots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileSlots").field("live", &self.live_slots()).finish_non_exhaustive()
    }
}

/// Returns the index of a slot's cluster, and the slot's index in it.
fn indices(slot: Slot) -> (usize, usize) {
    (slot.cluster().0 as usize, slot.index_in_cluster().get() as usize)
}

impl FileSlots {
    /// Makes the slots of a file that `slots` manages.
    pub(super) fn new(slots: SwapClusters) -> FileSlots {
        let clusters = vec![Cluster::default(); (slots.slots() / CLUSTER_SLOTS) as usize];
        let wants_discard = slots.wants_discard();
        FileSlots {
            slots,
            wants_discard,
            space: Mutex::new(Space { clusters, joined: BTreeMap::new(), live_slots: 0, tables: 0 }),
        }
    }

    /// Allocates 2^order contiguous, naturally aligned slots. Each counts one piece: the caller's.
    pub(super) fn alloc(&self, source: &dyn RunSource, cpu: CpuNumber, order: Order) -> Option<Slot> {
        let mut space = self.space.lock();
        loop {
            let first = match self.slots.alloc(cpu, order) {
                Ok(first) => first,
                Err(reason) => {
                    let pending = (reason == NoSlots::Discard).then(|| self.slots.take_discard()).flatten();
                    match pending {
                        // The cluster will be written soon, so its discard is pointless.
                        Some(pending) => self.let_go(&mut space, source, pending),
                        None if self.recover(&mut space, source) => {}
                        None => return None,
                    }
                    continue;
                }
            };
            let (number, at) = indices(first);
            let slots = order.pages() as usize;
            let cluster = &mut space.clusters[number];
            if cluster.holding == Holding::Not {
                let claimed = source.claim_cluster(first.cluster());
                cluster.holding = if claimed { Holding::Owned } else { Holding::Withheld };
            }
            let usable = matches!(cluster.holding, Holding::Owned | Holding::Lent);
            let had_table = cluster.pieces.is_some();
            cluster.pieces()[at..at + slots].fill(if usable { 1 } else { DEAD });
            if usable {
                cluster.live_slots += slots as u16;
                space.live_slots += slots as u32;
                source.count_user(first.0..first.0 + slots as u32);
            }
            space.tables += usize::from(!had_table);
            if usable {
                return Some(first);
            }
        }
    }

    /// Frees dead slots that no other process needs any more. Returns whether there were any.
    fn recover(&self, space: &mut Space, source: &dyn RunSource) -> bool {
        let mut found = false;
        for (number, cluster) in space.clusters.iter_mut().enumerate() {
            let number = ClusterNumber(number as u32);
            cluster.holding = match cluster.holding {
                Holding::Lent | Holding::Borrowed if source.fence_cluster(number) => Holding::Owned,
                Holding::Withheld if source.claim_cluster(number) => {
                    if !self.wants_discard {
                        // The next allocation from the cluster claims it again.
                        source.release_cluster(number);
                    }
                    self.emptied()
                }
                _ => continue,
            };
            let first = number.slots().start;
            for (at, pieces) in (0..).zip(cluster.pieces()) {
                if *pieces == DEAD {
                    *pieces = 0;
                    self.slots.free(FREER, first.offset(at), 1);
                    found = true;
                }
            }
            if cluster.holding != Holding::Owned {
                space.tables -= usize::from(cluster.pieces.take().is_some());
            }
        }
        found
    }

    /// Returns the holding of a cluster without slots in use.
    fn emptied(&self) -> Holding {
        if self.wants_discard { Holding::Emptied } else { Holding::Not }
    }

    /// Releases a cluster that was discarded or need not be.
    fn let_go(&self, space: &mut Space, source: &dyn RunSource, pending: PendingDiscard) {
        space.clusters[pending.cluster().0 as usize].holding = Holding::Not;
        source.release_cluster(pending.cluster());
        self.slots.discarded(pending);
    }

    /// Returns the number of clusters that wait for discard.
    pub(super) fn awaiting_discard(&self) -> u32 {
        self.slots.awaiting_discard()
    }

    /// Discards an empty cluster that this process holds. Returns whether there was one.
    pub(super) fn discard_one(&self, source: &dyn RunSource, discard: impl FnOnce(ClusterNumber)) -> bool {
        let pending = {
            let _space = self.space.lock();
            self.slots.take_discard()
        };
        let Some(pending) = pending else { return false };
        discard(pending.cluster());
        self.let_go(&mut self.space.lock(), source, pending);
        true
    }

    /// Counts one more piece in each of `slots`, which must have one already.
    pub(super) fn add_piece(&self, slots: Range<u32>) {
        let mut space = self.space.lock();
        for slot in slots {
            let pieces = space.pieces_mut(Slot(slot));
            debug_assert!(*pieces > 0 && *pieces < DEAD - 1, "slot {slot} has {pieces} pieces");
            *pieces += 1;
        }
    }

    /// Counts one more piece in each of `slots`, whose content a process published when their
    /// cluster had `generation`. Returns whether they have that content still, and keep it as long
    /// as this process counts pieces there.
    pub(super) fn join(&self, source: &dyn RunSource, slots: Range<u32>, generation: u64) -> bool {
        let mut space = self.space.lock();
        let cluster = Slot(slots.start).cluster();
        let is_in_file = (cluster.0 as usize) < space.clusters.len();
        if !is_in_file || slots.is_empty() || Slot(slots.end - 1).cluster() != cluster {
            return false;
        }
        let can_count = slots.clone().all(|slot| space.can_join(Slot(slot)));
        if !can_count || !source.join_cluster(cluster, generation) {
            return false;
        }
        for slot in slots.clone().map(Slot) {
            if !space.has_pieces(slot) && !source.add_user(slot) {
                // All others have given it up.
                self.drop_pieces(&mut space, source, slots.start..slot.0);
                if !space.has_own(cluster) && !space.joined.contains_key(&cluster) {
                    source.release_cluster(cluster);
                }
                return false;
            }
            space.count_joined(slot);
        }
        true
    }

    /// Counts one piece less in each of `slots`.
    pub(super) fn drop_piece(&self, source: &dyn RunSource, slots: Range<u32>) {
        self.drop_pieces(&mut self.space.lock(), source, slots);
    }

    fn drop_pieces(&self, space: &mut Space, source: &dyn RunSource, slots: Range<u32>) {
        let freed: Vec<Slot> = slots.map(Slot).filter(|&slot| space.drop_one(slot)).collect();
        // While this process holds the cluster: afterwards others may use the slots.
        discard_unused(source, freed.iter().copied());
        for slot in freed {
            if space.joined.contains_key(&slot.cluster()) {
                space.drop_joined(source, slot.cluster());
                continue;
            }
            let cluster = &mut space.clusters[indices(slot).0];
            if cluster.holding == Holding::Owned && !source.fence_cluster(slot.cluster()) {
                // Another process has joined.
                cluster.holding = Holding::Lent;
            }
            self.free_own(space, source, slot);
        }
    }

    /// Gives back `slots`, which [`FileSlots::alloc`] has just returned, unwritten. They need no
    /// fence: nobody can have published what they have.
    pub(super) fn give_back(&self, source: &dyn RunSource, slots: Range<u32>) {
        let mut space = self.space.lock();
        for slot in slots.map(Slot) {
            let is_free = space.drop_one(slot);
            debug_assert!(is_free, "{slot:?} was allocated just now");
            source.drop_user(slot);
            self.free_own(&mut space, source, slot);
        }
    }

    /// Frees a slot of this process's own, in which the last piece was dropped.
    fn free_own(&self, space: &mut Space, source: &dyn RunSource, slot: Slot) {
        let (number, at) = indices(slot);
        let cluster = &mut space.clusters[number];
        let is_owned = cluster.holding == Holding::Owned;
        if is_owned {
            self.slots.free(FREER, slot, 1);
        } else {
            cluster.pieces()[at] = DEAD;
        }
        cluster.live_slots -= 1;
        if cluster.live_slots == 0 {
            // The slots that the allocator counts as used are the dead ones; an owned cluster has
            // none.
            cluster.holding = if is_owned { self.emptied() } else { Holding::Withheld };
            let is_held = cluster.holding == Holding::Emptied;
            let freed_table = is_owned && cluster.pieces.take().is_some();
            space.tables -= usize::from(freed_table);
            if !is_held {
                source.release_cluster(slot.cluster());
            }
        }
    }

    /// Marks owned clusters as lent, because the process is about to fork and its child will hold
    /// them, too.
    pub(super) fn lend(&self) {
        self.change_holding(Holding::Owned, Holding::Lent);
    }

    /// Counts the child that this process is about to fork as a user of all slots with pieces.
    pub(super) fn count_child(&self, source: &dyn RunSource) {
        let space = self.space.lock();
        space.for_each_used(|slot| {
            let is_used = source.add_user(slot);
            debug_assert!(is_used, "this process uses {slot:?}");
        });
    }

    /// Counts this process, or a child that was not forked, as a user of no slot.
    pub(super) fn drop_users(&self, source: &dyn RunSource) {
        let space = self.space.lock();
        let mut used = Vec::new();
        space.for_each_used(|slot| used.push(slot));
        discard_unused(source, used.into_iter());
    }

    /// Marks lent clusters as borrowed in the child of a fork: its parent holds them, too.
    pub(super) fn borrow(&self) {
        self.change_holding(Holding::Lent, Holding::Borrowed);
    }

    fn change_holding(&self, from: Holding, to: Holding) {
        for cluster in &mut self.space.lock().clusters {
            if cluster.holding == from {
                cluster.holding = to;
            }
        }
    }

    /// Returns the number of slots with pieces.
    pub(super) fn live_slots(&self) -> u32 {
        self.space.lock().live_slots
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        let space = self.space.lock();
        size_of_val(&*space.clusters) + (space.tables + space.joined.len()) * size_of::<PiecesBySlot>()
    }

    /// Checks everything. `pieces_in` has the number of pieces of each slot with pieces.
    pub(super) fn check(&self, pieces_in: &std::collections::HashMap<u32, u8>) {
        self.slots.check();
        let space = self.space.lock();
        let (mut live, mut dead, mut tables) = (0, 0, 0);
        for (number, cluster) in space.clusters.iter().enumerate() {
            tables += usize::from(cluster.pieces.is_some());
            let mut live_here = 0;
            for (at, &pieces) in cluster.pieces.iter().flat_map(|pieces| pieces.iter().enumerate()) {
                let slot = ClusterNumber(number as u32).slots().start.0 + at as u32;
                let is_joined = space.joined.contains_key(&ClusterNumber(number as u32));
                let expected = if is_joined { 0 } else { pieces_in.get(&slot).copied().unwrap_or(0) };
                assert_eq!(if pieces == DEAD { 0 } else { pieces }, expected, "pieces in slot {slot} of the file");
                live_here += u32::from(expected > 0);
                dead += u32::from(pieces == DEAD);
                assert!(pieces != DEAD || cluster.holding != Holding::Owned, "slot {slot} is dead in an owned cluster");
            }
            assert_eq!(u32::from(cluster.live_slots), live_here, "slots with pieces in cluster {number}");
            let has_live = matches!(cluster.holding, Holding::Owned | Holding::Lent | Holding::Borrowed);
            assert_eq!(has_live, live_here > 0, "cluster {number} is {:?}", cluster.holding);
            live += live_here;
        }
        let own = live;
        for (number, joined) in &space.joined {
            assert!(!space.has_own(*number), "{number:?} has slots of two kinds");
            let slots = number.slots().start.0..number.slots().end.0;
            let live_here = slots.clone().zip(*joined.pieces).filter(|&(slot, pieces)| {
                assert_eq!(pieces, pieces_in.get(&slot).copied().unwrap_or(0), "pieces in joined slot {slot}");
                pieces > 0
            });
            let live_here = live_here.count();
            assert!(live_here > 0 && live_here == usize::from(joined.live_slots), "slots with pieces in {number:?}");
            live += live_here as u32;
        }
        assert_eq!(live, space.live_slots, "slots with pieces");
        assert_eq!(live, pieces_in.len() as u32, "slots of records");
        assert_eq!(own + dead, self.slots.used_slots(), "slots that the allocator counts as used");
        assert_eq!(tables, space.tables, "tables of slots");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Strategy as SlotStrategy, SwapDevice};
    use foliomem_types::discard::Discard;
    use foliomem_types::units::FrameRun;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet, HashMap};

    const CLUSTERS: u32 = 4;

    /// A lock of the tests, outside the lock order.
    type Mutex<T> = crate::sync::Mutex<T, crate::sync::ranks::Unchecked>;

    /// The clusters that this process and all others hold, and the generation of each.
    #[derive(Default)]
    struct Others {
        ours: Mutex<BTreeSet<ClusterNumber>>,
        theirs: Mutex<BTreeSet<ClusterNumber>>,
        generations: Mutex<BTreeMap<ClusterNumber, u64>>,
        /// The number of users of each slot, this process included.
        users: Mutex<BTreeMap<u32, u32>>,
        /// The slots that were discarded since the last look.
        discarded: Mutex<Vec<u32>>,
    }

    impl Others {
        fn generation(&self, cluster: ClusterNumber) -> u64 {
            self.generations.lock().get(&cluster).copied().unwrap_or(0)
        }

        fn begin_generation(&self, cluster: ClusterNumber) {
            *self.generations.lock().entry(cluster).or_default() += 1;
        }
    }

    impl RunSource for Others {
        fn alloc_run(&self, _order: Order) -> Option<FrameRun> {
            None
        }

        fn free_run(&self, _run: FrameRun) {}

        fn claim_cluster(&self, cluster: ClusterNumber) -> bool {
            let is_claimed = !self.theirs.lock().contains(&cluster) && self.ours.lock().insert(cluster);
            if is_claimed {
                self.begin_generation(cluster);
            }
            is_claimed
        }

        fn release_cluster(&self, cluster: ClusterNumber) {
            assert!(self.ours.lock().remove(&cluster), "{cluster:?} is not held");
        }

        fn fence_cluster(&self, cluster: ClusterNumber) -> bool {
            assert!(self.ours.lock().contains(&cluster), "{cluster:?} is not held");
            let is_sole = !self.theirs.lock().contains(&cluster);
            if is_sole {
                self.begin_generation(cluster);
            }
            is_sole
        }

        fn join_cluster(&self, cluster: ClusterNumber, generation: u64) -> bool {
            let is_held = self.ours.lock().contains(&cluster) || self.theirs.lock().contains(&cluster);
            let joins = is_held && self.generation(cluster) == generation;
            joins && {
                self.ours.lock().insert(cluster);
                true
            }
        }

        fn count_user(&self, slots: Range<u32>) {
            self.users.lock().extend(slots.map(|slot| (slot, 1)));
        }

        fn add_user(&self, slot: Slot) -> bool {
            self.users.lock().get_mut(&slot.0).map(|users| *users += 1).is_some()
        }

        fn drop_user(&self, slot: Slot) -> bool {
            let mut users = self.users.lock();
            let its = users.get_mut(&slot.0).expect("a slot in use");
            *its -= 1;
            let is_last = *its == 0;
            if is_last {
                users.remove(&slot.0);
            }
            is_last
        }

        fn discard_slots(&self, slots: Range<u32>) {
            assert!(self.ours.lock().contains(&Slot(slots.start).cluster()), "{slots:?} are not held");
            assert!(slots.clone().all(|slot| !self.users.lock().contains_key(&slot)), "{slots:?} are in use");
            self.discarded.lock().extend(slots);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Alloc(u8),
        Share(prop::sample::Index),
        Drop(prop::sample::Index),
        Fork {
            child: bool,
        },
        OthersClaim(ClusterNumber),
        OthersGo(ClusterNumber),
        /// Another process publishes slots of a cluster that it holds.
        OthersPublish(ClusterNumber, u32),
        /// Another process joins slots that this one has written.
        OthersJoin(prop::sample::Index),
        /// This process joins published slots.
        Join(prop::sample::Index),
        Discard,
    }

    fn cluster() -> impl Strategy<Value = ClusterNumber> {
        (0..CLUSTERS).prop_map(ClusterNumber)
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0u8..10).prop_map(Step::Alloc),
            2 => any::<prop::sample::Index>().prop_map(Step::Share),
            6 => any::<prop::sample::Index>().prop_map(Step::Drop),
            1 => any::<bool>().prop_map(|child| Step::Fork { child }),
            1 => cluster().prop_map(Step::OthersClaim),
            2 => cluster().prop_map(Step::OthersGo),
            2 => (cluster(), 0..CLUSTER_SLOTS - 1).prop_map(|(cluster, at)| Step::OthersPublish(cluster, at)),
            2 => any::<prop::sample::Index>().prop_map(Step::OthersJoin),
            3 => any::<prop::sample::Index>().prop_map(Step::Join),
            2 => Just(Step::Discard),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        #[test]
        fn slots_that_another_process_may_need_are_not_used_or_discarded(
            discard in prop::sample::select(vec![Discard::Never, Discard::ForRoom, Discard::ForDevice]),
            steps in prop::collection::vec(step(), 1..120),
        ) {
            let device = SwapDevice { slots: CLUSTERS * CLUSTER_SLOTS, discard };
            let slots = SwapClusters::new(device, 1, SlotStrategy::default());
            let (file, others) = (FileSlots::new(slots), Others::default());
            // Slots that the other side of a fork may need as long as it holds their cluster.
            let mut needed: BTreeSet<u32> = BTreeSet::new();
            let mut live: Vec<Range<u32>> = Vec::new();
            // What processes have published: the slots, and the generation of their cluster.
            let mut published: Vec<(Range<u32>, u64)> = Vec::new();
            for step in steps {
                match step {
                    Step::Alloc(order) => {
                        let order = Order::new(order).unwrap();
                        if let Some(first) = file.alloc(&others, CpuNumber(0), order) {
                            let range = first.0..first.0 + order.pages();
                            prop_assert!(range.clone().all(|slot| !needed.contains(&slot)), "{range:?} is needed");
                            prop_assert!(others.ours.lock().contains(&first.cluster()));
                            prop_assert!(!live.iter().any(|other| other.start < range.end && range.start < other.end));
                            // A process that joined by what was published there before would read
                            // what is written now.
                            let generation = others.generation(first.cluster());
                            let overlaps = |(other, its): &(Range<u32>, u64)| *its == generation && other.start < range.end && range.start < other.end;
                            prop_assert!(!published.iter().any(overlaps), "{range:?} is published");
                            published.push((range.clone(), generation));
                            live.push(range);
                        }
                    }
                    Step::Share(index) if !live.is_empty() => {
                        let range = live[index.index(live.len())].clone();
                        if live.iter().filter(|&other| *other == range).count() < 100 {
                            file.add_piece(range.clone());
                            live.push(range);
                        }
                    }
                    Step::Drop(index) if !live.is_empty() => {
                        let range = live.swap_remove(index.index(live.len()));
                        file.drop_piece(&others, range);
                    }
                    Step::OthersPublish(cluster, at) => {
                        // The others write only to clusters that are theirs alone.
                        let first = cluster.slots().start.0 + at;
                        if others.theirs.lock().contains(&cluster) && !others.ours.lock().contains(&cluster) {
                            others.begin_generation(cluster);
                            others.count_user(first..first + 2);
                            published.push((first..first + 2, others.generation(cluster)));
                        }
                    }
                    Step::OthersJoin(index) if !live.is_empty() => {
                        let range = live[index.index(live.len())].clone();
                        others.theirs.lock().insert(Slot(range.start).cluster());
                        prop_assert!(range.clone().all(|slot| needed.contains(&slot) || others.add_user(Slot(slot))));
                        needed.extend(range);
                    }
                    Step::Join(index) if !published.is_empty() => {
                        let (range, generation) = published[index.index(published.len())].clone();
                        let is_current = others.generation(Slot(range.start).cluster()) == generation;
                        if live.iter().filter(|&other| *other == range).count() < 100 && file.join(&others, range.clone(), generation) {
                            prop_assert!(is_current, "{range:?} may have other content");
                            prop_assert!(range.clone().all(|slot| others.users.lock().contains_key(&slot)));
                            live.push(range);
                        }
                    }
                    Step::Share(_) | Step::Drop(_) | Step::OthersJoin(_) | Step::Join(_) => {}
                    Step::Fork { child } => {
                        file.lend();
                        file.count_child(&others);
                        needed.extend(live.iter().cloned().flatten());
                        if child {
                            file.borrow();
                            // The parent continues to use free slots, except in clusters that it
                            // would have to release first.
                            let space = file.space.lock();
                            let is_used = |cluster: &&ClusterNumber| space.clusters[cluster.0 as usize].holding != Holding::Emptied;
                            for &cluster in others.ours.lock().iter().filter(is_used) {
                                let slots = cluster.slots();
                                needed.extend(slots.start.0..slots.end.0);
                            }
                        }
                        let ours = others.ours.lock().clone();
                        others.theirs.lock().extend(ours);
                    }
                    Step::OthersClaim(cluster) => {
                        if !others.ours.lock().contains(&cluster) {
                            others.theirs.lock().insert(cluster);
                        }
                    }
                    Step::Discard => {
                        let mut discarded = None;
                        let found = file.discard_one(&others, |cluster| {
                            assert!(others.ours.lock().contains(&cluster), "{cluster:?} may belong to another process");
                            discarded = Some(cluster);
                        });
                        prop_assert!(discard != Discard::Never || !found);
                        let is_in = |range: &Range<u32>| Some(Slot(range.start).cluster()) == discarded;
                        prop_assert!(!live.iter().any(is_in), "{discarded:?} has pieces");
                        let is_needed = |&slot: &u32| Some(Slot(slot).cluster()) == discarded;
                        prop_assert!(!needed.iter().any(is_needed), "{discarded:?} is needed");
                    }
                    Step::OthersGo(cluster) => {
                        others.theirs.lock().remove(&cluster);
                        needed.retain(|&slot| Slot(slot).cluster() != cluster);
                    }
                }
                for slot in others.discarded.lock().drain(..) {
                    prop_assert!(!live.iter().any(|range| range.contains(&slot)), "slot {slot} has pieces");
                    prop_assert!(!needed.contains(&slot), "slot {slot} is needed");
                }
                let mut pieces_in: HashMap<u32, u8> = HashMap::new();
                let counted = live.iter().cloned().flatten();
                counted.for_each(|slot| *pieces_in.entry(slot).or_default() += 1);
                file.check(&pieces_in);
            }
            // Every slot is available once no other process holds a cluster, and an empty cluster
            // is discarded.
            live.into_iter().for_each(|range| file.drop_piece(&others, range));
            if discard != Discard::Never && others.theirs.lock().is_empty() {
                prop_assert_eq!(file.awaiting_discard() as usize, others.ours.lock().len());
                while file.discard_one(&others, |_| {}) {}
            }
            others.theirs.lock().clear();
            let whole = Order::new(9).unwrap();
            let all: BTreeMap<u32, ()> =
                std::iter::from_fn(|| file.alloc(&others, CpuNumber(0), whole)).map(|first| (first.0, ())).collect();
            prop_assert_eq!(all.len() as u32, CLUSTERS);
        }
    }
}
