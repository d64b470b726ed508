//! The manifest: what ran, and how the rank files hold it.

use std::collections::BTreeMap;
use std::path::Path;

use seamproof_judge::subject::{Declaration, PaddingContract, TensorName};
use seamproof_judge::subjects::Recorded;
use seamproof_oracle::envelope::{
    Accumulation, Arithmetic, Delta, DsWeights, GroupSums, MergeBy, Partition, SoftCap, WeightRounding,
};
use seamproof_oracle::{
    ContextParallel, Dims, Form, Format, Heads, InputMode, Mask, Pass, Precision, Problem, ProblemFields,
    ScaleValues, Scaling, Sequence, Sharing, Softmax, Steps, TensorRows,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::quoted;
use super::{
    Fault, NOTE_MAX, RANKS_MAX, RECORDING_VERSION, RecordingError, TEXT_MAX, VERSIONS_MAX, rank_file_name,
};

/// What ran, and how the rank files hold it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the format, [`RECORDING_VERSION`].
    #[serde(rename = "seamproof_recording")]
    pub version: u32,
    /// Run id, which is in every rank file too.
    pub run: String,
    /// What ran.
    pub subject: RecordedSubject,
    /// Problem of all ranks together.
    pub problem: RecordedProblem,
    /// Source of the rows' places.
    pub placement: Placement,
    /// Padding contract of what ran.
    pub padding: PaddingContract,
    /// Form of the LSE.
    pub lse: LseForm,
    /// Form of dsink.
    pub dsink: DsinkForm,
    /// Arithmetic of what ran.
    pub arithmetic: RecordedArithmetic,
    /// Scales of FP8 tensors. None are read yet.
    pub scales: Vec<Value>,
    /// Rank files, in group order.
    pub ranks: Vec<RankEntry>,
    /// Text for people.
    #[serde(default)]
    pub note: String,
}

/// What ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedSubject {
    /// Name, in words.
    pub name: String,
    /// Versions of what ran, by name.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
}

/// A problem without the fields that draw its values: in a recording the values are there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct RecordedProblem {
    pub sequences: Vec<Sequence>,
    pub rows: TensorRows,
    pub heads: Heads,
    pub dims: Dims,
    pub mask: Mask,
    pub softmax: Softmax,
    pub precision: Precision,
    pub parallel: ContextParallel,
    pub pass: Pass,
    #[serde(default, skip_serializing_if = "Sharing::is_empty")]
    pub sharing: Sharing,
}

/// Source of the rows' places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// The problem's balance. Where there are tables too, they must say the same.
    Rule,
    /// Tables in the rank files.
    Tables,
}

/// Form of the LSE in the rank files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LseForm {
    /// Base of the logarithm.
    pub base: LseBase,
    /// Order of the axes.
    pub order: LseOrder,
    /// Value of a row that sees neither key nor sink.
    pub empty: EmptyLse,
}

/// Base of an LSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LseBase {
    /// The natural logarithm.
    #[serde(rename = "e")]
    E,
    /// The logarithm of base 2.
    #[serde(rename = "2")]
    Two,
}

/// Order of an LSE's axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LseOrder {
    /// `[heads, rows]`.
    Ht,
    /// `[rows, heads]`.
    Th,
}

/// LSE of a row that sees neither key nor sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EmptyLse {
    /// −∞.
    #[serde(rename = "-inf")]
    MinusInfinity,
    /// +∞.
    #[serde(rename = "+inf")]
    PlusInfinity,
    /// Anything.
    #[serde(rename = "unspecified")]
    Unspecified,
}

/// Form of dsink in the rank files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DsinkForm {
    /// Each rank's own part: the gradient is the sum over the ranks.
    Partial,
    /// The gradient, the same on all ranks.
    Reduced,
}

/// Arithmetic of what ran. What is not known has the weakest bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedArithmetic {
    /// Way of all sums.
    pub accumulation: Accumulation,
    /// Smallest tile; `None` where it is not known.
    pub tile: Option<Tile>,
    /// Format in which partial outs are stored and merged.
    pub merge: FormatName,
    /// Formula by which outs are merged.
    #[serde(default)]
    pub merge_by: MergeBy,
    /// Format in which partial sums of dk and dv are stored; `None` where they are not rounded.
    pub wire: Option<FormatName>,
    /// Order of rounding weights and dividing by the row's sum.
    #[serde(default)]
    pub weights: WeightRounding,
    /// Source of D.
    #[serde(default)]
    pub delta: Delta,
    /// Format of the gradients of one query head of a group.
    #[serde(default)]
    pub group_sums: GroupSums,
    /// Accuracy of the soft cap.
    #[serde(default)]
    pub soft_cap: SoftCap,
    /// Weights that dS is made of.
    #[serde(default)]
    pub ds_weights: DsWeights,
}

