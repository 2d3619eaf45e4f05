//! The name of a process, as the kernel shows it: the first 15 characters of the program's name.

/// Returns the name of process `pid`; `None` if there is no such process any more.
pub fn name_of(pid: u32) -> Option<String> {
    Some(std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::name_of;

    #[test]
    fn only_a_living_process_has_a_name() {
        // A test's thread has a name of its own, but the process has that of the program.
        assert!(name_of(std::process::id()).is_some_and(|name| name.starts_with("foliomem")));
        assert_eq!(name_of(u32::MAX), None);
    }
}
