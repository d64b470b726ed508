//! Problems as a fuzzer keeps them: [`RawProblem`]s in postcard behind a version, and small changes of one.
//!
//! A corpus of values outlives changes of the generator, which bytes of choices do not. A value says what a case is,
//! and `fixup` makes a case of any value. Bytes of another version or shape are no value, and a mutation of them
//! begins at the simplest one.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use seamproof_judge::generate::{RawProblem, RawSequence};
use seamproof_oracle::BORDERS_MAX;

/// First byte of a value.
pub const VALUE_VERSION: u8 = 8;
/// First byte of a value from before sequences could share keys.
const WITHOUT_SHARED_KEYS: u8 = 7;
/// First byte of a value from before its mask had sink tokens.
const WITHOUT_SINK_TOKENS: u8 = 6;
/// First byte of a value from before it had pages and a region.
const WITHOUT_PAGES: u8 = 5;
/// First byte of a value from before it had steps.
const WITHOUT_STEPS: u8 = 4;
/// First byte of a value from before keys had a layout of their own.
const WITHOUT_KV_LAYOUT: u8 = 3;
/// First byte of a value from before its mask had blocks and a prefix.
const WITHOUT_BLOCKS: u8 = 2;
/// First byte of a value from before it had a form.
const WITHOUT_FORM: u8 = 1;
/// Largest number of sequences in a value, as of the generator's cases. Bytes with more are no value.
const SEQUENCES_MAX: usize = 1100;
/// Largest number of changes in one mutation.
const CHANGES_MAX: u32 = 3;
/// Lengths at which edges lie.
const EDGES: [u32; 10] = [0, 1, 2, 3, 4, 7, 8, 9, 16, 17];

/// Returns a value as bytes.
pub fn to_bytes(raw: &RawProblem) -> Vec<u8> {
    let mut bytes = vec![VALUE_VERSION];
    // The conversion cannot fail, since all maps and sequences in the value have lengths.
    bytes.extend(postcard::to_allocvec(raw).unwrap_or_default());
    bytes
}

/// Reads a value from bytes; `None` for bytes that are no value.
pub fn from_bytes(bytes: &[u8]) -> Option<RawProblem> {
    let (&version, body) = bytes.split_first()?;
    let body = match version {
        VALUE_VERSION => body.to_vec(),
        // No shared keys, no sink tokens, no region, no pages, no steps, the layout of the queries, no borders, no
        // chunks, no prefix and the plain form are numbers 0.
        WITHOUT_SHARED_KEYS => [body, &[0; 1]].concat(),
        WITHOUT_SINK_TOKENS => [body, &[0; 2]].concat(),
        WITHOUT_PAGES => [body, &[0; 7]].concat(),
        WITHOUT_STEPS => [body, &[0; 8]].concat(),
        WITHOUT_KV_LAYOUT => [body, &[0; 9]].concat(),
        WITHOUT_BLOCKS => [body, &[0; 12]].concat(),
        WITHOUT_FORM => [body, &[0; 13]].concat(),
        _ => return None,
    };
    let (raw, rest): (RawProblem, &[u8]) = postcard::take_from_bytes(&body).ok()?;
    (rest.is_empty() && raw.sequences.len() <= SEQUENCES_MAX).then_some(raw)
}

/// Changes the value in the first `size` bytes of `data` a little, as `seed` says, and returns the size of the new
/// value. A value that does not fit is left as it was.
pub fn mutate(data: &mut [u8], size: usize, seed: u32) -> usize {
    let size = size.min(data.len());
    let mut raw = from_bytes(&data[..size]).unwrap_or_default();
    let mut rng = ChaCha8Rng::seed_from_u64(seed.into());
    for _ in 0..=rng.next_u32() % CHANGES_MAX {
        change(&mut raw, &mut rng);
    }
    let bytes = to_bytes(&raw);
    match data.get_mut(..bytes.len()) {
        Some(place) => {
            place.copy_from_slice(&bytes);
            bytes.len()
        }
        None => size,
    }
}

