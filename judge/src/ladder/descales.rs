//! Mistakes with the descales of inputs, and with the format of their codes: a descale that is left out, or that of
//! another place. Each is an edit of the inputs, and the hypotheses of both passes ask the oracle what it gives.

use ndarray::{Array2, Array3};
use seamproof_oracle::{
    Format, Inputs, Precision, Problem, ProblemFields, Scales, Scaling, TensorName, TensorScales,
};

/// Largest number of these mistakes that are told at once. Where more give the same results, the case is too small to
/// tell them apart.
const TOLD_MAX: usize = 3;

/// A mistake with a descale: what stands in its place.
struct Edit {
    words: fn(&str, bool) -> String,
    /// Function that returns what stands in the place of a descale.
    descale: fn(&TensorScales, [usize; 3]) -> f32,
}

/// Mistakes with single descales, the more frequent ones first.
const EDITS: [Edit; 6] = [
    Edit {
        words: |of, is_one| format!("the {} of {of} {} ignored", noun(is_one), were(is_one)),
        descale: |_, _| 1.0,
    },
    Edit {
        words: |of, is_one| format!("the {} of {of} {} applied twice", noun(is_one), were(is_one)),
        descale: |own, at| own.descale()[at] * own.descale()[at],
    },
    Edit {
        words: |of, is_one| {
            format!("the {} of {of} {} inverted (1/δ in place of δ)", noun(is_one), were(is_one))
        },
        descale: |own, at| 1.0 / own.descale()[at],
    },
    Edit {
        words: |of, is_one| format!("the {} of {of} in sequence 0 stood for every sequence", noun(is_one)),
        descale: |own, [rows, head, lanes]| {
            let rows = if own.groups().are_of_rows() { rows } else { 0 };
            own.descale()[[rows, head, lanes]]
        },
    },
    Edit {
        words: |of, is_one| format!("the {} of {of} in head 0 stood for every head", noun(is_one)),
        descale: |own, [rows, _, lanes]| own.descale()[[rows, 0, lanes]],
    },
    Edit {
        words: |of, _| format!("codes of {of} were read as those of its fnuz format, which are half of them"),
        descale: |own, at| 0.5 * own.descale()[at],
    },
];

fn noun(is_one: bool) -> &'static str {
    if is_one { "descale" } else { "descales" }
}

fn were(is_one: bool) -> &'static str {
    if is_one { "was" } else { "were" }
}

/// Tensors that share a mistake, the smallest sets first.
const SETS: [&[TensorName]; 6] = [
    &[TensorName::Q],
    &[TensorName::K],
    &[TensorName::V],
    &[TensorName::Dout],
    &[TensorName::K, TensorName::V],
    &[TensorName::Q, TensorName::K, TensorName::V],
];

/// Tensors whose descales are exchanged.
const EXCHANGES: [[TensorName; 2]; 3] =
    [[TensorName::K, TensorName::V], [TensorName::V, TensorName::Dout], [TensorName::Q, TensorName::K]];

/// A mistake of one call, which asks for this problem with these inputs.
pub(super) struct Mistake {
    pub(super) words: String,
    /// The tensors that it is about.
    pub(super) tensors: &'static [TensorName],
    pub(super) problem: Problem,
    pub(super) inputs: Inputs,
    /// The factor by which the descale of v is off for each sequence and query head, where query heads of a group have
    /// different ones.
    pub(super) of_v: Option<Array2<f64>>,
}

/// Function that returns the mistakes of a kind that change something.
type Kind = fn(&Problem, &Inputs) -> Vec<Mistake>;

/// The kinds of mistakes, the more frequent ones first.
const KINDS: [Kind; 9] = [
    |problem, inputs| edited(problem, inputs, &EDITS[0]),
    |problem, inputs| edited(problem, inputs, &EDITS[1]),
    exchanged,
    |problem, inputs| edited(problem, inputs, &EDITS[2]),
    |problem, inputs| edited(problem, inputs, &EDITS[3]),
    |problem, inputs| edited(problem, inputs, &EDITS[4]),
    of_query_heads,
    read_as_the_other,
    |problem, inputs| edited(problem, inputs, &EDITS[5]),
];

