//! The engine's machine on a real program, by role.
//!
//! | module | role |
//! |---|---|
//! | [`machine`] | the state, and the table of what the engine can ask for |
//! | [`arena`] | frames: their memory, and how it is populated and released |
//! | [`arena_size`] | how large the arena and the swap device are |
//! | [`address_space`] | pages: how they move between the program and the arena |
//! | [`pieces`] | compression: how a folio becomes pieces, and pieces a folio |
//! | [`swap`] | the swap file: this process's part in it |
//! | [`encrypted_file`], [`swap_writer`] | reads and writes of the swap file |
//!
//! Lock order: the lock of the mappings comes before the engine's locks; all others are leaves.

pub mod address_space;
pub mod arena;
pub mod arena_size;
pub mod encrypted_file;
pub mod machine;
pub mod pieces;
pub mod swap;
pub mod swap_writer;
