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

impl Source {
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
