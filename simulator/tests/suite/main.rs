//! Schedules, their checker and their capabilities. All tests are one program, since each program of tests takes
//! seconds to link.

mod all_gather;
mod calls;
mod capabilities;
mod check;
mod check_rejects;
mod codes;
mod common;
mod converted;
mod descaled;
mod fault_catalogue;
mod helpers;
mod pages;
mod plan;
mod plan_drawn;
mod plan_rewritten;
mod python_helpers;
mod resources;
mod ring;
mod schedules;
mod sequence_parallel;
mod sharding;
mod shared;
mod sub_groups;
mod symbolic;
mod tables;
mod threads;
