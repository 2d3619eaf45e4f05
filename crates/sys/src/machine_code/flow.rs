//! Follows the numbers of system calls through the registers of a library's code.
//!
//! Compilers keep the number of a call in another register over a loop, and the code right before
//! the call does not show it. An example is `libgomp`, the library of OpenMP, which only waits for
//! futexes. This analysis decodes all of the code in sequence, divides it into blocks, and computes
//! which constant each register has at the start of each block, whichever way leads there.
//!
//! A register is unknown where code begins that nothing jumps to, at the targets of calls, and
//! after a call if the callee may change it. An indirect jump may lead anywhere in its function, so
//! a system call between the same two function starts is unknown. There is no lock.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory};
use iced_x86::{Mnemonic, OpAccess, OpKind, Register};
use std::collections::BTreeMap;

/// Maximum size of the code that is analysed, in bytes. The analysis takes some tens of
/// milliseconds, and for that time about 16 times as much memory.
pub const MAX_BYTES: usize = 512 << 10;
/// Alignment of functions.
const FUNCTION_ALIGNMENT: u64 = 16;
/// The registers that a function may change.
const CHANGED_BY_CALLS: [Register; 9] = [
    Register::RAX,
    Register::RCX,
    Register::RDX,
    Register::RSI,
    Register::RDI,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
];

/// The content of a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Value {
    /// No way that leads here is known so far.
    Unreached,
    Constant(u32),
    Unknown,
}

impl Value {
    fn join(self, other: Value) -> Value {
        match (self, other) {
            (Value::Unreached, value) | (value, Value::Unreached) => value,
            _ if self == other => self,
            _ => Value::Unknown,
        }
    }
}

/// The content of the general registers.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Registers([Value; 16]);

/// Returns the index of a general register of 32 or 64 bits.
fn index(register: Register) -> Option<usize> {
    let is_whole = register.is_gpr32() || register.is_gpr64();
    is_whole.then(|| register.number())
}

impl Registers {
    fn forget(&mut self, register: Register) {
        let full = register.full_register();
        if full.is_gpr64() {
            self.0[full.number()] = Value::Unknown;
        }
    }

    /// Applies an instruction.
    fn apply(&mut self, instruction: &Instruction, infos: &mut InstructionInfoFactory) {
        if let Some((to, value)) = self.moved(instruction) {
            self.0[to] = value;
            return;
        }
        for used in infos.info(instruction).used_registers() {
            if !matches!(used.access(), OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess | OpAccess::None) {
                self.forget(used.register());
            }
        }
        let changed: &[Register] = match instruction.flow_control() {
            _ if instruction.mnemonic() == Mnemonic::Syscall => &[Register::RAX, Register::RCX, Register::R11],
            FlowControl::Call | FlowControl::IndirectCall => &CHANGED_BY_CALLS,
            _ => &[],
        };
        changed.iter().for_each(|&register| self.forget(register));
    }

    /// Returns the register and its new content if the instruction moves a constant or a register.
    fn moved(&self, instruction: &Instruction) -> Option<(usize, Value)> {
        if instruction.op0_kind() != OpKind::Register {
            return None;
        }
        let to = index(instruction.op0_register())?;
        let from_register = || index(instruction.op1_register()).filter(|_| instruction.op1_kind() == OpKind::Register);
        let value = match (instruction.mnemonic(), instruction.code()) {
            (_, Code::Mov_r32_imm32 | Code::Mov_r64_imm64 | Code::Mov_rm32_imm32 | Code::Mov_rm64_imm32) => {
                // The kernel uses only the lower half of a number.
                Value::Constant(instruction.immediate(1) as u32)
            }
            (Mnemonic::Mov, _) => self.0[from_register()?],
            (Mnemonic::Xor | Mnemonic::Sub, _) if from_register()? == to => Value::Constant(0),
            _ => return None,
        };
        Some((to, value))
    }
}

/// A run of instructions that are executed in sequence.
struct Block {
    /// Index of the first instruction, and of the one after the last.
    first: usize,
    end: usize,
    /// Indices of the blocks that may follow.
    next: Vec<usize>,
}

/// The decoded code.
struct Program {
    instructions: Vec<Instruction>,
    blocks: Vec<Block>,
    /// Indices of the blocks at whose start all registers are unknown.
    entries: Vec<usize>,
}

fn ends_flow(instruction: &Instruction) -> bool {
    let control = instruction.flow_control();
    matches!(control, FlowControl::UnconditionalBranch | FlowControl::IndirectBranch | FlowControl::Return)
        || matches!(control, FlowControl::Exception | FlowControl::Interrupt)
        || instruction.is_invalid()
}

