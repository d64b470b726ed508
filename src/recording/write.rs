//! Recording of a subject's run.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use ndarray::{Array3, ArrayView3, Axis, s};
use seamproof_judge::files;
use seamproof_judge::subject::{Backend, Outputs};
use seamproof_oracle::region::rotated_back;
use seamproof_oracle::sharding::{PlacedRun, RankLayout, ShardingError, SideLayout, layouts, run_of};
use seamproof_oracle::{Inputs, Problem, Run, Scales, Side};

use super::manifest::{
    DsinkForm, EmptyLse, LseBase, LseForm, LseOrder, Manifest, Placement, RankEntry, RecordedArithmetic,
    RecordedSubject,
};
use super::rank_file::RankPlace;
use super::{
    Fault, MANIFEST, RECORDING_VERSION, RankFile, RankTables, RecordingError, Share, digest, rank_file_name,
};
use crate::record::{make_dir, write_whole};

/// A run that was made, to be recorded.
pub struct Made<'a> {
    /// What ran.
    pub backend: &'a dyn Backend,
    /// Its name, with options.
    pub name: String,
    /// The problem.
    pub problem: &'a Problem,
    /// Inputs in the problem's own layout, with the padding rows that the subject saw.
    pub inputs: &'a Inputs,
    /// Results of the ranks.
    pub outputs: Outputs,
    /// Whether tables are written that say which rank holds which position.
    pub tables: bool,
}

/// Checks that a recording can be written there: into a new directory, or into an empty one.
pub fn check_free(dir: &Path) -> Result<(), RecordingError> {
    let is_taken = fs::symlink_metadata(dir).is_ok_and(|found| !found.is_dir())
        || files::list(dir).map_or(true, |names| !names.is_empty());
    if is_taken { Err(RecordingError::Taken { path: dir.to_owned() }) } else { Ok(()) }
}

/// Writes a recording into a new directory, or into an empty one. The manifest comes last.
pub fn write(dir: &Path, made: Made<'_>) -> Result<Manifest, RecordingError> {
    check_free(dir)?;
    let problem = made.problem;
    let uncut = |error: ShardingError| RecordingError::field(&dir.join(MANIFEST), "problem", error.into());
    let layouts = layouts(problem).map_err(uncut)?;
    if made.outputs.ranks.len() != layouts.len() {
        let (got, expected) = (made.outputs.ranks.len(), format!("the problem has {} ranks", layouts.len()));
        return Err(RecordingError::field(dir, "results", Fault::Count { got, expected }));
    }
    let mut manifest = manifest_of(&made);
    let unread = |(field, fault)| RecordingError::field(&dir.join(MANIFEST), field, fault);
    manifest.checked().map_err(unread)?;
    make_dir(dir)?;
    for (rank, (layout, outputs)) in layouts.iter().zip(made.outputs.ranks).enumerate() {
        let path = dir.join(rank_file_name(rank));
        let file = RankFile {
            inputs: local(problem, layout, made.inputs),
            outputs,
            tables: made.tables.then(|| RankTables::of(layout)),
            step: "0".into(),
            layer: "0".into(),
        };
        let (layout, share) = (Some(layout), Share::all(problem));
        let bytes = file.to_bytes(RankPlace { manifest: &manifest, problem, rank, layout, share });
        let unwritten = |error| RecordingError::field(&path, "header", Fault::Header(format!("{error}")));
        let bytes = bytes.map_err(unwritten)?;
        write_whole(&path, &bytes)?;
        manifest.ranks[rank].blake2b = digest(&bytes);
    }
    write_whole(&dir.join(MANIFEST), &manifest.to_json())?;
    Ok(manifest)
}

