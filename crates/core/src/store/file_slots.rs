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
//! Locks: one lock protects everything here. The locks of the cluster allocator are taken under it.

use super::RunSource;
use crate::cluster::{NoSlots, PendingDiscard, SwapClusters};
use crate::sync::{Mutex, ranks};
use foliomem_types::units::{CLUSTER_SLOTS, ClusterNumber, CpuNumber, Order, Slot};
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
        self.pieces.get_or_insert_with(|| Box::new([0; CLUSTER_SLOTS as usize]))
    }
}

#[derive(Debug)]
struct Space {
    clusters: Vec<Cluster>,
    live_slots: u32,
    tables: usize,
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
        FileSlots { slots, wants_discard, space: Mutex::new(Space { clusters, live_slots: 0, tables: 0 }) }
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
                Holding::Lent | Holding::Borrowed if source.is_sole_holder(number) => Holding::Owned,
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
            let (number, at) = indices(Slot(slot));
            let pieces = &mut space.clusters[number].pieces()[at];
            debug_assert!(*pieces > 0 && *pieces < DEAD - 1, "slot {slot} has {pieces} pieces");
            *pieces += 1;
        }
    }

    /// Counts one piece less in each of `slots`.
    pub(super) fn drop_piece(&self, source: &dyn RunSource, slots: Range<u32>) {
        let mut space = self.space.lock();
        for slot in slots {
            let (number, at) = indices(Slot(slot));
            let cluster = &mut space.clusters[number];
            let holding = cluster.holding;
            let pieces = &mut cluster.pieces()[at];
            debug_assert!(*pieces > 0 && *pieces < DEAD, "slot {slot} has {pieces} pieces");
            *pieces -= 1;
            if *pieces > 0 {
                continue;
            }
            if holding == Holding::Owned {
                self.slots.free(FREER, Slot(slot), 1);
            } else {
                *pieces = DEAD;
            }
            cluster.live_slots -= 1;
            let is_empty = cluster.live_slots == 0;
            if is_empty {
                // The slots that the allocator counts as used are the dead ones; an owned cluster
                // has none.
                cluster.holding = if holding == Holding::Owned { self.emptied() } else { Holding::Withheld };
                let is_held = cluster.holding == Holding::Emptied;
                let freed_table = holding == Holding::Owned && cluster.pieces.take().is_some();
                space.tables -= usize::from(freed_table);
                if !is_held {
                    source.release_cluster(Slot(slot).cluster());
                }
            }
            space.live_slots -= 1;
        }
    }

    /// Marks owned clusters as lent, because the process is about to fork and its child will hold
    /// them, too.
    pub(super) fn lend(&self) {
        self.change_holding(Holding::Owned, Holding::Lent);
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
        size_of_val(&*space.clusters) + space.tables * size_of::<PiecesBySlot>()
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
                let expected = pieces_in.get(&slot).copied().unwrap_or(0);
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
        assert_eq!(live, space.live_slots, "slots with pieces");
        assert_eq!(live, pieces_in.len() as u32, "slots of records");
        assert_eq!(live + dead, self.slots.used_slots(), "slots that the allocator counts as used");
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

    /// The clusters that this process and all others hold.
    #[derive(Default)]
    struct Others {
        ours: Mutex<BTreeSet<ClusterNumber>>,
        theirs: Mutex<BTreeSet<ClusterNumber>>,
    }

    impl RunSource for Others {
        fn alloc_run(&self, _order: Order) -> Option<FrameRun> {
            None
        }

        fn free_run(&self, _run: FrameRun) {}

        fn claim_cluster(&self, cluster: ClusterNumber) -> bool {
            let is_theirs = self.theirs.lock().contains(&cluster);
            !is_theirs && self.ours.lock().insert(cluster)
        }

        fn release_cluster(&self, cluster: ClusterNumber) {
            assert!(self.ours.lock().remove(&cluster), "{cluster:?} is not held");
        }

        fn is_sole_holder(&self, cluster: ClusterNumber) -> bool {
            !self.theirs.lock().contains(&cluster)
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Alloc(u8),
        Share(prop::sample::Index),
        Drop(prop::sample::Index),
        Fork { child: bool },
        OthersClaim(ClusterNumber),
        OthersGo(ClusterNumber),
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
            for step in steps {
                match step {
                    Step::Alloc(order) => {
                        let order = Order::new(order).unwrap();
                        if let Some(first) = file.alloc(&others, CpuNumber(0), order) {
                            let range = first.0..first.0 + order.pages();
                            prop_assert!(range.clone().all(|slot| !needed.contains(&slot)), "{range:?} is needed");
                            prop_assert!(others.ours.lock().contains(&first.cluster()));
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
                    Step::Share(_) | Step::Drop(_) => {}
                    Step::Fork { child } => {
                        file.lend();
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
