//! Bodies of frames: a head in JSON (a problem in the form of case files), then the elements of the tensors as raw
//! little-endian f32, one tensor after the other.
//!
//! Decoding trusts nothing: every shape is checked against the bytes that are there before anything is allocated for
//! it, and texts are cut.

use std::collections::BTreeMap;
use std::fmt;

use ndarray::{Array, Array1, Array2, Array3, ArrayView, Dimension, IntoDimension};
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::groups::Groups;
use seamproof_oracle::limits::WORLD_MAX;
use seamproof_oracle::{Inputs, Pass, Problem, Quantity, Scales, TensorScales};
use seamproof_simulator::Damage;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use seamproof_judge::finding::Phase;
use seamproof_judge::subject::{
    ChangedInput, Costs, Outputs, RankGradients, RankOutputs, Refusal, RunError, TensorName,
};

/// Largest number of bytes that are kept of a text from a worker.
pub const TEXT_MAX: usize = 4096;
/// Largest number of versions that are kept of a worker's answer.
pub const VERSIONS_MAX: usize = 64;
/// Number of times that a run may build a kernel, and so renew the deadline of its launch.
pub const COMPILING_MAX: u32 = 20;

/// Returns the beginning of a text, at most [`TEXT_MAX`] bytes of it.
pub(crate) fn cut(mut text: String) -> String {
    if text.len() > TEXT_MAX {
        text.truncate(text.floor_char_boundary(TEXT_MAX));
        text.push('…');
    }
    text
}

/// Error of a body that does not match its kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MessageError(pub String);

fn wrong<T>(what: impl Into<String>) -> Result<T, MessageError> {
    Err(MessageError(what.into()))
}

/// The request to open a subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenRequest {
    /// Name of the subject, as the worker knows it.
    pub name: String,
    /// Options of the subject.
    pub options: BTreeMap<String, String>,
    /// Ordinal of the device.
    pub device: usize,
}

/// The answer that a subject is open.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// Number of devices that there are for the subject.
    #[serde(default = "one")]
    pub devices: usize,
    /// Name of the device that the subject is on; empty for a CPU core.
    #[serde(default)]
    pub name: String,
    /// Versions of what runs, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub versions: BTreeMap<String, String>,
    /// Declaration of a subject that is not built into this program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<Value>,
}

fn one() -> usize {
    1
}

/// Decodes the body of [`super::frame::Kind::Ready`].
pub fn decode_ready(body: &[u8]) -> Result<Ready, MessageError> {
    let ready: Ready = decode(body)?;
    if ready.devices == 0 {
        return wrong("a subject on 0 devices");
    }
    let versions = ready.versions.into_iter().take(VERSIONS_MAX);
    let versions = versions.map(|(name, version)| (cut(name), cut(version))).collect();
    Ok(Ready { name: cut(ready.name), versions, ..ready })
}

/// Encodes a request or an answer without tensors.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // These maps have text keys and numbers, which JSON can always hold.
    serde_json::to_vec(value).unwrap_or_default()
}

/// Decodes a request or an answer without tensors.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, MessageError> {
    serde_json::from_slice(body).map_err(|error| MessageError(error.to_string()))
}

/// Encodes the body of [`super::frame::Kind::Phase`].
pub fn encode_phase(phase: Phase) -> [u8; 1] {
    [phase as u8]
}

/// Decodes the body of [`super::frame::Kind::Phase`]: a phase, and for the last one the costs of the run.
pub fn decode_phase(body: &[u8]) -> Result<(Phase, Costs), MessageError> {
    let none = || MessageError("no such phase".into());
    let (byte, costs) = body.split_first().ok_or_else(none)?;
    let phase = Phase::ALL.get(usize::from(*byte)).copied().ok_or_else(none)?;
    match (phase, costs) {
        (_, []) => Ok((phase, Costs::default())),
        (Phase::Done, costs) => Ok((phase, decode(costs)?)),
        _ => wrong(format!("{} bytes after phase {phase}", costs.len())),
    }
}

