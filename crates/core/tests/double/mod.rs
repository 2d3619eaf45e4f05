//! A test double of all ports, made of maps. The content of a page is one word, so that a test
//! knows what every page of the program must hold. Tests can inject faults: pinned pages, mappings
//! that refuse moves, pages shared by a fork, a small budget, a swap file that fails or belongs to
//! others.

mod swap_file;

use foliomem_core::engine::{Engine, Resumed};
use foliomem_core::page_table::Entries;
use foliomem_core::ports::{
    AddressSpace, Arena, Budget, Clock, Compressed, Corrupted, Mapping, Marks, MoveError, Offer, Pieces, Ports,
    Recompressed, Recompressor, SharedPages, Stopped,
};
use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_core::store::{Fragment, FragmentMut, FragmentRef, Piece, Place, PlaceMut};
use foliomem_core::sync::Mutex;
use foliomem_types::counters::Counters;
use foliomem_types::size_policy::{Advice, Disabled, SizePolicy};
use foliomem_types::units::{ClusterNumber, CpuNumber, Frame, FrameRun, MAX_ORDER, OrderSet, PageNumber};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;

/// A call that wakes a waiting thread.
pub type Waker = Box<dyn FnOnce() + Send>;

/// The pieces in the swap file, by their start, each with its nonce.
type FilePieces = HashMap<(u32, u32), (u64, Vec<u64>)>;

/// The scratch memory of a thread, and its unfinished writes to the swap file.
#[derive(Default)]
pub struct Worker {
    words: Vec<u64>,
    /// The unfinished writes; none outside of a call of the engine.
    pub writes: VecDeque<FilePieces>,
}

impl Worker {
    /// Turns the stored words in the scratch memory into the content of `piece`.
    fn decode(&mut self, piece: &Piece<'_>) {
        if piece.recompressed {
            self.words.iter_mut().for_each(|word| *word = !*word);
        }
    }
}

/// The state of the double.
#[derive(Default)]
pub struct State {
    /// The pages present in the program.
    pub program: BTreeMap<u64, u64>,
    /// The staged and free pages, by frame.
    pub homes: HashMap<u32, u64>,
    /// The mapped ranges, each with its advice.
    pub mappings: Vec<(Range<u64>, Advice)>,
    /// The size policy.
    pub sizes: SizePolicy,
    /// Whether the program disabled huge pages for itself.
    pub disabled: Disabled,
    /// The pages that cannot be moved.
    pub pinned: BTreeSet<u64>,
    /// The pages of mappings that refuse moves.
    pub refusing: BTreeSet<u64>,
    /// The pages shared since a fork.
    pub shared: BTreeSet<u64>,
    /// The pages whose access ends the program.
    pub poisoned: BTreeSet<u64>,
    /// The pages whose waiting threads were woken.
    pub woken: BTreeSet<u64>,
    /// The waiting threads, by page.
    pub waiting: Vec<(u64, Waker)>,
    /// Number of moves out of the program.
    pub moves_out: u32,
    /// Number of pauses of threads that wait for others to free memory.
    pub pauses: u32,
    /// Number of mapping changes in progress, received or not. No page moves meanwhile.
    pub changes: u32,
    /// Whether the engine is receiving one of them.
    pub is_hearing: bool,
    /// Number of guards that hold off mapping events.
    pub steady: u32,
    /// The pieces, by the place of their first byte.
    pub pieces: HashMap<(u32, u32), Vec<u64>>,
    /// The time.
    pub now_ns: u64,
    /// The pages charged to the budget.
    pub charged: i64,
    /// The limit in pages.
    pub limit_pages: i64,
    /// Marks in place of pages that were unmapped into the arena.
    pub marks: BTreeSet<u64>,
    /// Pages without a mark whose content counts nevertheless: they could not be marked because of
    /// a mapping change. Addresses are those before the changes that nobody has received.
    pub unmarked: BTreeSet<u64>,
    /// The mapping changes in progress: where a range goes, or `None` if it is unmapped.
    pub in_progress: VecDeque<(Range<u64>, Option<u64>)>,
    /// Whether a frame must go back to the system before it is used again.
    pub frames_escape: bool,
    /// Whether the engine reported that the arena is full.
    pub arena_is_full: bool,
    /// Number of calls of `compress` since a test last reset it.
    pub compressions: u64,
    /// Whether the next read finds a corrupted piece.
    pub corrupt_next: bool,
    /// Whether the next read gives one wrong bit, which no checksum shows: the fault that the
    /// verification of the tests must notice.
    pub flip_next: bool,
    /// The content of the swap file.
    pub file: FilePieces,
    /// Number of writes to the swap file.
    pub file_writes: u64,
    /// Maximum unfinished writes that one worker has had.
    pub most_writes: usize,
    /// Number of next writes to the swap file that fail.
    pub failing_writes: u32,
    /// Number of next reads of the swap file that fail.
    pub failing_reads: u32,
    /// The clusters of the swap file that the engine holds.
    pub clusters: BTreeSet<ClusterNumber>,
    /// The clusters that other processes hold, alone or together with this one.
    pub foreign_clusters: BTreeSet<ClusterNumber>,
    /// The generations of clusters.
    pub generations: BTreeMap<ClusterNumber, u64>,
    /// Whether the swap file is a shared store.
    pub is_shared_store: bool,
    /// What this process has published, by checksum.
    pub published: HashMap<u64, Offer>,
    /// The number of users of each slot of a shared store.
    pub users: BTreeMap<u32, u32>,
    /// A cluster to which a relative alone writes, and its next slot: it has each piece that is
    /// looked up there.
    pub of_relative: Option<(ClusterNumber, u32)>,
    /// Whether the relative has other content with the same checksum.
    pub relative_differs: bool,
}