fn is_padding(instruction: &Instruction) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Int3)
}

/// Returns the instructions of `code`, without what fills it up to the next function or section.
fn instructions(code: &[u8]) -> Vec<Instruction> {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let mut instructions = Vec::new();
    while decoder.can_decode() {
        let instruction = decoder.decode();
        let end = decoder.position();
        let aligned = end.next_multiple_of(FUNCTION_ALIGNMENT as usize).min(code.len());
        let is_filled = code[end..aligned].iter().all(|byte| matches!(byte, 0 | 0x90 | 0xcc));
        if ends_flow(&instruction) && is_filled {
            if decoder.set_position(aligned).is_err() {
                break;
            }
            decoder.set_ip(aligned as u64);
        }
        instructions.push(instruction);
    }
    instructions
}

/// The branches to an instruction.
#[derive(Clone, Copy, Default)]
struct Branches {
    has_call: bool,
    has_jump: bool,
    has_conditional: bool,
}

impl Program {
    /// Decodes `code`. Returns `None` if a branch leads into an instruction: then the code is not
    /// what it seems.
    fn decode(code: &[u8]) -> Option<Program> {
        let instructions = instructions(code);
        let at = |address: u64| instructions.binary_search_by_key(&address, Instruction::ip);
        let mut branches: BTreeMap<usize, Branches> = BTreeMap::new();
        for instruction in &instructions {
            let control = instruction.flow_control();
            let is_near = instruction.op0_kind() == OpKind::NearBranch64;
            if !is_near || instruction.near_branch_target() >= code.len() as u64 {
                continue;
            }
            let target = branches.entry(at(instruction.near_branch_target()).ok()?).or_default();
            target.has_call |= control == FlowControl::Call;
            target.has_jump |= control == FlowControl::UnconditionalBranch;
            target.has_conditional |= control == FlowControl::ConditionalBranch;
        }
        let mut program = Program { blocks: Vec::new(), entries: Vec::new(), instructions };
        program.divide(&branches);
        program.link(code.len() as u64);
        Some(program)
    }

    /// Divides the instructions into blocks, and finds the entries.
    fn divide(&mut self, branches: &BTreeMap<usize, Branches>) {
        let (mut begins, mut follows) = (true, false);
        for (number, instruction) in self.instructions.iter().enumerate() {
            let here = branches.get(&number).copied();
            // Between functions, and before aligned targets of jumps.
            if begins && !follows && here.is_none() && is_padding(instruction) {
                continue;
            }
            if begins || here.is_some() {
                let here = here.unwrap_or_default();
                let is_aligned = instruction.ip().is_multiple_of(FUNCTION_ALIGNMENT);
                let may_be_function = !here.has_conditional && (!here.has_jump || is_aligned);
                let is_marked = matches!(instruction.mnemonic(), Mnemonic::Endbr64);
                if here.has_call || is_marked || !follows && may_be_function {
                    self.entries.push(self.blocks.len());
                }
                self.blocks.push(Block { first: number, end: number, next: Vec::new() });
            }
            if let Some(block) = self.blocks.last_mut() {
                block.end = number + 1;
            }
            follows = !ends_flow(instruction);
            begins = !follows || instruction.flow_control() == FlowControl::ConditionalBranch;
        }
    }

    /// Finds the blocks that may follow each block.
    fn link(&mut self, code_bytes: u64) {
        let block_of = |first: usize| self.blocks.binary_search_by_key(&first, |block| block.first).ok();
        let next = |number: usize, block: &Block| {
            let last = &self.instructions[block.end - 1];
            let jumps =
                matches!(last.flow_control(), FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch)
                    && last.op0_kind() == OpKind::NearBranch64
                    && last.near_branch_target() < code_bytes;
            let target = jumps
                .then(|| self.instructions.binary_search_by_key(&last.near_branch_target(), Instruction::ip).ok())
                .flatten()
                .and_then(block_of);
            let after = (!ends_flow(last) && number + 1 < self.blocks.len()).then_some(number + 1);
            target.into_iter().chain(after).collect::<Vec<_>>()
        };
        let all: Vec<_> = self.blocks.iter().enumerate().map(|(number, block)| next(number, block)).collect();
        self.blocks.iter_mut().zip(all).for_each(|(block, next)| block.next = next);
    }

