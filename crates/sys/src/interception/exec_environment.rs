//! The environment of a program that the program executes: the agent is carried into it.
//!
//! The agent comes into a program by two variables. A program may execute another one with an
//! environment that lacks them, or whose `LD_PRELOAD` has another library alone: it would run
//! without the limit. So the entry ([`crate::interception::entry`]) executes it with an environment
//! that has them, and its agent takes them out again before any code of the program sees them
//! ([`take_out`]).
//!
//! In another root the agent's library may not be there, and the loader would complain on the
//! program's stderr. So the entry takes the library out of `LD_PRELOAD` for a program that cannot
//! open it.
//!
//! The new list is made on the caller's stack: in a child of `vfork(2)`, memory from elsewhere
//! would be lost to the parent. There is no lock.

use crate::interception::entry::system_call;
use crate::interception::fork_call;
use linux_raw_sys::general as raw;
use std::ffi::{CStr, CString, c_char};
use std::sync::OnceLock;

/// The variable that names the control segment of the run.
pub const CONTROL: &[u8] = b"FOLIOMEM_CONTROL=";
/// The variable that names it in an environment into which the agent was carried.
pub const CARRIED: &[u8] = b"FOLIOMEM_CARRIED=";
/// The loader's variable, a list of libraries.
const PRELOAD: &[u8] = b"LD_PRELOAD=";
/// Maximum number of bytes on the stack. (The child of `posix_spawn(3)` has 32 KiB.)
const MAX_BYTES: usize = 16 << 10;
/// Number of words beyond those of the program's own variables: two variables and the end.
const MORE_WORDS: usize = 3;

/// The load: the library, and the two variables that carry it.
struct Load {
    /// The path of the agent's library.
    agent: &'static CStr,
    /// The loader's variable with the agent alone.
    preload: CString,
    /// [`CARRIED`] with its value.
    control: CString,
}

static LOAD: OnceLock<Load> = OnceLock::new();

/// Carries the library at path `agent`, and the control segment that is called `control`, into the
/// programs that this process executes from here on.
pub fn carry(agent: &'static CStr, control: &CStr) {
    let variable = |name: &[u8], value: &CStr| CString::new([name, value.to_bytes()].concat());
    if let (Ok(preload), Ok(control)) = (variable(PRELOAD, agent), variable(CARRIED, control)) {
        let _ = LOAD.set(Load { agent, preload, control });
    }
}

/// Returns the variables of a list, which ends with null; a null pointer is an empty list.
///
/// # Safety
/// The list and its strings stay as they are.
pub unsafe fn variables<'a>(list: *const *const c_char) -> impl Iterator<Item = &'a CStr> + Clone {
    // SAFETY: the list ends with null, and the caller keeps it and its strings.
    (0..).map_while(move |index| unsafe {
        let variable = if list.is_null() { std::ptr::null() } else { *list.add(index) };
        (!variable.is_null()).then(|| CStr::from_ptr(variable))
    })
}

/// Returns the value of the variable that begins with `name`, which includes `=`.
fn value_of<'a>(variable: &'a CStr, name: &[u8]) -> Option<&'a [u8]> {
    variable.to_bytes().strip_prefix(name)
}

/// Returns the libraries in a value of [`PRELOAD`].
fn libraries(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| matches!(byte, b':' | b' '))
}

/// A change of an environment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    /// The agent is added.
    Carry,
    /// The agent is taken out of the loader's variable.
    Leave,
}

/// How an environment is changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Plan {
    change: Change,
    /// Number of the program's variables.
    count: usize,
    /// Index and length of the loader's variable, if there is one.
    preload: Option<(usize, usize)>,
}

