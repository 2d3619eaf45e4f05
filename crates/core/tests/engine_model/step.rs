//! The steps of random programs, and their strategies.

use super::world::{BASE, PAGES, World};
use foliomem_types::size_policy::{Advice, Disabled, SizePolicy};
use foliomem_types::units::{ClusterNumber, Order, PageNumber};
use proptest::prelude::*;

#[derive(Clone, Debug)]
pub enum Step {
    Map {
        start: u64,
        pages: u64,
    },
    NativeTouch {
        start: u64,
        pages: u64,
        value: u64,
    },
    Write {
        page: u64,
        pages: u64,
        value: u64,
    },
    Read {
        page: u64,
        pages: u64,
    },
    Stride {
        page: u64,
        step: u64,
        pages: u64,
    },
    Reclaim {
        pages: u64,
    },
    /// A round of the search for cold memory.
    FindCold {
        pages: u64,
        rounds: u64,
    },
    PageOut {
        start: u64,
        pages: u64,
    },
    Resume,
    Discard {
        start: u64,
        pages: u64,
        every: u64,
    },
    Guard {
        start: u64,
        pages: u64,
        every: u64,
    },
    Wait,
    Unmap {
        start: u64,
        pages: u64,
    },
    Remap {
        from: u64,
        to: u64,
        pages: u64,
    },
    Pin {
        page: u64,
    },
    Unpin,
    Share,
    Refuse {
        start: u64,
        pages: u64,
    },
    Shrink {
        pages: u32,
    },
    CompactStore {
        pages: u32,
    },
    Recompress {
        steps: u32,
    },
    Compact {
        order: u8,
    },
    FailWrites {
        count: u32,
    },
    DiscardFile,
    FailReads {
        count: u32,
    },
    OthersClaim {
        cluster: ClusterNumber,
    },
    OthersGo,
    ShareStore {
        steps: u32,
    },
    /// A relative writes to a cluster that it holds alone.
    RelativeStores {
        cluster: ClusterNumber,
        differs: bool,
    },
    Fork {
        child: bool,
    },
    BringAllIn,
    Sizes {
        policy: SizePolicy,
    },
    Advise {
        start: u64,
        pages: u64,
        advice: Advice,
    },
    Disable {
        how: Disabled,
    },
}

pub fn step() -> impl Strategy<Value = Step> {
    let page = 0..PAGES;
    let short = 1u64..80;
    prop_oneof![
        2 => (page.clone(), 1u64..700).prop_map(|(start, pages)| Step::Map { start, pages }),
        1 => (page.clone(), short.clone(), 0u64..40).prop_map(|(start, pages, value)| Step::NativeTouch { start, pages, value }),
        6 => (page.clone(), short.clone(), 0u64..40).prop_map(|(page, pages, value)| Step::Write { page, pages, value }),
        4 => (page.clone(), short.clone()).prop_map(|(page, pages)| Step::Read { page, pages }),
        2 => (page.clone(), 2u64..40, 1u64..80).prop_map(|(page, step, pages)| Step::Stride { page, step, pages }),
        3 => (1u64..300).prop_map(|pages| Step::Reclaim { pages }),
        3 => (1u64..1000, 1u64..4).prop_map(|(pages, rounds)| Step::FindCold { pages, rounds }),
        3 => (page.clone(), 1u64..300).prop_map(|(start, pages)| Step::PageOut { start, pages }),
        2 => Just(Step::Resume),
        3 => (page.clone(), short.clone(), 1u64..4)
            .prop_map(|(start, pages, every)| Step::Discard { start, pages, every }),
        2 => (page.clone(), short.clone(), 1u64..4)
            .prop_map(|(start, pages, every)| Step::Guard { start, pages, every }),
        1 => Just(Step::Wait),
        2 => (page.clone(), 1u64..300).prop_map(|(start, pages)| Step::Unmap { start, pages }),
        2 => (page.clone(), page.clone(), 1u64..200).prop_map(|(from, to, pages)| Step::Remap { from, to, pages }),
        1 => page.clone().prop_map(|page| Step::Pin { page }),
        1 => Just(Step::Unpin),
        1 => Just(Step::Share),
        1 => (page, short).prop_map(|(start, pages)| Step::Refuse { start, pages }),
        1 => (1u32..200).prop_map(|pages| Step::Shrink { pages }),
        2 => (1u32..100).prop_map(|pages| Step::CompactStore { pages }),
        3 => (1u32..20).prop_map(|steps| Step::ShareStore { steps }),
        2 => (0u32..8, any::<bool>()).prop_map(|(cluster, differs)| {
            Step::RelativeStores { cluster: ClusterNumber(cluster), differs }
        }),
        3 => (1u32..60).prop_map(|steps| Step::Recompress { steps }),
        3 => (1u8..10).prop_map(|order| Step::Compact { order }),
        1 => (1u32..4).prop_map(|count| Step::FailWrites { count }),
        1 => Just(Step::DiscardFile),
        1 => (1u32..4).prop_map(|count| Step::FailReads { count }),
        1 => (0u32..8).prop_map(|cluster| Step::OthersClaim { cluster: ClusterNumber(cluster) }),
        1 => Just(Step::OthersGo),
        1 => any::<bool>().prop_map(|child| Step::Fork { child }),
        1 => Just(Step::BringAllIn),
        1 => any::<u32>().prop_map(|bits| Step::Sizes { policy: SizePolicy::from_bits(bits) }),
        2 => (0..PAGES, 1u64..700, prop::sample::select(vec![Advice::None, Advice::Huge, Advice::NoHuge]))
            .prop_map(|(start, pages, advice)| Step::Advise { start, pages, advice }),
        1 => prop::sample::select(vec![Disabled::No, Disabled::No, Disabled::ExceptAdvised, Disabled::Yes])
            .prop_map(|how| Step::Disable { how }),
    ]
}

