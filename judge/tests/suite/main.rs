//! The judge on right and on broken subjects. All tests are one program, since each program of tests takes seconds to link.

mod any_order;
mod approximate;
mod broken_backends;
mod choices;
mod edges;
mod emulated_bytes;
mod first_kernel;
mod fitted;
mod hypotheses;
mod identity;
mod judge;
mod many_sequences;
mod odd_shapes;
mod own_kernel;
mod sample;
mod shrink;
mod tables;
mod tiers;
