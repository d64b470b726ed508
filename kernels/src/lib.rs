#![doc = include_str!("../README.md")]
//!
//! [`bench`]: mod@bench
//! [`reference`]: mod@reference

pub mod attend;
pub mod backward;
pub mod bench;
pub mod block;
pub mod cache;
pub mod check;
pub mod device;
pub mod error;
pub mod faults;
pub mod forward;
pub mod gpu;
pub mod merge;
pub mod metadata;
pub mod nvrtc;
pub mod pairs;
mod ready;
pub mod reference;
pub mod rows;
pub mod source;
pub mod tables;
pub mod view;

pub use device::CudaDevice;
pub use error::KernelError;
pub use gpu::Gpu;
