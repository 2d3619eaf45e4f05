//! Tests with a small machine, which is checked after every operation.

use super::*;
use crate::machine::Access;
use crate::random::Random;
use foliomem_types::units::Order;
use proptest::prelude::*;

/// Memory of the machine: 16 MiB.
const FRAMES: u32 = 4096;

fn machine(variant: Option<Variant>) -> PageCache {
    PageCache::new(FRAMES, 2, variant, Pick::LastFreed, Costs::reference())
}

fn read_all(cache: &mut PageCache, file: FileId, pages: u32) {
    let mut reader = Reader::new(file);
    (0..pages).for_each(|index| cache.read(&mut reader, index).unwrap());
}

fn variants() -> impl Iterator<Item = Option<Variant>> {
    std::iter::once(None).chain(Variant::ALL.map(Some))
}

#[test]
fn a_file_read_in_order_gets_large_folios() {
    let mut cache = machine(None);
    let file = cache.create(Backing::File, 1024);
    read_all(&mut cache, file, 1024);
    cache.check();
    assert_eq!(cache.used_pages(), 1024);
    let counters = cache.counters();
    let pages: u64 = (0..).zip(counters.allocated).map(|(order, folios)| folios << order).sum();
    assert_eq!(pages, 1024, "no page was read twice");
    assert!(counters.allocated[4] >= 16 && counters.allocated[0] < 8, "{counters:?}");
    cache.truncate(file);
    cache.check();
    assert_eq!(cache.used_pages(), 0);
}

#[test]
fn a_file_larger_than_memory_reclaims_itself() {
    for variant in variants() {
        let mut cache = machine(variant);
        let file = cache.create(Backing::File, 4 * FRAMES);
        read_all(&mut cache, file, 4 * FRAMES);
        cache.check();
        let counters = cache.counters();
        assert!(cache.used_pages() < FRAMES && counters.reclaimed_pages > 3 * u64::from(FRAMES) - 512, "{counters:?}");
    }
}

#[test]
fn folios_used_twice_outlive_folios_used_once() {
    let mut cache = machine(None);
    let (twice, once) = (cache.create(Backing::File, 512), cache.create(Backing::File, 2 * FRAMES));
    read_all(&mut cache, twice, 512);
    read_all(&mut cache, twice, 512);
    read_all(&mut cache, once, FRAMES);
    let cached =
        |cache: &PageCache, file: FileId| cache.folios.table.borrow().files[usize::from(file.0)].folios().len();
    let before = cached(&cache, twice);
    assert!(before > 0);
    cache.check();
    read_all(&mut cache, once, FRAMES);
    assert_eq!(cached(&cache, twice), before, "the file is still active");
}

#[test]
fn mapped_files_are_mapped_around_and_their_page_tables_stay() {
    let mut cache = machine(None);
    let file = cache.create(Backing::File, 4 * FRAMES);
    let mut readahead = Readahead::default();
    for index in 0..4 * FRAMES {
        cache.touch(Mapper(3), file, &mut readahead, index, Access::Read).unwrap();
    }
    cache.check();
    assert_eq!(cache.table_pages(), 4 * FRAMES / 512);
    cache.truncate(file);
    cache.check();
    assert_eq!(cache.table_pages(), 0);
}

#[test]
fn compaction_moves_large_folios_only_with_the_series() {
    for variant in variants() {
        let mut cache = machine(variant);
        // Every second run of 16 pages is free, the others are files of 16 pages, so that a block
        // of 2 MiB must be cleared.
        let files: Vec<FileId> = (0..FRAMES / 16).map(|_| cache.create(Backing::File, 16)).collect();
        let order = Order::new(4).unwrap();
        for &file in &files {
            let run = cache.folios.homes.alloc_empty(order).unwrap();
            cache.insert(run, file, 0, Content::Zeros);
        }
        files.iter().step_by(2).for_each(|&file| cache.truncate(file));
        cache.check();
        let wanted = Order::new(5).unwrap();
        let had = cache.alloc(wanted).unwrap();
        let moved = cache.vm_counters().pgmigrate_success.get();
        assert_eq!(moved > 0, variant.is_some(), "{variant:?}");
        if let Some(run) = had {
            cache.folios.homes.free_empty(run);
        }
        cache.check();
    }
}