impl State {
    pub fn generation(&self, cluster: ClusterNumber) -> u64 {
        self.generations.get(&cluster).copied().unwrap_or(0)
    }

    pub fn begin_generation(&mut self, cluster: ClusterNumber) {
        *self.generations.entry(cluster).or_default() += 1;
    }

    /// Frees a page of the program, as the kernel does.
    pub fn drop_page(&mut self, page: u64) {
        self.marks.remove(&page);
        if self.program.remove(&page).is_some() {
            self.charged -= 1;
        }
    }

    /// Marks pages that stay swapped out, or remembers them while they cannot be marked.
    fn mark(&mut self, pages: Range<u64>) {
        if self.changes > 0 {
            self.unmarked.extend(pages);
        } else {
            self.unmarked.retain(|page| !pages.contains(page));
            self.marks.extend(pages);
        }
    }

    /// Whether the program has discarded a swapped-out page. During a mapping change a missing mark
    /// says nothing: the page may have moved with its content.
    fn is_lost(&self, page: u64) -> bool {
        self.changes == 0 && !self.marks.contains(&page) && !self.unmarked.contains(&page)
    }

    fn note_change(&mut self, from: &Range<u64>, to: Option<u64>) {
        if self.changes > 0 {
            self.in_progress.push_back((from.clone(), to));
        } else {
            self.unmarked.retain(|page| !from.contains(page));
        }
    }

    /// Unmaps `range`, as munmap does.
    pub fn unmap(&mut self, range: Range<u64>) {
        self.note_change(&range, None);
        self.cut(&range);
        for page in range {
            self.drop_page(page);
            self.pinned.remove(&page);
            self.shared.remove(&page);
            self.refusing.remove(&page);
        }
    }

    /// Moves a range to an unmapped address, as mremap does.
    pub fn remap(&mut self, from: Range<u64>, to: u64) {
        self.note_change(&from, Some(to));
        for (mapping, advice) in self.cut(&from) {
            self.mappings.push((mapping.start - from.start + to..mapping.end - from.start + to, advice));
        }
        for (page, new) in from.zip(to..) {
            if self.marks.remove(&page) {
                self.marks.insert(new);
            }
            if let Some(content) = self.program.remove(&page) {
                self.program.insert(new, content);
            }
            for pages in [&mut self.shared, &mut self.refusing] {
                if pages.remove(&page) {
                    pages.insert(new);
                }
            }
        }
    }

    /// Changes the advice of `range`, as madvise does; splits mappings if needed.
    pub fn advise(&mut self, range: &Range<u64>, advice: Advice) {
        for (mapping, _) in self.cut(range) {
            self.mappings.push((mapping, advice));
        }
    }

    /// Returns the mapping of `page`.
    pub fn mapping(&self, page: u64) -> Option<&(Range<u64>, Advice)> {
        self.mappings.iter().find(|(mapping, _)| mapping.contains(&page))
    }

