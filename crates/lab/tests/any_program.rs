//! Random programs on random machines. Reads return what was written (the machine checks that), the
//! engine's checks hold, and after everything is unmapped only free frames are charged.

#![allow(missing_docs)]

use foliomem_core::cluster::Strategy as SlotStrategy;
use foliomem_core::compaction::Variant;
use foliomem_core::engine::{EngineConfig, NoRoom};
use foliomem_core::locality::SwapIn;
use foliomem_core::pacing::Pacing;
use foliomem_core::ports::Budget;
use foliomem_lab::costs::Costs;
use foliomem_lab::lab::Lab;
use foliomem_lab::machine::{Access, Content, LabMachine, Store};
use foliomem_types::units::{CpuNumber, Order, OrderSet, PageNumber};
use proptest::prelude::*;

const AREA_PAGES: u32 = 1500;
const AREAS: u32 = 3;
const LIMIT_PAGES: u32 = 1600;

#[derive(Clone, Copy, Debug)]
enum Step {
    Touch { area: u32, page: u32, pages: u32, access: Access },
    Discard { area: u32, page: u32, pages: u32 },
    PageOut { area: u32, page: u32, pages: u32 },
    Exit { area: u32 },
    Go { cpu: u16 },
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..AREAS, 0..AREA_PAGES, 1..400u32);
    prop_oneof![
        8 => (range(), prop::sample::select(vec![Access::Read, Access::Write])).prop_map(|((area, page, pages), access)| Step::Touch { area, page, pages, access }),
        2 => range().prop_map(|(area, page, pages)| Step::Discard { area, page, pages }),
        2 => range().prop_map(|(area, page, pages)| Step::PageOut { area, page, pages }),
        1 => (0..AREAS).prop_map(|area| Step::Exit { area }),
        1 => (0..3u16).prop_map(|cpu| Step::Go { cpu }),
    ]
}

fn config() -> impl Strategy<Value = (OrderSet, EngineConfig)> {
    let swap_in = prop::sample::select(vec![SwapIn::Adaptive, SwapIn::Whole, SwapIn::Page]);
    let no_room = prop::sample::select(vec![NoRoom::Reclaim, NoRoom::FallBack]);
    let strategy = prop::sample::select(SlotStrategy::ALL.to_vec());
    let whole_out = prop_oneof![3 => Just(OrderSet::ALL), 1 => any::<u16>().prop_map(OrderSet::from_bits)];
    (any::<u16>(), 0u8..10, 10..16u32, strategy, swap_in, no_room, whole_out, any::<bool>()).prop_map(
        |(sizes, granule, clusters, strategy, swap_in, no_room, whole_out, keep_copies)| {
            (
                OrderSet::from_bits(sizes),
                EngineConfig {
                    granule: Order::new(granule).unwrap(),
                    arena_frames: 16 * LIMIT_PAGES,
                    swap_slots: 512 * clusters,
                    strategy,
                    swap_in,
                    no_room,
                    whole_out,
                    keep_copies,
                    make_ahead: true,
                    pacing: Pacing::Watermarks,
                    compaction: Variant::default(),
                    cpus: 3,
                    protected_pages: 0,
                    backing: None,
                    recompress_idle_ns: None,
                },
            )
        },
    )
}

/// Returns the pages from `page` on of an area whose start is not aligned.
fn part(area: u32, page: u32, pages: u32) -> std::ops::Range<PageNumber> {
    let start = PageNumber(u64::from(area * 2048 + 37));
    start.offset(page)..start.offset((page + pages).min(AREA_PAGES))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    #[test]
    fn reads_return_the_written_content(
        (sizes, config) in config(),
        store in prop::sample::select(vec![Store::Lz4, Store::Zstd, Store::Outside, Store::RamDisk]),
        filled in prop::sample::select(vec![false, false, true]),
        steps in prop::collection::vec(step(), 1..60)
    ) {
        let content = Content { store, filled };
        let machine = LabMachine::new(AREAS * 2048, config.arena_frames, LIMIT_PAGES, sizes, content, Costs::reference());
        let mut lab = Lab::new(machine, config, u64::from(LIMIT_PAGES) * 2, Some(256));
        (0..AREAS).for_each(|area| lab.map(part(area, 0, AREA_PAGES)));
        let mut now_ns = 0;
        for step in steps {
            match step {
                Step::Touch { area, page, pages, access } => lab.touch_all(part(area, page, pages), access).unwrap(),
                Step::Discard { area, page, pages } => lab.discard(part(area, page, pages)),
                Step::PageOut { area, page, pages } => lab.page_out(part(area, page, pages)),
                Step::Exit { area } => {
                    lab.unmap(part(area, 0, AREA_PAGES));
                    lab.map(part(area, 0, AREA_PAGES));
                }
                Step::Go { cpu } => {
                    now_ns += lab.machine().spent_ns();
                    lab.begin(CpuNumber(cpu), now_ns);
                }
            }
        }
        lab.engine().check();
        (0..AREAS).for_each(|area| lab.unmap(part(area, 0, AREA_PAGES)));
        lab.engine().check();
        prop_assert_eq!(lab.engine().swapped_pages(), 0);
        let held = i64::from(lab.engine().free_frames());
        prop_assert_eq!(i64::from(LIMIT_PAGES) - lab.machine().room_pages(), held);
    }
}
