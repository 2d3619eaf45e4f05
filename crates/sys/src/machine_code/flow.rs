//! Follows the numbers of system calls through the registers of a library's code.
//!
//! Compilers keep the number of a call in another register over a loop, and the code right before
//! the call does not show it. An example is `libgomp`, the library of OpenMP, which only waits for
//! futexes. This analysis decodes all of the code in sequence, divides it into blocks, and computes
//! which constant each register has at the start of each block, whichever way leads there.
//!
//! A register is unknown where code begins that nothing jumps to, at the targets of calls, and
//! after a call if the callee may change it. An indirect jump may lead anywhere in its function,
//! parts elsewhere included, so all system calls of that function are unknown. There is no lock.

use crate::machine_code::{loaded_constant, written};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpKind, Register};
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
    /// Makes a register unknown, which is a whole one.
    fn forget(&mut self, register: Register) {
        if register.is_gpr64() {
            self.0[register.number()] = Value::Unknown;
        }
    }

    /// Applies an instruction.
    fn apply(&mut self, instruction: &Instruction, infos: &mut InstructionInfoFactory) {
        if let Some((to, value)) = self.moved(instruction) {
            self.0[to] = value;
            return;
        }
        written(instruction, infos).for_each(|register| self.forget(register));
        let changed: &[Register] = match instruction.flow_control() {
            _ if instruction.mnemonic() == Mnemonic::Syscall => &[Register::RAX, Register::RCX, Register::R11],
            FlowControl::Call | FlowControl::IndirectCall => &CHANGED_BY_CALLS,
            _ => &[],
        };
        changed.iter().for_each(|&register| self.forget(register));
    }

    /// Returns the register and its new content if the instruction moves a constant or a register.
    fn moved(&self, instruction: &Instruction) -> Option<(usize, Value)> {
        if let Some((to, constant)) = loaded_constant(instruction) {
            return Some((to.number(), Value::Constant(constant)));
        }
        let [to, from] = [(0, instruction.op0_register()), (1, instruction.op1_register())]
            .map(|(operand, register)| index(register).filter(|_| instruction.op_kind(operand) == OpKind::Register));
        (instruction.mnemonic() == Mnemonic::Mov).then_some((to?, self.0[from?]))
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
    /// Indices of the blocks with which functions begin for certain. Others may begin between them.
    functions: Vec<usize>,
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
        let mut program = Program { instructions, blocks: Vec::new(), entries: Vec::new(), functions: Vec::new() };
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
                let is_function = here.has_call || is_marked;
                if is_function {
                    self.functions.push(self.blocks.len());
                }
                if is_function || !follows && may_be_function {
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
        let has_indirect = self.has_indirect_jumps();
        let mut infos = InstructionInfoFactory::new();
        let mut calls = BTreeMap::new();
        for (number, (block, &state)) in self.blocks.iter().zip(&states).enumerate() {
            let is_followed = !has_indirect[self.function_of(number)];
            let mut registers = state;
            for instruction in &self.instructions[block.first..block.end] {
                if instruction.mnemonic() == Mnemonic::Syscall {
                    let value = if is_followed { registers.0[0] } else { Value::Unknown };
                    calls.insert(instruction.ip() as usize, value);
                }
                registers.apply(instruction, &mut infos);
            }
        }
        calls
    }

    /// Returns the number of the function that a block belongs to: 0 before the first one.
    fn function_of(&self, block: usize) -> usize {
        self.functions.partition_point(|&first| first <= block)
    }

    /// Returns for each function whether it has an indirect jump, or one with jumps between the
    /// two: they may be parts of the same function, unless the jump leads to the start.
    fn has_indirect_jumps(&self) -> Vec<bool> {
        // A jump by a table of the linker leaves the function.
        let is_indirect = |instruction: &Instruction| {
            instruction.flow_control() == FlowControl::IndirectBranch && !instruction.is_ip_rel_memory_operand()
        };
        let mut found = vec![false; self.functions.len() + 1];
        let mut joined = vec![Vec::new(); found.len()];
        for (number, block) in self.blocks.iter().enumerate() {
            let here = self.function_of(number);
            found[here] |= is_indirect(&self.instructions[block.end - 1]);
            for next in block.next.iter().filter(|next| self.functions.binary_search(next).is_err()) {
                let there = self.function_of(*next);
                if there != here {
                    joined[here].push(there);
                    joined[there].push(here);
                }
            }
        }
        let mut left: Vec<usize> = (0..found.len()).filter(|&function| found[function]).collect();
        while let Some(function) = left.pop() {
            for &other in &joined[function] {
                if !std::mem::replace(&mut found[other], true) {
                    left.push(other);
                }
            }
        }
        found
    }
}

