//! A rank file: the tensors of one rank in its own layout, as a safetensors file.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use ndarray::{Array, Array1, Array2, Array3, ArrayView, Dimension, IntoDimension};
use safetensors::tensor::{Metadata, TensorView};
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use seamproof_judge::subject::{RankGradients, RankOutputs};
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::sharding::RankLayout;
use seamproof_oracle::{Format, Inputs, Pass, Problem, ProblemFields, Scales, Side, Sink};

use super::error::quoted;
use super::manifest::{LseBase, LseOrder, Manifest, Placement};
use super::{
    Fault, HEADER_BYTES_MAX, RECORDING_VERSION, RankTables, RecordingError, Share, SideTable, TEXT_MAX,
};

/// Number of bytes before the header, which hold its size.
const SIZE: usize = 8;
/// Beginning of every key of the metadata that this format defines.
const KEY: &str = "seamproof.";
/// Beginnings of names of tensors that anybody may add; they are not read.
const FREE: [&str; 2] = ["x.", "amax."];
/// Names of the four tables.
const TABLES: [&str; 4] = ["q.sequence", "q.position", "kv.sequence", "kv.position"];

/// The tensors of one rank.
#[derive(Clone, Debug)]
pub struct RankFile {
    /// Inputs in the rank's layout, padding rows and slack included.
    pub inputs: Inputs,
    /// Results in the rank's layout, with the LSE as a natural logarithm `[heads, rows]`.
    pub outputs: RankOutputs,
    /// Places of the rows.
    pub tables: Option<RankTables>,
    /// Step of the training.
    pub step: String,
    /// Layer of the model.
    pub layer: String,
}

/// Place of a rank file in its recording.
#[derive(Clone, Copy, Debug)]
pub struct RankPlace<'a> {
    /// The manifest.
    pub manifest: &'a Manifest,
    /// Problem of the manifest.
    pub problem: &'a Problem,
    /// Rank of the group, or of all its regions.
    pub rank: usize,
    /// Layout that the rule of placement gives the rank; `None` where tables do.
    pub layout: Option<&'a RankLayout>,
    /// Heads that are kept.
    pub share: Share,
}

struct Reader<'a> {
    path: &'a Path,
    place: RankPlace<'a>,
    metadata: HashMap<String, String>,
    tensors: SafeTensors<'a>,
}

