//! The judge, held to right and to broken subjects. One program: a file of tests links in seconds, ten in ten times that.

mod any_order;
mod approximate;
mod broken_backends;
mod emulated_bytes;
mod identity;
mod judge;
mod odd_shapes;
mod sample;
mod shrink;
mod tiers;
