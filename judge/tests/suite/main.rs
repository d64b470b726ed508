//! The judge on right and on broken subjects. All tests are one program, since each program of tests takes seconds to
//! link.

mod any_order;
mod approximate;
mod beside;
mod broken_backends;
mod built_schedules;
mod case_file;
mod census;
mod choices;
mod declarations;
mod descales;
mod differences;
mod edges;
mod emulated_bytes;
mod exact_document;
mod first_kernel;
mod fitted;
mod forms;
mod fp8;
mod fp8_given_replay;
mod fp8_others;
mod fp8_replay;
mod generator_values;
mod gradient_hypotheses;
mod hypotheses;
mod identity;
mod identity_table;
mod judge;
mod judge_faults;
mod latent;
mod lse;
mod many_sequences;
mod odd_shapes;
mod one_identity;
mod own_kernel;
mod pages;
mod quantise;
mod region;
mod sample;
mod shared;
mod shrink;
mod sights;
mod steps;
mod strategy;
mod subject_names;
mod tables;
mod threads;
mod tiers;
mod unfused;
mod values;
mod worlds;

/// Allocator of the program. A case allocates thousands of small buffers.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
