//! Tests of the kernels on a Hopper GPU. They need a driver and NVRTC, and fail without them: `cargo test --release
//! -p seamproof-lab --test gpu -- --ignored`

use seamproof_kernels::cache::Cache;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_lab::check::{
    REPLAYED, ReplayTables, STEADY_DIMS, STEADY_MASKS, STEADY_PACKS, accumulated, check, check_calls,
    check_few_blocks, check_large, check_levels, check_quantise, check_turned, direct, instances,
    launch_instances, prepare, replayed, seen, steady,
};
use seamproof_lab::faults::{by_id, source_faults};

/// The cases of the comparison, and the least that each operation must get to write.
const CASES: u64 = 7140;
const WRITING_CASES_MIN: u64 = 200;
/// The number of drawn quantisations.
const QUANTISATIONS: u64 = 4000;
/// The number of calls. Each is launched in every way.
const CALLS: u64 = 200;

/// Returns what was done, or fails with the error's text.
#[track_caller]
fn done<T>(result: Result<T, KernelError>) -> T {
    match result {
        Ok(done) => done,
        Err(error) => panic!("{error}"),
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn every_kernel_gives_its_twins_bits() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    let outcome = done(check(&gpu, CASES, 1));
    assert!(outcome.mismatches.is_empty(), "{}", outcome.mismatches[0]);
    for tally in outcome.tallies {
        assert!(tally.wrote >= WRITING_CASES_MIN, "too little run: {tally:?}");
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn products_of_rows_and_elements_are_64_bits_wide() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    let found = done(check_large(&gpu));
    assert!(found.is_empty(), "{}", found[0]);
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn a_turned_copy_has_every_code_in_its_place() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    let found = done(check_turned(&gpu));
    assert!(found.is_empty(), "{}", found[0]);
}

/// Tensors of all formats, padding and ranks, under every scaling and recipe.
#[test]
#[ignore = "needs a Hopper GPU"]
fn codes_and_scales_are_those_of_the_definition() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    let found = done(check_quantise(&gpu, QUANTISATIONS, 1, 1));
    assert!(found.is_empty(), "{}", found[0]);
}

/// The scores are so large that the next number is far away.
#[test]
#[ignore = "needs a Hopper GPU"]
fn weights_of_scores_far_from_0_are_right() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    let found = done(check_levels(&gpu));
    assert!(found.is_empty(), "{}", found[0]);
}

/// The calls have several runs of keys to a segment, bounds of any kind and sinks of −∞. Every kernel runs them.
#[test]
#[ignore = "needs a Hopper GPU"]
fn calls_that_no_schedule_makes_are_right() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    let found = done(check_calls(&gpu, CALLS, 1, 1));
    assert!(found.is_empty(), "{}", found[0]);
}

/// Gradients are added to what is there, in both orders, in f32 and in the tensors' own format.
#[test]
#[ignore = "needs a Hopper GPU"]
fn accumulated_gradients_are_sums_rounded_once() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    let found = done(accumulated(&gpu));
    assert!(found.is_empty(), "{}", found[0]);
}

/// dq is written at once where the keys that a tile of rows sees are one tile.
#[test]
#[ignore = "needs a Hopper GPU"]
fn direct_dq_has_the_bits_of_sums() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    let found = done(direct(&gpu));
    assert!(found.is_empty(), "{}", found[0]);
}

/// Blocks take many tiles each where there are few. A planted fault of a forward's later tiles must be seen, and one of a
/// backward's.
#[test]
#[ignore = "needs a Hopper GPU"]
fn few_blocks_give_the_bits_of_all() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    let found = done(check_few_blocks(&gpu, 1));
    assert!(found.is_empty(), "{}", found[0]);
    for id in ["first-place-of-queries", "gradients-of-the-tile-before-kept"] {
        let fault = by_id(id).expect("a planted fault");
        let sources = fault.edit.sources().expect("a source with the fault");
        let gpu = done(Gpu::with_sources(0, &Cache::of_user(), &sources));
        assert!(!done(check_few_blocks(&gpu, 1)).is_empty(), "{id} would be missed");
    }
}

/// A graph is recorded with one batch's lengths. It must be right with others that are written to the same tables,
/// and stale tables must be seen.
#[test]
#[ignore = "needs a Hopper GPU"]
fn a_graph_is_replayed_with_other_lengths() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    for what in REPLAYED {
        let replays = |tables| done(replayed(&gpu, what, tables));
        let found = replays(ReplayTables::Rewritten);
        assert!(found.is_empty(), "{}", found[0]);
        let stale = replays(ReplayTables::Stale);
        assert!(!stale.is_empty(), "{}: tables of other lengths would not be missed", what.name);
    }
}

/// These are the launches that a sanitizer watches around `seamproof kernels stress`.
#[test]
#[ignore = "needs a Hopper GPU"]
fn every_instance_is_launched() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    assert!(instances(&gpu).count() > 0 && instances(&gpu).all(|(_, count)| count == 0));
    done(launch_instances(&gpu));
    let missing: Vec<&str> = instances(&gpu).filter(|(_, count)| *count == 0).map(|(name, _)| name).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The launches of each head dim, mask and pack. `seamproof kernels stress` makes more.
const STEADY_LAUNCHES: usize = 200;

#[test]
#[ignore = "needs a Hopper GPU"]
fn the_fixed_order_gives_the_same_bits_and_any_order_does_not() {
    let gpu = done(Gpu::open(0, &Cache::of_user()));
    for dim in STEADY_DIMS {
        for (name, mask) in STEADY_MASKS {
            // Chance decides which launch meets another order, most of all beside other processes.
            let launches = [1, 4, 16, 64].map(|times| times * STEADY_LAUNCHES);
            let any = launches.into_iter().any(|launches| {
                let differing = STEADY_PACKS.map(|pack| {
                    let steady = done(steady(&gpu, pack, (dim, mask), launches));
                    assert_eq!(steady.fixed, 0, "head dim {dim}, {name}, {}: {steady:?}", pack.name);
                    steady.any
                });
                differing.iter().any(|&differing| differing > 0)
            });
            assert!(any, "head dim {dim}, {name}: differences would not be seen");
        }
    }
}

/// The check itself is under test: every planted fault is seen where it says.
#[test]
#[ignore = "needs a Hopper GPU"]
fn a_planted_fault_is_seen() {
    // Other tests look at campaigns. The remaining faults end the process that runs them.
    let faults: Vec<_> = source_faults().filter(|fault| fault.edit.seen.is_compared()).collect();
    let cache = Cache::of_user();
    prepare(&faults, &cache);
    for fault in faults {
        let gpu = done(Gpu::with_sources(0, &cache, &fault.edit.sources().unwrap()));
        let (found, _) = done(seen(&gpu, fault, 1785, 2)).unwrap();
        assert!(found, "{} was not seen, or elsewhere", fault.id);
    }
}
