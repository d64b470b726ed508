//! The descales of a place of a case: those of the codes that a row and head of a result is made of.

use std::fmt::Write;

use seamproof_judge::finding::Place;
use seamproof_judge::values;
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{Element, Inputs, Pass, Problem, Quantity, Scales, Side, TensorName};

/// Largest number of descales that are told of a tensor.
const DESCALES_SHOWN: usize = 4;
/// Largest number of codes of a tensor whose codes are told.
const CODES_SHOWN: usize = 8;

/// The descales of one quantity at a place, and its codes where it has few.
struct Descaled {
    name: String,
    element: Element,
    descales: Vec<f32>,
    codes: Vec<u32>,
}

/// Returns a table of the descales at a place of a result; nothing of a problem without descales.
pub fn descales(problem: &Problem, tensor: Option<TensorName>, place: &Place) -> String {
    let all = at(problem, tensor, place);
    if all.is_empty() {
        return String::new();
    }
    let [name, element] = [
        all.iter().map(|of| of.name.len()).max().unwrap_or(0),
        all.iter().map(|of| of.element.to_string().len()).max().unwrap_or(0),
    ];
    let (q, kv) = heads(problem, tensor, place);
    let sequence = place.sequence.unwrap_or(0);
    let mut text = format!(
        "descales  of sequence {sequence}, query head {q}, KV head {kv}; a value is its code times its descale\n"
    );
    for Descaled { name: of, element: codes_in, descales, codes } in all {
        let codes: Vec<String> = codes.iter().map(|code| format!("{code:#04x}")).collect();
        let told = if codes.is_empty() { String::new() } else { format!("; codes {}", codes.join(" ")) };
        let element_of = codes_in.to_string();
        let _ = writeln!(text, "          {of:name$}  {element_of:element$}  {}{told}", listed(&descales));
    }
    text
}

/// Returns the descales at a place of a result in a few words; `None` of a problem without descales.
pub(crate) fn descales_there(problem: &Problem, tensor: Option<TensorName>, place: &Place) -> Option<String> {
    let each: Vec<String> = at(problem, tensor, place)
        .iter()
        .map(|Descaled { name, descales, .. }| format!("{name} {}", listed(descales)))
        .collect();
    // A largest logit is of all sequences.
    let of = if place.sequence.is_none() { "of sequence 0" } else { "there" };
    (!each.is_empty()).then(|| format!("descales {of}: {}", each.join("; ")))
}

/// Returns numbers in words, the first ones of many.
fn listed(descales: &[f32]) -> String {
    let mut each: Vec<String> = descales.iter().take(DESCALES_SHOWN).map(f32::to_string).collect();
    each.extend((descales.len() > DESCALES_SHOWN).then(|| "…".to_owned()));
    each.join(", ")
}

/// Returns the query head of a place, the first of a KV head's, and the KV head.
fn heads(problem: &Problem, tensor: Option<TensorName>, place: &Place) -> (usize, usize) {
    let (head, group) = (place.head.unwrap_or(0), problem.group());
    if is_of_keys(tensor) { (head * group, head) } else { (head, head / group) }
}

fn is_of_keys(tensor: Option<TensorName>) -> bool {
    tensor.is_some_and(|tensor| tensor.side() == Side::Kv)
}

fn at(problem: &Problem, tensor: Option<TensorName>, place: &Place) -> Vec<Descaled> {
    let scales = values::scales(problem);
    let is_asked = |pass_is_forward: bool| pass_is_forward || problem.pass == Pass::Backward;
    let is_scaled = |input: &TensorName| scales.of(*input).is_some() && is_asked(*input != TensorName::Dout);
    let scaled: Vec<TensorName> = Scales::TENSORS.into_iter().filter(is_scaled).collect();
    let codes = |input: TensorName| problem.shape_of(input).iter().product::<usize>();
    let has_few = |input: &TensorName| codes(*input) <= CODES_SHOWN;
    let inputs = scaled.iter().any(has_few).then(|| values::inputs(problem));
    let of_inputs = scaled.iter().map(|input| Descaled {
        name: input.to_string(),
        element: problem.precision.of(*input),
        descales: of_input(problem, &scales, *input, (tensor, place)),
        codes: inputs.as_ref().filter(|_| has_few(input)).map_or(Vec::new(), |inputs| {
            let format = problem.precision.of(*input).format;
            codes_of(inputs, *input).map(|value| format.encode(f64::from(value))).collect()
        }),
    });
    let of_inputs: Vec<Descaled> = of_inputs.collect();
    let precision = &problem.precision;
    let is_given = |of: &Quantity| of.is_given(precision) && is_asked(of.is_forward());
    let own = Quantity::ALL.into_iter().filter(is_given).map(|of| Descaled {
        name: of.name().to_owned(),
        element: of.element(precision),
        descales: vec![scales.own.of(of)],
        codes: Vec::new(),
    });
    of_inputs.into_iter().chain(own).collect()
}

