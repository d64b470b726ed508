//! The kernels' sources, and the options that they are compiled with.
//!
//! One file may be compiled several times, each time with other macros. These are its *instances*, whose kernels have
//! names of their own.

/// An instance of a file of CUDA C++.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file's name, as messages show it.
    pub file: &'static str,
    /// The text.
    pub text: String,
    /// The options besides [`OPTIONS`]: how arithmetic is contracted, and macros (`-DNAME=VALUE`).
    pub options: &'static [&'static str],
    /// Whether the text is an edit that plants a fault.
    pub planted: bool,
}

/// The headers that sources may include, each with its name. A header includes no other.
pub const HEADERS: [(&str, &str); 16] = [
    ("common.cuh", include_str!("../cuda/common.cuh")),
    ("codes.cuh", include_str!("../cuda/codes.cuh")),
    ("hopper.cuh", include_str!("../cuda/hopper.cuh")),
    ("quantise.cuh", include_str!("../cuda/quantise.cuh")),
    ("plan.cuh", include_str!("../cuda/plan.cuh")),
    ("forward_producer.cuh", include_str!("../cuda/forward_producer.cuh")),
    ("forward_consumer.cuh", include_str!("../cuda/forward_consumer.cuh")),
    ("forward_codes.cuh", include_str!("../cuda/forward_codes.cuh")),
    ("forward_split.cuh", include_str!("../cuda/forward_split.cuh")),
    ("forward_plan.cuh", include_str!("../cuda/forward_plan.cuh")),
    ("backward_rows.cuh", include_str!("../cuda/backward_rows.cuh")),
    ("backward_tiles.cuh", include_str!("../cuda/backward_tiles.cuh")),
    ("backward_statistics.cuh", include_str!("../cuda/backward_statistics.cuh")),
    ("backward_consumer.cuh", include_str!("../cuda/backward_consumer.cuh")),
    ("backward_codes.cuh", include_str!("../cuda/backward_codes.cuh")),
    ("backward_plan.cuh", include_str!("../cuda/backward_plan.cuh")),
];

/// The options of every source: machine code for Hopper. `-v` makes the assembler say which registers and memory each
/// kernel takes.
pub const OPTIONS: [&str; 5] =
    ["--gpu-architecture=sm_90a", "--std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v"];
/// Without contraction of products and sums, kernels give the bits of the CPU device.
const TWINS_BITS: &[&str] = &["--fmad=false"];

/// The largest head dim and the format: 1 is bf16, 2 is fp16. The first instance also has the planning kernel. The general
/// ones take what the others leave out.
const TENSOR_CORES: &[&[&str]] = &[
    &["--fmad=false", "-DDIM=128", "-DTYPE=1", "-DPLAN"],
    &["--fmad=false", "-DDIM=64", "-DTYPE=1"],
    &["--fmad=false", "-DDIM=128", "-DTYPE=2"],
    &["--fmad=false", "-DDIM=64", "-DTYPE=2"],
    &["--fmad=false", "-DDIM=128", "-DTYPE=1", "-DGENERAL"],
    &["--fmad=false", "-DDIM=128", "-DTYPE=2", "-DGENERAL"],
];

/// The passes with head dims over 128.
const WIDEST: &[&[&str]] = &[
    &["--fmad=false", "-DDIM=256", "-DTYPE=1", "-DGENERAL"],
    &["--fmad=false", "-DDIM=256", "-DTYPE=2", "-DGENERAL"],
];
/// The forward with head dims over 256.
const LATENT: &[&[&str]] = &[
    &["--fmad=false", "-DDIM=576", "-DTYPE=1", "-DGENERAL"],
    &["--fmad=false", "-DDIM=576", "-DTYPE=2", "-DGENERAL"],
];
/// The forward and the backward in FP8: 3 is e4m3.
const TENSOR_CORES_FP8: &[&[&str]] =
    &[&["--fmad=false", "-DDIM=128", "-DTYPE=3"], &["--fmad=false", "-DDIM=64", "-DTYPE=3"]];
/// The forward in FP8 for head dims over 128.
const WIDE_FP8: &[&[&str]] = &[&["--fmad=false", "-DDIM=256", "-DTYPE=3"]];

