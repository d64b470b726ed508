//! The campaign's own tests that need no process of their own, in one program.

mod accuracy;
#[path = "../../judge/tests/suite/any_order/mod.rs"]
mod any_order;
mod campaign;
mod case_file;
mod corpus;
mod crashing;
mod defects;
mod diagnosis;
mod exact;
mod explain;
mod faults;
mod kill;
mod power;
mod recorded_power;
mod recording_schema;
mod recordings;

/// Allocator of the program. A case allocates thousands of small buffers.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
