//! Detects whether valgrind runs the program.

use std::arch::asm;

/// The request `RUNNING_ON_VALGRIND` of `valgrind.h`.
const RUNNING_ON_VALGRIND: usize = 0x1001;

/// Returns whether valgrind runs the calling code. Valgrind answers a sequence of instructions that
/// does nothing on a CPU.
pub fn is_running() -> bool {
    let request = [RUNNING_ON_VALGRIND, 0, 0, 0, 0, 0];
    let mut depth = 0usize;
    // SAFETY: the four rotations add up to 128 bits and leave rdi unchanged, and the exchange does
    // nothing. Valgrind reads the request and writes rdx.
    unsafe {
        asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            in("rax") request.as_ptr(), inout("rdx") depth, inout("rdi") 0usize => _, options(nostack),
        );
    }
    depth != 0
}
