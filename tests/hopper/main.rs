//! What runs on a Hopper GPU and is held to the CPU there. Tests that need the GPU are ignored unless asked for, and
//! fail without one: `cargo test --release --test hopper -- --ignored`

mod cuda;
mod lanes;
mod properties;
mod reference;
mod threads;