/// Encodes the body of [`super::frame::Kind::Run`].
pub fn encode_run(problem: &Problem, inputs: &Inputs) -> Vec<u8> {
    let mut body = Body::new(problem);
    body.array(inputs.q.view());
    body.array(inputs.k.view());
    body.array(inputs.v.view());
    body.array(inputs.dout.view());
    body.array(inputs.sink.view());
    for scales in Scales::TENSORS.into_iter().filter_map(|tensor| inputs.scales.of(tensor)) {
        body.array(scales.descale().view());
    }
    for quantity in given(problem) {
        body.array(ndarray::arr1(&[inputs.scales.own.of(quantity)]).view());
    }
    body.0
}

/// Returns the quantities whose descales a problem gives to whoever quantises them.
fn given(problem: &Problem) -> impl Iterator<Item = Quantity> {
    Quantity::ALL.into_iter().filter(|quantity| quantity.is_given(&problem.precision))
}

/// Encodes a request of another kind than a run: a head alone.
pub fn encode_question<T: Serialize>(question: &T) -> Vec<u8> {
    Body::new(question).0
}

/// Decodes an answer of another kind than outputs: its head, and the bytes that follow.
pub fn decode_answer<T: DeserializeOwned>(body: &[u8]) -> Result<(T, &[u8]), MessageError> {
    let (head, Tensors(bytes)) = split(body)?;
    Ok((head, bytes))
}

/// Decodes the body of [`super::frame::Kind::Run`]: a valid problem, and inputs of its shapes.
pub fn decode_run(body: &[u8]) -> Result<(Problem, Inputs), MessageError> {
    let (problem, mut tensors) = split::<Problem>(body)?;
    let dout = match problem.pass {
        Pass::Forward => [0, problem.heads.q, problem.dims.v],
        Pass::Backward => problem.out_shape(),
    };
    let mut inputs = Inputs {
        q: tensors.array(problem.q_shape())?,
        k: tensors.array(problem.k_shape())?,
        v: tensors.array(problem.v_shape())?,
        dout: tensors.array(dout)?,
        sink: tensors.array([problem.learnable_sinks()])?,
        scales: Scales::default(),
    };
    let Scales { q, k, v, dout, own } = &mut inputs.scales;
    for (tensor, scales) in Scales::TENSORS.into_iter().zip([q, k, v, dout]) {
        let element = problem.precision.of(tensor);
        if element.is_scaled() {
            let descale = tensors.array(Groups::new(&problem, tensor, element.scaling).shape())?;
            *scales = Some(TensorScales::new(&problem, tensor, |place| descale[place]));
        }
    }
    for quantity in given(&problem) {
        let descale = tensors.array([1])?;
        *own = own.with(&problem.precision, quantity, descale[0]);
    }
    tensors.end()?;
    Ok((problem, inputs))
}

/// Returns the amaxes that a rank tells.
fn told(amax: &Amaxes) -> impl Iterator<Item = (Quantity, f32)> {
    Quantity::ALL.into_iter().filter_map(|quantity| Some((quantity, amax.of(quantity)?)))
}

/// Shapes of one rank's results.
#[derive(Serialize, Deserialize)]
struct RankShapes {
    out: [usize; 3],
    lse: Option<[usize; 2]>,
    max_logit: Option<[usize; 1]>,
    gradients: Option<GradientShapes>,
    /// Quantities whose amaxes come behind the tensors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    amax: Vec<Quantity>,
}

#[derive(Serialize, Deserialize)]
struct GradientShapes {
    dq: [usize; 3],
    dk: [usize; 3],
    dv: [usize; 3],
    dsink: [usize; 1],
}

#[derive(Serialize, Deserialize)]
struct OutputsHead {
    ranks: Vec<RankShapes>,
    damage: Vec<DamageHead>,
}

/// Something that was overwritten: an input, or a guard band.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum DamageHead {
    Input(ChangedInput),
    Band(Damage),
}