impl<'a> Reader<'a> {
    fn new(path: &'a Path, bytes: &'a [u8], place: RankPlace<'a>) -> Result<Reader<'a>, RecordingError> {
        let wrong = |what: String| RecordingError::field(path, "header", Fault::Header(quoted(what)));
        let header = header(bytes).map_err(wrong)?;
        let of_crate = |error: SafeTensorError| wrong(error.to_string());
        let tensors = SafeTensors::deserialize(bytes).map_err(of_crate)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        Ok(Reader { path, place, metadata, tensors })
    }

    fn error(&self, field: impl ToString, fault: Fault) -> RecordingError {
        RecordingError::field(self.path, field, fault)
    }

    /// Checks the metadata against the manifest, and returns step and layer.
    fn check_metadata(&self) -> Result<[String; 2], RecordingError> {
        let RankPlace { manifest, rank, .. } = self.place;
        let world_rank = manifest.ranks.get(rank).map_or(0, |entry| entry.world_rank);
        self.key("recording", Some(&RECORDING_VERSION.to_string()))?;
        self.key("run", Some(&manifest.run))?;
        self.key("group_rank", Some(&rank.to_string()))?;
        self.key("group_size", Some(&manifest.ranks.len().to_string()))?;
        self.key("world_rank", Some(&world_rank.to_string()))?;
        Ok([self.key("step", None)?, self.key("layer", None)?])
    }

    /// Returns a value of the metadata, which must be the expected one where there is one.
    fn key(&self, name: &str, expected: Option<&str>) -> Result<String, RecordingError> {
        let key = format!("{KEY}{name}");
        let missing = || Fault::Missing("a recorder writes it into the metadata of every rank file");
        let got = self.metadata.get(&key).ok_or_else(|| self.error(&key, missing()))?;
        let length = got.chars().count();
        if length > TEXT_MAX {
            return Err(self.error(&key, Fault::Long { got: length, most: TEXT_MAX }));
        }
        match expected {
            Some(expected) if got != expected => Err(self.error(
                &key,
                Fault::Differs {
                    got: got.clone(),
                    whose: "recording.json says",
                    expected: expected.to_owned(),
                    advice: "the files are not of one run; record it again",
                },
            )),
            _ => Ok(got.clone()),
        }
    }

    /// Refuses tensors that the format does not know, or that this recording does not have.
    fn check_names(&self) -> Result<(), RecordingError> {
        let problem = self.place.problem;
        let backward = problem.pass == Pass::Backward;
        let learnable = problem.softmax.sink == Sink::Learnable;
        let mut names = self.tensors.names();
        names.sort_unstable();
        for name in names {
            let wrong = match name {
                "q" | "k" | "v" | "out" | "lse" | "max_logit" => None,
                "dout" | "dq" | "dk" | "dv" => (!backward).then_some("problem.pass is forward"),
                "sink" => (!learnable).then_some("problem.softmax.sink is not learnable"),
                "dsink" if !learnable => Some("problem.softmax.sink is not learnable"),
                "dsink" => (!backward).then_some("problem.pass is forward"),
                _ if TABLES.contains(&name) || FREE.iter().any(|free| name.starts_with(free)) => None,
                _ if name.starts_with("scale.") => Some("scales in recording.json is empty"),
                _ => Some("the format names no such tensor; names that begin with x. are free"),
            };
            if let Some(why) = wrong {
                return Err(self.error(name, Fault::Unexpected(why)));
            }
        }
        Ok(())
    }

    /// Returns the number of rows of q and of k. With tables, the tensors themselves say it.
    fn rows(&self) -> Result<[usize; 2], RecordingError> {
        if let Some(layout) = self.place.layout {
            return Ok([layout.q.rows, layout.kv.rows]);
        }
        let most = self.place.problem.rows;
        let of = |name: &str, most: usize| {
            let tensor = self.tensor(name)?.ok_or_else(|| self.missing(name))?;
            let got = tensor.shape().first().copied().unwrap_or_default();
            let expected = || format!("problem.rows says that all ranks together have {most}");
            if got > most {
                Err(self.error(name, Fault::Count { got, expected: expected() }))
            } else {
                Ok(got)
            }
        };
        Ok([of("q", most.q)?, of("k", most.kv)?])
    }

    fn tensor(&self, name: &str) -> Result<Option<TensorView<'a>>, RecordingError> {
        match self.tensors.tensor(name) {
            Ok(tensor) => Ok(Some(tensor)),
            Err(SafeTensorError::TensorNotFound(_)) => Ok(None),
            Err(error) => Err(self.error(name, Fault::Header(quoted(error)))),
        }
    }

    fn missing(&self, name: &str) -> RecordingError {
        self.error(name, Fault::Missing("the recording needs this tensor"))
    }

    fn required(
        &self,
        name: &str,
        format: Format,
        shape: [usize; 3],
        side: Side,
    ) -> Result<Array3<f32>, RecordingError> {
        self.optional(name, &[format], shape, (1, self.kept(side)))?.ok_or_else(|| self.missing(name))
    }

    /// Returns the kept heads of a tensor of one of these formats, widened to f32; `None` where there is none. The
    /// axis is that of the heads, of which these are kept.
    fn optional<S: IntoDimension>(
        &self,
        name: &str,
        formats: &[Format],
        shape: S,
        (axis, heads): (usize, Range<usize>),
    ) -> Result<Option<Array<f32, S::Dim>>, RecordingError> {
        let Some(tensor) = self.tensor(name)? else { return Ok(None) };
        let Some(format) = formats.iter().find(|format| dtype(**format) == Some(tensor.dtype())) else {
            let expected: Vec<_> = formats.iter().filter_map(|format| dtype(*format)).collect();
            let expected = expected.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
            return Err(self.error(name, Fault::Dtype { got: tensor.dtype().to_string(), expected }));
        };
        let mut shape = shape.into_dimension();
        self.check_shape(name, &tensor, shape.slice())?;
        let codes = of_heads(tensor.data(), shape.slice(), axis, &heads);
        shape[axis] = heads.len();
        self.shaped(name, shape, widened(*format, &codes)).map(Some)
    }

    fn check_shape(
        &self,
        name: &str,
        tensor: &TensorView<'_>,
        expected: &[usize],
    ) -> Result<(), RecordingError> {
        let (got, expected) = (tensor.shape().to_vec(), expected.to_vec());
        if got == expected { Ok(()) } else { Err(self.error(name, Fault::Shape { got, expected })) }
    }