    /// Removes the parts of mappings in `range` and returns them.
    fn cut(&mut self, range: &Range<u64>) -> Vec<(Range<u64>, Advice)> {
        let all = std::mem::take(&mut self.mappings);
        let parts = |part: fn(&Range<u64>, &Range<u64>) -> Range<u64>| {
            let parts = all.iter().map(move |(mapping, advice)| (part(mapping, range), *advice));
            parts.filter(|(part, _)| part.start < part.end).collect::<Vec<_>>()
        };
        self.mappings = parts(|mapping, range| mapping.start..mapping.end.min(range.start));
        self.mappings.extend(parts(|mapping, range| mapping.start.max(range.end)..mapping.end));
        parts(|mapping, range| mapping.start.max(range.start)..mapping.end.min(range.end))
    }
}

/// A guard that holds off mapping events.
pub struct Steady<'a>(&'a Double);

impl Drop for Steady<'_> {
    fn drop(&mut self) {
        self.0.state.lock().steady -= 1;
    }
}

/// The double.
pub struct Double {
    pub state: Mutex<State>,
    counters: Counters,
}

impl Double {
    pub fn new(limit_pages: i64) -> Double {
        Double { state: Mutex::new(State { limit_pages, ..State::default() }), counters: Counters::default() }
    }

    fn refuses(state: &State, page: u64) -> Option<MoveError> {
        if state.pinned.contains(&page) || state.shared.contains(&page) {
            Some(MoveError::Busy)
        } else if state.refusing.contains(&page) {
            Some(MoveError::Refused)
        } else {
            None
        }
    }

    fn place_key(place: &Place<'_>) -> (u32, u32) {
        let first = place.fragments()[0];
        (first.head.0, first.offset_bytes)
    }
}

/// Panics unless `pages` are of `block`, whose lock the engine must hold.
fn assert_held(block: &Entries, pages: Range<u64>) {
    assert!(block.first().0 <= pages.start && pages.end <= block.end().0, "{pages:x?} are of another block");
}

fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(1, |sum: u64, word| sum.wrapping_mul(31) ^ word)
}

fn frames(run: FrameRun) -> impl Iterator<Item = u32> {
    (0..run.frames()).map(move |index| run.head.0 + index)
}

impl Ports for Double {
    type Worker = Worker;
    type Clock = Self;
    type Budget = Self;
    type Arena = Self;
    type AddressSpace = Self;
    type Pieces = Self;
    type Recompressor = Self;
    type Marks = Self;
    type SharedPages = Self;
    type SwapDevice = Self;
    type SharedStore = Self;

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn clock(&self) -> &Self {
        self
    }

    fn budget(&self) -> &Self {
        self
    }

    fn arena(&self) -> &Self {
        self
    }

    fn address_space(&self) -> &Self {
        self
    }

    fn pieces(&self) -> &Self {
        self
    }

    fn recompressor(&self) -> Option<&Self> {
        Some(self)
    }

    fn marks(&self) -> Option<&Self> {
        Some(self)
    }

    fn shared_pages(&self) -> Option<&Self> {
        Some(self)
    }

    fn swap_device(&self) -> Option<&Self> {
        Some(self)
    }

    fn shared_store(&self) -> Option<&Self> {
        self.state.lock().is_shared_store.then_some(self)
    }
}

impl Clock for Double {
    fn now_ns(&self) -> u64 {
        self.state.lock().now_ns
    }

    fn cpu(&self) -> CpuNumber {
        CpuNumber(0)
    }

    fn pause(&self) {
        self.state.lock().pauses += 1;
        foliomem_sync::back_off();
    }
}

impl Budget for Double {
    fn try_charge(&self, pages: u32) -> bool {
        let mut state = self.state.lock();
        let fits = state.charged + i64::from(pages) <= state.limit_pages;
        if fits {
            state.charged += i64::from(pages);
        }
        fits
    }

    fn charge(&self, pages: u32) {
        self.state.lock().charged += i64::from(pages);
    }

    fn uncharge(&self, pages: u32) {
        self.state.lock().charged -= i64::from(pages);
    }

    fn limit_pages(&self) -> i64 {
        self.state.lock().limit_pages
    }

    fn room_pages(&self) -> i64 {
        let state = self.state.lock();
        state.limit_pages - state.charged
    }

    fn is_shrinking(&self) -> bool {
        self.room_pages() < 0
    }
}