/// A file: its name, its text, and the options of each instance.
type File = (&'static str, &'static str, &'static [&'static [&'static str]]);
const FILES: [File; 16] = [
    ("rows.cu", include_str!("../cuda/rows.cu"), &[TWINS_BITS]),
    ("rotation.cu", include_str!("../cuda/rotation.cu"), &[TWINS_BITS]),
    ("merge.cu", include_str!("../cuda/merge.cu"), &[TWINS_BITS]),
    ("metadata.cu", include_str!("../cuda/metadata.cu"), &[TWINS_BITS]),
    ("pairs.cu", include_str!("../cuda/pairs.cu"), &[TWINS_BITS]),
    ("attend.cu", include_str!("../cuda/attend.cu"), &[TWINS_BITS]),
    ("quantise.cu", include_str!("../cuda/quantise.cu"), &[TWINS_BITS]),
    ("turned.cu", include_str!("../cuda/turned.cu"), &[TWINS_BITS]),
    ("forward.cu", include_str!("../cuda/forward.cu"), TENSOR_CORES),
    ("forward.cu", include_str!("../cuda/forward.cu"), WIDEST),
    ("forward.cu", include_str!("../cuda/forward.cu"), LATENT),
    ("forward.cu", include_str!("../cuda/forward.cu"), WIDE_FP8),
    ("forward.cu", include_str!("../cuda/forward.cu"), TENSOR_CORES_FP8),
    ("backward.cu", include_str!("../cuda/backward.cu"), TENSOR_CORES),
    ("backward.cu", include_str!("../cuda/backward.cu"), WIDEST),
    ("backward.cu", include_str!("../cuda/backward.cu"), TENSOR_CORES_FP8),
];

/// Returns every instance of every file, as it is built.
pub fn sources() -> Vec<Source> {
    let instances = |&(file, text, instances): &File| {
        instances.iter().map(move |options| Source { file, text: text.to_owned(), options, planted: false })
    };
    FILES.iter().flat_map(instances).collect()
}

/// Sources whose kernels wait for earlier launches themselves, so that they may be started early; and how the names of such
/// kernels begin in other sources. The split shape's kernel may plan before it waits: its planning kernel is not among these.
const OVERLAPPING: [&str; 6] =
    ["rows.cu", "rotation.cu", "merge.cu", "metadata.cu", "quantise.cu", "turned.cu"];
const OVERLAPPING_KERNELS: [&str; 2] = ["forward_split_", "forward_merge_"];

/// Kernels whose warps hand registers to each other (`setmaxnreg`): how their names begin, and the threads of a
/// block.
pub(crate) const SHARING: [(&str, usize); 17] = [
    ("backward_fp8_tiles_", 384),
    ("backward_short_", 384),
    ("backward_tiles_", 384),
    ("forward_fp8_long_128", 384),
    ("forward_fp8_long_256", 384),
    ("forward_fp8_long_64", 512),
    ("forward_fp8_short_128", 512),
    ("forward_fp8_short_256", 384),
    ("forward_fp8_short_64", 512),
    ("forward_long_128_", 512),
    ("forward_long_256_", 384),
    ("forward_long_576_", 384),
    ("forward_long_64_", 512),
    ("forward_middle_128_", 512),
    ("forward_paired_128_", 384),
    ("forward_short_128_", 512),
    ("forward_short_64_", 640),
];

/// Returns the threads of a block of a kernel whose warps hand registers to each other; `None` for any other kernel.
pub(crate) fn sharing_threads(kernel: &str) -> Option<usize> {
    SHARING.iter().find(|(begin, _)| kernel.starts_with(begin)).map(|(_, threads)| *threads)
}

impl Source {
    /// Returns the name in messages: the file, and for one of several instances its head dim and format, and whether it is
    /// general.
    pub fn name(&self) -> String {
        let value = |name: &str| self.options.iter().find_map(|option| option.strip_prefix(name));
        let format = value("-DTYPE=").map(|number| match number {
            "1" => "bf16",
            "2" => "fp16",
            _ => "e4m3",
        });
        match value("-DDIM=").zip(format) {
            Some((dim, format)) => {
                let general = if self.options.contains(&"-DGENERAL") { ", general" } else { "" };
                format!("{} (head dim {dim}, {format}{general})", self.file)
            }
            None => self.file.to_owned(),
        }
    }

    /// Returns this source with another text, which plants a fault.
    pub fn with_text(self, text: String) -> Source {
        Source { text, planted: true, ..self }
    }

    /// Returns the source as it is built, without the edit that plants a fault.
    pub(crate) fn as_built(&self) -> Source {
        let is_it = |built: &Source| built.file == self.file && built.options == self.options;
        let built = if self.planted { sources().into_iter().find(is_it) } else { None };
        built.unwrap_or_else(|| self.clone())
    }

    /// Returns whether one of its kernels may be started while earlier launches run. It waits for them before it touches what
    /// they write.
    pub(crate) fn overlaps(&self, kernel: &str) -> bool {
        OVERLAPPING.contains(&self.file) || OVERLAPPING_KERNELS.iter().any(|begin| kernel.starts_with(begin))
    }

    /// Returns the headers that it includes: their names and texts.
    pub(crate) fn headers(&self) -> Vec<(&'static str, &'static str)> {
        HEADERS.into_iter().filter(|(name, _)| self.text.contains(&include(name))).collect()
    }

    /// Returns the text with its headers put in.
    pub fn whole(&self) -> String {
        self.headers().into_iter().fold(self.text.clone(), |text, (name, header)| {
            text.replace(&include(name), &header.replace("#pragma once", ""))
        })
    }

    /// Returns the hash of everything that decides the machine code, apart from NVRTC's version.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let headers = self.headers().into_iter().flat_map(|(name, text)| [name, text]);
        let texts = [self.file, &self.text].into_iter().chain(headers);
        for part in texts.chain(OPTIONS).chain(self.options.iter().copied()) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.finalize().to_hex()[..32].to_owned()
    }
}

/// Returns the line that includes a header.
fn include(name: &str) -> String {
    format!("#include \"{name}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each instance is a file of machine code that is built, stored and loaded. A new one has to be worth that.
    #[test]
    fn instances_are_few() {
        let count = sources().len();
        assert!(count <= 31, "{count} instances; at most 31 may be shipped");
    }

    #[test]
    fn an_instance_has_a_name_of_its_own() {
        let names: Vec<String> = sources().iter().map(Source::name).collect();
        let unique: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(unique.len(), names.len(), "{names:?}");
        assert!(names.iter().any(|name| name == "rows.cu"), "{names:?}");
        assert!(sources().iter().all(|source| !source.planted));
        assert!(sources().into_iter().all(|source| source.clone().with_text("".into()).as_built() == source));
        assert!(names.iter().any(|name| name == "backward.cu (head dim 64, fp16)"), "{names:?}");
    }

    /// A kernel that hands registers over, and is not listed, would hang where it is compiled to fewer.
    #[test]
    fn every_kernel_that_hands_registers_over_is_known() {
        let mut kinds = Vec::new();
        for (file, text, _) in FILES.iter().filter(|(_, text, _)| text.contains("setmaxnreg")) {
            let stem = file.trim_end_matches(".cu");
            let named = |line: &str| {
                // The line makes a kernel of the forward from a configuration, or names a kernel of the backward on
                // tiles.
                let forward = line.strip_prefix("KERNEL(").and_then(|rest| rest.split([',', ')']).nth(1));
                let backward = || line.split("NAMED(").nth(1).filter(|_| line.contains("THREADS_ALL"));
                let kind = forward.or_else(|| backward()?.split(',').next())?.trim().to_owned();
                Some(format!("{stem}_{kind}_"))
            };
            kinds.extend(text.lines().filter_map(named));
        }
        kinds.sort();
        kinds.dedup();
        let of_kind = |kind: &String| SHARING.iter().any(|(begin, _)| begin.starts_with(&**kind));
        assert_eq!(kinds.len(), 6, "{kinds:?}");
        assert!(kinds.iter().all(of_kind), "{kinds:?}");
        assert_eq!(sharing_threads("forward_plan"), None);
    }

    /// A kernel that is started early and does not wait would read what is not written yet.
    #[test]
    fn every_kernel_that_may_start_early_waits_first() {
        let mut by_name = 0;
        for source in sources() {
            let text: String = source.whole().split_whitespace().filter(|word| *word != "\\").collect();
            // Kernels of other sources that may have macros in their names.
            let kinds = OVERLAPPING_KERNELS.map(|begin| {
                let (_, kind) = begin.trim_end_matches('_').split_once('_').expect("a source and a kind");
                format!("NAMED({kind},")
            });
            let all = OVERLAPPING.contains(&source.file);
            let bodies: Vec<&str> = text.split("__global__").skip(1).collect();
            let early = |body: &&&str| all || kinds.iter().any(|kind| body.contains(&**kind));
            assert!(!all || !bodies.is_empty());
            assert!(
                !all || !text.contains("__ldg("),
                "{}: a load of constants may come before the wait",
                source.file
            );
            by_name += if all { 0 } else { bodies.iter().filter(early).count() };
            for body in bodies.iter().filter(early) {
                let (head, first) = body.split_once("){").expect("a body");
                // What has a plan of its own needs nothing of the planning kernel, which is never started early.
                let first = first.strip_prefix("__shared__FewTilesfew;").unwrap_or(first);
                let waits = ["after_earlier_launches();", "plan_before_waiting(of_call,few);"];
                assert!(waits.iter().any(|wait| first.starts_with(wait)), "{}: {head}", source.file);
            }
        }
        let forwards: Vec<Source> =
            sources().into_iter().filter(|source| source.file == "forward.cu").collect();
        assert!(forwards.iter().all(|source| !source.overlaps("forward_plan")), "a plan is started early");
        assert_eq!(by_name, OVERLAPPING_KERNELS.len() * forwards.len(), "both are in every instance's text");
    }
}
