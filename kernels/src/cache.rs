//! Compiled kernels on disk.
//!
//! An entry's name is the hash of source and options, and the version of NVRTC. Its contents carry their own length
//! and hash: a torn or damaged entry is not believed, and is compiled again. An entry is written beside its place and
//! renamed into it. So two processes that compile the same source both succeed, and a reader sees a whole entry or
//! none. A cache that cannot be written costs time and nothing else. Without NVRTC, an entry of any version serves.
//!
//! A package may bring entries along, in a folder beside the program that nobody writes to. They serve where the cache has none
//! and NVRTC, if it is there, is of the same major version.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Once;

use crate::error::KernelError;
use crate::nvrtc::{self, Compiled};
use crate::source::Source;
use crate::version::CudaVersion;

const MAGIC: &[u8; 8] = b"SEAMCUB1";
const HASH_BYTES: usize = 32;

/// The variable that names the folder. It goes before the user's cache directory.
pub const FOLDER_VARIABLE: &str = "SEAMPROOF_KERNEL_CACHE";

/// The folder of what a package brings along, beside the folder of programs that an environment has.
const SHIPPED: &str = "share/seamproof/kernels";
const PROGRAMS: &str = "bin";

/// A folder of compiled kernels, or none, and one that was brought along.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    folder: Option<PathBuf>,
    shipped: Option<PathBuf>,
}

/// The origin of machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The disk.
    Cache,
    /// A compilation.
    Compiled,
}

impl Cache {
    /// Returns the user's cache: `$SEAMPROOF_KERNEL_CACHE`, `$XDG_CACHE_HOME/seamproof/kernels` or
    /// `~/.cache/seamproof/kernels`. Where there is no such place, the cache has no folder. A program in a folder `bin` is
    /// taken for an installed one, which has `share/seamproof/kernels` besides.
    pub fn of_user() -> Cache {
        let named = |variable: &str| {
            std::env::var_os(variable).map(PathBuf::from).filter(|path| !path.as_os_str().is_empty())
        };
        let below = |path: PathBuf| path.join("seamproof").join("kernels");
        let folder = named(FOLDER_VARIABLE)
            .or_else(|| named("XDG_CACHE_HOME").map(below))
            .or_else(|| named("HOME").map(|home| below(home.join(".cache"))));
        let program = std::env::current_exe().and_then(std::fs::canonicalize).ok();
        let programs = program.as_deref().and_then(Path::parent).filter(|folder| folder.ends_with(PROGRAMS));
        let shipped = programs.and_then(Path::parent).map(|environment| environment.join(SHIPPED));
        Cache { folder, shipped: shipped.filter(|folder| folder.is_dir()) }
    }

    /// Returns the cache in a folder, which is made when something is written. Nothing is brought along.
    pub fn at(folder: &Path) -> Cache {
        Cache { folder: Some(folder.to_owned()), shipped: None }
    }

    /// Returns the folder.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Returns the folder of what was brought along; `None` where nothing was.
    pub fn shipped(&self) -> Option<&Path> {
        self.shipped.as_deref()
    }

    /// Returns the machine code of a source, from disk or compiled. What is compiled is stored if the folder allows
    /// it. Where this NVRTC spills registers, a line on standard error says so: such kernels are right, and slower.
    pub fn get(&self, source: &Source) -> Result<(Compiled, Origin), KernelError> {
        let version = match nvrtc::version() {
            Ok(version) => version,
            Err(error) => {
                return self.peek(source).map(|found| (found, Origin::Cache)).ok_or(error);
            }
        };
        let stored = self.stored(source, version).or_else(|| self.brought(source, Some(version.major)));
        if let Some(found) = stored {
            return Ok((found, Origin::Cache));
        }
        let compiled = self.compiled(source, version)?;
        if let Some(warning) = warning(source, &compiled, version) {
            TOLD.call_once(|| eprintln!("{warning}"));
        }
        Ok((compiled, Origin::Compiled))
    }

    /// Compiles a source, and stores the machine code.
    fn compiled(&self, source: &Source, version: CudaVersion) -> Result<Compiled, KernelError> {
        let compiled = nvrtc::compile(source)?;
        // If it cannot be stored, whoever comes next compiles again. The machine code is good.
        let _ = self.store(source, version, &compiled);
        Ok(compiled)
    }

    /// Returns what is on disk, for any version of NVRTC.
    pub fn peek(&self, source: &Source) -> Option<Compiled> {
        let own = self.folder.as_deref().and_then(|folder| last_entry(folder, source, None));
        own.or_else(|| self.brought(source, None))
    }

