//! Compilation of CUDA C++ to machine code (a *cubin*), without a GPU.
//!
//! The target is a real architecture, so that the assembler runs inside NVRTC. Its warnings are here, and are not
//! lost in the driver. A warning that undoes a kernel's design (serialised wgmma, an ignored setmaxnreg) is an error
//! everywhere, since such a kernel may hang. So is a kernel that is launched with other registers than its warps
//! share out. Registers that are spilled to memory cost time and nothing else. They stop whoever builds the kernels
//! ([`without_spills`]); whoever runs them with another NVRTC is told.
#![allow(unsafe_code, reason = "NVRTC is a C library")]

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::{result, sys};

use crate::error::KernelError;
use crate::source::{OPTIONS, Source, sharing_threads};
use crate::version::{CUDA_MAJOR_MIN, CudaVersion};

/// Machine code, and the compiler's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The cubin, an ELF file.
    pub cubin: Vec<u8>,
    /// The log.
    pub log: String,
}

/// Resources of a kernel, according to the assembler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub kernel: String,
    /// The registers of a thread.
    pub registers: u32,
    /// The static shared memory of a block, in bytes.
    pub shared: u32,
    /// The bytes of registers that are stored to memory and loaded again.
    pub spills: u32,
    /// The stack of a thread, in bytes.
    pub stack: u32,
}

/// Returns the version of the installed NVRTC.
pub fn version() -> Result<CudaVersion, KernelError> {
    // SAFETY: loads a library by its name; NVRTC's initialisers have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        return Err(KernelError::NvrtcMissing);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two valid places for numbers.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(|e| failed("version", e))?;
    let version = CudaVersion { major, minor };
    if major < CUDA_MAJOR_MIN { Err(KernelError::NvrtcTooOld(version)) } else { Ok(version) }
}

/// The first NVRTC that keeps a cache of its own.
const OWN_CACHE_SINCE: CudaVersion = CudaVersion { major: 13, minor: 0 };

/// Returns the options of a compilation. A hit in NVRTC's own cache has no log of the assembler, by which kernels are
/// judged here.
fn options(source: &Source, version: CudaVersion) -> Vec<&'static str> {
    let own_cache = (version >= OWN_CACHE_SINCE).then_some("--no-cache");
    OPTIONS.into_iter().chain(source.options.iter().copied()).chain(own_cache).collect()
}

/// Compiles a source. The module's text says what is refused.
pub fn compile(source: &Source) -> Result<Compiled, KernelError> {
    let program = compiled(source, &options(source, version()?))?;
    let log = program.log()?;
    accept(source.file, &log)?;
    Ok(Compiled { cubin: program.cubin()?, log })
}

/// Refuses a source whose C++ does not compile. No code is made, which takes most of a compilation: neither inline
/// assembly is looked at, nor what only the assembler knows.
pub fn check_syntax(source: &Source) -> Result<(), KernelError> {
    let options: Vec<&str> =
        options(source, version()?).into_iter().chain(["-fdevice-syntax-only"]).collect();
    compiled(source, &options).map(drop)
}