    fn shaped<D: Dimension, T>(
        &self,
        name: &str,
        shape: D,
        elements: Vec<T>,
    ) -> Result<Array<T, D>, RecordingError> {
        let expected = shape.slice().to_vec();
        let got = vec![elements.len()];
        let differs = |_| self.error(name, Fault::Shape { got, expected });
        Array::from_shape_vec(shape, elements).map_err(differs)
    }

    /// Returns the kept heads of a side.
    fn kept(&self, side: Side) -> Range<usize> {
        self.place.share.heads(self.place.problem, side)
    }

    /// Returns the heads of the rank's statistics, and those of them that are kept, counted from the first.
    fn kept_statistics(&self) -> (usize, Range<usize>) {
        let (all, kept) = (self.place.problem.heads.q, self.kept(Side::Q));
        let own = self.place.layout.map_or(0..all, |layout| layout.statistics_heads(all));
        let inside = |head: usize| head.clamp(own.start, own.end) - own.start;
        (own.len(), inside(kept.start)..inside(kept.end))
    }

    fn inputs(&self, [q, kv]: [usize; 2]) -> Result<Inputs, RecordingError> {
        let ProblemFields { heads, dims, precision, pass, .. } = &**self.place.problem;
        Ok(Inputs {
            q: self.required("q", precision.q.format, [q, heads.q, dims.qk], Side::Q)?,
            k: self.required("k", precision.k.format, [kv, heads.kv, dims.qk], Side::Kv)?,
            v: self.required("v", precision.v.format, [kv, heads.kv, dims.v], Side::Kv)?,
            dout: match pass {
                Pass::Forward => Array3::zeros((0, self.kept(Side::Q).len(), dims.v)),
                Pass::Backward => {
                    self.required("dout", precision.dout.format, [q, heads.q, dims.v], Side::Q)?
                }
            },
            sink: self.sink()?,
            scales: Scales::default(),
        })
    }

    fn outputs(&self, rows: [usize; 2]) -> Result<RankOutputs, RecordingError> {
        let ProblemFields { heads, dims, precision, pass, .. } = &**self.place.problem;
        let (own, kept) = self.kept_statistics();
        Ok(RankOutputs {
            out: self.required("out", precision.out.format, [rows[0], heads.q, dims.v], Side::Q)?,
            lse: self.lse(rows[0])?,
            max_logit: self.optional("max_logit", &[Format::F32], [own], (0, kept))?,
            gradients: if *pass == Pass::Backward { Some(self.gradients(rows)?) } else { None },
            amax: Amaxes::default(),
        })
    }

    fn gradients(&self, [q, kv]: [usize; 2]) -> Result<RankGradients, RecordingError> {
        let (problem, format) = (self.place.problem, self.place.problem.precision.gradients.format);
        let (heads, dims) = (problem.heads, problem.dims);
        Ok(RankGradients {
            dq: self.required("dq", format, [q, heads.q, dims.qk], Side::Q)?,
            dk: self.required("dk", format, [kv, heads.kv, dims.qk], Side::Kv)?,
            dv: self.required("dv", format, [kv, heads.kv, dims.v], Side::Kv)?,
            dsink: match problem.learnable_sinks() {
                0 => Array1::zeros(0),
                sinks => self
                    .optional("dsink", &[Format::F32], [sinks], (0, self.kept(Side::Q)))?
                    .ok_or_else(|| self.missing("dsink"))?,
            },
        })
    }

    fn sink(&self) -> Result<Array1<f32>, RecordingError> {
        let problem = self.place.problem;
        match problem.learnable_sinks() {
            0 => Ok(Array1::zeros(0)),
            sinks => {
                let formats = [Format::F32, problem.precision.q.format];
                let kept = (0, self.kept(Side::Q));
                self.optional("sink", &formats, [sinks], kept)?.ok_or_else(|| self.missing("sink"))
            }
        }
    }

    /// Returns the LSE as a natural logarithm `[heads, rows]`.
    fn lse(&self, rows: usize) -> Result<Option<Array2<f32>>, RecordingError> {
        let (form, (heads, kept)) = (self.place.manifest.lse, self.kept_statistics());
        let rows = self.place.layout.map_or(rows, |layout| layout.statistics_rows().rows);
        let read: Option<Array2<f32>> = match form.order {
            LseOrder::Ht => self.optional("lse", &[Format::F32], [heads, rows], (0, kept))?,
            LseOrder::Th => self
                .optional("lse", &[Format::F32], [rows, heads], (1, kept))?
                .map(|lse: Array2<f32>| lse.reversed_axes().as_standard_layout().into_owned()),
        };
        Ok(match form.base {
            LseBase::E => read,
            LseBase::Two => read.map(|lse| lse.mapv(|lse| (f64::from(lse) * std::f64::consts::LN_2) as f32)),
        })
    }

