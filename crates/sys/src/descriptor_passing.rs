//! Passing descriptors over a socket (SCM_RIGHTS, unix(7)), with system calls only. There is no
//! lock.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// Maximum number of descriptors in a message.
pub const MAX_PASSED: usize = 5;
/// Size of the buffer for the descriptors of a message, in bytes.
const ANCILLARY_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_PASSED));

/// Sends the descriptors that are `Some`, and their positions.
///
/// # Errors
/// Fails with `INVAL` if all are `None`, or if the kernel cannot send the message without waiting.
pub fn send(socket: impl AsFd, descriptors: [Option<BorrowedFd<'_>>; MAX_PASSED]) -> Result<(), Errno> {
    let Some(any) = descriptors.iter().flatten().next() else { return Err(Errno::INVAL) };
    let mut present = 0u8;
    let (mut passed, mut count) = ([*any; MAX_PASSED], 0);
    for (index, descriptor) in descriptors.iter().enumerate() {
        if let Some(descriptor) = descriptor {
            present |= 1 << index;
            passed[count] = *descriptor;
            count += 1;
        }
    }
    let mut space = [MaybeUninit::uninit(); ANCILLARY_BYTES];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&passed[..count])) {
        return Err(Errno::TOOBIG);
    }
    sendmsg(socket, &[IoSlice::new(&[present])], &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map(|_| ())
}

/// Receives a message of [`send`]. Each descriptor has the position that it had there.
///
/// # Errors
/// Fails with `CONNRESET` if the other side has closed the socket, or if the kernel has no message.
pub fn receive(socket: impl AsFd, flags: RecvFlags) -> Result<[Option<OwnedFd>; MAX_PASSED], Errno> {
    let mut present = [0u8];
    let mut space = [MaybeUninit::uninit(); ANCILLARY_BYTES];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut present)];
    if recvmsg(socket, &mut parts, &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC)?.bytes != 1 {
        return Err(Errno::CONNRESET);
    }
    let mut received = [const { None }; MAX_PASSED];
    let mut free = (0..MAX_PASSED).filter(|index| present[0] & 1 << index != 0);
    for message in ancillary.drain() {
        let RecvAncillaryMessage::ScmRights(descriptors) = message else { continue };
        for descriptor in descriptors {
            if let Some(index) = free.next() {
                received[index] = Some(descriptor);
            }
        }
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn descriptors_arrive_in_their_places() {
        let (one, other) = UnixStream::pair().unwrap();
        let file = |text: &[u8]| {
            let file = rustix::fs::memfd_create("passed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&file, text).unwrap();
            file
        };
        let (first, last) = (file(b"first"), file(b"lasts"));
        send(&one, [Some(first.as_fd()), None, Some(last.as_fd()), None, None]).unwrap();
        send(&one, [None, Some(last.as_fd()), None, None, None]).unwrap();
        let text = |file: &Option<OwnedFd>| {
            let mut bytes = [0; 5];
            file.as_ref().map(|file| rustix::io::pread(file, &mut bytes, 0).map(|_| bytes).unwrap())
        };
        let received = receive(&other, RecvFlags::DONTWAIT).unwrap();
        assert_eq!(received.each_ref().map(text), [Some(*b"first"), None, Some(*b"lasts"), None, None]);
        let received = receive(&other, RecvFlags::DONTWAIT).unwrap();
        assert_eq!(received.each_ref().map(text), [None, Some(*b"lasts"), None, None, None]);
        assert_eq!(receive(&other, RecvFlags::DONTWAIT).err(), Some(Errno::AGAIN));
        assert_eq!(send(&one, [None; MAX_PASSED]), Err(Errno::INVAL));
        drop(one);
        assert_eq!(receive(&other, RecvFlags::empty()).err(), Some(Errno::CONNRESET));
    }
}