/// Returns a source's program, compiled with these options.
fn compiled(source: &Source, options: &[&'static str]) -> Result<Program, KernelError> {
    let text = |text: &str| {
        CString::new(text).map_err(|_| KernelError::shape(format!("{}: a NUL in a source", source.file)))
    };
    let (file, body) = (text(source.file)?, text(&source.text)?);
    let headers: Vec<[CString; 2]> = source
        .headers()
        .into_iter()
        .map(|(name, header)| Ok([text(name)?, text(header)?]))
        .collect::<Result<_, KernelError>>()?;
    let program = Program::new(&file, &body, &headers)?;
    // SAFETY: the program and its texts are alive.
    let compiled = unsafe { result::compile_program(program.0, options) };
    match compiled {
        Ok(()) => Ok(program),
        Err(error) if error.0 == sys::nvrtcResult::NVRTC_ERROR_COMPILATION => {
            Err(KernelError::Compile { file: source.file.to_owned(), log: program.log()? })
        }
        Err(error) => Err(failed("compile", error)),
    }
}

/// Returns whether a message of the assembler says that a kernel is not what its source says: C7508 (setmaxnreg
/// ignored), or one about wgmma, from C7510 on.
fn undone(line: &str) -> bool {
    let code = line.split("(C75").nth(1).or_else(|| line.split(" C75").nth(1));
    let number = code.and_then(|rest| rest.get(..2)).and_then(|digits| digits.parse::<u32>().ok());
    number.is_some_and(|number| number == 8 || number >= 10)
        || (line.contains("wgmma") && line.contains("serializ"))
        || (line.contains("setmaxnreg") && line.contains("ignored"))
}

fn accept(file: &str, log: &str) -> Result<(), KernelError> {
    let lines: Vec<&str> = log.lines().filter(|line| undone(line)).collect();
    if !lines.is_empty() {
        return Err(KernelError::Undone { file: file.to_owned(), lines: lines.join("\n") });
    }
    if resources(log).is_empty() {
        return Err(KernelError::Unjudged { file: file.to_owned(), log: log.to_owned() });
    }
    check_registers(log)
}

/// The registers of a Hopper multiprocessor, and the step in which a thread gets them: 256 for a warp (CUDA C++
/// Programming Guide, technical specifications of compute capability 9.0).
pub(crate) const REGISTERS: usize = 65_536;
pub(crate) const REGISTERS_STEP: usize = 8;

/// Refuses a kernel whose warps hand registers to each other, and whose threads do not have all that they can get at
/// their launch. With fewer, a warp that asks for more waits for ever.
pub(crate) fn check_registers(log: &str) -> Result<(), KernelError> {
    for Resources { kernel, registers, .. } in resources(log) {
        let Some(threads) = sharing_threads(&kernel) else { continue };
        let needed = (REGISTERS / threads / REGISTERS_STEP * REGISTERS_STEP) as u32;
        if registers.next_multiple_of(REGISTERS_STEP as u32) != needed {
            return Err(KernelError::Registers { kernel, threads, registers, needed });
        }
    }
    Ok(())
}

/// Refuses a log in which a kernel spills registers to memory.
pub fn without_spills(file: &str, log: &str) -> Result<(), KernelError> {
    match resources(log).into_iter().find(|kernel| kernel.spills > 0) {
        None => Ok(()),
        Some(kernel) => {
            Err(KernelError::Spills { file: file.to_owned(), kernel: kernel.kernel, bytes: kernel.spills })
        }
    }
}

/// Returns a log without the assembler's times. So one source compiles to the same bytes every time, whoever wins the
/// race for its entry.
fn without_times(log: &str) -> String {
    log.split_inclusive('\n').filter(|line| !line.contains("Compile time = ")).collect()
}

/// Returns the resources of each kernel from a log of `ptxas -v`, in order of names.
pub fn resources(log: &str) -> Vec<Resources> {
    let before = |line: &str, what: &str| {
        line.split(what).next()?.split([' ', ',']).rfind(|word| !word.is_empty())?.parse::<u32>().ok()
    };
    let number = |line: &str, what: &str| if line.contains(what) { before(line, what) } else { None };
    let mut kernels: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(Resources { kernel, registers: 0, shared: 0, spills: 0, stack: 0 });
        } else if let Some(kernel) = kernels.last_mut() {
            kernel.registers = number(line, " registers").unwrap_or(kernel.registers);
            kernel.shared = number(line, " bytes smem").unwrap_or(kernel.shared);
            kernel.stack = number(line, " bytes stack frame").unwrap_or(kernel.stack);
            kernel.spills += number(line, " bytes spill stores").unwrap_or(0);
            kernel.spills += number(line, " bytes spill loads").unwrap_or(0);
        }
    }
    kernels.sort_by(|a, b| a.kernel.cmp(&b.kernel));
    kernels
}

fn failed(call: &'static str, error: result::NvrtcError) -> KernelError {
    KernelError::Nvrtc { call, error: error.to_string() }
}

/// A program of NVRTC. Its drop destroys it.
struct Program(sys::nvrtcProgram);