    /// Returns the tables, which are all there or none.
    fn tables(&self, [q, kv]: [usize; 2]) -> Result<Option<RankTables>, RecordingError> {
        let needed = self.place.manifest.placement == Placement::Tables;
        let names = self.tensors.names();
        if !needed && !TABLES.iter().any(|table| names.contains(table)) {
            return Ok(None);
        }
        let [q_sequence, q_position, kv_sequence, kv_position] = TABLES;
        Ok(Some(RankTables {
            q: SideTable { sequence: self.table(q_sequence, q)?, position: self.table(q_position, q)? },
            kv: SideTable { sequence: self.table(kv_sequence, kv)?, position: self.table(kv_position, kv)? },
        }))
    }

    fn table(&self, name: &str, rows: usize) -> Result<Vec<i32>, RecordingError> {
        let missing =
            || self.error(name, Fault::Missing("write all four tables, or none with placement \"rule\""));
        let tensor = self.tensor(name)?.ok_or_else(missing)?;
        if tensor.dtype() != Dtype::I32 {
            let (got, expected) = (tensor.dtype().to_string(), Dtype::I32.to_string());
            return Err(self.error(name, Fault::Dtype { got, expected }));
        }
        let entries = words(tensor.data()).map(|word| i32::from_le_bytes(*word)).collect();
        self.check_shape(name, &tensor, &[rows])?;
        Ok(entries)
    }
}

/// Reads the header, and checks every size in it against the bytes that are there. The crate adds sizes up without a
/// check, so that is done before it sees them.
fn header(bytes: &[u8]) -> Result<Metadata, String> {
    let size = bytes.first_chunk::<SIZE>().ok_or("the file has fewer than 8 bytes")?;
    let size = u64::from_le_bytes(*size);
    if size > HEADER_BYTES_MAX {
        return Err(format!("a header of {size} bytes; at most {HEADER_BYTES_MAX} are read"));
    }
    let header = bytes.get(SIZE..SIZE + size as usize).ok_or("the file ends inside of the header")?;
    let header: Metadata = serde_json::from_slice(header).map_err(|error| error.to_string())?;
    let there = (bytes.len() - SIZE) as u64 - size;
    match header.data_len() as u64 {
        announced if announced == there => Ok(header),
        announced => Err(format!("it announces {announced} bytes of tensors, and {there} are there")),
    }
}

/// Returns the type of a format in a safetensors file; `None` for formats that are not read.
pub(super) fn dtype(format: Format) -> Option<Dtype> {
    match format {
        Format::F32 => Some(Dtype::F32),
        Format::Bf16 => Some(Dtype::BF16),
        Format::Fp16 => Some(Dtype::F16),
        Format::E4m3 | Format::E5m2 => None,
    }
}

/// Returns the codes of some heads of a tensor, whose heads lie along this axis.
fn of_heads<'a>(codes: &'a [u8], shape: &[usize], axis: usize, heads: &Range<usize>) -> Cow<'a, [u8]> {
    if *heads == (0..shape[axis]) {
        return codes.into();
    }
    let head = codes.len() / shape[..=axis].iter().product::<usize>().max(1);
    let rows = codes.chunks((shape[axis] * head).max(1));
    rows.flat_map(|row| &row[heads.start * head..heads.end * head]).copied().collect::<Vec<u8>>().into()
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = &[u8; N]> {
    bytes.as_chunks::<N>().0.iter()
}

/// Returns the numbers that little-endian codes stand for.
fn widened(format: Format, codes: &[u8]) -> Vec<f32> {
    match format {
        Format::F32 => words(codes).map(|code| f32::from_le_bytes(*code)).collect(),
        // A bf16 is the upper half of an f32.
        Format::Bf16 => {
            words(codes).map(|code| f32::from_bits(u32::from(u16::from_le_bytes(*code)) << 16)).collect()
        }
        _ => words(codes).map(|code| format.decode(u16::from_le_bytes(*code).into()) as f32).collect(),
    }
}