/// Returns in words the mistakes that explain something: of each kind all tensors that do alone, or the first set that
/// does. `explains` says whether a mistake does.
pub(super) fn told(problem: &Problem, inputs: &Inputs, explains: impl Fn(&Mistake) -> bool) -> Vec<String> {
    let of_kind = |kind: &Kind| {
        let (single, sets): (Vec<Mistake>, Vec<Mistake>) =
            kind(problem, inputs).into_iter().partition(|mistake| mistake.tensors.len() == 1);
        let mut told: Vec<Mistake> = single.into_iter().filter(&explains).collect();
        if told.is_empty() {
            told.extend(sets.into_iter().find(&explains));
        }
        told.into_iter().map(|mistake| mistake.words)
    };
    KINDS.iter().flat_map(of_kind).take(TOLD_MAX).collect()
}

/// Returns the mistake in the descales of each set of tensors that have some, where it changes them all.
fn edited(problem: &Problem, inputs: &Inputs, edit: &Edit) -> Vec<Mistake> {
    let of_set = |tensors: &&'static [TensorName]| {
        let mut scales = inputs.scales.clone();
        for tensor in *tensors {
            let own = inputs.scales.of(*tensor)?;
            let of = |(rows, head, lanes)| (edit.descale)(own, [rows, head, lanes]);
            let edited = TensorScales::new(problem, *tensor, of);
            if edited == *own {
                return None;
            }
            scales = scales.with(*tensor, edited);
        }
        let words = (edit.words)(&names(tensors), tensors.len() == 1);
        Some(with_scales(problem, inputs, words, tensors, scales))
    };
    SETS.iter().filter_map(of_set).collect()
}

/// Returns names as in `q, k and v`.
fn names(tensors: &[TensorName]) -> String {
    let names: Vec<String> = tensors.iter().map(TensorName::to_string).collect();
    match names.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => names.concat(),
    }
}

fn with_scales(
    problem: &Problem,
    inputs: &Inputs,
    words: String,
    tensors: &'static [TensorName],
    scales: Scales,
) -> Mistake {
    let inputs = Inputs { scales, ..inputs.clone() };
    Mistake { words, tensors, problem: problem.clone(), inputs, of_v: None }
}

/// Returns the exchanges of the descales of two tensors. Those of other shapes cannot be exchanged.
fn exchanged(problem: &Problem, inputs: &Inputs) -> Vec<Mistake> {
    let exchange = |pair: &'static [TensorName; 2]| {
        let (a, b) = (inputs.scales.of(pair[0])?, inputs.scales.of(pair[1])?);
        if a.groups().shape() != b.groups().shape() || a.descale() == b.descale() {
            return None;
        }
        let of = |tensor, other: &TensorScales| TensorScales::new(problem, tensor, |at| other.descale()[at]);
        let scales = inputs.scales.clone().with(pair[0], of(pair[0], b)).with(pair[1], of(pair[1], a));
        let words = format!("the descales of {} were exchanged", names(pair));
        Some(with_scales(problem, inputs, words, pair, scales))
    };
    EXCHANGES.iter().filter_map(exchange).collect()
}

/// The numbers of a query head: of itself, of its sequence, and of the KV heads.
#[derive(Clone, Copy)]
struct Counted {
    head: usize,
    sequence: usize,
    kv_heads: usize,
}

