#![doc = include_str!("../README.md")]

pub mod bench;
pub mod cache;
pub mod check;
pub mod error;
pub mod faults;
pub mod gpu;
pub mod merge;
pub mod metadata;
pub mod nvrtc;
pub mod rows;
pub mod source;
pub mod tables;

pub use error::KernelError;
pub use gpu::Gpu;