impl Arena for Double {
    fn populate(&self, run: RunMut<'_>) {
        let mut state = self.state.lock();
        for frame in frames(*run) {
            assert!(state.homes.insert(frame, 0).is_none(), "frame {frame:x} was populated");
        }
    }

    fn release(&self, run: RunMut<'_>) {
        let mut state = self.state.lock();
        for frame in frames(*run) {
            assert!(state.homes.remove(&frame).is_some(), "frame {frame:x} was unpopulated");
        }
    }

    fn zero(&self, run: RunMut<'_>) {
        let mut state = self.state.lock();
        for frame in frames(*run) {
            *state.homes.get_mut(&frame).expect("a populated frame") = 0;
        }
    }

    fn copy(&self, from: RunRef<'_>, to: RunMut<'_>) {
        let mut state = self.state.lock();
        for (from, to) in frames(*from).zip(frames(*to)) {
            let content = state.homes[&from];
            *state.homes.get_mut(&to).expect("a populated frame") = content;
        }
    }

    fn regroup(&self, from: Frame, to: Frame, pages: u32) -> Result<(), Stopped> {
        let mut state = self.state.lock();
        for index in 0..pages {
            let absent = Stopped { moved_pages: index, error: MoveError::Absent };
            let content = state.homes.remove(&(from.0 + index)).ok_or(absent)?;
            assert!(state.homes.insert(to.0 + index, content).is_none(), "{to:?} was populated");
        }
        Ok(())
    }

    fn hash(&self, run: RunRef<'_>) -> u64 {
        let state = self.state.lock();
        checksum(&frames(*run).map(|frame| state.homes[&frame]).collect::<Vec<_>>())
    }

    fn frames_escape(&self) -> bool {
        self.state.lock().frames_escape
    }

    fn note_full(&self) {
        self.state.lock().arena_is_full = true;
    }
}

impl AddressSpace for Double {
    type Steady<'a> = Steady<'a>;

