//! PR_SET_THP_DISABLE during a fork. The setting is one of the whole process, so this test has a
//! process of its own.

use foliomem_sys::process_limits::{disable_huge_pages, disabled_huge_pages, restore_huge_pages};
use foliomem_types::size_policy::Disabled;
use rustix::thread::disable_transparent_huge_pages as set;

#[test]
fn the_programs_own_setting_is_restored() {
    for own in [Disabled::No, Disabled::Yes] {
        set(own == Disabled::Yes).unwrap();
        let before = disable_huge_pages();
        assert_eq!(disabled_huge_pages(), Disabled::Yes);
        restore_huge_pages(before);
        assert_eq!(disabled_huge_pages(), own);
    }
    set(false).unwrap();
    // SAFETY: prctl(2) takes numbers. Linux before 6.18 refuses these.
    if unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 2, 0, 0) } == 0 {
        let before = disable_huge_pages();
        assert_eq!((before, disabled_huge_pages()), (Disabled::ExceptAdvised, Disabled::Yes));
        restore_huge_pages(before);
        assert_eq!(disabled_huge_pages(), Disabled::ExceptAdvised);
        set(false).unwrap();
    }
    // The program changes the setting meanwhile.
    let before = disable_huge_pages();
    set(false).unwrap();
    restore_huge_pages(before);
    assert_eq!(disabled_huge_pages(), Disabled::No);
}
