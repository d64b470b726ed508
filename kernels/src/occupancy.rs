//! Launch sizes of each kernel, and how many of its blocks a Hopper multiprocessor holds at once.

use crate::block::{SCAN_THREADS, THREADS, WARP};
use crate::nvrtc::{REGISTERS, REGISTERS_STEP, Resources};
use crate::source::sharing_threads;
use crate::{backward, forward, forward_fp8};

/// The threads and the shared memory of a multiprocessor.
const SM_THREADS: usize = 2048;
const SM_SHARED: usize = 233_472;
/// The shared memory that a block takes in addition to its own.
const BLOCK_SHARED: usize = 1024;
/// Kernels whose blocks go over a whole table, and kernels whose blocks are a warp.
const SCANS: [&str; 5] = ["rank_slots", "cu_seqlens_on_rank", "sum_runs", "forward_plan", "backward_plan"];
const WARPS: [&str; 2] = ["hold_up", "sink_gradient"];

/// A block of threads as it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The number of threads.
    pub threads: usize,
    /// The dynamic shared memory in bytes, for a kernel with head dims at run time that of the largest.
    pub shared: usize,
}

/// Returns the block that a kernel of this crate is launched with.
pub fn block_of(kernel: &str) -> Block {
    let threads = match kernel {
        _ if SCANS.contains(&kernel) => SCAN_THREADS,
        _ if WARPS.contains(&kernel) || kernel.ends_with("_bulk") => WARP,
        _ if ["forward_split_", "forward_merge_"].iter().any(|begin| kernel.starts_with(begin)) => {
            forward::SPLIT_THREADS
        }
        _ => sharing_threads(kernel).unwrap_or(THREADS),
    };
    let shared = forward::shared_of(kernel)
        .or_else(|| forward_fp8::shared_of(kernel))
        .or_else(|| backward::shared_of(kernel));
    Block { threads, shared: shared.unwrap_or(0) }
}

impl Block {
    /// Returns all shared memory of a block, in bytes.
    pub fn shared_with(self, resources: &Resources) -> usize {
        self.shared + resources.shared as usize
    }

    /// Returns how many warps of such blocks a multiprocessor holds at once.
    pub fn resident_warps(self, resources: &Resources) -> usize {
        let registers = (resources.registers as usize).next_multiple_of(REGISTERS_STEP).max(REGISTERS_STEP);
        let by_registers = REGISTERS / (registers * self.threads);
        let by_shared = SM_SHARED / (self.shared_with(resources) + BLOCK_SHARED);
        by_registers.min(by_shared).min(SM_THREADS / self.threads) * self.threads / WARP
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::sources;

    fn of(kernel: &str, registers: u32, shared: u32) -> (usize, usize, usize) {
        let block = block_of(kernel);
        let resources = Resources { kernel: kernel.to_owned(), registers, shared, spills: 0, stack: 0 };
        (block.threads, block.shared_with(&resources), block.resident_warps(&resources))
    }

    /// The numbers are made by hand: two rings of 80 KiB beside a tile of 48 KiB and two first kilobytes, in one block of
    /// 512 threads; and so on.
    #[test]
    fn blocks_are_as_they_are_launched() {
        assert_eq!(of("forward_long_128_1", 128, 0), (512, 2048 + 49_152 + 8 * 20_480, 16));
        assert_eq!(of("forward_short_64_2", 96, 0), (640, 1024 + 4 * (1024 + 6 * 8192), 20));
        assert_eq!(of("backward_tiles_128_1", 168, 0).0, 384);
        assert_eq!(of("backward_tiles_128_1", 168, 0).2, 12);
        assert_eq!(of("backward_before_128_1", 64, 0), (256, 0, 32));
        assert_eq!(of("forward_plan", 31, 4096), (1024, 4096, 64));
        assert_eq!(of("attend", 63, 8192), (256, 8192, 32));
        assert_eq!(of("hold_up", 8, 0), (32, 0, 64));
    }

    /// The sources name every kernel's launch bounds by these constants.
    #[test]
    fn threads_are_those_of_the_sources() {
        let mut seen = 0;
        for source in sources() {
            let text = source.whole();
            for head in text.split("__launch_bounds__(").skip(1) {
                let (bounds, rest) = head.split_once(')').expect("bounds");
                let name = rest.trim_start_matches([' ', '\\', '\n']).split('(').next().unwrap_or_default();
                let bound = bounds.split(',').next().unwrap_or_default();
                let want = match bound {
                    "THREADS" => THREADS,
                    "SCAN_THREADS" | "PLANNERS" => SCAN_THREADS,
                    "32" => WARP,
                    _ => continue,
                };
                if name.contains(|c: char| !(c.is_ascii_alphanumeric() || c == '_')) || name == "NAMED" {
                    continue;
                }
                assert_eq!(block_of(name).threads, want, "{name}");
                seen += 1;
            }
        }
        assert!(seen > 20, "{seen}");
    }
}
