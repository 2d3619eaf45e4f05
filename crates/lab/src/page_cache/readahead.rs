//! What is read of a file before anybody asks for it, as Linux 6.6 decides it (`ondemand_readahead`, `page_cache_ra_order`,
//! `do_sync_mmap_readahead`): windows that grow while a file is read in order, in folios that grow from window to window.

use foliomem_core::units::Order;

/// The largest window: 128 KiB, `VM_READAHEAD_PAGES`.
pub const WINDOW_PAGES: u32 = 32;
/// Misses of a mapping after which it is not read around any more: `MMAP_LOTSAMISS`.
const MOST_MISSES: u32 = 100;
/// How much faster a window's folios grow than by one order.
const ORDER_STEP: u8 = 2;

/// What is to be read: folios of `order` as far as they fit into `start..start + pages`. The folio at `mark`, or the next that
/// begins after it, starts the next window when it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// First page of the file.
    pub start: u32,
    /// How many.
    pub pages: u32,
    /// See the type.
    pub mark: u32,
    /// The largest folio.
    pub order: Order,
}

impl Window {
    /// The order of the folio at page `index`: aligned, and not beyond the window. Order 1 is not used, because a folio of two
    /// pages has no room for what Linux keeps of a large one.
    pub fn order_at(&self, index: u32) -> Order {
        let order = self.order.min(Order::largest_at(index, self.start + self.pages - index));
        if order.get() == 1 { Order::ZERO } else { order }
    }
}

/// Of an open file, or a mapping of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Readahead {
    start: u32,
    pages: u32,
    /// What of the window is read before it is needed.
    async_pages: u32,
    last_read: Option<u32>,
    misses: u32,
}

fn next_pages(pages: u32) -> u32 {
    match pages {
        _ if pages < WINDOW_PAGES / 16 => pages * 4,
        _ if pages <= WINDOW_PAGES / 2 => pages * 2,
        _ => WINDOW_PAGES,
    }
}

impl Readahead {
    fn window(&self, marked: Option<Order>) -> Window {
        let mark = self.start + self.pages - self.async_pages;
        Window { start: self.start, pages: self.pages, mark, order: self.grown(marked.unwrap_or(Order::ZERO)) }
    }

    /// The order that follows one of `order`: no larger than the window.
    fn grown(&self, order: Order) -> Order {
        let most = Order::largest_at(0, self.pages.max(1));
        Order::new(order.get() + ORDER_STEP).map_or(most, |grown| grown.min(most))
    }

    fn advance(&mut self) {
        self.start += self.pages;
        self.pages = next_pages(self.pages);
        self.async_pages = self.pages;
    }

    /// `read()` of page `index`, which is not cached.
    pub fn missed(&mut self, index: u32) -> Window {
        let in_order = self.last_read.is_some_and(|last| index.wrapping_sub(last) <= 1);
        let expected = self.start + self.pages;
        if index != 0 && self.pages > 0 && (index == expected || index == expected - self.async_pages) {
            self.advance();
        } else if index == 0 || in_order {
            (self.start, self.pages, self.async_pages) = (index, 4, 3);
        } else {
            return Window { start: index, pages: 1, mark: u32::MAX, order: Order::ZERO };
        }
        if index == self.start && self.pages == self.async_pages {
            let more = next_pages(self.pages);
            if self.pages + more <= WINDOW_PAGES {
                (self.pages, self.async_pages) = (self.pages + more, more);
            } else {
                (self.pages, self.async_pages) = (WINDOW_PAGES, WINDOW_PAGES / 2);
            }
        }
        self.window(None)
    }

    /// `read()` has come to page `index`; returns where it was before.
    pub fn read(&mut self, index: u32) -> Option<u32> {
        self.last_read.replace(index)
    }

    /// A marked folio of `order` was used, at page `index`, for `pages` pages. `next_miss`: the next page that is not cached, if there
    /// is one within a window.
    pub fn marked(
        &mut self,
        index: u32,
        order: Order,
        pages: u32,
        next_miss: impl FnOnce() -> Option<u32>,
    ) -> Option<Window> {
        let expected = (self.start + self.pages - self.async_pages).next_multiple_of(order.pages());
        if self.pages > 0 && (index == expected || index == self.start + self.pages) {
            self.advance();
        } else {
            let start = next_miss()?;
            self.start = start;
            self.pages = next_pages(start - index + pages);
            self.async_pages = self.pages;
        }
        Some(self.window(Some(order)))
    }