fn change(raw: &mut RawProblem, rng: &mut ChaCha8Rng) {
    if rng.next_u32().is_multiple_of(2) {
        change_sequences(&mut raw.sequences, rng);
    } else if rng.next_u32().is_multiple_of(16) {
        raw.data_seed = rng.next_u64();
    } else {
        let mut fields = numbers(raw);
        let at = below(rng, fields.len() + 1);
        if at < fields.len() {
            change_number(fields[at], rng);
        } else if raw.borders.len() < BORDERS_MAX {
            raw.borders.push(1 + rng.next_u32() % 32);
        } else {
            raw.borders.clear();
        }
    }
}

fn below(rng: &mut ChaCha8Rng, end: usize) -> usize {
    rng.next_u32() as usize % end.max(1)
}

/// Changes a number by one step, or to an edge, a small number or any number.
fn change_number(number: &mut u32, rng: &mut ChaCha8Rng) {
    *number = match rng.next_u32() % 5 {
        0 => number.wrapping_add(1),
        1 => number.saturating_sub(1),
        2 => EDGES[below(rng, EDGES.len())],
        3 => rng.next_u32() % 32,
        _ => rng.next_u32(),
    };
}

fn change_sequences(sequences: &mut Vec<RawSequence>, rng: &mut ChaCha8Rng) {
    let at = below(rng, sequences.len());
    match rng.next_u32() % 8 {
        0 if sequences.len() < SEQUENCES_MAX => {
            let copy = sequences.get(at).copied().unwrap_or(RawSequence {
                q_len: 1,
                kv_len: 1,
                ..RawSequence::default()
            });
            sequences.insert(at, copy);
        }
        1 if !sequences.is_empty() => {
            sequences.remove(at);
        }
        2 if !sequences.is_empty() => {
            let other = below(rng, sequences.len());
            sequences.swap(at, other);
        }
        _ => {
            let Some(sequence) = sequences.get_mut(at) else { return };
            let RawSequence { q_len, q_padding, q_gap, kv_len, kv_padding, kv_gap } = sequence;
            let fields = [q_len, q_padding, q_gap, kv_len, kv_padding, kv_gap];
            let which = below(rng, fields.len());
            for (index, field) in fields.into_iter().enumerate() {
                if index == which {
                    change_number(field, rng);
                }
            }
        }
    }
}