    fn steady(&self) -> Option<Steady<'_>> {
        let mut state = self.state.lock();
        if state.is_hearing {
            return None;
        }
        state.steady += 1;
        Some(Steady(self))
    }

    fn mapping(&self, page: PageNumber) -> Option<Mapping> {
        let state = self.state.lock();
        let (pages, advice) = state.mapping(page.0)?;
        let sizes = state.sizes.allowed(*advice, state.disabled);
        Some(Mapping { pages: PageNumber(pages.start)..PageNumber(pages.end), sizes })
    }

    fn sizes_of_return(&self, page: PageNumber) -> OrderSet {
        self.mapping(page).map_or(OrderSet::ALL, |mapping| mapping.sizes)
    }

    fn for_each_present(&self, pages: Range<PageNumber>, found: &mut dyn FnMut(Range<PageNumber>)) {
        let present: Vec<u64> = {
            let state = self.state.lock();
            state.program.range(pages.start.0..pages.end.0).map(|(&page, _)| page).collect()
        };
        for run in present.chunk_by(|a, b| a + 1 == *b) {
            found(PageNumber(run[0])..PageNumber(run[run.len() - 1] + 1));
        }
    }

    fn is_shared(&self, page: PageNumber) -> bool {
        self.state.lock().shared.contains(&page.0)
    }

    fn move_in(&self, _steady: &Steady<'_>, block: &Entries, run: FrameRun, to: PageNumber) -> Result<(), Stopped> {
        assert_held(block, to.0..to.0 + u64::from(run.frames()));
        let mut state = self.state.lock();
        for (index, frame) in frames(run).enumerate() {
            let page = to.0 + index as u64;
            let error = match () {
                () if state.changes > 0 => MoveError::Changing,
                () if state.mapping(page).is_none() => MoveError::Gone,
                () if state.refusing.contains(&page) => MoveError::Refused,
                () if state.program.contains_key(&page) => MoveError::Exists,
                () => match state.homes.remove(&frame) {
                    Some(content) => {
                        state.marks.remove(&page);
                        state.program.insert(page, content);
                        continue;
                    }
                    None => MoveError::Absent,
                },
            };
            state.mark(page..to.0 + u64::from(run.frames()));
            return Err(Stopped { moved_pages: index as u32, error });
        }
        Ok(())
    }

    fn move_out(
        &self,
        _steady: &Steady<'_>,
        block: &Entries,
        from: PageNumber,
        to: Frame,
        pages: u32,
    ) -> Result<(), Stopped> {
        assert_held(block, from.0..from.0 + u64::from(pages));
        let mut state = self.state.lock();
        state.moves_out += 1;
        for (index, frame) in (to.0..to.0 + pages).enumerate() {
            let page = from.0 + index as u64;
            let stop = |error| Err(Stopped { moved_pages: index as u32, error });
            if state.changes > 0 {
                return stop(MoveError::Changing);
            }
            if let Some(error) = Double::refuses(&state, page) {
                return stop(error);
            }
            let Some(content) = state.program.remove(&page) else { return stop(MoveError::Absent) };
            assert!(state.homes.insert(frame, content).is_none(), "frame {frame:x} was populated");
            state.mark(page..page + 1);
        }
        Ok(())
    }

    fn copy_in(&self, _steady: &Steady<'_>, block: &Entries, frame: Frame, to: PageNumber) -> Result<(), MoveError> {
        assert_held(block, to.0..to.0 + 1);
        let mut state = self.state.lock();
        if state.changes > 0 {
            return Err(MoveError::Changing);
        }
        if state.mapping(to.0).is_none() {
            return Err(MoveError::Gone);
        }
        if state.program.contains_key(&to.0) {
            return Err(MoveError::Exists);
        }
        let content = state.homes[&frame.0];
        state.marks.remove(&to.0);
        state.program.insert(to.0, content);
        Ok(())
    }

    fn zero_in(&self, _steady: &Steady<'_>, block: &Entries, to: PageNumber) -> Result<(), MoveError> {
        assert_held(block, to.0..to.0 + 1);
        let mut state = self.state.lock();
        if state.changes > 0 {
            return Err(MoveError::Changing);
        }
        state.marks.remove(&to.0);
        if state.program.insert(to.0, 0).is_some() {
            panic!("{to:?} has content");
        }
        Ok(())
    }

    fn poison(
        &self,
        _steady: &Steady<'_>,
        block: &Entries,
        page: PageNumber,
        _why: Corrupted,
    ) -> Result<(), MoveError> {
        assert_held(block, page.0..page.0 + 1);
        self.state.lock().poisoned.insert(page.0);
        Ok(())
    }

    fn split_huge(&self, block: &Entries, head: PageNumber, border: PageNumber) {
        assert_held(block, head.0..head.0 + 1);
        assert!(head < border && border < head.offset(MAX_ORDER.pages()) && head.head(MAX_ORDER) == head);
    }

    fn wake(&self, pages: Range<PageNumber>) {
        let woken: Vec<_> = {
            let mut state = self.state.lock();
            // Under the schedule explorer, other threads may hold guards.
            assert!(cfg!(feature = "shuttle") || state.steady == 0, "a wake while mapping events are held off");
            state.woken.extend(pages.start.0..pages.end.0);
            state.waiting.extract_if(.., |(page, _)| pages.contains(&PageNumber(*page))).collect()
        };
        woken.into_iter().for_each(|(_, wake)| wake());
    }
}

impl Marks for Double {
    fn for_each_lost(&self, block: &Entries, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        assert_held(block, pages.start.0..pages.end.0);
        let missing: Vec<u64> = {
            let state = self.state.lock();
            (pages.start.0..pages.end.0).filter(|&page| state.is_lost(page)).collect()
        };
        missing.into_iter().for_each(|page| lost(PageNumber(page)..PageNumber(page + 1)));
    }

    fn take(
        &self,
        block: &mut Entries,
        pages: Range<PageNumber>,
        lost: &mut dyn FnMut(&mut Entries, Range<PageNumber>),
    ) {
        let mut found = Vec::new();
        self.for_each_lost(block, pages.clone(), &mut |run| found.push(run));
        found.into_iter().for_each(|run| lost(block, run));
        let mut state = self.state.lock();
        if state.changes == 0 {
            state.marks.retain(|page| !(pages.start.0..pages.end.0).contains(page));
        }
    }

    fn set(&self, block: &Entries, pages: Range<PageNumber>) {
        assert_held(block, pages.start.0..pages.end.0);
        self.state.lock().mark(pages.start.0..pages.end.0);
    }
}

impl SharedPages for Double {
    fn exist(&self) -> bool {
        !self.state.lock().shared.is_empty()
    }

    fn unprotect(&self, block: &Entries, pages: Range<PageNumber>) -> Result<(), MoveError> {
        assert_held(block, pages.start.0..pages.end.0);
        Ok(())
    }

