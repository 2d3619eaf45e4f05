//! Tests of pacing: background reclaim runs from the low watermark to the high one, and torture
//! works whatever room there is.

#[allow(dead_code, reason = "the model needs more of it")]
mod double;

use double::{Double, Worker, resume_all};
use foliomem_core::cluster::Strategy;
use foliomem_core::compaction::Variant;
use foliomem_core::engine::{Engine, EngineConfig, NoRoom, Recompression, Served};
use foliomem_core::locality::SwapIn;
use foliomem_core::pacing::{Activity, BackgroundReclaim, Pacing, Protection, Room, Watermarks, reads_ahead_after};
use foliomem_types::counters::FaultKind;
use foliomem_types::size_policy::{Advice, SizePolicy};
use foliomem_types::units::{Order, OrderSet, PageNumber};

const BASE: u64 = 512 * 1000;
const LIMIT_PAGES: i64 = 8192;

fn config(pacing: Pacing) -> EngineConfig {
    EngineConfig {
        granule: Order::ZERO,
        arena_frames: 4 * LIMIT_PAGES as u32,
        swap_slots: 512 * 64,
        strategy: Strategy::default(),
        swap_in: SwapIn::default(),
        no_room: NoRoom::default(),
        whole_out: OrderSet::ALL,
        keep_copies: true,
        make_ahead: true,
        pacing,
        compaction: Variant::default(),
        cpus: 1,
        protected_pages: 0,
        backing: None,
        recompress_idle_ns: Some(pacing.recompress_idle_ns()),
    }
}

/// Returns an engine whose program has touched `pages` pages of zeros.
fn engine(pacing: Pacing, pages: u64) -> (Engine<Double>, Worker) {
    let (engine, mut worker) = (Engine::new(Double::new(LIMIT_PAGES), config(pacing)), Worker::default());
    {
        let mut state = engine.ports().state.lock();
        state.sizes = SizePolicy::always(OrderSet::EMPTY);
        state.mappings.push((BASE..BASE + pages, Advice::None));
    }
    (BASE..BASE + pages).for_each(|page| {
        engine.fault(&mut worker, PageNumber(page));
    });
    (engine, worker)
}

#[test]
fn background_reclaim_runs_from_the_low_watermark_to_the_high_one() {
    let watermarks = Watermarks::of(LIMIT_PAGES);
    let (engine, mut worker) = engine(Pacing::Watermarks, (LIMIT_PAGES - watermarks.low_pages()) as u64);
    assert!(!engine.room().is_low() && !engine.should_reclaim(&engine.room()), "{:?}", engine.room());
    engine.ports().state.lock().charged += 1;
    assert!(engine.room().is_low() && engine.should_reclaim(&engine.room()), "{:?}", engine.room());
    let mut freed_pages = 0;
    loop {
        match engine.reclaim_in_background(&mut worker) {
            BackgroundReclaim::StoreCompacted => {}
            BackgroundReclaim::Freed(pages) => freed_pages += pages,
            BackgroundReclaim::Done(pages) => {
                assert_eq!(pages, 0, "a last step frees nothing");
                break;
            }
        }
    }
    assert!(freed_pages > 0 && engine.room().is_high(), "{freed_pages} freed: {:?}", engine.room());
    let most = watermarks.high_pages() + 2 * foliomem_core::pacing::BATCH_PAGES as i64;
    assert!(engine.room().pages <= most, "reclaim went on: {:?}", engine.room());
    engine.check();
}

#[test]
fn torture_reclaims_with_all_room_left() {
    let (calm, mut worker) = engine(Pacing::Watermarks, 1024);
    assert_eq!(calm.reclaim_in_background(&mut worker), BackgroundReclaim::Done(0));
    assert!(!calm.always_has_work() && calm.swapped_pages() == 0);
    let (tortured, mut worker) = engine(Pacing::Torture, 1024);
    assert!(tortured.room().is_high() && tortured.always_has_work());
    assert!(matches!(tortured.reclaim_in_background(&mut worker), BackgroundReclaim::Done(1..)));
    assert!(tortured.swapped_pages() > 0 && tortured.resident_pages() < 1024);
    tortured.check();
}

#[test]
fn recompression_waits_for_idle_cpus_except_under_torture() {
    for (pacing, asks) in [(Pacing::Watermarks, true), (Pacing::Torture, false)] {
        let (engine, mut worker) = engine(pacing, 8);
        let mut was_asked = false;
        let result = engine.recompress_in_background(&mut worker, || {
            was_asked = true;
            true
        });
        assert_eq!(was_asked, asks, "{pacing:?}");
        assert_eq!(result == Recompression::Contended, asks, "{pacing:?}");
    }
    assert!(Pacing::Watermarks.recompress_idle_ns() > Pacing::Torture.recompress_idle_ns());
}