impl Plan {
    /// Returns how to change `variables`; `None` if they need nothing, or have too many for the
    /// stack. `can_open` says whether the program will find the agent.
    fn of<'a>(
        variables: impl Iterator<Item = &'a CStr>,
        agent: &CStr,
        can_open: impl FnOnce(&CStr) -> bool,
    ) -> Option<Plan> {
        let (mut count, mut preload) = (0, None);
        let (mut has_control, mut has_agent) = (false, false);
        for variable in variables {
            if let Some(value) = value_of(variable, PRELOAD) {
                // The loader takes the last one.
                has_agent = libraries(value).any(|library| library == agent.to_bytes());
                preload = Some((count, variable.count_bytes()));
            }
            has_control |= value_of(variable, CONTROL).or_else(|| value_of(variable, CARRIED)).is_some();
            count += 1;
        }
        let change = match (can_open(agent), has_agent) {
            (true, true) if has_control => return None,
            (true, _) => Change::Carry,
            (false, true) => Change::Leave,
            (false, false) => return None,
        };
        Some(Plan { change, count, preload }).filter(|plan| plan.bytes(agent) <= MAX_BYTES)
    }

    /// Returns the size of the words of the new list.
    fn list_bytes(self) -> usize {
        (self.count + MORE_WORDS) * size_of::<usize>()
    }

    /// Returns the size of the new list, and of a new variable for the loader. It does not depend
    /// on the change.
    fn bytes(self, agent: &CStr) -> usize {
        let preload_bytes = self.preload.map_or(0, |(_, len)| agent.count_bytes() + len + 2);
        (self.list_bytes() + preload_bytes).next_multiple_of(16)
    }
}

/// Returns whether the program that is executed now can open the agent.
fn can_open(agent: &CStr) -> bool {
    if fork_call::has_filter() {
        return true;
    }
    let arguments = [libc::AT_FDCWD as usize, agent.as_ptr().expose_provenance(), libc::R_OK as usize, 0, 0, 0];
    // SAFETY: faccessat(2) only reads the string.
    unsafe { system_call(raw::__NR_faccessat, arguments) == 0 }
}

/// Returns the size of the room that [`changed`] needs for the variables of `list`, in bytes; 0 if
/// they can stay as they are.
pub(super) extern "C" fn needed_bytes(list: *const *const c_char) -> usize {
    let Some(load) = LOAD.get() else { return 0 };
    // SAFETY: execve(2) reads the list, too.
    let plan = Plan::of(unsafe { variables(list) }, load.agent, can_open);
    plan.map_or(0, |plan| plan.bytes(load.agent))
}

/// Makes the list of variables with which the program is executed in `room`, which has as many
/// bytes as [`needed_bytes`] has returned. Returns the list.
///
/// # Safety
/// `list` is as it was when `needed_bytes` was called, and `room` is aligned to 16 bytes.
pub(super) unsafe extern "C" fn changed(list: *const *const c_char, room: *mut *const c_char) -> *const *const c_char {
    let Some(load) = LOAD.get() else { return list };
    // SAFETY: execve(2) reads the list, too.
    let plan = Plan::of(unsafe { variables(list) }, load.agent, can_open);
    // SAFETY: the contract of this function; another root may only change what is written.
    plan.map_or(list, |plan| unsafe { change(plan, load, list, room) })
}

/// Carries out `plan`.
///
/// # Safety
/// The plan is one for `list`, and `room` has as many bytes as it needs.
unsafe fn change(
    plan: Plan,
    load: &Load,
    list: *const *const c_char,
    room: *mut *const c_char,
) -> *const *const c_char {
    let mut next = room;
    // SAFETY: the room has enough words for the program's variables, two more, and the end. The
    // indices are those of the list.
    unsafe {
        let mut push = |variable: *const c_char| {
            next.write(variable);
            next = next.add(1);
        };
        for index in 0..plan.count {
            let variable = *list.add(index);
            match plan.preload.filter(|&(at, _)| at == index) {
                None => push(variable),
                Some(_) => {
                    let value = value_of(CStr::from_ptr(variable), PRELOAD).unwrap_or(&[]);
                    let made = room.byte_add(plan.list_bytes()).cast::<u8>();
                    if write_preload(plan.change, load.agent, value, made) {
                        push(made.cast());
                    }
                }
            }
        }
        if plan.change == Change::Carry {
            if plan.preload.is_none() {
                push(load.preload.as_ptr());
            }
            push(load.control.as_ptr());
        }
        push(std::ptr::null());
    }
    room
}