/// Rows of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tile {
    /// Number of query rows.
    pub q: usize,
    /// Number of keys.
    pub kv: usize,
}

/// A format by its name in case files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FormatName(pub Format);

impl TryFrom<String> for FormatName {
    type Error = String;

    fn try_from(name: String) -> Result<FormatName, String> {
        name.parse()
            .map(FormatName)
            .map_err(|_| format!("'{}' is no format; use f32, bf16, fp16, e4m3 or e5m2", quoted(&name)))
    }
}

impl From<FormatName> for String {
    fn from(FormatName(format): FormatName) -> String {
        format.name().to_owned()
    }
}

/// A rank file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankEntry {
    /// Name of the file, [`rank_file_name`].
    pub file: String,
    /// BLAKE2b-256 digest of the file, in hex digits.
    pub blake2b: String,
    /// Rank of the world.
    pub world_rank: usize,
}

impl From<Problem> for RecordedProblem {
    fn from(problem: Problem) -> RecordedProblem {
        let ProblemFields {
            sequences,
            rows,
            heads,
            dims,
            mask,
            softmax,
            precision,
            parallel,
            pass,
            sharing,
            ..
        } = problem.into();
        RecordedProblem { sequences, rows, heads, dims, mask, softmax, precision, parallel, pass, sharing }
    }
}

impl From<RecordedProblem> for ProblemFields {
    /// Returns the fields with a mode and a seed that nothing reads, since no value is drawn.
    fn from(recorded: RecordedProblem) -> ProblemFields {
        let RecordedProblem {
            sequences,
            rows,
            heads,
            dims,
            mask,
            softmax,
            precision,
            parallel,
            pass,
            sharing,
        } = recorded;
        let (mode, data_seed) = (InputMode::Flat, 0);
        ProblemFields {
            sequences,
            rows,
            heads,
            dims,
            mask,
            softmax,
            precision,
            parallel,
            mode,
            data_seed,
            pass,
            scales: ScaleValues::default(),
            form: Form::CuSeqlens,
            steps: Steps::default(),
            pages: None,
            sharing,
        }
    }
}

impl RecordedArithmetic {
    /// Returns the arithmetic of a subject, from its declaration and from how it cuts the problem's sums.
    pub fn of(arithmetic: Arithmetic, partition: Partition) -> RecordedArithmetic {
        let Partition { q_tile, kv_tile, merges, sums } = partition;
        let Arithmetic { accumulation, weights, delta, group_sums, soft_cap, ds_weights, .. } = arithmetic;
        let is_coarser = merges.step.precision_bits() < merges.running.precision_bits();
        RecordedArithmetic {
            accumulation,
            tile: Some(Tile { q: q_tile, kv: kv_tile }),
            merge: FormatName(if is_coarser { merges.step } else { merges.running }),
            merge_by: merges.by,
            wire: (sums.format != Format::F32).then_some(FormatName(sums.format)),
            weights,
            delta,
            group_sums,
            soft_cap,
            ds_weights,
        }
    }

    fn arithmetic(self) -> Arithmetic {
        let RecordedArithmetic { accumulation, weights, delta, group_sums, soft_cap, ds_weights, .. } = self;
        // Tensors of a recording have no scales, so weights and logit gradients are rounded as they are.
        let unscaled = Arithmetic::default();
        Arithmetic { accumulation, weights, delta, group_sums, soft_cap, ds_weights, ..unscaled }
    }

    /// Returns the weakest partition that fits a group of ranks. A tile that is not known is one row.
    pub fn partition(self, parallel: &ContextParallel) -> Partition {
        let Tile { q, kv } = self.tile.unwrap_or(Tile { q: 1, kv: 1 });
        let FormatName(merge) = self.merge;
        let wire = self.wire.map_or(Format::F32, |FormatName(format)| format);
        Partition::single(q.max(1), kv.max(1)).of_group(parallel, merge, self.merge_by, wire)
    }
}

