//! The kernels' sources, and the options that they are compiled with.
//!
//! One file may be compiled several times, with other macros each time: these are its *instances*, whose kernels have names
//! of their own.

/// One CUDA C++ source: an instance of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file's name, as messages show it.
    pub file: &'static str,
    /// Its text.
    pub text: String,
    /// What it is compiled with besides [`OPTIONS`]: how arithmetic is contracted, and macros (`-DNAME=VALUE`).
    pub options: &'static [&'static str],
}

/// The header of every source.
pub const HEADER: (&str, &str) = ("common.cuh", include_str!("../cuda/common.cuh"));

/// What every source is compiled with: machine code for Hopper. `-v` makes the assembler say what registers and memory each
/// kernel takes.
pub const OPTIONS: [&str; 5] =
    ["--gpu-architecture=sm_90a", "--std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v"];
/// Products and sums are not contracted, so that the CPU device gives the same bits.
const TWINS_BITS: &[&str] = &["--fmad=false"];
/// Products and sums are contracted where the compiler sees fit: what they are added to is bounded, not equal to anything.
const CONTRACTED: &[&str] = &[];

/// File, text, and the options of each instance.
type File = (&'static str, &'static str, &'static [&'static [&'static str]]);
const FILES: [File; 6] = [
    ("rows.cu", include_str!("../cuda/rows.cu"), &[TWINS_BITS]),
    ("merge.cu", include_str!("../cuda/merge.cu"), &[TWINS_BITS]),
    ("metadata.cu", include_str!("../cuda/metadata.cu"), &[TWINS_BITS]),
    ("pairs.cu", include_str!("../cuda/pairs.cu"), &[TWINS_BITS]),
    ("attend.cu", include_str!("../cuda/attend.cu"), &[TWINS_BITS]),
    ("reference.cu", include_str!("../cuda/reference.cu"), &[CONTRACTED]),
];

/// Every instance of every file, as it is built.
pub fn sources() -> Vec<Source> {
    let instances = |&(file, text, instances): &File| {
        instances.iter().map(move |options| Source { file, text: text.to_owned(), options })
    };
    FILES.iter().flat_map(instances).collect()
}

impl Source {
    /// The hash of all that the machine code follows from, NVRTC's version apart.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let texts = [self.file, &self.text, HEADER.0, HEADER.1];
        for part in texts.into_iter().chain(OPTIONS).chain(self.options.iter().copied()) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.finalize().to_hex()[..32].to_owned()
    }
}