fn codes_of(inputs: &Inputs, input: TensorName) -> impl Iterator<Item = f32> {
    let tensor = match input {
        TensorName::K => &inputs.k,
        TensorName::V => &inputs.v,
        TensorName::Dout => &inputs.dout,
        _ => &inputs.q,
    };
    tensor.iter().copied()
}

/// Returns the descales of an input at a place, each once, and no more than are told: of the place's own row on its side,
/// and of all rows of the sequence on the other.
fn of_input(
    problem: &Problem,
    scales: &Scales,
    input: TensorName,
    (tensor, place): (Option<TensorName>, &Place),
) -> Vec<f32> {
    let index = place.sequence.unwrap_or(0);
    let (Some(scales), Some(sequence)) = (scales.of(input), problem.sequences.get(index)) else {
        return Vec::new();
    };
    let (q, kv) = heads(problem, tensor, place);
    let is_key = input.side() == Side::Kv;
    let head = if is_key { kv } else { q };
    let of_place = place.row.filter(|_| is_key == is_of_keys(tensor));
    let len = if scales.groups().are_of_rows() { run_of(sequence, input.side()).len } else { 1 };
    let rows = of_place.map_or(0..len, |row| row..row + 1);
    let lanes = if scales.groups().shape()[2] == 1 { 1 } else { problem.shape_of(input)[2] };
    let mut places: Vec<[usize; 3]> = Vec::new();
    for (row, lane) in rows.flat_map(|row| (0..lanes).map(move |lane| (row, lane))) {
        let at = scales.groups().of(index, row, head, lane);
        if !places.contains(&at) {
            places.push(at);
        }
        if places.len() > DESCALES_SHOWN {
            break;
        }
    }
    places.into_iter().filter_map(|at| scales.descale().get(at).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_oracle::{Format, Heads, ProblemFields, Scaling};

    /// Returns two sequences with codes in a scaling.
    fn problem(scaling: Scaling, rows: &[(usize, usize)], dim: usize) -> Problem {
        let mut fields = ProblemFields {
            heads: Heads { q: 2, kv: 1 },
            pass: Pass::Forward,
            ..ProblemFields::packed(rows, dim)
        };
        let code = Element { format: Format::E4m3, scaling };
        let precision = &mut fields.precision;
        (precision.q, precision.k, precision.v) = (code, code, code);
        Problem::new(fields).expect("a problem")
    }

    #[test]
    fn descales_are_those_of_the_place() {
        let problem = problem(Scaling::PerSequenceGroup, &[(1, 9), (5, 5)], 4);
        let place = Place { sequence: Some(1), head: Some(1), row: Some(3), lane: None };
        let scales = values::scales(&problem);
        let of = |tensor| scales.of(tensor).expect("scaled").descale()[[1, 0, 0]];
        let [q, k, v] = [TensorName::Q, TensorName::K, TensorName::V].map(of);
        let text = descales(&problem, Some(TensorName::Out), &place);
        let expected = format!(
            "descales  of sequence 1, query head 1, KV head 0; a value is its code times its descale
          q  e4m3/sequence-group  {q}
          k  e4m3/sequence-group  {k}
          v  e4m3/sequence-group  {v}
"
        );
        assert_eq!(text, expected);
        let there = descales_there(&problem, Some(TensorName::Out), &place);
        assert_eq!(there, Some(format!("descales there: q {q}; k {k}; v {v}")));
        let bf16 = Problem::new(ProblemFields::packed(&[(5, 5)], 4)).expect("a problem");
        assert_eq!(descales(&bf16, None, &place), "");
    }

    /// Test that the row on the other side is not known, so that its first descales are told, and that few codes are told
    /// too.
    #[test]
    fn descales_of_rows_and_codes_of_tiny_tensors() {
        let rows = problem(Scaling::PerTokenHead, &[(9, 9)], 4);
        let place = Place { sequence: Some(0), head: Some(1), row: Some(3), lane: None };
        let text = descales(&rows, Some(TensorName::Out), &place);
        let numbers: Vec<usize> = text.lines().skip(1).map(|line| line.matches(", ").count()).collect();
        assert_eq!(numbers, [0, DESCALES_SHOWN, DESCALES_SHOWN], "{text}");
        let tiny = descales(&problem(Scaling::PerTensor, &[(1, 2)], 2), None, &Place::default());
        let codes: Vec<usize> = tiny.lines().skip(1).map(|line| line.matches("0x").count()).collect();
        assert_eq!(codes, [4, 4, 4], "{tiny}");
    }
}
