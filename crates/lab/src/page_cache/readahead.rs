//! Readahead of files as in Linux 6.6 (`ondemand_readahead`, `page_cache_ra_order`,
//! `do_sync_mmap_readahead`): windows grow while a file is read in order, and folios grow from
//! window to window.

use foliomem_types::units::Order;

/// Maximum window, 128 KiB: `VM_READAHEAD_PAGES`.
pub const WINDOW_PAGES: u32 = 32;
/// Maximum misses of a mapping before read-around stops: `MMAP_LOTSAMISS`.
const MAX_MISSES: u32 = 100;
/// Growth of a window's folio order.
const ORDER_STEP: u8 = 2;

/// A window to read: folios of `order` as far as they fit into `start..start + pages`. A use of the
/// folio at `mark`, or of the next one that begins after it, starts the next window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// The first page in the file.
    pub start: u32,
    /// The number of pages.
    pub pages: u32,
    /// The page whose use starts the next window.
    pub mark: u32,
    /// The maximum order of a folio.
    pub order: Order,
}

impl Window {
    /// Returns the order of the folio at page `index`: aligned, and inside the window. Order 1 is
    /// not used, because two pages have no room for the data that Linux keeps for a large folio.
    pub fn order_at(&self, index: u32) -> Order {
        let order = self.order.min(Order::largest_at(index, self.start + self.pages - index));
        if order.get() == 1 { Order::ZERO } else { order }
    }
}

/// The readahead state of an open file or a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Readahead {
    start: u32,
    pages: u32,
    /// The pages of the window that are read before they are needed.
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

    /// Returns the order after `order`, at most the size of the window.
    fn grown(&self, order: Order) -> Order {
        let most = Order::largest_at(0, self.pages.max(1));
        Order::new(order.get() + ORDER_STEP).map_or(most, |grown| grown.min(most))
    }

    fn advance(&mut self) {
        self.start += self.pages;
        self.pages = next_pages(self.pages);
        self.async_pages = self.pages;
    }

    /// Returns the window for `read()` of page `index`, which is not cached.
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

    /// Records that `read()` reached page `index`; returns the previous page.
    pub fn read(&mut self, index: u32) -> Option<u32> {
        self.last_read.replace(index)
    }

    /// Returns the next window after a use of a marked folio of `order` at page `index`, for
    /// `pages` pages. `next_miss` returns the next page that is not cached, if there is one within
    /// a window.
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

    /// Returns the window for a touch of page `index` of a mapping, which is not cached; `None` if
    /// reading around did not help recently.
    pub fn missed_mapped(&mut self, index: u32) -> Option<Window> {
        self.misses = (self.misses + 1).min(MAX_MISSES * 10);
        if self.misses > MAX_MISSES {
            return None;
        }
        self.start = index.saturating_sub(WINDOW_PAGES / 2);
        (self.pages, self.async_pages) = (WINDOW_PAGES, WINDOW_PAGES / 4);
        Some(self.window(None))
    }

    /// Records that the mapping touched `pages` cached pages.
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

    /// Returns the windows that follow `first`; the marked folio of each starts the next.
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
    fn windows_and_folios_grow_during_sequential_reads() {
        let mut readahead = Readahead::default();
        assert_eq!(readahead.missed(0), Window { start: 0, pages: 4, mark: 1, order: order(2) });
        readahead.read(3);
        let second = readahead.missed(4);
        // The alignment of a window's start limits its first folio, and so the following ones.
        assert_eq!(follow(&mut readahead, second), [(4, 24, 2), (28, 32, 4), (60, 32, 4), (92, 32, 4)]);
    }

    #[test]
    fn a_mapping_is_read_around_and_then_ahead_in_growing_folios() {
        let mut readahead = Readahead::default();
        let first = readahead.missed_mapped(0).unwrap();
        assert_eq!(follow(&mut readahead, first), [(0, 32, 2), (32, 32, 4), (64, 32, 5), (96, 32, 5)]);
    }

    #[test]
    fn the_mark_of_another_reader_starts_a_whole_window() {
        let windows = [1, WINDOW_PAGES].map(|pages| {
            let mut other = Readahead::default();
            other.marked(100, order(2), pages, || Some(104)).map(|window| (window.start, window.pages))
        });
        assert_eq!(windows, [Some((104, 10)), Some((104, 32))], "for read() of a page, and for a fault");
    }

    #[test]
    fn folios_are_aligned_within_their_window() {
        let window = Window { start: 6, pages: 26, mark: 6, order: order(5) };
        assert_eq!([6, 8, 16].map(|index| window.order_at(index)), [order(0), order(3), order(4)]);
        let short = Window { start: 32, pages: 6, mark: 32, order: order(5) };
        assert_eq!([32, 36].map(|index| short.order_at(index)), [order(2), order(0)]);
    }

    #[test]
    fn scattered_reads_and_touches_read_single_pages() {
        let mut readahead = Readahead::default();
        assert_eq!(readahead.missed(900).pages, 1, "no earlier read makes it sequential");
        readahead.read(5);
        assert_eq!(readahead.missed(900).pages, 1);
        assert_eq!(readahead.missed(6).pages, 4);
        let mut mapped = Readahead::default();
        let around: Vec<bool> = (1..200).map(|at| mapped.missed_mapped(at * 1000).is_some()).collect();
        assert_eq!(around.iter().filter(|&&around| around).count(), MAX_MISSES as usize);
        mapped.hit_mapped(500);
        assert_eq!(mapped.missed_mapped(64).map(|window| (window.start, window.order)), Some((48, order(2))));
    }
}
