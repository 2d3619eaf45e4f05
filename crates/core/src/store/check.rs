//! The whole-store check, for tests and the lab: every byte belongs to at most one piece, every
//! slot and extent to a live piece, and every gauge equals the sum over the pieces.

use super::word::{Location, PieceWord, ZspageId};
use super::{PieceId, Store};
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::PAGE_BYTES;
use std::collections::{HashMap, HashSet};

impl Store {
    /// Walks everything and panics at the first inconsistency. No other call may be in progress;
    /// pieces may be pinned.
    pub fn check(&self) {
        let live = self.check_pieces();
        let mut held_frames = 0;
        let mut heads = Vec::new();
        for zspage in self.zspages.in_use() {
            let extent = self.zspages.extent(zspage);
            held_frames += extent.frames;
            heads.extend(extent.runs().map(|run| (run.head.0, run.frames())));
            if self.zspages.class(zspage).is_some() {
                self.check_slots(zspage, &live);
            }
        }
        assert_eq!(held_frames, self.held_frames(), "held frames");
        heads.sort_unstable();
        for pair in heads.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "frames {:x} and {:x} overlap", pair[0].0, pair[1].0);
        }
        self.check_extents(&live);
        self.zspages.check_lists();
        self.check_backing();
    }

    /// Returns the pieces with bytes, after comparing the gauges with all pieces.
    fn check_pieces(&self) -> HashMap<PieceId, PieceWord> {
        let (mut pieces, mut content_pages, mut filled_pages, mut raw_pages, mut bytes) = (0, 0, 0, 0, 0);
        let mut live = HashMap::new();
        for id in self.pieces.ids() {
            let word = self.pieces.at(id).load();
            if word.is_dead() {
                assert_eq!(word, PieceWord::FREE, "{id:?} is dead and not free");
                continue;
            }
            let pages = u64::from(word.references());
            pieces += 1;
            content_pages += pages;
            if word.location() == Location::FILLED {
                filled_pages += pages;
                continue;
            }
            if !word.location().is_in_memory() {
                continue;
            }
            raw_pages += if word.raw() { pages } else { 0 };
            let place = self.place_of(word.location());
            let len_bytes = place.len_bytes();
            let in_fragments: u32 = place.fragments().iter().map(|fragment| fragment.len_bytes).sum();
            assert_eq!(len_bytes, in_fragments, "bytes of {id:?}");
            assert!(len_bytes as usize <= word.granule().bytes(), "{id:?} is larger than its granule");
            bytes += u64::from(len_bytes);
            live.insert(id, word);
        }
        let stats = self.stats();
        assert_eq!(stats.pieces, pieces, "pieces");
        assert_eq!(stats.orig_data_bytes, content_pages * PAGE_BYTES as u64, "pages of content");
        assert_eq!(stats.same_filled_pages, filled_pages, "filled pages");
        assert_eq!(stats.huge_pages, raw_pages, "raw pages");
        assert_eq!(stats.compr_data_bytes, bytes, "bytes of pieces");
        assert_eq!(self.gauges.pieces.load(Relaxed), stats.pieces);
        live
    }

    /// Checks that the piece of every taken slot of a zspage names this slot as its place.
    fn check_slots(&self, zspage: ZspageId, live: &HashMap<PieceId, PieceWord>) {
        let Some(class) = self.zspages.class(zspage) else { return };
        for (slot, id) in self.zspages.check_zspage(zspage) {
            let Some(word) = live.get(&id) else { panic!("slot {slot} of {zspage:?} holds {id:?}, which is free") };
            let location = word.location();
            assert_eq!(location.zspage(), zspage, "the zspage of {id:?}");
            assert_eq!(u32::from(location.last_byte()) / class.shape().size_bytes, slot, "the slot of {id:?}");
        }
    }

    /// Checks that every piece has its slot or its extents, and that every extent has one piece.
    fn check_extents(&self, live: &HashMap<PieceId, PieceWord>) {
        let mut owned = HashSet::new();
        let mut slots = 0;
        for (id, word) in live {
            let first = word.location().zspage();
            if self.zspages.class(first).is_some() {
                slots += 1;
                continue;
            }
            let mut next = Some(first);
            while let Some(link) = next {
                assert!(owned.insert(link), "{link:?} of {id:?} has two owners");
                next = self.zspages.next_extent(link);
            }
        }
        let in_use: Vec<_> = self.zspages.in_use().collect();
        let (zspages, extents): (Vec<_>, Vec<_>) =
            in_use.into_iter().partition(|&zspage| self.zspages.class(zspage).is_some());
        assert!(extents.iter().all(|extent| owned.contains(extent)), "an extent without owner");
        assert_eq!(extents.len(), owned.len(), "a piece has extents that are not in use");
        let taken: usize = zspages.iter().map(|&zspage| self.zspages.check_zspage(zspage).len()).sum();
        assert_eq!(slots, taken, "a piece has no slot");
    }
}
