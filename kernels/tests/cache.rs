//! Tests of compiled kernels on disk. They need NVRTC, and no GPU: `cargo test --test cache -- --ignored`

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use seamproof_kernels::cache::{Cache, Origin};
use seamproof_kernels::source::{Source, sources};
use seamproof_kernels::{KernelError, nvrtc};

/// Returns what was done, or fails with the error's text.
#[track_caller]
fn done<T>(result: Result<T, KernelError>) -> T {
    match result {
        Ok(done) => done,
        Err(error) => panic!("{error}"),
    }
}

/// Returns a source that compiles in little time.
fn metadata() -> Source {
    sources().into_iter().find(|source| source.file == "metadata.cu").expect("a source")
}

/// The folder that the processes of the next test share.
const SHARED: &str = "SEAMPROOF_TEST_SHARED_CACHE";

/// This is one process of the next test. By itself it compiles into a folder of its own.
#[test]
#[ignore = "needs NVRTC"]
fn a_process_fills_a_cache() {
    let own = tempfile::tempdir().unwrap();
    let folder = std::env::var_os(SHARED).map_or_else(|| own.path().to_owned(), PathBuf::from);
    let source = &metadata();
    let (compiled, _) = done(Cache::at(&folder).get(source));
    assert_eq!(done(Cache::at(&folder).get(source)), (compiled, Origin::Cache));
}

/// Processes that compile one source at once all get whole machine code and leave one entry. A truncated entry is
/// compiled again. A folder that cannot be written costs nothing but time.
#[test]
#[ignore = "needs NVRTC"]
fn a_cache_survives_company_and_damage() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let source = &metadata();
    let process = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "a_process_fills_a_cache"]).env(SHARED, folder.path());
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let both = [(); 2].map(|()| process());
    for process in both {
        let ended = process.wait_with_output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "one entry, and nothing left over");
    let entry = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let whole = std::fs::read(&entry).unwrap();
    std::fs::write(&entry, &whole[..whole.len() / 2]).unwrap();
    assert_eq!(done(cache.get(source)).1, Origin::Compiled);
    assert_eq!(std::fs::read(&entry).unwrap(), whole, "a source compiles to the same bytes every time");
    assert_eq!(done(cache.get(source)).1, Origin::Cache);
    // Permissions keep everybody but root from writing. A file in the folder's place keeps everybody.
    let locked = tempfile::tempdir().unwrap();
    std::fs::set_permissions(locked.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    assert!(matches!(Cache::at(locked.path()).get(source), Ok((_, Origin::Compiled))), "a read-only folder");
    assert!(
        matches!(Cache::at(&entry).get(source), Ok((_, Origin::Compiled))),
        "a folder that cannot be written"
    );
    let mut broken = source.clone();
    broken.text.push_str("\nint broken = missing;\n");
    assert!(
        matches!(cache.get(&broken), Err(KernelError::Compile { log, .. }) if log.contains("metadata.cu("))
    );
}

/// What is wrong in an instance of a template only is found without code being made.
#[test]
#[ignore = "needs NVRTC"]
fn a_wrong_instance_is_refused_without_making_code() {
    let template = "template <int N> __device__ int of(const int (&x)[N]) { return x.size + N; }\n";
    let with = |call: &str| {
        let right = metadata();
        let text = format!("{}\n{template}{call}", right.text);
        nvrtc::check_syntax(&right.with_text(text))
    };
    done(with(""));
    let refused = with("extern \"C\" __global__ void wrong(int* to) { int x[2] = {}; *to = of(x); }");
    assert!(matches!(refused, Err(KernelError::Compile { .. })), "{refused:?}");
}