    fn unshare(&self, pages: Range<PageNumber>) {
        let mut state = self.state.lock();
        (pages.start.0..pages.end.0).for_each(|page| {
            state.shared.remove(&page);
        });
    }

    fn unshare_staged(&self, _run: FrameRun) {}
}

impl Pieces<Worker> for Double {
    fn compress(&self, worker: &mut Worker, _head: PageNumber, run: RunRef<'_>) -> Compressed {
        self.state.lock().compressions += 1;
        // Page by page, which takes long: no other thread may use these frames meanwhile.
        worker.words.clear();
        worker.words.extend(frames(*run).map(|frame| self.state.lock().homes[&frame]));
        if worker.words.iter().all(|&word| word == worker.words[0]) && worker.words[0].is_multiple_of(5) {
            return Compressed::Filled(worker.words[0]);
        }
        let raw = worker.words[0].is_multiple_of(7);
        let whole = run.order.bytes() as u32;
        let len_bytes = if raw { whole } else { 32 + (worker.words[0] % u64::from(whole * 3 / 4)) as u32 };
        Compressed::Bytes { len_bytes, raw, checksum: checksum(&worker.words) }
    }

    fn write(&self, worker: &mut Worker, _run: RunRef<'_>, place: PlaceMut<'_>) {
        self.state.lock().pieces.insert(Double::place_key(&place), worker.words.clone());
    }

    fn copy(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        let key = |fragment: &Fragment| (fragment.head.0, fragment.offset_bytes);
        assert_eq!(from.len_bytes, to.len_bytes);
        assert!(from.end_bytes() <= to.start_bytes() || to.end_bytes() <= from.start_bytes());
        let mut state = self.state.lock();
        // The bytes at `from` stay: a reader may have started. A piece is stored under the place of
        // its first fragment.
        if let Some(content) = state.pieces.get(&key(&from)).cloned() {
            state.pieces.insert(key(&to), content);
        }
    }

    fn read(&self, worker: &mut Worker, piece: &Piece<'_>, skip_pages: u32, into: RunMut<'_>) -> Result<(), Corrupted> {
        if std::mem::take(&mut self.state.lock().corrupt_next) {
            return Err(Corrupted);
        }
        worker.words.clear();
        match piece.filled {
            Some(word) => worker.words.resize(piece.granule.pages() as usize, word),
            None => {
                worker.words.extend(&self.state.lock().pieces[&Double::place_key(&piece.place)]);
                if checksum(&worker.words) != piece.checksum {
                    return Err(Corrupted);
                }
                worker.decode(piece);
            }
        }
        if std::mem::take(&mut self.state.lock().flip_next) {
            worker.words[skip_pages as usize] ^= 1;
        }
        for (frame, word) in frames(*into).zip(&worker.words[skip_pages as usize..]) {
            *self.state.lock().homes.get_mut(&frame).expect("a populated frame") = *word;
        }
        Ok(())
    }
}

impl Recompressor<Worker> for Double {
    fn recompress(&self, worker: &mut Worker, piece: &Piece<'_>) -> Option<Recompressed> {
        assert!(!piece.recompressed && piece.filled.is_none() && piece.place.in_file().is_none(), "{piece:?}");
        worker.words = self.state.lock().pieces[&Double::place_key(&piece.place)].clone();
        if checksum(&worker.words) != piece.checksum || worker.words[0].is_multiple_of(3) {
            return None;
        }
        // Recompressed words differ from the original ones, so that a read of the wrong kind is
        // corrupted.
        worker.words.iter_mut().for_each(|word| *word = !*word);
        Some(Recompressed { len_bytes: piece.place.len_bytes() * 3 / 4, checksum: checksum(&worker.words) })
    }

    fn write(&self, worker: &mut Worker, place: PlaceMut<'_>) {
        self.state.lock().pieces.insert(Double::place_key(&place), worker.words.clone());
    }
}

/// Resumes block by block, as far as there is room. Returns the number of resumed blocks.
pub fn resume_all(engine: &Engine<Double>, worker: &mut Worker) -> u32 {
    let (mut from, mut blocks) = (PageNumber(0), 0);
    while let Some(block) = engine.block_from(from)
        && engine.resume(worker, block.clone()) == Resumed::Block
    {
        (from, blocks) = (block.end, blocks + 1);
    }
    blocks
}