impl Manifest {
    /// Reads a manifest from bytes. The path is for the error alone.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<(Manifest, Problem), RecordingError> {
        check_version(path, bytes)?;
        let mut deserializer = serde_json::Deserializer::from_slice(bytes);
        let read: Result<Manifest, _> = serde_path_to_error::deserialize(&mut deserializer);
        let manifest = read
            .map_err(|error| RecordingError::field(path, error.path(), Fault::Json(quoted(error.inner()))))?;
        let wrong = |error| RecordingError::field(path, "text", Fault::Json(quoted(error)));
        deserializer.end().map_err(wrong)?;
        let problem =
            manifest.checked().map_err(|(field, fault)| RecordingError::field(path, field, fault))?;
        Ok((manifest, problem))
    }

    /// Returns the manifest as readable JSON.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Checks everything that no type checks, and returns the problem.
    pub(super) fn checked(&self) -> Result<Problem, (String, Fault)> {
        for (field, text, most) in [
            ("run", &self.run, TEXT_MAX),
            ("subject.name", &self.subject.name, TEXT_MAX),
            ("note", &self.note, NOTE_MAX),
        ] {
            at_most(field, text, most)?;
        }
        if self.run.is_empty() {
            let missing = Fault::Missing("write a text that no other run has, such as a UUID");
            return Err(("run".into(), missing));
        }
        self.check_versions()?;
        if !self.scales.is_empty() {
            return Err(("scales".into(), Fault::Unscaled("FP8".into())));
        }
        check_precision(&self.problem.precision)?;
        let problem = Problem::new(self.problem.clone().into());
        let problem = problem.map_err(|error| ("problem".to_owned(), error.into()))?;
        if problem.parallel.region > 1 && self.placement == Placement::Tables {
            return Err(("placement".into(), Fault::RegionTables));
        }
        self.check_ranks(&problem)?;
        Ok(problem)
    }

    fn check_versions(&self) -> Result<(), (String, Fault)> {
        let versions = &self.subject.versions;
        if versions.len() > VERSIONS_MAX {
            let expected = format!("name at most {VERSIONS_MAX}");
            return Err(("subject.versions".into(), Fault::Count { got: versions.len(), expected }));
        }
        let mut texts = versions.iter().flat_map(|(name, version)| [name, version]);
        texts.try_for_each(|text| at_most("subject.versions", text, TEXT_MAX))
    }

    /// Checks the list of rank files against the problem's group.
    fn check_ranks(&self, problem: &Problem) -> Result<(), (String, Fault)> {
        let (got, ranks) = (self.ranks.len(), problem.parallel.all_ranks());
        if got != ranks || got > RANKS_MAX {
            let expected = format!("problem.parallel has {ranks} ranks, and at most {RANKS_MAX} are read");
            return Err(("ranks".into(), Fault::Count { got, expected }));
        }
        for (index, (entry, world_rank)) in self.ranks.iter().zip(problem.parallel.world_ranks()).enumerate()
        {
            let differs = |got: String, expected: String, whose| {
                let advice = "list the files in the order of the group";
                Fault::Differs { got: quoted(got), whose, expected, advice }
            };
            if entry.file != rank_file_name(index) {
                let (got, expected) = (entry.file.clone(), rank_file_name(index));
                return Err((format!("ranks[{index}].file"), differs(got, expected, "its place asks for")));
            }
            if entry.world_rank != world_rank {
                let (got, expected) = (entry.world_rank.to_string(), world_rank.to_string());
                let fault = differs(got, expected, "problem.parallel.ranks says");
                return Err((format!("ranks[{index}].world_rank"), fault));
            }
        }
        Ok(())
    }

    /// Returns what ran as a subject, with the statistics that it returned.
    pub(super) fn subject(&self, problem: &Problem, statistics: Vec<TensorName>) -> Recorded {
        let (tensors, weights) = (problem.precision.q.format, problem.precision.p.format);
        let declaration = Declaration::single_rank(tensors, weights);
        let mut table = declaration.table.clone();
        table.statistics = statistics;
        Recorded {
            name: self.subject.name.clone(),
            declaration: declaration
                .with_table(table)
                .with_padding(self.padding)
                .with_arithmetic(self.arithmetic.arithmetic()),
            partition: self.arithmetic.partition(&problem.parallel),
            replay: None,
        }
    }
}

/// Checks the version before anything else. A manifest of another version then says so, whatever else is in it.
fn check_version(path: &Path, bytes: &[u8]) -> Result<(), RecordingError> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object with a 'seamproof_recording'")]
    struct Head {
        seamproof_recording: u64,
    }
    match serde_json::from_slice::<Head>(bytes) {
        Ok(Head { seamproof_recording }) if seamproof_recording == u64::from(RECORDING_VERSION) => Ok(()),
        Ok(Head { seamproof_recording: got }) => {
            Err(RecordingError::field(path, "seamproof_recording", Fault::Version(got)))
        }
        Err(error) => Err(RecordingError::field(path, "text", Fault::Json(quoted(error)))),
    }
}

fn at_most(field: &str, text: &str, most: usize) -> Result<(), (String, Fault)> {
    match text.chars().count() {
        got if got > most => Err((field.into(), Fault::Long { got, most })),
        _ => Ok(()),
    }
}

/// Refuses formats of tensors that need scales.
fn check_precision(precision: &Precision) -> Result<(), (String, Fault)> {
    let is_read = |format| matches!(format, Format::F32 | Format::Bf16 | Format::Fp16);
    let stands_in_no_file = |quantity: &str| matches!(quantity, "p" | "ds");
    for (quantity, element) in precision.elements() {
        let stored = is_read(element.format) || stands_in_no_file(quantity);
        if !stored || element.scaling != Scaling::None {
            return Err((format!("problem.precision.{quantity}"), Fault::Unscaled(element.to_string())));
        }
    }
    Ok(())
}
