//! The kernels' sources, and the options that they are compiled with.

/// One CUDA C++ source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file's name, as messages show it.
    pub file: &'static str,
    /// Its text.
    pub text: String,
}

/// The header of every source.
pub const HEADER: (&str, &str) = ("common.cuh", include_str!("../cuda/common.cuh"));

/// What every source is compiled with: machine code for Hopper, and no contraction of products and sums, so that the
/// CPU device gives the same bits. `-v` makes the assembler say what registers and memory each kernel takes.
pub const OPTIONS: [&str; 6] = [
    "--gpu-architecture=sm_90a",
    "--std=c++17",
    "-default-device",
    "-lineinfo",
    "--fmad=false",
    "--ptxas-options=-v",
];

const TEXTS: [(&str, &str); 5] = [
    ("rows.cu", include_str!("../cuda/rows.cu")),
    ("merge.cu", include_str!("../cuda/merge.cu")),
    ("metadata.cu", include_str!("../cuda/metadata.cu")),
    ("pairs.cu", include_str!("../cuda/pairs.cu")),
    ("attend.cu", include_str!("../cuda/attend.cu")),
];

/// Every source, as it is built.
pub fn sources() -> Vec<Source> {
    TEXTS.iter().map(|&(file, text)| Source { file, text: text.to_owned() }).collect()
}

/// The sources whose kernels wait for earlier launches by themselves, so that they may be started early.
const OVERLAPPING: [&str; 3] = ["rows.cu", "merge.cu", "metadata.cu"];

impl Source {
    /// Whether its kernels may be started while earlier launches run: each waits for them in its first statement.
    pub(crate) fn overlaps(&self) -> bool {
        OVERLAPPING.contains(&self.file)
    }

    /// The hash of all that the machine code follows from, NVRTC's version apart.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for part in [self.file, &self.text, HEADER.0, HEADER.1].into_iter().chain(OPTIONS) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.finalize().to_hex()[..32].to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel that may be started early and does not wait would read what is not written yet.
    #[test]
    fn every_kernel_that_may_start_early_waits_first() {
        for source in sources().into_iter().filter(Source::overlaps) {
            let text: String = source.text.split_whitespace().filter(|word| *word != "\\").collect();
            let bodies: Vec<&str> = text.split("__global__").skip(1).collect();
            assert!(!bodies.is_empty());
            for body in bodies {
                let (head, first) = body.split_once("){").expect("a body");
                assert!(first.starts_with("after_earlier_launches();"), "{}: {head}", source.file);
            }
        }
    }
}