/// Writes the changed variable of the loader, which has `value` so far, to `to`. Returns whether it
/// has a value.
///
/// # Safety
/// There is room for the variable's name, the agent, the value and two bytes.
unsafe fn write_preload(change: Change, agent: &CStr, value: &[u8], to: *mut u8) -> bool {
    let mut len = 0;
    // SAFETY: the written parts are the name, the agent or a part of the value less, and as many
    // separators as the value has, one more, and the end.
    let mut write = |part: &[u8]| unsafe {
        to.add(len).copy_from_nonoverlapping(part.as_ptr(), part.len());
        len += part.len();
    };
    write(PRELOAD);
    let mut has_value = false;
    match change {
        Change::Carry => {
            for part in [agent.to_bytes(), b":", value] {
                write(part);
            }
            has_value = true;
        }
        Change::Leave => {
            for library in libraries(value).filter(|library| *library != agent.to_bytes() && !library.is_empty()) {
                if std::mem::replace(&mut has_value, true) {
                    write(b":");
                }
                write(library);
            }
        }
    }
    write(b"\0");
    has_value
}

/// Removes what carried the agent into this program from the variables of `list`, if it was
/// carried. `agent` is the path of its library.
///
/// # Safety
/// `list` is the list with which the program was started, and no other thread uses it.
pub unsafe fn take_out(list: *mut *mut c_char, agent: &CStr) {
    // SAFETY: the list ends with null.
    unsafe {
        if !variables(list.cast()).any(|variable| value_of(variable, CARRIED).is_some()) {
            return;
        }
        let (mut from, mut to) = (list, list);
        while !(*from).is_null() {
            let variable = CStr::from_ptr(*from);
            if let Some(kept) = without_agent(*from, variable, agent) {
                to.write(kept);
                to = to.add(1);
            }
            from = from.add(1);
        }
        to.write(std::ptr::null_mut());
    }
}