    fn stored(&self, source: &Source, version: CudaVersion) -> Option<Compiled> {
        read(&self.entry(source, version)?)
    }

    /// Returns what was brought along, of this major version of NVRTC or of any.
    fn brought(&self, source: &Source, major: Option<i32>) -> Option<Compiled> {
        last_entry(self.shipped.as_deref()?, source, major)
    }

    /// Puts the machine code of a source on disk, like [`Cache::get`], and refuses spilled registers.
    pub fn fill(&self, source: &Source) -> Result<(Compiled, Origin), KernelError> {
        let version = nvrtc::version()?;
        let (compiled, origin) = match self.stored(source, version) {
            Some(found) => (found, Origin::Cache),
            None => (self.compiled(source, version)?, Origin::Compiled),
        };
        nvrtc::without_spills(source.file, &compiled.log)?;
        let stored = self.entry(source, version).is_some_and(|path| path.exists());
        if !stored {
            let path = self.folder.clone().unwrap_or_default();
            self.store(source, version, &compiled).map_err(|source| KernelError::Cache { path, source })?;
        }
        Ok((compiled, origin))
    }

    fn entry(&self, source: &Source, version: CudaVersion) -> Option<PathBuf> {
        let name = format!("{}-nvrtc{version}.cubin", source.digest());
        self.folder.as_ref().map(|folder| folder.join(name))
    }

    fn store(&self, source: &Source, version: CudaVersion, compiled: &Compiled) -> std::io::Result<()> {
        let no_folder = || std::io::Error::other("there is no folder for compiled kernels");
        let path = self.entry(source, version).ok_or_else(no_folder)?;
        let folder = path.parent().ok_or_else(no_folder)?;
        std::fs::create_dir_all(folder)?;
        let mut file =
            tempfile::Builder::new().prefix(".tmp-").permissions(readable()).tempfile_in(folder)?;
        file.write_all(&encode(compiled))?;
        file.as_file().sync_all()?;
        file.persist(&path).map_err(|error| error.error)?;
        Ok(())
    }
}

/// Returns the last whole entry of a folder in order of names, of this major version of NVRTC or of any.
fn last_entry(folder: &Path, source: &Source, major: Option<i32>) -> Option<Compiled> {
    let of_major = major.map_or_else(String::new, |major| format!("{major}."));
    let begin = format!("{}-nvrtc{of_major}", source.digest());
    let entries = std::fs::read_dir(folder).ok()?;
    let mut names: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    names.retain(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with(&begin) && name.ends_with(".cubin")
    });
    names.sort();
    names.iter().rev().find_map(|path| read(path))
}

/// Says that spilled registers were reported: once in a process is enough.
static TOLD: Once = Once::new();

/// Returns the warning about spilled registers of a shipped source. A planted edit has to run, and need not be fast.
fn warning(source: &Source, compiled: &Compiled, version: CudaVersion) -> Option<String> {
    let spills = nvrtc::without_spills(source.file, &compiled.log).err().filter(|_| !source.planted)?;
    Some(format!(
        "warning: {spills} with NVRTC {version}: its results are the same, and it is slower than with another NVRTC; \
         `seamproof kernels info` shows all that spill"
    ))
}

/// Returns the permissions of an entry: a folder of compiled kernels may be carried to where others read it.
fn readable() -> std::fs::Permissions {
    use std::os::unix::fs::PermissionsExt;
    std::fs::Permissions::from_mode(0o644)
}

/// Encodes an entry: magic, length of the cubin, length of the log, hash of all that follows, cubin, log.
fn encode(compiled: &Compiled) -> Vec<u8> {
    let body = [&compiled.cubin[..], compiled.log.as_bytes()].concat();
    let mut bytes = MAGIC.to_vec();
    bytes.extend((compiled.cubin.len() as u64).to_le_bytes());
    bytes.extend((compiled.log.len() as u64).to_le_bytes());
    bytes.extend(blake3::hash(&body).as_bytes());
    bytes.extend(body);
    bytes
}

