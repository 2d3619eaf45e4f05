//! Finds the system calls that a piece of x86-64 code can make.
//!
//! The code may begin anywhere, and is not divided into functions. The bytes of a `syscall`
//! instruction also occur inside of other instructions. So the code before each occurrence is
//! decoded from several starts: decoding from a wrong start soon agrees with the real instructions.
//! The occurrence counts as an instruction if most readings have one there. There is no lock.

pub mod flow;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory};
use iced_x86::{Mnemonic, OpAccess, OpKind, Register};
use memchr::memmem;

/// The `syscall` instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Length of the code before a system call that is decoded, in bytes. Programs load the number a
/// few instructions before the call.
pub const WINDOW_BYTES: usize = 96;
/// Number of starts from which the code is decoded: more than the bytes of the longest instruction.
const READINGS: usize = 16;

/// Returns the offsets of the system calls in `code`, from byte `from` on, whose number is in
/// `watched` or unknown. The bytes before `from` only serve to find the numbers.
pub fn suspects(code: &[u8], from: usize, watched: &[u32]) -> impl Iterator<Item = usize> {
    memmem::find_iter(code, &SYSCALL).filter(move |&at| at >= from && is_watched(code, at, watched))
}

/// The content of a register.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Value {
    Known(u32),
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
        number = match loaded_constant(&instruction) {
            Some((Register::RAX, constant)) => {
                // A branch may lead from here to the call and skip the code that loads another
                // number.
                may_be_watched |= watched.contains(&constant);
                Value::Known(constant)
            }
            _ if leaves(&instruction)
                || written(&instruction, &mut infos).any(|register| register == Register::RAX) =>
            {
                Value::Unknown
            }
            _ => number,
        };
    }
    let is_there = start + decoder.position() == at;
    is_there.then_some(if may_be_watched { Value::Unknown } else { number })
}

/// Returns the whole register into which an instruction loads a constant, and the lower half of the
/// constant: the kernel uses no more of a number. Returns `None` if it loads none.
fn loaded_constant(instruction: &Instruction) -> Option<(Register, u32)> {
    let to = instruction.op0_register();
    if instruction.op0_kind() != OpKind::Register || !(to.is_gpr32() || to.is_gpr64()) {
        return None;
    }
    let is_with_itself = instruction.op1_kind() == OpKind::Register && instruction.op1_register() == to;
    let constant = match (instruction.mnemonic(), instruction.code()) {
        (_, Code::Mov_r32_imm32 | Code::Mov_r64_imm64 | Code::Mov_rm32_imm32 | Code::Mov_rm64_imm32) => {
            instruction.immediate(1) as u32
        }
        (Mnemonic::Xor | Mnemonic::Sub, _) if is_with_itself => 0,
        _ => return None,
    };
    Some((to.full_register(), constant))
}

/// Returns the registers that an instruction may change, as whole ones.
fn written(instruction: &Instruction, infos: &mut InstructionInfoFactory) -> impl Iterator<Item = Register> {
    let changes = |access| {
        matches!(access, OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
    };
    let used = infos.info(instruction).used_registers().iter();
    used.filter(move |used| changes(used.access())).map(|used| used.register().full_register())
}

/// Returns whether an instruction does not lead to the next one, or not at once.
fn leaves(instruction: &Instruction) -> bool {
    !matches!(instruction.flow_control(), FlowControl::Next | FlowControl::ConditionalBranch)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MADVISE: u32 = 28;
    /// `push rbx; mov rbx, rdi; mov rdi, rsi; mov rsi, rdx`.
    const BEFORE: [u8; 10] = [0x53, 0x48, 0x89, 0xfb, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6];

    fn can_make(code: &[u8], from: usize) -> bool {
        suspects(code, from, &[MADVISE]).next().is_some()
    }

    fn can_madvise(code: &[u8]) -> bool {
        let code = [&BEFORE.repeat(12), code, &BEFORE.repeat(2)].concat();
        can_make(&code, 0)
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
        assert!(can_make(&SYSCALL, 0));
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
        assert!(can_make(&code, code.len() - 2));
        assert!(!can_make(&code, code.len() - 1));
    }
}
