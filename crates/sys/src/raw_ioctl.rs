//! An ioctl with a struct as its argument, through rustix, which uses neither libc nor errno.

use rustix::fd::AsFd;
use rustix::io::Result;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};
use std::ffi::c_void;

/// An ioctl whose argument the kernel reads and writes.
struct InOut<'a, T> {
    opcode: Opcode,
    argument: &'a mut T,
}

// SAFETY: only `call` makes this type, and its caller guarantees that the opcode takes a pointer to
// `T`.
unsafe impl<T> Ioctl for InOut<'_, T> {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self.argument).cast()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _argument: *mut c_void) -> Result<IoctlOutput> {
        Ok(output)
    }
}

/// Calls the ioctl. The kernel reads and writes `argument`.
///
/// # Safety
/// `opcode` takes a pointer to a `T`. The memory beyond `argument` that the kernel accesses may be
/// accessed that way.
///
/// # Errors
/// Fails if the kernel refuses the call.
pub unsafe fn call<T>(fd: impl AsFd, opcode: Opcode, argument: &mut T) -> Result<IoctlOutput> {
    // SAFETY: the caller guarantees that `opcode` and `argument` match, and allows the other
    // accesses.
    unsafe { ioctl(fd, InOut { opcode, argument }) }
}
