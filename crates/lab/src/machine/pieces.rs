//! The lab's codec: sizes and costs of compressed pieces, without bytes.

use super::{Home, HomeContent, LabMachine, Store, hash_versions};
use foliomem_core::ports::{Compressed, Corrupted, Pieces};
use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_core::store::{FragmentMut, FragmentRef, Piece, PlaceMut};
use foliomem_core::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::{Order, PageNumber};

impl Pieces<()> for LabMachine {
    #[inline]
    fn compress(&self, _worker: &mut (), _head: PageNumber, run: RunRef<'_>) -> Compressed {
        let content = self.content(*run);
        let name = content.as_ref().map_or(0, HomeContent::name);
        let Some(codec) = self.codec() else {
            // A repeated word is only detected, which costs as much as a hash.
            let page_ns = if self.content.filled { self.costs.hash_page_ns } else { self.costs.copy_page_ns };
            self.spend_by_page(0, page_ns, run.frames());
            return Compressed::Filled(name);
        };
        self.spend_by_page(0, codec.compress_page_ns[run.order.index()], run.frames());
        let Some(content) = content.filter(|_| name != 0 && self.content.store != Store::Outside) else {
            return Compressed::Filled(name);
        };
        let density = self.density.lock();
        let len_bytes = content.len_bytes(self.stored_page_bytes[run.order.index()], density.as_ref());
        Compressed::Bytes { len_bytes, raw: len_bytes == run.order.bytes() as u32, checksum: name }
    }

    #[inline]
    fn write(&self, _worker: &mut (), _run: RunRef<'_>, _place: PlaceMut<'_>) {
        // A piece has no bytes; its checksum names the content.
    }

    #[inline]
    fn copy(&self, from: FragmentRef<'_>, _to: FragmentMut<'_>) {
        self.spend(u64::from(self.costs.copy_page_ns) * u64::from(from.len_bytes) / Order::ZERO.bytes() as u64);
    }

    #[inline]
    fn read(&self, _worker: &mut (), piece: &Piece<'_>, skip_pages: u32, into: RunMut<'_>) -> Result<(), Corrupted> {
        match self.codec() {
            // Everything before the part is decompressed, too.
            Some(codec) => {
                let page_ns = codec.decompress_page_ns[piece.granule.index()];
                self.spend(u64::from(page_ns) * u64::from(skip_pages + into.frames()));
            }
            None if self.content.filled => self.spend_by_page(0, self.costs.zero_page_ns, into.frames()),
            None => self.spend_by_page(0, self.costs.copy_page_ns, into.frames()),
        }
        let name = piece.filled.unwrap_or(piece.checksum);
        let (first, hash) = (name >> 32, name as u32);
        // Other parts of the piece may have returned and changed since.
        let whole = into.order == piece.granule && u32::from(piece.references) == into.frames();
        if name != 0 && whole && hash_versions(self.pages.folio(PageNumber(first), into.frames())) != hash {
            return Err(Corrupted);
        }
        for (number, home) in (first as u32 + skip_pages..).zip(self.staged(*into)) {
            assert_ne!(home.load(Relaxed), Home::EMPTY, "{into:?} was unpopulated");
            home.store(if name == 0 { Home::ANY } else { number + Home::FIRST_PAGE }, Relaxed);
        }
        Ok(())
    }
}
