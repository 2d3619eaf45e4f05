//! One ioctl with a struct as its argument, through rustix (no libc, no errno).

use rustix::fd::AsFd;
use rustix::io::Result;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};
use std::ffi::c_void;

struct InOut<'a, T> {
    opcode: Opcode,
    argument: &'a mut T,
}

// SAFETY: the opcode and the type of its argument belong together, by the contract of `call`.
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

/// Calls the ioctl; the kernel reads and writes `argument`.
///
/// # Safety
/// `opcode` takes a pointer to a `T`, and what it does to memory beyond `argument` is allowed.
pub unsafe fn call<T>(fd: impl AsFd, opcode: Opcode, argument: &mut T) -> Result<IoctlOutput> {
    // SAFETY: by the contract.
    unsafe { ioctl(fd, InOut { opcode, argument }) }
}