    /// Returns the content of the registers at the start of each block.
    fn solve(&self) -> Vec<Registers> {
        let mut infos = InstructionInfoFactory::new();
        let mut states = vec![Registers([Value::Unreached; 16]); self.blocks.len()];
        let mut left = self.entries.clone();
        left.iter().for_each(|&entry| states[entry] = Registers([Value::Unknown; 16]));
        while let Some(number) = left.pop() {
            let block = &self.blocks[number];
            let mut registers = states[number];
            for instruction in &self.instructions[block.first..block.end] {
                registers.apply(instruction, &mut infos);
            }
            for &next in &block.next {
                let mut joined = states[next];
                joined.0.iter_mut().zip(registers.0).for_each(|(value, other)| *value = value.join(other));
                if joined != states[next] {
                    states[next] = joined;
                    left.push(next);
                }
            }
        }
        states
    }

    /// Returns the addresses of the system calls with their numbers.
    fn calls(&self) -> BTreeMap<usize, Value> {
        let states = self.solve();
        let mut infos = InstructionInfoFactory::new();
        let (mut calls, mut in_function, mut is_indirect) = (BTreeMap::new(), Vec::new(), false);
        let mut entries = self.entries.iter().peekable();
        for (number, (block, &state)) in self.blocks.iter().zip(&states).enumerate() {
            if entries.next_if_eq(&&number).is_some() {
                finish_function(&mut calls, &mut in_function, std::mem::take(&mut is_indirect));
            }
            let mut registers = state;
            for instruction in &self.instructions[block.first..block.end] {
                if instruction.mnemonic() == Mnemonic::Syscall {
                    in_function.push((instruction.ip() as usize, registers.0[0]));
                }
                // A jump by a table of the linker leaves the function.
                is_indirect |= instruction.flow_control() == FlowControl::IndirectBranch
                    && !instruction.is_ip_rel_memory_operand();
                registers.apply(instruction, &mut infos);
            }
        }
        finish_function(&mut calls, &mut in_function, is_indirect);
        calls
    }
}

/// Adds the calls of one function to `calls`, which are unknown if it `is_indirect`.
fn finish_function(calls: &mut BTreeMap<usize, Value>, in_function: &mut Vec<(usize, Value)>, is_indirect: bool) {
    let value = |value| if is_indirect { Value::Unknown } else { value };
    calls.extend(in_function.drain(..).map(|(at, number)| (at, value(number))));
}