#[test]
fn dirty_pages_are_written_back_once() {
    let mut cache = machine(Some(Variant::FreeSplit));
    let image = cache.create(Backing::Shm, 64);
    let file = cache.create_kept_in(image, 64);
    let mut readahead = Readahead::default();
    (0..64).for_each(|index| cache.touch(Mapper(0), file, &mut readahead, index, Access::Write).unwrap());
    cache.sync(file, 0..64).unwrap();
    cache.sync(file, 0..64).unwrap();
    assert_eq!(cache.counters().written_back_pages, 64);
    cache.check();
}

#[test]
fn written_back_pages_take_memory_in_their_image() {
    let mut cache = machine(None);
    let image = cache.create(Backing::Shm, 1024);
    let file = cache.create_kept_in(image, 1024);
    let other = cache.create(Backing::File, 4 * FRAMES);
    let mut readahead = Readahead::default();
    (0..1024).for_each(|index| cache.touch(Mapper(0), file, &mut readahead, index, Access::Write).unwrap());
    read_all(&mut cache, other, 4 * FRAMES);
    cache.check();
    let written = cache.counters().written_back_pages;
    let is_there = |cache: &mut PageCache, file, index| cache.folio_at(file, index) != FolioId::NONE;
    let gone = (0..1024).filter(|&index| !is_there(&mut cache, file, index)).collect::<Vec<_>>();
    assert!(written >= gone.len() as u64 && gone.len() >= 64, "{written} written");
    assert!(gone.iter().all(|&index| is_there(&mut cache, image, index)));
}

#[test]
fn a_large_folio_used_by_one_program_is_freed_unless_used_again() {
    let mut cache = machine(None);
    let file = cache.create(Backing::File, 64);
    let mut readahead = Readahead::default();
    let touch = |cache: &mut PageCache, readahead: &mut Readahead, mapper| {
        (0..64).for_each(|index| cache.touch(mapper, file, readahead, index, Access::Read).unwrap());
    };
    touch(&mut cache, &mut readahead, Mapper(0));
    let id = cache.folio_at(file, 32);
    let large = |cache: &PageCache| cache.folios.table.borrow().run(id).frames();
    assert!(large(&cache) > 1);
    let list = |cache: &PageCache| cache.folios.table.borrow().folio(id).list;
    // The first check keeps the folio, however many of its pages were used.
    let pop = |cache: &mut PageCache| {
        let fate = cache.fate(id);
        let to = if matches!(fate, reclaim::Fate::Activate) { List::Active } else { List::Inactive };
        cache.folios.table.get_mut().enlist(id, to);
        fate
    };
    assert!(matches!(pop(&mut cache), reclaim::Fate::Keep) && list(&cache) == List::Inactive);
    touch(&mut cache, &mut readahead, Mapper(0));
    assert!(matches!(pop(&mut cache), reclaim::Fate::Activate), "the second use activates");
    touch(&mut cache, &mut readahead, Mapper(0));
    assert!(matches!(pop(&mut cache), reclaim::Fate::Activate), "a use while it is active counts");
    assert!(matches!(pop(&mut cache), reclaim::Fate::Free), "it was not used since");
    let other = cache.folio_at(file, 0);
    cache.touch(Mapper(1), file, &mut readahead, 0, Access::Read).unwrap();
    assert!(matches!(cache.fate(other), reclaim::Fate::Activate), "two programs used it");
}

#[test]
fn copied_pages_are_not_zeroed_and_a_write_is_one_fault() {
    let mut cache = machine(None);
    let costs = Costs::reference();
    let spent = |cache: &mut PageCache| cache.take_spent_ns().0;
    let own = cache.create(Backing::Anonymous, 64);
    cache.copy_on_write(Mapper(0), own, 0).unwrap();
    spent(&mut cache);
    cache.copy_on_write(Mapper(0), own, 1).unwrap();
    let PageCacheCosts { fault_ns, map_folio_ns, insert_folio_ns, .. } = costs.page_cache;
    assert_eq!(spent(&mut cache), u64::from(fault_ns + map_folio_ns + insert_folio_ns + costs.copy_page_ns));
    // The page is cached but not mapped: one fault maps it and makes it writable.
    let file = cache.create(Backing::File, 64);
    let run = cache.alloc_page().unwrap();
    cache.insert(run, file, 3, Content::Zeros);
    let run = cache.alloc_page().unwrap();
    cache.insert(run, file, 40, Content::Zeros);
    let mut readahead = Readahead::default();
    cache.touch(Mapper(0), file, &mut readahead, 3, Access::Write).unwrap();
    spent(&mut cache);
    cache.touch(Mapper(0), file, &mut readahead, 40, Access::Write).unwrap();
    assert_eq!(spent(&mut cache), u64::from(fault_ns + map_folio_ns));
    cache.sync(file, 0..64).unwrap();
    spent(&mut cache);
    cache.touch(Mapper(0), file, &mut readahead, 40, Access::Write).unwrap();
    assert_eq!(spent(&mut cache), u64::from(fault_ns), "the first write after writeback takes a fault");
}