/// Returns a write to `page` that does not compress in the double: a multiple of 7.
pub fn incompressible(page: u64) -> Step {
    Step::Write { page, pages: 1, value: 7 * (page + 1) - (BASE + page) % 3 }
}

impl World {
    pub fn run(&mut self, step: &Step) {
        match *step {
            Step::Map { start, pages } => self.map(start, pages),
            Step::NativeTouch { start, pages, value } => self.native_touch(start, pages, value),
            Step::Write { page, pages, value } => self.write(page, pages, value),
            Step::Read { page, pages } => self.mapped(page, pages).into_iter().for_each(|page| self.verify(page)),
            Step::Stride { page, step, pages } => {
                (0..pages).map(|n| BASE + page + n * step).for_each(|page| self.verify(page));
            }
            Step::Reclaim { pages } => {
                self.engine.reclaim(&mut self.worker, pages);
            }
            Step::FindCold { pages, rounds } => self.find_cold(pages, rounds),
            Step::PageOut { start, pages } => {
                self.engine.page_out(&mut self.worker, PageNumber(BASE + start)..PageNumber(BASE + start + pages));
            }
            Step::Resume => self.resume(),
            Step::Discard { start, pages, every } => self.discard(start, pages, every),
            Step::Guard { start, pages, every } => self.guard(start, pages, every),
            Step::Wait => self.wait(),
            Step::Unmap { start, pages } => self.unmap(start, pages),
            Step::Remap { from, to, pages } => self.remap(from, to, pages),
            Step::Pin { page } => self.pin(page),
            Step::Unpin => self.engine.ports().state.lock().pinned.clear(),
            Step::Share => {
                let mut state = self.engine.ports().state.lock();
                state.shared = state.program.keys().copied().collect();
            }
            Step::Refuse { start, pages } => {
                let pages = self.mapped(start, pages);
                self.engine.ports().state.lock().refusing.extend(pages);
            }
            Step::Shrink { pages } => {
                self.engine.shrink(0, pages);
            }
            Step::CompactStore { pages } => {
                let before = self.engine.free_frames();
                let freed = self.engine.compact_store(pages);
                assert_eq!(self.engine.free_frames(), before + freed);
            }
            Step::Recompress { steps } => (0..steps).for_each(|_| {
                self.engine.recompress(&mut self.worker);
            }),
            Step::ShareStore { steps } => (0..steps).for_each(|_| {
                self.engine.share(&mut self.worker);
            }),
            Step::RelativeStores { cluster, differs } => self.relative_stores(cluster, differs),
            Step::DiscardFile => while self.engine.discard_one() {},
            Step::Compact { order } => {
                self.engine.compact(Order::new(order).unwrap());
            }
            Step::FailWrites { count } => self.engine.ports().state.lock().failing_writes = count,
            Step::FailReads { count } => self.engine.ports().state.lock().failing_reads = count,
            Step::OthersClaim { cluster } => self.others_claim(cluster),
            Step::Sizes { policy } => self.engine.ports().state.lock().sizes = policy,
            Step::Advise { start, pages, advice } => {
                let range = BASE + start..(BASE + start + pages).min(BASE + PAGES);
                self.engine.ports().state.lock().advise(&range, advice);
            }
            Step::Disable { how } => self.engine.ports().state.lock().disabled = how,
            Step::OthersGo => self.engine.ports().state.lock().foreign_clusters.clear(),
            Step::BringAllIn => self.bring_all_in(),
            Step::Fork { child } => self.fork(child),
        }
    }

    fn write(&mut self, start: u64, pages: u64, value: u64) {
        for page in self.mapped(start, pages) {
            if !self.model.contains_key(&page) || !self.touch(page) {
                continue;
            }
            self.engine.ports().state.lock().program.insert(page, value + page % 3);
            self.model.insert(page, value + page % 3);
        }
    }

    fn pin(&mut self, page: u64) {
        let mut state = self.engine.ports().state.lock();
        if state.program.contains_key(&(BASE + page)) {
            state.pinned.insert(BASE + page);
        }
    }

    fn others_claim(&mut self, cluster: ClusterNumber) {
        let mut state = self.engine.ports().state.lock();
        if !state.clusters.contains(&cluster) {
            state.foreign_clusters.insert(cluster);
        }
    }

    /// Makes a relative claim a cluster, unless this process holds it.
    fn relative_stores(&mut self, cluster: ClusterNumber, differs: bool) {
        let mut state = self.engine.ports().state.lock();
        if state.is_shared_store && !state.clusters.contains(&cluster) {
            state.foreign_clusters.insert(cluster);
            state.begin_generation(cluster);
            (state.of_relative, state.relative_differs) = (Some((cluster, 0)), differs);
        }
    }

    /// Forks; the model continues with the child, or with the parent.
    fn fork(&mut self, child: bool) {
        self.engine.lend_file();
        if child {
            self.engine.borrow_file();
            // The kernel fills some empty entries before the child's memory is registered.
            self.add_strays(3);
            self.engine.remove_strays().expect("the kernel moves all of them");
        }
        let mut state = self.engine.ports().state.lock();
        let held = state.clusters.clone();
        state.foreign_clusters.extend(held);
    }
}