fn decode(bytes: &[u8]) -> Option<Compiled> {
    let (head, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (cubin, rest) = rest.split_first_chunk::<8>()?;
    let (log, rest) = rest.split_first_chunk::<8>()?;
    let (hash, body) = rest.split_first_chunk::<HASH_BYTES>()?;
    let [cubin, log] = [cubin, log].map(|length| u64::from_le_bytes(*length) as usize);
    let whole = head == MAGIC && Some(body.len()) == cubin.checked_add(log) && blake3::hash(body) == *hash;
    whole.then(|| Compiled {
        cubin: body[..cubin].to_vec(),
        log: String::from_utf8_lossy(&body[cubin..]).into_owned(),
    })
}

fn read(path: &Path) -> Option<Compiled> {
    decode(&std::fs::read(path).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiled() -> Compiled {
        Compiled { cubin: vec![7; 300], log: "a line\n".into() }
    }

    fn source() -> Source {
        Source {
            file: "x.cu",
            text: "extern \"C\" __global__ void x() {}".into(),
            options: &[],
            planted: false,
        }
    }

    const VERSION: CudaVersion = CudaVersion { major: 13, minor: 0 };

    #[test]
    fn an_entry_reads_back_and_a_damaged_one_does_not() {
        let bytes = encode(&compiled());
        assert_eq!(decode(&bytes), Some(compiled()));
        for length in 0..bytes.len() {
            assert_eq!(decode(&bytes[..length]), None, "cut to {length} bytes");
        }
        for place in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[place] ^= 1;
            assert_eq!(decode(&damaged), None, "byte {place}");
        }
        assert_eq!(decode(&[&bytes[..], b"x"].concat()), None);
    }

    #[test]
    fn many_writers_of_one_entry_leave_a_whole_one_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(&folder.path().join("deep").join("kernels"));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        cache.store(&source(), VERSION, &compiled()).unwrap();
                        assert_eq!(cache.peek(&source()), Some(compiled()));
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(cache.folder().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_truncated_entry_is_passed_over_and_a_folder_that_is_none_is_no_cache() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        cache.store(&source(), VERSION, &compiled()).unwrap();
        let newer = cache.entry(&source(), CudaVersion { major: 13, minor: 5 }).unwrap();
        std::fs::write(newer, &encode(&compiled())[..100]).unwrap();
        assert_eq!(cache.peek(&source()), Some(compiled()), "the older one is whole");
        // A file stands where the folder should be, so that nobody can write there, whatever their rights.
        let file = folder.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let cache = Cache::at(&file);
        assert!(cache.store(&source(), VERSION, &compiled()).is_err());
        assert_eq!(cache.peek(&source()), None);
    }

    /// Test that what is brought along serves where the cache has nothing, and only for its own major version.
    #[test]
    fn what_is_brought_along_serves_where_the_cache_has_nothing() {
        let (own, brought) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        Cache::at(brought.path()).store(&source(), VERSION, &compiled()).unwrap();
        let cache = Cache { shipped: Some(brought.path().to_owned()), ..Cache::at(own.path()) };
        assert_eq!(cache.peek(&source()), Some(compiled()));
        assert_eq!(
            [12, 13, 1].map(|major| cache.brought(&source(), Some(major)).is_some()),
            [false, true, false]
        );
        let newer = Compiled { log: "own".into(), ..compiled() };
        cache.store(&source(), VERSION, &newer).unwrap();
        assert_eq!(cache.peek(&source()), Some(newer));
        assert_eq!(std::fs::read_dir(brought.path()).unwrap().count(), 1, "nobody writes there");
        assert_eq!(Cache::at(own.path()).shipped(), None);
    }

    #[test]
    fn spilled_registers_are_told_of_shipped_sources() {
        let shipped = &crate::source::sources()[0];
        let planted = shipped.clone().with_text(shipped.text.clone() + " ");
        let log = |spilled: u32| {
            format!(
                "ptxas info : Compiling entry function 'a' for 'sm_90a'\n{spilled} bytes spill stores, 0 bytes spill loads\n"
            )
        };
        let of =
            |source, spilled| warning(source, &Compiled { cubin: Vec::new(), log: log(spilled) }, VERSION);
        let told = of(shipped, 8).expect("it spills");
        assert!(told.contains("a spills 8 bytes of registers to memory with NVRTC 13.0"), "{told}");
        assert_eq!((of(shipped, 0), of(&planted, 8)), (None, None));
    }

    #[test]
    fn a_digest_follows_the_text() {
        let other = Source { text: "extern \"C\" __global__ void y() {}".into(), ..source() };
        assert_ne!(source().digest(), other.digest());
        assert_ne!(source().digest(), Source { file: "y.cu", ..source() }.digest());
        assert_ne!(source().digest(), Source { options: &["-DX"], ..source() }.digest());
    }
}
