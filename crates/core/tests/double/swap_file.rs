//! The double's swap file, which is a shared store if a test says so.

use super::{Double, FilePieces, Worker, checksum, frames};
use foliomem_core::ports::{Corrupted, MAX_WRITES, NotWritten, Offer, SharedStore, SwapDevice};
use foliomem_core::run_tokens::RunMut;
use foliomem_core::store::{FilePlace, Piece, Seal, WriteBatch};
use foliomem_types::units::{CLUSTER_SLOTS, ClusterNumber, Slot};
use std::ops::Range;

impl SwapDevice<Worker> for Double {
    fn begin_write(&self, worker: &mut Worker, batch: &WriteBatch<'_>, seals: &mut Vec<Seal>) {
        let mut state = self.state.lock();
        let slots = batch.first().0..batch.first().0 + batch.slots();
        let cluster = Slot(slots.start).cluster();
        assert!(state.clusters.contains(&cluster), "a write to {cluster:?}, which is not held");
        assert!(worker.writes.len() < MAX_WRITES, "too many unfinished writes");
        state.file_writes += 1;
        // The old content is lost whatever the result of the write.
        state.file.retain(|&(slot, _), _| !slots.contains(&slot));
        let mut written = FilePieces::new();
        for (piece, start_bytes) in batch.pieces() {
            let nonce = state.file_writes << 32 | u64::from(start_bytes);
            let seal = Seal { nonce, tag: [0; 2] };
            seals.push(seal);
            let place = batch.place(piece, start_bytes, seal);
            assert!(place.first.0 + place.slots() <= slots.end, "{place:?} is outside of its batch");
            let content = state.pieces[&Double::place_key(&piece.place)].clone();
            written.insert((place.first.0, place.offset_bytes), (nonce, content));
        }
        worker.writes.push_back(written);
        state.most_writes = state.most_writes.max(worker.writes.len());
    }

    fn finish_write(&self, worker: &mut Worker) -> Result<(), NotWritten> {
        let mut state = self.state.lock();
        let written = worker.writes.pop_front().expect("an unfinished write");
        if state.failing_writes > 0 {
            state.failing_writes -= 1;
            return Err(NotWritten);
        }
        state.file.extend(written);
        Ok(())
    }

    fn note_full(&self) {}

    fn read(
        &self,
        worker: &mut Worker,
        piece: &Piece<'_>,
        place: &FilePlace,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        let mut state = self.state.lock();
        if state.failing_reads > 0 {
            state.failing_reads -= 1;
            return Err(Corrupted);
        }
        let (nonce, content) = state.file[&(place.first.0, place.offset_bytes)].clone();
        assert_eq!(nonce, place.seal.nonce, "{place:?} was overwritten");
        assert_eq!(checksum(&content), piece.checksum);
        worker.words = content;
        worker.decode(piece);
        for (frame, word) in frames(*into).zip(&worker.words[skip_pages as usize..]) {
            *state.homes.get_mut(&frame).expect("a populated frame") = *word;
        }
        Ok(())
    }

    fn discard(&self, cluster: ClusterNumber) -> bool {
        let mut state = self.state.lock();
        assert!(state.clusters.contains(&cluster), "{cluster:?} is discarded but not held");
        state.file.retain(|&(slot, _), _| Slot(slot).cluster() != cluster);
        true
    }

    fn claim(&self, cluster: ClusterNumber) -> bool {
        let mut state = self.state.lock();
        let is_claimed = !state.foreign_clusters.contains(&cluster) && state.clusters.insert(cluster);
        if is_claimed {
            state.begin_generation(cluster);
        }
        is_claimed
    }

    fn release(&self, cluster: ClusterNumber) {
        assert!(self.state.lock().clusters.remove(&cluster), "{cluster:?} is not held");
    }

    fn fence(&self, cluster: ClusterNumber) -> bool {
        let mut state = self.state.lock();
        assert!(state.clusters.contains(&cluster), "{cluster:?} is not held");
        let is_sole = !state.foreign_clusters.contains(&cluster);
        if is_sole {
            state.begin_generation(cluster);
        }
        is_sole
    }

    fn join(&self, cluster: ClusterNumber, generation: u64) -> bool {
        let mut state = self.state.lock();
        let is_held = state.clusters.contains(&cluster) || state.foreign_clusters.contains(&cluster);
        let joins = is_held && state.generation(cluster) == generation;
        if joins {
            state.clusters.insert(cluster);
        }
        joins
    }
}

impl SharedStore<Worker> for Double {
    fn offer(&self, piece: &Piece<'_>) -> Option<Offer> {
        let mut state = self.state.lock();
        if let Some(offer) = state.published.get(&piece.checksum) {
            return Some(*offer);
        }
        let (cluster, at) = state.of_relative.filter(|(cluster, _)| state.foreign_clusters.contains(cluster))?;
        let (first, len_bytes) = (cluster.slots().start.offset(at), piece.place.len_bytes());
        let seal = Seal { nonce: 1 << 62 | u64::from(at), tag: [0; 2] };
        let place = FilePlace { first, offset_bytes: 0, len_bytes, seal };
        if at + place.slots() > CLUSTER_SLOTS {
            return None;
        }
        let mut content = state.pieces[&Double::place_key(&piece.place)].clone();
        content[0] ^= u64::from(state.relative_differs);
        state.file.insert((first.0, 0), (seal.nonce, content));
        (first.0..first.0 + place.slots()).for_each(|slot| *state.users.entry(slot).or_default() = 1);
        state.of_relative = Some((cluster, at + place.slots()));
        let offer = Offer { place, generation: state.generation(cluster) };
        state.published.insert(piece.checksum, offer);
        Some(offer)
    }

    fn is_equal(&self, _worker: &mut Worker, piece: &Piece<'_>, place: &FilePlace) -> bool {
        let state = self.state.lock();
        let ours = &state.pieces[&Double::place_key(&piece.place)];
        let theirs = state.file.get(&(place.first.0, place.offset_bytes));
        theirs.is_some_and(|(nonce, content)| *nonce == place.seal.nonce && content == ours)
    }

    fn publish(&self, piece: &Piece<'_>, place: &FilePlace) {
        let mut state = self.state.lock();
        let offer = Offer { place: *place, generation: state.generation(place.first.cluster()) };
        state.published.insert(piece.checksum, offer);
    }

    fn count_user(&self, slots: Range<u32>) {
        let mut state = self.state.lock();
        slots.for_each(|slot| {
            state.users.insert(slot, 1);
        });
    }

    fn add_user(&self, slot: Slot) -> bool {
        let mut state = self.state.lock();
        assert!(state.clusters.contains(&slot.cluster()), "{slot:?} is not held");
        state.users.get_mut(&slot.0).map(|users| *users += 1).is_some()
    }

    fn drop_user(&self, slot: Slot) -> bool {
        let mut state = self.state.lock();
        let users = state.users.get_mut(&slot.0).expect("a slot in use");
        *users -= 1;
        let is_last = *users == 0;
        if is_last {
            state.users.remove(&slot.0);
        }
        is_last
    }

    fn discard(&self, slots: Range<u32>) {
        let mut state = self.state.lock();
        assert!(state.clusters.contains(&Slot(slots.start).cluster()), "{slots:?} are not held");
        assert!(slots.clone().all(|slot| !state.users.contains_key(&slot)), "{slots:?} are in use");
        state.file.retain(|&(slot, _), _| !slots.contains(&slot));
    }
}