/// Returns every number of a problem that belongs to no sequence, without the data seed.
fn numbers(raw: &mut RawProblem) -> Vec<&mut u32> {
    let RawProblem {
        sequences: _,
        layout,
        q_slack,
        kv_slack,
        kv_heads,
        group,
        qk_dim,
        v_dim,
        left,
        right,
        bottom_right,
        scale,
        softcap,
        sink,
        fp16,
        weights_f32,
        mode,
        backward,
        data_seed: _,
        budget,
        unsupported,
        malformed,
        detail,
        algorithm,
        balance,
        stripe,
        ranks,
        all_to_all,
        others,
        order,
        exact,
        form,
        borders,
        chunk,
        prefix,
        kv_layout,
        steps,
        pages,
        page_order,
        free_pages,
        shared_pages,
        region,
        sink_tokens,
        shared_keys,
    } = raw;
    let mut numbers = vec![
        layout,
        q_slack,
        kv_slack,
        kv_heads,
        group,
        qk_dim,
        v_dim,
        left,
        right,
        bottom_right,
        scale,
        softcap,
        sink,
        fp16,
        weights_f32,
        mode,
        backward,
        budget,
        unsupported,
        malformed,
        detail,
        algorithm,
        balance,
        stripe,
        ranks,
        all_to_all,
        others,
        order,
        exact,
        form,
        chunk,
        prefix,
        kv_layout,
        steps,
        pages,
        page_order,
        free_pages,
        shared_pages,
        region,
        sink_tokens,
        shared_keys,
    ];
    numbers.extend(borders);
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::generate::{Limits, draw_raw};

    #[test]
    fn values_read_back() {
        for index in 0..200 {
            let raw = draw_raw(9, index, &Limits::quick());
            assert_eq!(from_bytes(&to_bytes(&raw)), Some(raw));
        }
        assert_eq!(from_bytes(&[]), None);
        assert_eq!(from_bytes(&[&to_bytes(&RawProblem::default())[..], &[0]].concat()), None, "and a byte");
        let other = [&[VALUE_VERSION + 1], &to_bytes(&RawProblem::default())[1..]].concat();
        assert_eq!(from_bytes(&other), None, "another version");
    }

    #[test]
    fn values_from_before_a_number_was_added_read_back() {
        let raw = draw_raw(9, 3, &Limits::quick());
        let blocks =
            RawProblem { borders: Vec::new(), chunk: 0, prefix: 0, sink_tokens: 0, shared_keys: 0, ..raw };
        let pages =
            RawProblem { pages: 0, page_order: 0, free_pages: 0, shared_pages: 0, region: 0, ..blocks };
        let raw = RawProblem { form: 0, kv_layout: 0, steps: 0, ..pages };
        let bytes = to_bytes(&raw);
        for (missing, version) in [
            (1, WITHOUT_SHARED_KEYS),
            (2, WITHOUT_SINK_TOKENS),
            (7, WITHOUT_PAGES),
            (8, WITHOUT_STEPS),
            (9, WITHOUT_KV_LAYOUT),
            (12, WITHOUT_BLOCKS),
            (13, WITHOUT_FORM),
        ] {
            let old = [&[version], &bytes[1..bytes.len() - missing]].concat();
            assert_eq!(from_bytes(&old), Some(raw.clone()), "version {version}");
        }
    }

    #[test]
    fn bytes_of_any_kind_are_a_value_or_none() {
        let whole = to_bytes(&draw_raw(9, 3, &Limits::quick()));
        for end in 0..whole.len() {
            assert_eq!(from_bytes(&whole[..end]), None, "cut to {end} bytes");
        }
        // The bytes announce a list of 2^60 sequences.
        let mut hostile = vec![VALUE_VERSION];
        hostile.extend([0x80; 8].into_iter().chain([0x10]));
        assert_eq!(from_bytes(&hostile), None);
    }

    /// Test that a mutation is a value again, the same for the same seed, and that every number is reached.
    #[test]
    fn mutations_reach_every_number() {
        let mut data = vec![0; 4096];
        let mut reached = std::collections::BTreeSet::new();
        let mut size = 0;
        for seed in 0..4000 {
            let before = from_bytes(&data[..size]).unwrap_or_default();
            let copy = data.clone();
            size = mutate(&mut data, size, seed);
            let mut again = copy;
            let same = mutate(&mut again, to_bytes(&before).len().min(4096), seed);
            let mut after = from_bytes(&data[..size]).expect("a mutation is a value");
            assert!(seed == 0 || again[..same] == data[..size], "seed {seed}");
            let mut before = before;
            let (old, new) = (numbers(&mut before), numbers(&mut after));
            for (index, (old, new)) in old.iter().zip(&new).enumerate() {
                if **old != **new {
                    reached.insert(index);
                }
            }
        }
        assert_eq!(reached.len(), numbers(&mut RawProblem::default()).len() + BORDERS_MAX);
    }

    #[test]
    fn what_does_not_fit_is_left() {
        let raw = draw_raw(9, 3, &Limits::quick());
        let mut data = to_bytes(&raw);
        let size = data.len();
        for seed in 0..50 {
            let mut small = data.clone();
            let left = mutate(&mut small, size, seed);
            assert!(left <= size && from_bytes(&small[..left]).is_some());
        }
        data.truncate(1);
        assert_eq!(mutate(&mut data, 1, 0), 1);
    }
}