/// Returns whether each system call of `code` at one of the offsets `at` has a known number that is
/// not in `watched`. Returns `false` if the code is larger than [`MAX_BYTES`] or not understood.
pub fn are_known_and_others(code: &[u8], at: impl IntoIterator<Item = usize>, watched: &[u32]) -> bool {
    if code.len() > MAX_BYTES {
        return false;
    }
    let Some(program) = Program::decode(code) else { return false };
    let calls = program.calls();
    let is_other = |at| match calls.get(&at) {
        Some(Value::Constant(number)) => !watched.contains(number),
        // The way to a call that is not reached has not been understood.
        Some(Value::Unreached | Value::Unknown) | None => false,
    };
    at.into_iter().all(is_other)
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
        are_known_and_others(&code, at, &[VMSPLICE])
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
        assert_eq!(suspects(&code, 0, &[VMSPLICE]).count(), 1, "the instructions before the call do not show it");
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
    fn an_indirect_jump_may_lead_anywhere_in_its_function() {
        let filled = |code: &[u8]| [code, &vec![0x90; 16 - code.len() % 16][..]].concat();
        let [call, jump] = [[&COPY_R8[..], &SYSCALL, &[RET]].concat(), vec![0xff, 0xe2]];
        // mov r8d, number; test edi, edi; je +n
        let to_call = |skipped: u8| [&load_r8(FUTEX)[..], &TEST, &[0x74, skipped]].concat();
        assert!(are_others(&[&to_call(1), &[RET], &call]));
        assert!(!are_others(&[&to_call(2), &jump, &call]));
        // Aligned code behind a jump looks like another function.
        let first = filled(&[&to_call(22), &jump[..]].concat());
        assert!(!are_others(&[&first, &filled(&[RET]), &call]));
        // A call leads to the second one: here, the jump is another function's.
        assert!(!are_others(&[&filled(&jump), &filled(&[&to_call(1), &[RET][..], &call].concat())]));
        let calls_second = filled(&[&[0xe8, 0x0b, 0, 0, 0], &jump[..]].concat());
        assert!(are_others(&[&calls_second, &filled(&[&to_call(1), &[RET][..], &call].concat())]));
        // It jumps back into the first one.
        let second = [&to_call(1)[..], &[RET], &call[..call.len() - 1], &[0xeb, 0xe3]].concat();
        assert!(!are_others(&[&calls_second, &second]));
    }

    #[test]
    fn what_is_not_understood_is_unknown() {
        let known = [&load_r8(FUTEX)[..], &COPY_R8, &SYSCALL].concat();
        assert!(are_others(&[&known, &[RET]]));
        assert!(!are_others(&[&known, &[0xff, 0xe0]]), "jmp rax may lead anywhere in the function");
        assert!(!are_others(&[&known, &[0xeb, 0xfa]]), "a jump into an instruction");
        assert!(!are_known_and_others(&vec![0x90; MAX_BYTES + 1], [0], &[VMSPLICE]));
        assert!(!are_known_and_others(&[known, vec![RET]].concat(), [3], &[VMSPLICE]), "there is no call");
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_analysed(code in prop::collection::vec(any::<u8>(), 0..600), at in 0usize..600) {
            are_known_and_others(&code, [at], &[VMSPLICE]);
        }
    }
}
