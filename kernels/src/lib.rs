#![doc = include_str!("../README.md")]

pub mod cache;
pub mod error;
pub mod gpu;
pub mod merge;
pub mod metadata;
pub mod nvrtc;
pub mod rows;
pub mod source;
pub mod tables;

pub use error::KernelError;
pub use gpu::Gpu;