/// Returns the manifest, without the digests.
fn manifest_of(made: &Made<'_>) -> Manifest {
    let (backend, problem) = (made.backend, made.problem);
    let declaration = backend.declaration();
    let mut versions = backend.versions();
    versions.insert("seamproof".into(), env!("CARGO_PKG_VERSION").into());
    let entry = |(rank, world_rank): (usize, usize)| RankEntry {
        file: rank_file_name(rank),
        blake2b: String::new(),
        world_rank,
    };
    Manifest {
        version: RECORDING_VERSION,
        run: run_id(),
        subject: RecordedSubject { name: made.name.clone(), versions },
        problem: problem.clone().into(),
        placement: Placement::Rule,
        padding: declaration.padding,
        lse: LseForm { base: LseBase::E, order: LseOrder::Ht, empty: EmptyLse::MinusInfinity },
        dsink: DsinkForm::Partial,
        arithmetic: RecordedArithmetic::of(declaration.arithmetic, backend.partition(problem)),
        scales: Vec::new(),
        ranks: problem.parallel.world_ranks().enumerate().map(entry).collect(),
        note: String::new(),
    }
}

/// Returns a run id that no other run has: a UUID of the kind that its maker defines, here from process and time.
fn run_id() -> String {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let digest = digest(format!("{} {}", std::process::id(), time.as_nanos()).as_bytes());
    format!(
        "{}-{}-8{}-8{}-{}",
        &digest[..8],
        &digest[8..12],
        &digest[13..16],
        &digest[17..20],
        &digest[20..32]
    )
}

/// Returns the inputs in a rank's layout. Padding rows are copied too; rows that no sequence owns hold zeros. A rank of
/// a region has hidden rows.
fn local(problem: &Problem, layout: &RankLayout, whole: &Inputs) -> Inputs {
    let rows = |side: Side, whole: ArrayView3<'_, f32>| local_rows(problem, (layout.side(side), side), whole);
    let hidden = |side: Side, whole: ArrayView3<'_, f32>| {
        let mut local = rows(side, whole);
        if problem.parallel.region > 1 {
            rotate_back(layout.side(side), &mut local);
        }
        local
    };
    Inputs {
        q: hidden(Side::Q, whole.q.view()),
        k: hidden(Side::Kv, whole.k.view()),
        v: rows(Side::Kv, whole.v.view()),
        dout: rows(Side::Q, whole.dout.view()),
        sink: whole.sink.clone(),
        scales: Scales::default(),
    }
}

fn local_rows(
    problem: &Problem,
    (layout, side): (&SideLayout, Side),
    whole: ArrayView3<'_, f32>,
) -> Array3<f32> {
    let (rows, heads, dim) = whole.dim();
    if rows == 0 {
        // The dout of a forward pass has no rows on any rank.
        return Array3::zeros((0, heads, dim));
    }
    let mut local = Array3::zeros((layout.rows, heads, dim));
    for placed in &layout.runs {
        let run = run_of(&problem.sequences[placed.sequence], side);
        for (here, there) in owned(placed, &run) {
            local.slice_mut(s![here, .., ..]).assign(&whole.slice(s![there, .., ..]));
        }
    }
    local
}

/// Makes rows at attention hidden rows.
fn rotate_back(layout: &SideLayout, rows: &mut Array3<f32>) {
    for PlacedRun { piece, local, .. } in &layout.runs {
        for i in 0..local.span {
            for mut lanes in rows.index_axis_mut(Axis(0), local.row(i)).outer_iter_mut() {
                let hidden = rotated_back(&lanes.to_vec(), piece.start + i * piece.step);
                lanes.iter_mut().zip(hidden).for_each(|(lane, value)| *lane = value);
            }
        }
    }
}

/// Returns the rows of a rank's run that its sequence owns, each with its row in the problem's own tensor.
fn owned<'a>(placed: &'a PlacedRun, run: &'a Run) -> impl Iterator<Item = (usize, usize)> + 'a {
    let PlacedRun { piece, local, .. } = placed;
    (0..local.span).map(move |i| (local.row(i), run.row(piece.start + i * piece.step)))
}
