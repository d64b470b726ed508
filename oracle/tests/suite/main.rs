//! The oracle's own tests. All are one program, since each program of tests takes seconds to link.

mod analytic;
mod blocked;
mod common;
mod corpus;
mod dealing;
mod envelope;
mod finite_differences;
mod form;
mod format;
mod given;
mod high_precision;
mod pages;
mod problem;
mod quantise;
mod scales;
mod segments;
mod sharding;
mod shared;
mod steps;
mod sums;
