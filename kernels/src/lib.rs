#![doc = include_str!("../README.md")]

pub mod attend;
pub mod backward;
pub mod backward_fp8;
pub mod block;
pub mod cache;
mod codec;
pub mod device;
pub mod error;
pub mod forward;
pub mod forward_fp8;
pub mod gpu;
pub mod memory;
pub mod merge;
pub mod metadata;
pub mod nvrtc;
pub mod occupancy;
mod pages;
pub mod pairs;
pub mod quantise;
#[cfg(test)]
mod refusals;
pub mod region;
pub mod rows;
pub mod source;
mod summary;
pub mod tables;
pub mod turned;
mod version;
pub mod view;

pub use device::CudaDevice;
pub use error::KernelError;
pub use gpu::{Gpu, Launch};
pub use merge::MergeKernels;
pub use metadata::TableKernels;
pub use quantise::QuantiseKernels;
pub use region::RegionKernels;
pub use rows::RowKernels;
pub use version::{CUDA_MAJOR_MIN, CudaVersion};