#[test]
fn a_program_is_managed_below_the_activation_mark_or_at_once_under_torture() {
    let watermarks = Watermarks::of(1 << 20);
    let room = |pages| Room { pages, watermarks };
    let mark = watermarks.activation_pages();
    assert!(!Pacing::Watermarks.activates(&room(mark)) && Pacing::Watermarks.activates(&room(mark - 1)));
    assert!(Pacing::Torture.activates(&room(mark)));
}

#[test]
fn free_frames_go_back_when_the_tree_is_over_its_limit() {
    let (engine, mut worker) = engine(Pacing::Watermarks, 600);
    engine.page_out(&mut worker, PageNumber(BASE)..PageNumber(BASE + 600));
    let free_frames = engine.free_frames();
    assert!(i64::from(free_frames) > Watermarks::of(LIMIT_PAGES).low_pages(), "{free_frames}");
    engine.release_surplus(Activity::Busy);
    assert_eq!(engine.free_frames(), free_frames, "there is room");
    engine.ports().state.lock().charged += LIMIT_PAGES;
    engine.release_surplus(Activity::Busy);
    assert!(engine.free_frames() < free_frames, "{free_frames}");
    engine.check();
}

#[test]
fn only_a_fault_that_takes_memory_waits_for_other_processes() {
    let (engine, mut worker) = engine(Pacing::Watermarks, 2048);
    let page = |index| PageNumber(BASE + index);
    engine.page_out(&mut worker, page(0)..page(64));
    engine.reclaim(&mut worker, 1);
    assert!(engine.staged_pages() > 0, "reclaim stages more than it writes back");
    {
        let mut state = engine.ports().state.lock();
        state.charged += LIMIT_PAGES;
        state.shared.insert(BASE + 2047);
    }
    let mut pauses_of = |wanted: FaultKind, mut pages: std::ops::Range<u64>| {
        pages.find_map(|index| {
            let before = engine.ports().state.lock().pauses;
            let kind = engine.fault(&mut worker, page(index));
            (kind == Served::Done(wanted)).then(|| engine.ports().state.lock().pauses - before)
        })
    };
    assert_eq!(pauses_of(FaultKind::Staged, 64..2047), Some(0));
    assert_eq!(pauses_of(FaultKind::Spurious, 2000..2047), Some(0));
    assert!(pauses_of(FaultKind::SwapIn, 0..1) > Some(0));
    engine.check();
}

#[test]
fn reclaim_leaves_the_protected_minimum_unless_asked_for_everything() {
    let (engine, mut worker) = engine(Pacing::Watermarks, 2048);
    let protected_pages = Watermarks::of(LIMIT_PAGES).protected_pages();
    engine.follow_limit(Protection::Minimum);
    engine.reclaim(&mut worker, 4096);
    let kept_pages = engine.resident_pages() + engine.staged_pages();
    assert!(kept_pages < 2048 && kept_pages + 64 >= protected_pages, "{kept_pages} of {protected_pages} are kept");
    engine.follow_limit(Protection::Off);
    engine.reclaim(&mut worker, 4096);
    assert!(engine.resident_pages() + engine.staged_pages() < 64, "{} are kept", engine.resident_pages());
    engine.check();
}

#[test]
fn a_staged_page_says_nothing_about_its_neighbours() {
    let kinds = [FaultKind::FirstTouch, FaultKind::Staged, FaultKind::SwapIn, FaultKind::Spurious, FaultKind::Copy];
    assert_eq!(kinds.map(reads_ahead_after), [true, false, true, true, false]);
}

#[test]
fn resuming_brings_everything_back_without_a_fault() {
    let (engine, mut worker) = engine(Pacing::Watermarks, 2048);
    engine.page_out(&mut worker, PageNumber(BASE)..PageNumber(BASE + 2048));
    assert!(engine.swapped_pages() > 1900, "{}", engine.swapped_pages());
    assert_eq!(resume_all(&engine, &mut worker), 4);
    assert_eq!(engine.swapped_pages() + engine.staged_pages(), 0);
    assert_eq!(engine.resident_pages(), 2048);
    engine.check();
}

#[test]
fn resuming_ends_before_reclaim_would_begin() {
    let (engine, mut worker) = engine(Pacing::Watermarks, 6144);
    engine.page_out(&mut worker, PageNumber(BASE)..PageNumber(BASE + 6144));
    let other_pages = LIMIT_PAGES - 3000;
    engine.ports().state.lock().charged += other_pages;
    let blocks = resume_all(&engine, &mut worker);
    let room = engine.room();
    assert!((1..12).contains(&blocks) && room.is_high(), "{blocks} blocks, {room:?}");
    assert!(room.pages < room.watermarks.high_pages() + 512, "more would fit: {room:?}");
    assert!(!engine.should_reclaim(&room) && engine.resident_pages() >= 1024);
    engine.check();
}