impl Program {
    /// Creates a program. A header is its name and its text.
    fn new(file: &CStr, text: &CStr, headers: &[[CString; 2]]) -> Result<Program, KernelError> {
        let mut program = std::ptr::null_mut();
        let names: Vec<_> = headers.iter().map(|[name, _]| name.as_ptr()).collect();
        let texts: Vec<_> = headers.iter().map(|[_, text]| text.as_ptr()).collect();
        // SAFETY: all pointers are valid for the call; NVRTC copies what it keeps.
        unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                text.as_ptr(),
                file.as_ptr(),
                headers.len() as i32,
                texts.as_ptr(),
                names.as_ptr(),
            )
        }
        .result()
        .map_err(|error| failed("create program", error))?;
        Ok(Program(program))
    }

    /// Returns the log, without what differs from one compilation of a source to the next.
    fn log(&self) -> Result<String, KernelError> {
        // SAFETY: the program was created and not destroyed.
        let log = unsafe { result::get_program_log(self.0) }.map_err(|error| failed("log", error))?;
        let bytes: Vec<u8> =
            log.iter().map(|&letter| letter as u8).take_while(|&letter| letter != 0).collect();
        Ok(without_times(&String::from_utf8_lossy(&bytes)))
    }

    fn cubin(&self) -> Result<Vec<u8>, KernelError> {
        let mut size = 0;
        // SAFETY: the program was compiled, and the buffer is as long as NVRTC said.
        unsafe {
            sys::nvrtcGetCUBINSize(self.0, &mut size)
                .result()
                .map_err(|error| failed("cubin size", error))?;
            let mut cubin = vec![0_u8; size];
            sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast::<c_char>())
                .result()
                .map_err(|error| failed("cubin", error))?;
            Ok(cubin)
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: NVRTC created the program, and it is destroyed once. Nobody could act on a failure.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 52 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 28 registers, used 1 barriers, 1536 bytes smem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 0 barriers
";

    const GOOD: &str = "ptxas info    : Compiling entry function 'a' for 'sm_90a'\n";

    #[test]
    fn a_log_without_kernels_says_nothing() {
        assert!(accept("x.cu", GOOD).is_ok());
        assert!(matches!(accept("x.cu", ""), Err(KernelError::Unjudged { .. })));
    }

    #[test]
    fn a_log_says_what_each_kernel_takes() {
        let a = Resources { kernel: "a".into(), registers: 14, shared: 0, spills: 0, stack: 0 };
        let b = Resources { kernel: "b".into(), registers: 28, shared: 1536, spills: 20, stack: 16 };
        assert_eq!(resources(LOG), [a, b]);
        assert!(matches!(without_spills("x.cu", LOG), Err(KernelError::Spills { bytes: 20, .. })));
        assert!(without_spills("x.cu", GOOD).is_ok());
        assert!(accept("x.cu", LOG).is_ok(), "spilled registers do not keep a kernel from running");
    }

    #[test]
    fn a_log_does_not_say_how_long_a_compilation_took() {
        let timed =
            |time: &str| without_times(&format!("{GOOD}ptxas info    : Compile time = {time} ms\na: b\n"));
        assert_eq!(timed("29.596"), format!("{GOOD}a: b\n"));
        assert_eq!(timed("30.001"), timed("29.596"));
        assert_eq!(without_times(LOG), LOG);
    }

    #[test]
    fn what_undoes_a_kernel_is_an_error_and_other_messages_are_not() {
        let bad = [
            "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
            "ptxas warning : (C7515) Potential Performance Loss: wgmma ...",
            "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirement",
        ];
        for line in bad {
            assert!(matches!(accept("x.cu", line), Err(KernelError::Undone { .. })), "{line}");
        }
        let good =
            ["ptxas info : (C7509) something", "warning #177-D: variable \"COPY\" was never referenced", ""];
        for line in good {
            assert!(accept("x.cu", &format!("{line}\n{GOOD}")).is_ok(), "{line}");
        }
    }

    #[test]
    fn a_kernel_that_shares_out_registers_has_all_that_its_threads_can_get() {
        let of = |kernel: &str, registers: u32| {
            let log = format!(
                "ptxas info : Compiling entry function '{kernel}' for 'sm_90a'\nptxas info : Used {registers} registers, x\n"
            );
            accept("x.cu", &log)
        };
        // The shipped kernels' numbers, and one that the hardware rounds up to such a number. Other kernels have what
        // they like.
        let right = [("paired_128_1", 168), ("paired_128_2", 165), ("short_128_1", 128), ("short_64_2", 96)];
        for (kind, registers) in right.into_iter().chain([("plan", 42)]) {
            assert!(of(&format!("forward_{kind}"), registers).is_ok(), "{kind}, {registers}");
        }
        for (kernel, threads, registers) in [
            ("forward_paired_128_1", 384, 160),
            ("forward_short_64_1", 640, 104),
            ("backward_tiles_64_2", 384, 128),
        ] {
            let error = of(kernel, registers).expect_err("it would hang").to_string();
            let said = format!("{kernel} has {registers} registers for each of its {threads} threads");
            assert!(error.starts_with(&said), "{error}");
        }
    }
}