/// Returns whether each system call of `code` at one of the offsets `at` has a known number that is
/// not in `watched`. Returns `false` if the code is larger than [`MAX_BYTES`] or not understood.
pub fn are_known_and_others(code: &[u8], at: &[usize], watched: &[u32]) -> bool {
    if code.len() > MAX_BYTES {
        return false;
    }
    let Some(program) = Program::decode(code) else { return false };
    let calls = program.calls();
    let is_other = |at: &usize| match calls.get(at) {
        Some(Value::Constant(number)) => !watched.contains(number),
        // The way to a call that is not reached has not been understood.
        Some(Value::Unreached | Value::Unknown) | None => false,
    };
    at.iter().all(is_other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine_code::suspects;
    use proptest::prelude::*;

    const VMSPLICE: u32 = 278;
    const FUTEX: u32 = 202;
    const COPY_R8: [u8; 3] = [0x44, 0x89, 0xc0];
    const COPY_EBX: [u8; 2] = [0x89, 0xd8];
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    const RET: u8 = 0xc3;
    const TEST: [u8; 2] = [0x85, 0xff];

    fn load_r8(number: u32) -> Vec<u8> {
        [&[0x41, 0xb8], &number.to_le_bytes()[..]].concat()
    }

    fn load_ebx(number: u32) -> Vec<u8> {
        [&[0xbb], &number.to_le_bytes()[..]].concat()
    }

    fn load_eax(number: u32) -> Vec<u8> {
        [&[0xb8], &number.to_le_bytes()[..]].concat()
    }

    /// Returns whether all system calls of `parts` in sequence are known, and not vmsplice(2).
    fn are_others(parts: &[&[u8]]) -> bool {
        let code = parts.concat();
        let at: Vec<usize> = code.windows(2).enumerate().filter(|(_, two)| *two == SYSCALL).map(|(at, _)| at).collect();
        assert!(!at.is_empty());
        are_known_and_others(&code, &at, &[VMSPLICE])
    }

    #[test]
    fn a_number_in_another_register_is_followed_over_a_loop() {
        // mov r8d, number; again: mov eax, r8d; syscall; test edi, edi; jne again; ret
        let waits = |number| are_others(&[&load_r8(number), &COPY_R8, &SYSCALL, &TEST, &[0x75, 0xf7, RET]]);
        assert!(waits(FUTEX));
        assert!(!waits(VMSPLICE));
        // Far more instructions between the number and the call than one window has.
        let far = TEST.repeat(200);
        assert!(are_others(&[&load_r8(FUTEX), &far, &COPY_R8, &SYSCALL, &[RET]]));
        assert!(!are_others(&[&load_r8(VMSPLICE), &far, &COPY_R8, &SYSCALL, &[RET]]));
        let code = [&load_r8(FUTEX)[..], &far, &COPY_R8, &SYSCALL, &[RET]].concat();
        assert_eq!(suspects(&code, &[VMSPLICE]).len(), 1, "the instructions before the call do not show it");
    }

    #[test]
    fn a_number_from_outside_is_unknown() {
        assert!(!are_others(&[&COPY_R8, &SYSCALL, &[RET]]), "an argument");
        // mov rax, [rsp + 8]
        assert!(!are_others(&[&[0x48, 0x8b, 0x44, 0x24, 8], &SYSCALL, &[RET]]));
        // pop rax; mov al, 9
        assert!(!are_others(&[&load_eax(FUTEX), &[0x58], &SYSCALL, &[RET]]));
        assert!(!are_others(&[&load_eax(FUTEX), &[0xb0, 9], &SYSCALL, &[RET]]));
        assert!(!are_others(&[&load_eax(FUTEX), &SYSCALL, &SYSCALL, &[RET]]), "the result of another call");
    }

    #[test]
    fn all_ways_to_a_call_count() {
        // mov r8d, first; test edi, edi; je +6; mov r8d, second; mov eax, r8d; syscall; ret
        let either = |first, second| {
            are_others(&[&load_r8(first), &TEST, &[0x74, 6], &load_r8(second), &COPY_R8, &SYSCALL, &[RET]])
        };
        assert!(either(FUTEX, FUTEX));
        assert!(!either(FUTEX, VMSPLICE) && !either(VMSPLICE, FUTEX) && !either(FUTEX, 9));
    }

    #[test]
    fn a_callee_keeps_some_registers() {
        const CALL: [u8; 5] = [0xe8, 0x40, 0x40, 0, 0];
        assert!(are_others(&[&load_ebx(FUTEX), &CALL, &COPY_EBX, &SYSCALL, &[RET]]));
        assert!(!are_others(&[&load_r8(FUTEX), &CALL, &COPY_R8, &SYSCALL, &[RET]]));
        assert!(are_others(&[&load_r8(FUTEX), &load_eax(1), &SYSCALL, &COPY_R8, &SYSCALL, &[RET]]));
    }

    #[test]
    fn functions_begin_with_unknown_registers() {
        let call = [&COPY_R8[..], &SYSCALL, &[RET]].concat();
        let filled = |code: &[u8]| [code, &vec![0x90; 16 - code.len() % 16][..]].concat();
        // Only pointers lead to the function, or a jump from the end of another one, too.
        for jump in [&[RET][..], &[0xeb, 8]] {
            let first = filled(&[&load_r8(FUTEX)[..], jump].concat());
            assert!(!are_others(&[&first, &call]), "{jump:x?}");
        }
        // endbr64: somebody has its address.
        let marked = [&load_r8(FUTEX)[..], &TEST, &[0x74, 0], &[0xf3, 0x0f, 0x1e, 0xfa], &call].concat();
        assert!(!are_others(&[&marked]));
        // It begins with a loop, which nothing leads to.
        let spins = [&TEST[..], &[0x75, 0xfc], &call].concat();
        assert!(!are_others(&[&filled(&[&load_r8(FUTEX)[..], &[RET]].concat()), &spins]));
    }

    #[test]
    fn what_is_not_understood_is_unknown() {
        let known = [&load_r8(FUTEX)[..], &COPY_R8, &SYSCALL].concat();
        assert!(are_others(&[&known, &[RET]]));
        assert!(!are_others(&[&known, &[0xff, 0xe0]]), "jmp rax may lead anywhere in the function");
        assert!(!are_others(&[&known, &[0xeb, 0xfa]]), "a jump into an instruction");
        assert!(!are_known_and_others(&vec![0x90; MAX_BYTES + 1], &[0], &[VMSPLICE]));
        assert!(!are_known_and_others(&[known, vec![RET]].concat(), &[3], &[VMSPLICE]), "there is no call");
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_analysed(code in prop::collection::vec(any::<u8>(), 0..600), at in 0usize..600) {
            are_known_and_others(&code, &[at], &[VMSPLICE]);
        }
    }
}