/// A number that stands in the place of a group's: in words, and the place of the scale that it leads to.
type Miscounted = (&'static str, fn(Counted) -> [usize; 2]);

const MISCOUNTED: [Miscounted; 2] = [
    ("query head h had the descale at h mod the number of KV heads, not at its group", |of| {
        [of.sequence, of.head % of.kv_heads]
    }),
    ("query head h had the descale at h, not at its group", |of| {
        let place = of.sequence * of.kv_heads + of.head;
        [place / of.kv_heads, place % of.kv_heads]
    }),
];

/// Tensors whose descales are looked up by one number.
const OF_QUERY_HEADS: [&[TensorName]; 2] = [&[TensorName::Q], &[TensorName::Q, TensorName::K, TensorName::V]];

/// Returns the mistakes of descales that are looked up by the number of a query head in place of its group's. Each query
/// head then has its own, as one of q, and what that of v is off by.
fn of_query_heads(problem: &Problem, inputs: &Inputs) -> Vec<Mistake> {
    let is_asked = problem.precision.q.scaling == Scaling::PerSequenceGroup && problem.group() > 1;
    if !is_asked {
        return Vec::new();
    }
    let sets = OF_QUERY_HEADS.into_iter();
    sets.flat_map(|set| MISCOUNTED.into_iter().filter_map(move |of| miscounted(problem, inputs, of, set)))
        .collect()
}

/// Returns the mistake of one such number; `None` where it leads past the last descale.
fn miscounted(
    problem: &Problem,
    inputs: &Inputs,
    (words, place): Miscounted,
    tensors: &'static [TensorName],
) -> Option<Mistake> {
    let kv_heads = problem.heads.kv;
    let read = |tensor: TensorName, sequence: usize, head: usize| {
        let [rows, at] = place(Counted { head, sequence, kv_heads });
        Some(f64::from(*inputs.scales.of(tensor)?.descale().get([rows, at, 0])?))
    };
    // The factor by which what is read is off.
    let off = |tensor: TensorName, sequence: usize, head: usize| {
        let own = inputs.scales.of(tensor)?.descale().get([sequence, head / problem.group(), 0])?;
        let is_wrong = tensors.contains(&tensor);
        if is_wrong { Some(read(tensor, sequence, head)? / f64::from(*own)) } else { Some(1.0) }
    };
    let of_q = |sequence: usize, head: usize| {
        let own = inputs.scales.of(TensorName::Q)?.descale()[[sequence, head / problem.group(), 0]];
        Some(f64::from(own) * off(TensorName::Q, sequence, head)? * off(TensorName::K, sequence, head)?)
    };
    let all = |of: &dyn Fn(usize, usize) -> Option<f64>| {
        let places = (0..problem.sequences.len()).flat_map(|s| (0..problem.heads.q).map(move |h| (s, h)));
        let all = places.map(|(s, h)| of(s, h)).collect::<Option<Vec<f64>>>()?;
        Array2::from_shape_vec([problem.sequences.len(), problem.heads.q], all).ok()
    };
    let (of_q, of_v) = (all(&of_q)?, all(&|s, h| off(TensorName::V, s, h))?);
    let mut fields = ProblemFields::from(problem.clone());
    fields.precision.q.scaling = Scaling::PerSequenceHead;
    let problem = Problem::new(fields).ok()?;
    let q = TensorScales::new(&problem, TensorName::Q, |(s, h, _)| of_q[[s, h]] as f32);
    let words = format!("for {} {words}", names(tensors));
    let scales = inputs.scales.clone().with(TensorName::Q, q);
    Some(Mistake { of_v: Some(of_v), ..with_scales(&problem, inputs, words, tensors, scales) })
}

/// Returns the readings of codes in the other 8-bit format, where every code of a tensor has a number there.
fn read_as_the_other(problem: &Problem, inputs: &Inputs) -> Vec<Mistake> {
    let of_set = |tensors: &&'static [TensorName]| {
        let own = problem.precision.of(tensors[0]).format;
        let other = other_8_bits(own)?;
        let (mut fields, mut inputs) = (ProblemFields::from(problem.clone()), inputs.clone());
        for tensor in *tensors {
            let is_of_it = problem.precision.of(*tensor).format == own;
            let (format, codes) = stored(&mut fields.precision, &mut inputs, *tensor).filter(|_| is_of_it)?;
            *format = other;
            codes.mapv_inplace(|code| other.decode(own.encode(f64::from(code))) as f32);
            if codes.iter().any(|code| !code.is_finite()) {
                return None;
            }
        }
        let words = format!("{own} codes of {} were read as {other}", names(tensors));
        Some(Mistake { words, tensors, problem: Problem::new(fields).ok()?, inputs, of_v: None })
    };
    SETS.iter().filter_map(of_set).collect()
}

fn other_8_bits(format: Format) -> Option<Format> {
    match format {
        Format::E4m3 => Some(Format::E5m2),
        Format::E5m2 => Some(Format::E4m3),
        _ => None,
    }
}

/// Returns the format and the codes of an input with rows.
fn stored<'a>(
    precision: &'a mut Precision,
    inputs: &'a mut Inputs,
    tensor: TensorName,
) -> Option<(&'a mut Format, &'a mut Array3<f32>)> {
    match tensor {
        TensorName::Q => Some((&mut precision.q.format, &mut inputs.q)),
        TensorName::K => Some((&mut precision.k.format, &mut inputs.k)),
        TensorName::V => Some((&mut precision.v.format, &mut inputs.v)),
        TensorName::Dout => Some((&mut precision.dout.format, &mut inputs.dout)),
        _ => None,
    }
}
