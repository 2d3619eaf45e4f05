//! Finds the system calls that a piece of x86-64 code can make.
//!
//! The code may begin anywhere, and is not divided into functions. The bytes of a `syscall`
//! instruction also occur inside of other instructions. So the code before each occurrence is
//! decoded from several starts: decoding from a wrong start soon agrees with the real instructions.
//! The occurrence counts as an instruction if most readings have one there. There is no lock.

use iced_x86::{Code, Register};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind};
use memchr::memmem::Finder;

/// The `syscall` instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Length of the code before a system call that is decoded, in bytes. Programs load the number a
/// few instructions before the call.
pub const WINDOW_BYTES: usize = 96;
/// Number of starts from which the code is decoded: more than the bytes of the longest instruction.
const READINGS: usize = 16;

pub mod flow;

/// Returns the offsets of the system calls in `code` whose number is in `watched` or unknown.
pub fn suspects(code: &[u8], watched: &[u32]) -> Vec<usize> {
    Finder::new(&SYSCALL).find_iter(code).filter(|&at| is_watched(code, at, watched)).collect()
}

/// Returns whether `code` contains, from byte `from` on, a system call whose number is in `watched`
/// or unknown. The bytes before `from` only serve to find the number.
pub fn can_make(code: &[u8], from: usize, watched: &[u32]) -> bool {
    let finder = Finder::new(&SYSCALL);
    finder.find_iter(code).filter(|&at| at >= from).any(|at| is_watched(code, at, watched))
}

/// The content of a register.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Value {
    Known(u64),
    Unknown,
}

/// Returns whether the bytes at `at` are a system call that is watched.
fn is_watched(code: &[u8], at: usize, watched: &[u32]) -> bool {
    let first = at.saturating_sub(WINDOW_BYTES);
    let starts = first..(first + READINGS).min(at);
    if starts.is_empty() {
        return true;
    }
    let readings = starts.len();
    let mut hits = 0;
    let mut is_watched = false;
    for start in starts {
        let Some(number) = number_at(code, start, at, watched) else { continue };
        hits += 1;
        is_watched |= number == Value::Unknown;
    }
    hits * 2 > readings && is_watched
}

/// Decodes `code` from `start` on. Returns the number of the system call at `at`, `Unknown` if it
/// may be a watched one, and `None` if no instruction begins at `at`.
fn number_at(code: &[u8], start: usize, at: usize, watched: &[u32]) -> Option<Value> {
    let mut decoder = Decoder::new(64, &code[start..], DecoderOptions::NONE);
    let mut infos = InstructionInfoFactory::new();
    let mut instruction = Instruction::default();
    let mut number = Value::Unknown;
    let mut may_be_watched = false;
    while start + decoder.position() < at {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            return None;
        }
        number = match value_of_rax(&instruction) {
            Some(constant) => {
                // A branch may lead from here to the call and skip the code that loads another
                // number.
                may_be_watched |= watched.iter().any(|&watched| u64::from(watched) == constant);
                Value::Known(constant)
            }
            None if changes_rax(&instruction, &mut infos) => Value::Unknown,
            None => number,
        };
    }
    let is_there = start + decoder.position() == at;
    is_there.then_some(if may_be_watched { Value::Unknown } else { number })
}

/// Returns the constant that an instruction loads into `rax`, if it does.
fn value_of_rax(instruction: &Instruction) -> Option<u64> {
    let loads = instruction.op0_kind() == OpKind::Register
        && matches!(instruction.op0_register(), Register::EAX | Register::RAX);
    match (instruction.mnemonic(), instruction.code()) {
        _ if !loads => None,
        (_, Code::Mov_r32_imm32 | Code::Mov_r64_imm64 | Code::Mov_rm32_imm32 | Code::Mov_rm64_imm32) => {
            // The kernel uses only the lower half.
            Some(instruction.immediate(1) & u64::from(u32::MAX))
        }
        (Mnemonic::Xor | Mnemonic::Sub, _)
            if instruction.op1_kind() == OpKind::Register
                && instruction.op1_register().full_register() == Register::RAX =>
        {
            Some(0)
        }
        _ => None,
    }
}

