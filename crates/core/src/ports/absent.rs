//! The type of an optional port that does not exist.

use super::{
    Corrupted, Marks, MoveError, NotWritten, Offer, Recompressed, Recompressor, SharedPages, SharedStore, SwapDevice,
};
use crate::page_table::Entries;
use crate::run_tokens::RunMut;
use crate::store::{FilePlace, Piece, PlaceMut, Seal, WriteBatch};
use foliomem_types::units::{ClusterNumber, FrameRun, PageNumber, Slot};
use std::ops::Range;

/// No port. The type has no values, so the compiler removes the code that would use the port.
#[derive(Clone, Copy, Debug)]
pub enum Absent {}

impl Marks for Absent {
    fn for_each_lost(&self, _block: &Entries, _pages: Range<PageNumber>, _lost: &mut dyn FnMut(Range<PageNumber>)) {
        match *self {}
    }

    fn take(
        &self,
        _block: &mut Entries,
        _pages: Range<PageNumber>,
        _lost: &mut dyn FnMut(&mut Entries, Range<PageNumber>),
    ) {
        match *self {}
    }

    fn set(&self, _block: &Entries, _pages: Range<PageNumber>) {
        match *self {}
    }
}

impl SharedPages for Absent {
    fn exist(&self) -> bool {
        match *self {}
    }

    fn unprotect(&self, _block: &Entries, _pages: Range<PageNumber>) -> Result<(), MoveError> {
        match *self {}
    }

    fn unshare(&self, _pages: Range<PageNumber>) {
        match *self {}
    }

    fn unshare_staged(&self, _run: FrameRun) {
        match *self {}
    }
}

impl<W> Recompressor<W> for Absent {
    fn recompress(&self, _worker: &mut W, _piece: &Piece<'_>) -> Option<Recompressed> {
        match *self {}
    }

    fn write(&self, _worker: &mut W, _place: PlaceMut<'_>) {
        match *self {}
    }
}

impl<W> SwapDevice<W> for Absent {
    fn begin_write(&self, _worker: &mut W, _batch: &WriteBatch<'_>, _seals: &mut Vec<Seal>) {
        match *self {}
    }

    fn finish_write(&self, _worker: &mut W) -> Result<(), NotWritten> {
        match *self {}
    }

    fn note_full(&self) {
        match *self {}
    }

    fn read(
        &self,
        _worker: &mut W,
        _piece: &Piece<'_>,
        _place: &FilePlace,
        _skip_pages: u32,
        _into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        match *self {}
    }

    fn discard(&self, _cluster: ClusterNumber) -> bool {
        match *self {}
    }

    fn claim(&self, _cluster: ClusterNumber) -> bool {
        match *self {}
    }

    fn release(&self, _cluster: ClusterNumber) {
        match *self {}
    }

    fn fence(&self, _cluster: ClusterNumber) -> bool {
        match *self {}
    }

    fn join(&self, _cluster: ClusterNumber, _generation: u64) -> bool {
        match *self {}
    }
}

impl<W> SharedStore<W> for Absent {
    fn offer(&self, _piece: &Piece<'_>) -> Option<Offer> {
        match *self {}
    }

    fn is_equal(&self, _worker: &mut W, _piece: &Piece<'_>, _place: &FilePlace) -> bool {
        match *self {}
    }

    fn publish(&self, _piece: &Piece<'_>, _place: &FilePlace) {
        match *self {}
    }

    fn count_user(&self, _slots: Range<u32>) {
        match *self {}
    }

    fn add_user(&self, _slot: Slot) -> bool {
        match *self {}
    }

    fn drop_user(&self, _slot: Slot) -> bool {
        match *self {}
    }

    fn discard(&self, _slots: Range<u32>) {
        match *self {}
    }
}