/// Encodes the body of [`super::frame::Kind::Outputs`].
pub fn encode_outputs(outputs: &Outputs) -> Vec<u8> {
    let shapes = |rank: &RankOutputs| RankShapes {
        out: rank.out.dim().into(),
        lse: rank.lse.as_ref().map(|lse| lse.dim().into()),
        max_logit: rank.max_logit.as_ref().map(|max| [max.len()]),
        gradients: rank.gradients.as_ref().map(|of| GradientShapes {
            dq: of.dq.dim().into(),
            dk: of.dk.dim().into(),
            dv: of.dv.dim().into(),
            dsink: [of.dsink.len()],
        }),
        amax: told(&rank.amax).map(|(quantity, _)| quantity).collect(),
    };
    let ranks = outputs.ranks.iter().map(shapes).collect();
    let inputs = outputs.changed.iter().cloned().map(DamageHead::Input);
    let bands = outputs.damage.iter().cloned().map(DamageHead::Band);
    let damage = bands.chain(inputs).collect();
    let mut body = Body::new(&OutputsHead { ranks, damage });
    for rank in &outputs.ranks {
        body.array(rank.out.view());
        rank.lse.iter().for_each(|lse| body.array(lse.view()));
        rank.max_logit.iter().for_each(|max| body.array(max.view()));
        if let Some(of) = &rank.gradients {
            body.array(of.dq.view());
            body.array(of.dk.view());
            body.array(of.dv.view());
            body.array(of.dsink.view());
        }
        let amax: Vec<f32> = told(&rank.amax).map(|(_, amax)| amax).collect();
        body.array(ndarray::aview1(&amax));
    }
    body.0
}

/// Decodes the body of [`super::frame::Kind::Outputs`]. The shapes may be any that the bytes fill exactly. The judge
/// decides whether they are right.
pub fn decode_outputs(body: &[u8]) -> Result<Outputs, MessageError> {
    let (head, mut tensors) = split::<OutputsHead>(body)?;
    if head.ranks.len() > WORLD_MAX {
        return wrong(format!("{} ranks; at most {WORLD_MAX} are taken", head.ranks.len()));
    }
    let ranks = head.ranks.iter().map(|shapes| tensors.rank(shapes)).collect::<Result<_, _>>()?;
    tensors.end()?;
    let (mut damage, mut changed) = (Vec::new(), Vec::new());
    for overwritten in head.damage {
        match overwritten {
            DamageHead::Input(input) => changed.push(of_an_input(input)?),
            DamageHead::Band(band) => damage.push(band),
        }
    }
    Ok(Outputs { ranks, damage, changed, costs: Costs::default() })
}

/// Returns what is said of a changed input, if the tensor is one and the place may be in it.
fn of_an_input(changed: ChangedInput) -> Result<ChangedInput, MessageError> {
    let ChangedInput { tensor, ref first, elements } = changed;
    let dimensions = match tensor {
        TensorName::Q | TensorName::K | TensorName::V | TensorName::Dout => 3,
        TensorName::Sink => 1,
        _ => return wrong(format!("{tensor} is no input that could have been changed")),
    };
    if first.len() != dimensions {
        return wrong(format!("the place {first:?} in the input {tensor}; it takes {dimensions} numbers"));
    }
    if elements == 0 {
        return wrong(format!("the input {tensor} with 0 changed elements"));
    }
    Ok(changed)
}

/// Reason why a run gave no outputs, as a worker reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NoOutputs {
    /// A refusal of the problem. The worker continues.
    Refused(Refused),
    /// An error that the subject raised, and that leaves its process sound. The worker continues.
    Raised(String),
    /// A failure of the subject, from a driver's error or its own. The worker ends.
    Crash(String),
    /// A subject that ran out of memory. The worker ends.
    OutOfMemory(String),
    /// A failure of the worker, not of the subject. The worker continues.
    Infrastructure(String),
}