/// Returns whether an instruction may change `rax`, or does not lead to the next instruction.
fn changes_rax(instruction: &Instruction, infos: &mut InstructionInfoFactory) -> bool {
    match instruction.flow_control() {
        FlowControl::Next | FlowControl::ConditionalBranch => {}
        _ => return true,
    }
    let writes = |access| {
        matches!(access, OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
    };
    let info = infos.info(instruction);
    info.used_registers().iter().any(|used| used.register().full_register() == Register::RAX && writes(used.access()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MADVISE: u32 = 28;
    /// `push rbx; mov rbx, rdi; mov rdi, rsi; mov rsi, rdx`.
    const BEFORE: [u8; 10] = [0x53, 0x48, 0x89, 0xfb, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6];

    fn can_madvise(code: &[u8]) -> bool {
        let code = [&BEFORE.repeat(12), code, &BEFORE.repeat(2)].concat();
        can_make(&code, 0, &[MADVISE])
    }

    #[test]
    fn a_call_is_recognised_by_its_number() {
        assert!(can_madvise(&[0xb8, 28, 0, 0, 0, 0x0f, 0x05]));
        assert!(can_madvise(&[0x48, 0xc7, 0xc0, 28, 0, 0, 0, 0x48, 0x89, 0xd6, 0x0f, 0x05]));
        assert!(!can_madvise(&[0xb8, 9, 0, 0, 0, 0x0f, 0x05]));
        assert!(!can_madvise(&[0x31, 0xc0, 0x48, 0x89, 0xd6, 0x0f, 0x05]));
    }

    #[test]
    fn a_number_from_another_register_is_unknown() {
        // mov rax, rdi
        assert!(can_madvise(&[0x48, 0x89, 0xf8, 0x0f, 0x05]));
        // mov eax, 9; mov rax, [rbp - 24]
        assert!(can_madvise(&[0xb8, 9, 0, 0, 0, 0x48, 0x8b, 0x45, 0xe8, 0x0f, 0x05]));
        // mov eax, 9; call
        assert!(can_madvise(&[0xb8, 9, 0, 0, 0, 0xe8, 1, 2, 3, 4, 0x0f, 0x05]));
        // pop rax
        assert!(can_madvise(&[0x6a, 28, 0x58, 0x0f, 0x05]));
        // No code precedes the call.
        assert!(can_make(&SYSCALL, 0, &[MADVISE]));
    }

    #[test]
    fn a_branch_may_skip_the_last_number() {
        // mov eax, 28; jmp +5; mov eax, 9
        assert!(can_madvise(&[0xb8, 28, 0, 0, 0, 0xeb, 5, 0xb8, 9, 0, 0, 0, 0x0f, 0x05]));
    }

    #[test]
    fn bytes_inside_of_other_instructions_are_not_a_call() {
        // mov ecx, 0x050f; lea rax, [rip + 0x050f00]; mov eax, [rbx + 0x50f]
        let inside: [&[u8]; 3] =
            [&[0xb9, 0x0f, 0x05, 0, 0], &[0x48, 0x8d, 0x05, 0, 0x0f, 0x05, 0], &[0x8b, 0x83, 0x0f, 0x05, 0, 0]];
        for code in inside {
            assert!(!can_madvise(code), "{code:x?}");
        }
    }

    #[test]
    fn calls_before_the_searched_part_do_not_count() {
        let code = [&BEFORE.repeat(12)[..], &[0xb8, 28, 0, 0, 0, 0x0f, 0x05]].concat();
        assert!(can_make(&code, code.len() - 2, &[MADVISE]));
        assert!(!can_make(&code, code.len() - 1, &[MADVISE]));
    }
}
