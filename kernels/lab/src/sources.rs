//! Every CUDA source of this project: those of the production kernels, and the reference's.

use seamproof_kernels::occupancy::{self, Block};
use seamproof_kernels::source::{self, Source};

use crate::reference;

/// Returns every instance of every source.
pub fn sources() -> Vec<Source> {
    source::sources().into_iter().chain([reference::source()]).collect()
}

/// Returns the block that a kernel of these sources is launched with.
pub fn block_of(kernel: &str) -> Block {
    reference::block_of(kernel).unwrap_or_else(|| occupancy::block_of(kernel))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_launched_with_the_threads_of_its_source() {
        for kernel in ["reference", "reference_dither"] {
            let bounds = format!("__launch_bounds__(THREADS, 1) {kernel}(");
            assert_eq!(reference::source().text.matches(&bounds).count(), 1, "{kernel}");
            assert_eq!(block_of(kernel).threads, 256);
        }
        assert_eq!(block_of("forward_plan"), occupancy::block_of("forward_plan"));
    }
}