#[test]
fn shared_memory_beyond_the_limit_is_out_of_memory() {
    let mut cache = machine(None);
    let shm = cache.create(Backing::Shm, 2 * FRAMES);
    let mut readahead = Readahead::default();
    let refused =
        (0..2 * FRAMES).find_map(|index| cache.touch(Mapper(0), shm, &mut readahead, index, Access::Write).err());
    assert!(refused.unwrap().to_string().starts_with("out of memory: "));
    cache.check();
}

#[derive(Clone, Debug)]
enum Step {
    Read { file: u16, pages: u32 },
    Touch { mapper: u8, file: u16, at: u32, pages: u32, access: Access },
    Scatter { mapper: u8, seed: u64, touches: u32 },
    Anonymous { at: u32, pages: u32 },
    Truncate { file: u16 },
    Sync { file: u16 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u16..3, 1u32..3000).prop_map(|(file, pages)| Step::Read { file, pages }),
        4 => (0u8..4, 0u16..3, 0u32..6000, 1u32..2000, prop::sample::select(vec![Access::Read, Access::Write]))
            .prop_map(|(mapper, file, at, pages, access)| Step::Touch { mapper, file, at, pages, access }),
        2 => (0u8..4, any::<u64>(), 1u32..400).prop_map(|(mapper, seed, touches)| Step::Scatter { mapper, seed, touches }),
        1 => (0u32..1024, 1u32..600).prop_map(|(at, pages)| Step::Anonymous { at, pages }),
        1 => (0u16..4).prop_map(|file| Step::Truncate { file }),
        1 => (0u16..3).prop_map(|file| Step::Sync { file }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn all_checks_hold_after_random_operations(
        variant in 0usize..5, steps in prop::collection::vec(step(), 1..40)
    ) {
        const PAGES: u32 = 8192;
        let mut cache = machine(variants().nth(variant).unwrap());
        let image = cache.create(Backing::Shm, PAGES);
        let files: Vec<FileId> =
            vec![cache.create(Backing::File, PAGES), cache.create(Backing::File, PAGES), cache.create_kept_in(image, PAGES)];
        let own = cache.create(Backing::Anonymous, 1536);
        let mut readaheads = [Readahead::default(); 4];
        let mut readers: Vec<(Reader, u32)> = files.iter().map(|&file| (Reader::new(file), 0)).collect();
        for (number, step) in (0..).zip(steps) {
            cache.set_cpu(number % 2);
            match step {
                Step::Read { file, pages } => {
                    let (reader, at) = &mut readers[usize::from(file)];
                    for _ in 0..pages {
                        cache.read(reader, *at).unwrap();
                        *at = (*at + 1) % PAGES;
                    }
                }
                Step::Touch { mapper, file, at, pages, access } => {
                    let readahead = &mut readaheads[usize::from(mapper)];
                    let file = files[usize::from(file)];
                    for index in at..(at + pages).min(PAGES) {
                        // Written-back pages take memory forever here, so only a part is written.
                        let access = if index < 1024 { access } else { Access::Read };
                        cache.touch(Mapper(mapper), file, readahead, index, access).unwrap();
                    }
                }
                Step::Scatter { mapper, seed, touches } => {
                    let mut random = Random::new(seed);
                    for _ in 0..touches {
                        let index = random.below(u64::from(PAGES)) as u32;
                        let readahead = &mut readaheads[usize::from(mapper)];
                        cache.touch(Mapper(mapper), files[0], readahead, index, Access::Read).unwrap();
                    }
                }
                Step::Anonymous { at, pages } => {
                    for index in at..(at + pages).min(1536) {
                        cache.touch(Mapper(0), own, &mut Readahead::default(), index, Access::Write).unwrap();
                    }
                }
                Step::Truncate { file } => cache.truncate([&files[..], &[own]].concat()[usize::from(file)]),
                Step::Sync { file } => cache.sync(files[usize::from(file)], 0..PAGES).unwrap(),
            }
            cache.check();
        }
    }
}
