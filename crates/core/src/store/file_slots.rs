//! Slots of the swap file: which are free, and which hold bytes of how many pieces.
//!
//! Slots come from a cluster allocator of this process over the whole file. The file belongs to all processes of a run,
//! by whole clusters: before the first of its slots is used, a cluster is *claimed*, and when the last one is
//! free again, released ([`RunSource`]). Pieces are packed without regard to slots, so a slot counts the pieces
//! that have bytes in it.
//!
//! After a fork both sides hold the clusters that the parent held, and each frees slots that the other may still need.
//! So a slot of such a cluster is not used again before one of them holds the cluster alone.
//!
//! | holding | held | slots freed in it | allocated from it | left by |
//! |---|---|---|---|---|
//! | `Not` | no | there are none | once it is claimed | a claim that succeeds, or fails (withheld) |
//! | `Owned` | yes | at once | yes | the last free; a fork (lent) |
//! | `Lent` | yes | stay dead | yes: free ones are unknown to the child | the last free; being the sole holder; in the child (borrowed) |
//! | `Borrowed` | yes | stay dead | no: what comes up is dead at once | the last free; being the sole holder |
//! | `Withheld` | no | there are none | no: another process holds it | a claim that succeeds |
//! | `Emptied` | yes | there are none | no: it is to be discarded | being discarded, or wanted before |
//!
//! Where the file wants discards, a process that holds an emptied cluster alone keeps it until it is discarded, so that
//! nobody writes there meanwhile. After a fork both sides may have one emptied, and discard it: neither writes there
//! before it has let go of it, and claimed it again.
//!
//! A dead slot is used for the allocator, which knows nothing of other processes, and counts no piece.
//!
//! Lock: one, over everything here; under it that of the cluster allocator.

use super::RunSource;
use crate::cluster::{NoSlots, PendingDiscard, SwapClusters};
use crate::sync::{Mutex, ranks};
use crate::units::{CLUSTER_SLOTS, ClusterNumber, CpuNumber, Order, Slot};
use std::ops::Range;

/// Who frees slots, for the allocator: all of it is under one lock here.
const FREER: CpuNumber = CpuNumber(0);
/// Pieces in a slot, where none are and yet it cannot be used.
const DEAD: u8 = u8::MAX;
/// Pieces begin at multiples of this, so that a slot never has more of them than a byte counts.
pub(super) const PIECE_ALIGN_BYTES: u32 = 32;

const _: () = assert!(crate::units::PAGE_BYTES as u32 / PIECE_ALIGN_BYTES + 2 < DEAD as u32);

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
    /// Slots with pieces.
    live_slots: u16,
    /// Pieces in each slot, or [`DEAD`].
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

/// See the module.
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

/// The index of a slot's cluster, and of the slot there.
fn indices(slot: Slot) -> (usize, usize) {
    (slot.cluster().0 as usize, slot.index_in_cluster().get() as usize)
}

impl FileSlots {
    /// The slots of a file that has as many as `slots` manages.
    pub(super) fn new(slots: SwapClusters) -> FileSlots {
        let clusters = vec![Cluster::default(); (slots.slots() / CLUSTER_SLOTS) as usize];
        let wants_discard = slots.wants_discard();
        FileSlots { slots, wants_discard, space: Mutex::new(Space { clusters, live_slots: 0, tables: 0 }) }
    }

    /// 2^order contiguous slots, naturally aligned, each with one piece in it: that of the caller.
    pub(super) fn alloc(&self, source: &dyn RunSource, cpu: CpuNumber, order: Order) -> Option<Slot> {
        let mut space = self.space.lock();
        loop {
            let first = match self.slots.alloc(cpu, order) {
                Ok(first) => first,
                Err(reason) => {
                    let pending = (reason == NoSlots::Discard).then(|| self.slots.take_discard()).flatten();
                    match pending {
                        // It is about to be written anyway.
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

    /// Makes dead slots usable that no other process needs any more; returns whether there were any.
    fn recover(&self, space: &mut Space, source: &dyn RunSource) -> bool {
        let mut found = false;
        for (number, cluster) in space.clusters.iter_mut().enumerate() {
            let number = ClusterNumber(number as u32);
            cluster.holding = match cluster.holding {
                Holding::Lent | Holding::Borrowed if source.is_sole_holder(number) => Holding::Owned,
                Holding::Withheld if source.claim_cluster(number) => {
                    if !self.wants_discard {
                        // Claimed again when it comes up.
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

    /// What a cluster is without slots in use.
    fn emptied(&self) -> Holding {
        if self.wants_discard { Holding::Emptied } else { Holding::Not }
    }

    /// Lets go of a cluster that was, or need not be, discarded.
    fn let_go(&self, space: &mut Space, source: &dyn RunSource, pending: PendingDiscard) {
        space.clusters[pending.cluster().0 as usize].holding = Holding::Not;
        source.release_cluster(pending.cluster());
        self.slots.discarded(pending);
    }

    /// Clusters that are to be discarded.
    pub(super) fn awaiting_discard(&self) -> u32 {
        self.slots.awaiting_discard()
    }

    /// Has a cluster discarded that this process holds and nobody has anything in; returns whether there was one.
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

    /// Counts a piece in each of `slots`, which have one already.
    pub(super) fn add_piece(&self, slots: Range<u32>) {
        let mut space = self.space.lock();
        for slot in slots {
            let (number, at) = indices(Slot(slot));
            let pieces = &mut space.clusters[number].pieces()[at];
            debug_assert!(*pieces > 0 && *pieces < DEAD - 1, "slot {slot} has {pieces} pieces");
            *pieces += 1;
        }
    }

    /// A piece is gone from each of `slots`.
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
                // The allocator's used slots are the dead ones: none where it is owned.
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

    /// The process is about to fork: its child will hold what it holds.
    pub(super) fn lend(&self) {
        self.change_holding(Holding::Owned, Holding::Lent);
    }

    /// This process is the child of a fork: what it has is its parent's, too.
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

    /// Slots with pieces.
    pub(super) fn live_slots(&self) -> u32 {
        self.space.lock().live_slots
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        let space = self.space.lock();
        size_of_val(&*space.clusters) + space.tables * size_of::<PiecesBySlot>()
    }

    /// Walks everything; `pieces_in` says how many pieces each slot has that has any.
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
        assert_eq!(live + dead, self.slots.used_slots(), "slots the allocator has given out");
        assert_eq!(tables, space.tables, "tables of slots");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Discard, Strategy as SlotStrategy, SwapDevice};
    use crate::units::FrameRun;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet, HashMap};

    const CLUSTERS: u32 = 4;

    /// A lock of these tests' own.
    type Mutex<T> = crate::sync::Mutex<T, crate::sync::ranks::Unchecked>;

    /// The clusters, as all processes see them.
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
        fn no_slot_is_used_or_discarded_that_another_process_may_need(
            discard in prop::sample::select(vec![Discard::Never, Discard::ForRoom, Discard::ForDevice]),
            steps in prop::collection::vec(step(), 1..120),
        ) {
            let device = SwapDevice { slots: CLUSTERS * CLUSTER_SLOTS, discard };
            let slots = SwapClusters::new(device, 1, SlotStrategy::default());
            let (file, others) = (FileSlots::new(slots), Others::default());
            // Slots that a fork's other side may need, as long as it holds their cluster.
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
                            // The parent goes on using what was free, but where it would have to let go first.
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
                            assert!(others.ours.lock().contains(&cluster), "{cluster:?} may be somebody else's");
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
            // Everything can be had again once nobody else has it, and is discarded as soon as it is empty.
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