/// Returns the little-endian codes of numbers.
fn narrowed(format: Format, values: impl Iterator<Item = f32>) -> Vec<u8> {
    match format {
        Format::F32 => values.flat_map(f32::to_le_bytes).collect(),
        _ => values.flat_map(|value| (format.encode(value.into()) as u16).to_le_bytes()).collect(),
    }
}

/// A tensor that is to be written.
pub(super) struct Written {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    codes: Vec<u8>,
}

impl Written {
    fn new<D: Dimension>(name: &'static str, format: Format, array: ArrayView<'_, f32, D>) -> Written {
        Written {
            name,
            dtype: dtype(format).unwrap_or(Dtype::F32),
            shape: array.shape().to_vec(),
            codes: narrowed(format, array.iter().copied()),
        }
    }

    fn table(name: &'static str, entries: &[i32]) -> Written {
        let codes = entries.iter().copied().flat_map(i32::to_le_bytes).collect();
        Written { name, dtype: Dtype::I32, shape: vec![entries.len()], codes }
    }
}

impl RankFile {
    /// Reads a rank file from bytes. The path is for the error alone.
    pub fn parse(path: &Path, bytes: &[u8], place: RankPlace<'_>) -> Result<RankFile, RecordingError> {
        let reader = Reader::new(path, bytes, place)?;
        let [step, layer] = reader.check_metadata()?;
        reader.check_names()?;
        let rows = reader.rows()?;
        let (inputs, outputs) = (reader.inputs(rows)?, reader.outputs(rows)?);
        let tables = reader.tables(rows)?;
        if let Some(tables) = &tables {
            tables.check(path, place.problem)?;
        }
        Ok(RankFile { inputs, outputs, tables, step, layer })
    }

    /// Returns the file in bytes, for its place in a recording whose LSE is a natural logarithm `[heads, rows]`.
    pub fn to_bytes(&self, place: RankPlace<'_>) -> Result<Vec<u8>, SafeTensorError> {
        let tensors = self.tensors(place.problem);
        let views = tensors.iter().map(|tensor| {
            let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.codes)?;
            Ok((tensor.name, view))
        });
        let views = views.collect::<Result<Vec<_>, SafeTensorError>>()?;
        safetensors::serialize(views, Some(self.metadata(place)))
    }

    fn metadata(&self, RankPlace { manifest, rank, .. }: RankPlace<'_>) -> HashMap<String, String> {
        let world_rank = manifest.ranks.get(rank).map_or(0, |entry| entry.world_rank);
        let entries = [
            ("recording", RECORDING_VERSION.to_string()),
            ("run", manifest.run.clone()),
            ("group_rank", rank.to_string()),
            ("group_size", manifest.ranks.len().to_string()),
            ("world_rank", world_rank.to_string()),
            ("step", self.step.clone()),
            ("layer", self.layer.clone()),
        ];
        entries.into_iter().map(|(name, value)| (format!("{KEY}{name}"), value)).collect()
    }

    fn tensors(&self, problem: &Problem) -> Vec<Written> {
        let (precision, RankFile { inputs, outputs, .. }) = (problem.precision, self);
        let mut tensors = vec![
            Written::new("q", precision.q.format, inputs.q.view()),
            Written::new("k", precision.k.format, inputs.k.view()),
            Written::new("v", precision.v.format, inputs.v.view()),
            Written::new("out", precision.out.format, outputs.out.view()),
        ];
        tensors.extend(outputs.lse.iter().map(|lse| Written::new("lse", Format::F32, lse.view())));
        let max_logit = outputs.max_logit.iter();
        tensors.extend(max_logit.map(|max| Written::new("max_logit", Format::F32, max.view())));
        let learnable = problem.learnable_sinks() > 0;
        if learnable {
            tensors.push(Written::new("sink", Format::F32, inputs.sink.view()));
        }
        if let Some(gradients) = &outputs.gradients {
            let format = precision.gradients.format;
            tensors.extend([
                Written::new("dout", precision.dout.format, inputs.dout.view()),
                Written::new("dq", format, gradients.dq.view()),
                Written::new("dk", format, gradients.dk.view()),
                Written::new("dv", format, gradients.dv.view()),
            ]);
            if learnable {
                tensors.push(Written::new("dsink", Format::F32, gradients.dsink.view()));
            }
        }
        if let Some(RankTables { q, kv }) = &self.tables {
            let entries = [&q.sequence, &q.position, &kv.sequence, &kv.position];
            tensors.extend(TABLES.into_iter().zip(entries).map(|(name, table)| Written::table(name, table)));
        }
        tensors
    }
}
