//! The engine's machine on a real program, by role.
//!
//! | module | role |
//! |---|---|
//! | [`machine`] | the ports' state, and the engine's requests |
//! | [`arena`] | frames: their memory, populated and released |
//! | [`arena_size`] | the sizes of the arena and of the swap device |
//! | [`address_space`] | pages: moves between the program and the arena |
//! | [`pieces`] | compression: folios into pieces, and back |
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