impl From<RunError> for NoOutputs {
    fn from(error: RunError) -> NoOutputs {
        match error {
            RunError::Refused(refusal) => NoOutputs::Refused(Refused::Refusal(refusal)),
            RunError::RefusedByName(row) => NoOutputs::Refused(Refused::Row(row)),
            RunError::Crash(what) => NoOutputs::Crash(what),
            RunError::OutOfMemory(what) => NoOutputs::OutOfMemory(what),
            RunError::Infrastructure(what) => NoOutputs::Infrastructure(what),
            // Only a supervisor has these errors.
            RunError::Ended(ended) => NoOutputs::Crash(ended.to_string()),
            RunError::Sentinel(what) => NoOutputs::Crash(what),
        }
    }
}

impl fmt::Display for NoOutputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoOutputs::Refused(refusal) => write!(f, "refused: {refusal}"),
            NoOutputs::OutOfMemory(what) => write!(f, "out of memory: {what}"),
            NoOutputs::Raised(what) | NoOutputs::Crash(what) | NoOutputs::Infrastructure(what) => {
                write!(f, "{what}")
            }
        }
    }
}

/// A refusal, as a worker reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Refused {
    /// The row of a table that says no.
    Refusal(Refusal),
    /// A reason that is no row of a table.
    Row(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Refusal(refusal) => write!(f, "{refusal}"),
            Refused::Row(row) => write!(f, "{row}"),
        }
    }
}

/// Decodes the body of [`super::frame::Kind::Failed`].
pub fn decode_failed(body: &[u8]) -> Result<NoOutputs, MessageError> {
    Ok(match decode(body)? {
        NoOutputs::Refused(Refused::Row(row)) => NoOutputs::Refused(Refused::Row(cut(row))),
        NoOutputs::Refused(refused) => NoOutputs::Refused(refused),
        NoOutputs::Raised(what) => NoOutputs::Raised(cut(what)),
        NoOutputs::Crash(what) => NoOutputs::Crash(cut(what)),
        NoOutputs::OutOfMemory(what) => NoOutputs::OutOfMemory(cut(what)),
        NoOutputs::Infrastructure(what) => NoOutputs::Infrastructure(cut(what)),
    })
}

impl NoOutputs {
    /// Whether the worker that reports this failure ends.
    pub fn ends_worker(&self) -> bool {
        matches!(self, NoOutputs::Crash(_) | NoOutputs::OutOfMemory(_))
    }
}

/// A body in the making.
struct Body(Vec<u8>);

impl Body {
    fn new<T: Serialize>(head: &T) -> Body {
        let head = encode(head);
        let mut body = (head.len() as u32).to_le_bytes().to_vec();
        body.extend(head);
        Body(body)
    }

    fn array<D: Dimension>(&mut self, array: ArrayView<'_, f32, D>) {
        let start = self.0.len();
        self.0.resize(start + 4 * array.len(), 0);
        let (places, _) = self.0[start..].as_chunks_mut::<4>();
        match array.as_slice() {
            // This is the common case, and compiles to a copy.
            Some(values) => fill(places, values),
            None => fill(places, &array),
        }
    }
}

fn fill<'a>(places: &mut [[u8; 4]], values: impl IntoIterator<Item = &'a f32>) {
    places.iter_mut().zip(values).for_each(|(place, value)| *place = value.to_le_bytes());
}

/// Returns the head of a body, and its tensors.
fn split<T: DeserializeOwned>(body: &[u8]) -> Result<(T, Tensors<'_>), MessageError> {
    let short = || MessageError("shorter than its head".into());
    let (length, rest) = body.split_first_chunk::<4>().ok_or_else(short)?;
    let (head, tensors) = rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(short)?;
    Ok((decode(head)?, Tensors(tensors)))
}

/// The tensors of a body that are left to read.
struct Tensors<'a>(&'a [u8]);