/// Returns the variable at `start` as the program has passed it, or `None` if it has not.
///
/// # Safety
/// `variable` is the string at `start`, which nobody else uses.
unsafe fn without_agent(start: *mut c_char, variable: &CStr, agent: &CStr) -> Option<*mut c_char> {
    if value_of(variable, CARRIED).is_some() {
        return None;
    }
    let Some(rest) = value_of(variable, PRELOAD).and_then(|value| value.strip_prefix(agent.to_bytes())) else {
        return Some(start);
    };
    match rest {
        [] => None,
        [b':', ..] => {
            // SAFETY: the string has its name, the agent's path, and a colon, in this order.
            unsafe {
                let moved = start.add(agent.count_bytes() + 1);
                moved.copy_from(PRELOAD.as_ptr().cast(), PRELOAD.len());
                Some(moved)
            }
        }
        _ => Some(start),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGENT: &CStr = c"/usr/lib/libfoliomem_agent.so";

    /// A list of variables, as execve(2) takes it.
    fn list(variables: &[&str]) -> (Vec<CString>, Vec<*const c_char>) {
        let strings: Vec<_> = variables.iter().map(|&variable| CString::new(variable).unwrap()).collect();
        let words = strings.iter().map(|variable| variable.as_ptr()).chain([std::ptr::null()]).collect();
        (strings, words)
    }

    fn read(words: *const *const c_char) -> Vec<String> {
        // SAFETY: the tests' lists end with null.
        unsafe { variables(words) }.map(|variable| variable.to_str().unwrap().to_owned()).collect()
    }

    /// Returns the environment with which a program is executed that is given these variables.
    fn passed(given: &[&str], can_open: bool) -> Option<Vec<String>> {
        let (_strings, words) = list(given);
        let load = Load {
            agent: AGENT,
            preload: CString::new(format!("LD_PRELOAD={}", AGENT.to_str().unwrap())).unwrap(),
            control: c"FOLIOMEM_CARRIED=/proc/1/fd/3:/tmp/door".to_owned(),
        };
        // SAFETY: the list ends with null and stays as it is.
        let plan = Plan::of(unsafe { variables(words.as_ptr()) }, AGENT, |_| can_open)?;
        let mut room = vec![0u128; plan.bytes(AGENT) / 16];
        // SAFETY: the plan is for this list, and the room is large enough and aligned.
        Some(read(unsafe { change(plan, &load, words.as_ptr(), room.as_mut_ptr().cast()) }))
    }

    /// Returns what a program sees that is started with `variables`.
    fn seen(variables: &[String]) -> Vec<String> {
        let (_strings, mut words) = list(&variables.iter().map(String::as_str).collect::<Vec<_>>());
        // SAFETY: the list and its strings belong to this function alone.
        unsafe { take_out(words.as_mut_ptr().cast(), AGENT) };
        read(words.as_ptr())
    }

    const CARRIED_CONTROL: &str = "FOLIOMEM_CARRIED=/proc/1/fd/3:/tmp/door";
    const ALONE: &str = "LD_PRELOAD=/usr/lib/libfoliomem_agent.so";

    #[test]
    fn the_agent_is_carried_and_the_program_sees_what_it_was_given() {
        let cases: [(&[&str], &[&str]); 5] = [
            (&[], &[ALONE, CARRIED_CONTROL]),
            (&["A=1", "B="], &["A=1", "B=", ALONE, CARRIED_CONTROL]),
            (&["LD_PRELOAD=", "A=1"], &["LD_PRELOAD=/usr/lib/libfoliomem_agent.so:", "A=1", CARRIED_CONTROL]),
            (
                &["A=1", "LD_PRELOAD=/lib/x.so:y.so", "FOLIOMEM_CONTROL=z"],
                &[
                    "A=1",
                    "LD_PRELOAD=/usr/lib/libfoliomem_agent.so:/lib/x.so:y.so",
                    "FOLIOMEM_CONTROL=z",
                    CARRIED_CONTROL,
                ],
            ),
            (
                &[ALONE, "A=1"],
                &["LD_PRELOAD=/usr/lib/libfoliomem_agent.so:/usr/lib/libfoliomem_agent.so", "A=1", CARRIED_CONTROL],
            ),
        ];
        for (given, expected) in cases {
            let passed = passed(given, true).unwrap();
            assert_eq!(passed, expected);
            assert_eq!(seen(&passed), given);
        }
    }

    #[test]
    fn an_environment_with_the_agent_or_without_end_stays_as_it_is() {
        let with = |preload: &str| passed(&[preload, "FOLIOMEM_CONTROL=z"], true);
        for preload in [ALONE, "LD_PRELOAD=x.so:/usr/lib/libfoliomem_agent.so y.so"] {
            assert_eq!(with(preload), None);
            assert_eq!(seen(&[preload.to_owned(), "FOLIOMEM_CONTROL=z".to_owned()])[0], preload);
        }
        assert!(with("LD_PRELOAD=/usr/lib/libfoliomem_agent.so.1").is_some());
        assert_eq!(passed(&["A=1"; 5000], true), None, "it would not fit on the stack");
        assert_eq!(passed(&[&format!("LD_PRELOAD={}", "x".repeat(MAX_BYTES))], true), None);
    }

    #[test]
    fn what_cannot_open_the_agent_is_not_asked_to() {
        assert_eq!(passed(&["A=1", "LD_PRELOAD=x.so"], false), None);
        assert_eq!(passed(&[ALONE, "FOLIOMEM_CONTROL=z"], false).unwrap(), ["FOLIOMEM_CONTROL=z"]);
        let others = "LD_PRELOAD=x.so /usr/lib/libfoliomem_agent.so:y.so";
        assert_eq!(passed(&["A=1", others], false).unwrap(), ["A=1", "LD_PRELOAD=x.so:y.so"]);
    }

    #[test]
    fn without_a_run_nothing_changes() {
        assert_eq!(needed_bytes(std::ptr::null()), 0);
    }
}