    /// A mapping's page `index` was touched and is not cached; `None` where reading around has not helped lately.
    pub fn missed_mapped(&mut self, index: u32) -> Option<Window> {
        self.misses = (self.misses + 1).min(MOST_MISSES * 10);
        if self.misses > MOST_MISSES {
            return None;
        }
        self.start = index.saturating_sub(WINDOW_PAGES / 2);
        (self.pages, self.async_pages) = (WINDOW_PAGES, WINDOW_PAGES / 4);
        Some(self.window(None))
    }

    /// So many pages were cached when the mapping touched them.
    pub fn hit_mapped(&mut self, pages: u32) {
        self.misses = self.misses.saturating_sub(pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(order: u8) -> Order {
        Order::new(order).unwrap()
    }

    /// The windows that follow one, each begun by the marked folio of the last.
    fn follow(readahead: &mut Readahead, first: Window) -> Vec<(u32, u32, u8)> {
        let mut window = first;
        let mut seen = vec![(window.start, window.pages, window.order.get())];
        for _ in 0..3 {
            let at =
                (window.start..).find(|&at| at == window.mark.next_multiple_of(window.order_at(at).pages())).unwrap();
            window = readahead.marked(at, window.order_at(at), 1, || None).unwrap();
            seen.push((window.start, window.pages, window.order.get()));
        }
        seen
    }

    #[test]
    fn windows_and_folios_grow_while_a_file_is_read_in_order() {
        let mut readahead = Readahead::default();
        assert_eq!(readahead.missed(0), Window { start: 0, pages: 4, mark: 1, order: order(2) });
        readahead.read(3);
        let second = readahead.missed(4);
        // A folio that lies where a window begins is as small as that is aligned: those after it stay small.
        assert_eq!(follow(&mut readahead, second), [(4, 24, 2), (28, 32, 4), (60, 32, 4), (92, 32, 4)]);
    }

    #[test]
    fn a_mapping_is_read_around_and_then_ahead_in_ever_larger_folios() {
        let mut readahead = Readahead::default();
        let first = readahead.missed_mapped(0).unwrap();
        assert_eq!(follow(&mut readahead, first), [(0, 32, 2), (32, 32, 4), (64, 32, 5), (96, 32, 5)]);
    }

    #[test]
    fn a_mapping_that_comes_upon_the_mark_of_another_asks_for_a_whole_window() {
        let windows = [1, WINDOW_PAGES].map(|pages| {
            let mut other = Readahead::default();
            other.marked(100, order(2), pages, || Some(104)).map(|window| (window.start, window.pages))
        });
        assert_eq!(windows, [Some((104, 10)), Some((104, 32))], "read() of a page, and a fault");
    }

    #[test]
    fn folios_lie_aligned_within_their_window() {
        let window = Window { start: 6, pages: 26, mark: 6, order: order(5) };
        assert_eq!([6, 8, 16].map(|index| window.order_at(index)), [order(0), order(3), order(4)]);
        let short = Window { start: 32, pages: 6, mark: 32, order: order(5) };
        assert_eq!([32, 36].map(|index| short.order_at(index)), [order(2), order(0)]);
    }

    #[test]
    fn scattered_reads_and_touches_are_read_by_pages() {
        let mut readahead = Readahead::default();
        assert_eq!(readahead.missed(900).pages, 1, "nothing was read before it");
        readahead.read(5);
        assert_eq!(readahead.missed(900).pages, 1);
        assert_eq!(readahead.missed(6).pages, 4);
        let mut mapped = Readahead::default();
        let around: Vec<bool> = (1..200).map(|at| mapped.missed_mapped(at * 1000).is_some()).collect();
        assert_eq!(around.iter().filter(|&&around| around).count(), MOST_MISSES as usize);
        mapped.hit_mapped(500);
        assert_eq!(mapped.missed_mapped(64).map(|window| (window.start, window.order)), Some((48, order(2))));
    }
}