impl Tensors<'_> {
    fn array<S: IntoDimension + AsRef<[usize]>>(
        &mut self,
        shape: S,
    ) -> Result<Array<f32, S::Dim>, MessageError> {
        let bytes = shape.as_ref().iter().try_fold(4_usize, |bytes, axis| bytes.checked_mul(*axis));
        let Some((mine, rest)) = bytes.and_then(|bytes| self.0.split_at_checked(bytes)) else {
            return wrong(format!("a tensor of shape {:?} in {} bytes", shape.as_ref(), self.0.len()));
        };
        self.0 = rest;
        let (elements, _) = mine.as_chunks::<4>();
        let values = elements.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Array::from_shape_vec(shape.into_dimension(), values).map_err(|error| MessageError(error.to_string()))
    }

    fn rank(&mut self, shapes: &RankShapes) -> Result<RankOutputs, MessageError> {
        let out: Array3<f32> = self.array(shapes.out)?;
        let lse: Option<Array2<f32>> = shapes.lse.map(|shape| self.array(shape)).transpose()?;
        let max_logit: Option<Array1<f32>> = shapes.max_logit.map(|shape| self.array(shape)).transpose()?;
        let gradients = shapes.gradients.as_ref().map(|of| {
            Ok(RankGradients {
                dq: self.array(of.dq)?,
                dk: self.array(of.dk)?,
                dv: self.array(of.dv)?,
                dsink: self.array(of.dsink)?,
            })
        });
        let gradients = gradients.transpose()?;
        let told: Array1<f32> = self.array([shapes.amax.len()])?;
        let of = |quantity| {
            let place = shapes.amax.iter().position(|told| *told == quantity)?;
            Some(told[place])
        };
        Ok(RankOutputs { out, lse, max_logit, gradients, amax: Amaxes::new(of) })
    }

    fn end(&self) -> Result<(), MessageError> {
        if self.0.is_empty() { Ok(()) } else { wrong(format!("{} bytes too many", self.0.len())) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use seamproof_judge::generate::{self, Draw, Limits};
    use seamproof_judge::subject::Backend;
    use seamproof_judge::subjects::Emulated;
    use seamproof_judge::values;
    use seamproof_oracle::TensorName;

    fn drawn() -> impl Iterator<Item = Problem> {
        (0..200).filter_map(|index| match generate::draw(3, index, &Limits::seams()) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        })
    }

    fn bits<'a>(values: impl IntoIterator<Item = &'a f32>) -> Vec<u32> {
        values.into_iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn requests_and_results_arrive_bit_for_bit() {
        let mut refused = 0;
        for problem in drawn() {
            let mut inputs = values::inputs(&problem);
            values::poison(&mut inputs, &problem, values::Poison::Nan);
            let (there, got) = decode_run(&encode_run(&problem, &inputs)).expect("it is read");
            assert_eq!(there, problem);
            assert_eq!(bits(&got.q), bits(&inputs.q));
            assert_eq!(bits(&got.dout), bits(&inputs.dout));
            match Emulated::default().run(&problem, &inputs) {
                Ok(outputs) => {
                    let body = encode_outputs(&outputs);
                    let got = decode_outputs(&body).expect("it is read");
                    assert_eq!(got.ranks.len(), outputs.ranks.len());
                    assert_eq!(encode_outputs(&got), body);
                }
                Err(RunError::Refused(refusal)) => {
                    refused += 1;
                    let failure = NoOutputs::Refused(Refused::Refusal(refusal));
                    assert_eq!(decode(&encode(&failure)), Ok(failure));
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert!(refused > 0);
    }

    #[test]
    fn what_was_overwritten_arrives() {
        let problem = drawn().find(|problem| problem.tokens() > 8).expect("one of them");
        let mut outputs = Emulated::default().run(&problem, &values::inputs(&problem)).expect("it runs");
        let band = Damage {
            tensor: "out".into(),
            guard: seamproof_simulator::Guard::Before,
            distance: 3,
            elements: 2,
        };
        let input = ChangedInput { tensor: TensorName::V, first: vec![4, 0, 1], elements: 7 };
        outputs.damage.push(band.clone());
        outputs.changed.push(input.clone());
        let body = encode_outputs(&outputs);
        let told = r#""damage":[{"tensor":"out","before":true,"distance":3,"elements":2},{"tensor":"v","first":[4,0,1],"elements":7}]"#;
        assert!(String::from_utf8_lossy(&body).contains(told));
        let got = decode_outputs(&body).expect("it is read");
        assert_eq!((got.damage, got.changed), (vec![band], vec![input.clone()]));
        for (tensor, first, elements) in [
            (TensorName::Out, vec![4, 0, 1], 7),
            (TensorName::V, vec![4, 0], 7),
            (TensorName::Sink, vec![4, 0, 1], 7),
            (TensorName::V, vec![4, 0, 1], 0),
        ] {
            outputs.changed = vec![ChangedInput { tensor, first, elements }];
            assert!(decode_outputs(&encode_outputs(&outputs)).is_err(), "{:?}", outputs.changed);
        }
    }

    proptest! {
        #[test]
        fn noise_is_decoded_without_a_panic(
            length in 0..64_u32,
            noise in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let body = [&length.to_le_bytes()[..], &noise].concat();
            for bytes in [&body[..], &noise] {
                prop_assert!(decode_run(bytes).is_err());
                let _ = (decode_outputs(bytes), decode_failed(bytes), decode_phase(bytes), decode_ready(bytes));
            }
        }

        /// Test that a whole message with some bytes changed, cut or added never causes a panic, and never gives more
        /// elements than bytes.
        #[test]
        fn a_changed_message_is_decoded_without_a_panic(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            kept in 0..4000_usize,
        ) {
            let problem = drawn().find(|problem| problem.tokens() > 8).expect("one of them");
            let inputs = values::inputs(&problem);
            let outputs = Emulated::default().run(&problem, &inputs).expect("it runs");
            for mut body in [encode_run(&problem, &inputs), encode_outputs(&outputs)] {
                changes.iter().for_each(|(at, byte)| { let at = at.index(body.len()); body[at] = *byte; });
                body.truncate(kept.max(8));
                let elements = |got: &Outputs| got.ranks.iter().map(|rank| rank.out.len()).sum::<usize>();
                if let Ok(got) = decode_outputs(&body) {
                    prop_assert!(4 * elements(&got) <= body.len());
                }
                let _ = decode_run(&body);
            }
        }
    }

    #[test]
    fn texts_from_a_worker_are_cut() {
        let long = "é".repeat(TEXT_MAX);
        for failure in [NoOutputs::Raised(long.clone()), NoOutputs::Refused(Refused::Row(long.clone()))] {
            let text = decode_failed(&encode(&failure)).expect("a failure").to_string();
            assert!(text.len() < TEXT_MAX + 20 && text.ends_with('…'), "{} bytes", text.len());
        }
        let versions = (0..2 * VERSIONS_MAX).map(|index| (format!("{index}{long}"), long.clone())).collect();
        let ready =
            decode_ready(&encode(&Ready { devices: 1, versions, ..Ready::default() })).expect("it is ready");
        assert_eq!(ready.versions.len(), VERSIONS_MAX);
        assert!(ready.versions.iter().all(|(name, version)| name.len().max(version.len()) <= TEXT_MAX + 3));
    }

    #[test]
    fn only_the_last_phase_brings_costs() {
        let costs = Costs { peak_bytes: Some(7), ..Costs::default() };
        assert_eq!(decode_phase(b"\x04{\"peak_bytes\": 7}"), Ok((Phase::Done, costs)));
        assert_eq!(decode_phase(&[4]), Ok((Phase::Done, Costs::default())));
        for wrong in
            [&b""[..], b"\x05", b"\x03{}", b"\x04{\"peak_bytes\": -1}", b"\x04{\"bytes\": 1}", b"\x04x"]
        {
            assert!(decode_phase(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_shape_that_its_bytes_do_not_fill_is_refused() {
        let shapes = |out: [usize; 3]| {
            let ranks =
                vec![RankShapes { out, lse: None, max_logit: None, gradients: None, amax: Vec::new() }];
            decode_outputs(&Body::new(&OutputsHead { ranks, damage: Vec::new() }).0)
        };
        assert!(shapes([0, 1, 1]).is_ok());
        for huge in [[usize::MAX; 3], [1 << 40, 1, 1], [0, usize::MAX, usize::MAX], [1, 1, 1]] {
            assert!(shapes(huge).is_err(), "{huge:?}");
        }
    }
}
