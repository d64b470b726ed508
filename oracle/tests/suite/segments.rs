//! Segment ids and positions: what is broadcast, what is refused, and sequences that say the same.

use seamproof_oracle::segments::{
    Array, Described, Segments, SegmentsError, described, lengths_of, positions_of,
};
use seamproof_oracle::{Band, Mask, Run, Sequence, Side, TensorRows};

const CAUSAL: Band = Band { lo: None, hi: Some(0) };
const FULL: Band = Band { lo: None, hi: None };

fn array(shape: &[usize], values: &[i32]) -> Array {
    Array { shape: shape.to_vec(), values: values.to_vec() }
}

fn ids(shape: &[usize], values: &[i32]) -> Described {
    Described { ids: array(shape, values), positions: None }
}

/// Returns the lengths of q and kv of each sequence.
fn lengths(segments: &Segments) -> Vec<(usize, usize)> {
    let sequences = segments.sequences(usize::MAX).expect("sequences");
    sequences.iter().map(|sequence| (sequence.q.len, sequence.kv.len)).collect()
}

#[test]
fn a_segment_is_a_sequence_and_other_rows_are_padding() {
    let side = ids(&[2, 5], &[1, 1, 0, 2, 2, 7, 0, 0, 3, 0]);
    let segments = Segments::new(&side, &side).unwrap();
    let sequences = segments.sequences(2).unwrap();
    let runs: Vec<Run> = sequences.iter().map(|sequence| sequence.q).collect();
    let at = |offset, len| Run::packed(offset, len, len);
    assert_eq!(runs, [at(0, 2), at(3, 2), at(5, 1), at(8, 1)]);
    assert_eq!(segments.rows(), TensorRows { q: 10, kv: 10 });
    assert!(segments.sees(1, 0, CAUSAL) && !segments.sees(0, 1, CAUSAL) && segments.sees(0, 1, FULL));
    assert!(!segments.sees(2, 2, FULL), "padding sees nothing, padding included");
    assert_eq!(segments.sequences(1), Err(SegmentsError::TooMany { batch_row: 0, segments: 2, most: 1 }));
}

#[test]
fn positions_and_bands_may_be_any() {
    let (id, positions) = ([1, 1, 1], [i32::MIN, 0, i32::MAX]);
    let side = Described { ids: array(&[3], &id), positions: Some(array(&[3], &positions)) };
    let segments = Segments::new(&side, &side).unwrap();
    let band = |lo, hi| Band { lo: Some(lo), hi: Some(hi) };
    for (i, j) in (0..3).flat_map(|i| (0..3).map(move |j| (i, j))) {
        assert!(segments.sees(i, j, band(i64::MIN, i64::MAX)), "every key, of query {i} and key {j}");
        assert!(!segments.sees(i, j, band(i64::MAX, i64::MAX)), "no key, of query {i} and key {j}");
        assert!(!segments.sees(i, j, band(i64::MIN, i64::MIN)), "no key, of query {i} and key {j}");
    }
}

#[test]
fn a_segment_of_one_side_has_no_rows_on_the_other() {
    let segments = Segments::new(&ids(&[4], &[1, 1, 2, 2]), &ids(&[3], &[3, 2, 0])).unwrap();
    assert_eq!(lengths(&segments), [(2, 0), (2, 1), (0, 1)]);
}

#[test]
fn leading_dimensions_are_batch_rows() {
    // vmap of vmap over a batch of two rows.
    let values: Vec<i32> = (0..2 * 3 * 2 * 4).map(|at| 1 + at % 4 / 2).collect();
    let side = ids(&[2, 3, 2, 4], &values);
    let segments = Segments::new(&side, &side).unwrap();
    assert_eq!(segments.leading(), [2, 3, 2]);
    assert_eq!(lengths(&segments), [(2, 2); 24]);
    // The same ids in two batch rows are two segments.
    assert!(segments.sees(0, 1, FULL) && !segments.sees(0, 4, FULL));
}

#[test]
fn ids_and_positions_are_broadcast_either_way() {
    let (many, one) = ([1, 1, 2, 2, 1, 1, 1, 0], [0, 1, 2, 3]);
    let of = |ids, positions| Described { ids, positions: Some(positions) };
    let batched = array(&[2, 1, 4], &many);
    // Ids that vmap has batched, beside positions that it has not, and the reverse.
    let with = Segments::new(&of(batched, array(&[1, 4], &one)), &ids(&[1, 4], &[1; 4])).unwrap();
    assert_eq!(with.leading(), [2, 1]);
    assert!(with.sees(4, 4, CAUSAL) && with.sees(6, 5, CAUSAL) && !with.sees(7, 4, FULL));
    let places = [0, 1, 2, 3, 3, 2, 1, 0];
    let reverse = of(array(&[1, 4], &[1; 4]), array(&[2, 1, 4], &places));
    let reverse = Segments::new(&reverse, &reverse).unwrap();
    assert!(
        reverse.sees(4, 7, CAUSAL) && !reverse.sees(7, 4, CAUSAL),
        "positions are the second batch row's"
    );
}

#[test]
fn one_side_may_be_batched_alone() {
    let plain = ids(&[1, 3], &[1, 2, 2]);
    let batched = ids(&[2, 1, 3], &[1, 2, 2, 2, 2, 0]);
    let segments = Segments::new(&plain, &batched).unwrap();
    assert_eq!(lengths(&segments), [(1, 1), (2, 2), (1, 0), (2, 2)]);
    let turned = Segments::new(&batched, &plain).unwrap();
    assert_eq!(lengths(&turned), [(1, 1), (2, 2), (2, 2), (0, 1)]);
}

#[test]
fn shapes_that_do_not_fit_are_refused_with_both() {
    let ones = [1; 8];
    let refused = |q: &Described, kv: &Described| Segments::new(q, kv).unwrap_err().to_string();
    let (four, two) = (ids(&[4, 1, 2], &ones), ids(&[2, 2, 1, 2], &ones));
    assert_eq!(
        refused(&four, &two),
        "q has the leading dimensions [4, 1] and kv [2, 2, 1]; use the same, or the last of them alone on one side"
    );
    // Extra dimensions of both sides are the same, and not one the end of the other.
    let of = |shape: &[usize]| ids(shape, &vec![1; shape.iter().product()]);
    for (q, kv) in [([4, 1, 2].as_slice(), [2, 4, 1, 2].as_slice()), (&[2, 4, 1, 2], &[4, 1, 2])] {
        let dims = |shape: &[usize]| format!("{:?}", &shape[..shape.len() - 1]);
        let said = format!("q has the leading dimensions {} and kv {}; use the same", dims(q), dims(kv));
        assert!(refused(&of(q), &of(kv)).starts_with(&said), "{}", refused(&of(q), &of(kv)));
    }
    assert_eq!(Segments::new(&of(&[4, 2]), &of(&[3, 4, 2])).unwrap().leading(), [3, 4]);
    assert_eq!(Segments::new(&of(&[3, 4, 2]), &of(&[2])).unwrap().leading(), [3, 4]);
    let trailing = Described { ids: array(&[2, 4], &ones), positions: Some(array(&[4], &[0; 4])) };
    assert!(Segments::new(&trailing, &trailing).is_ok());
    let trailing = Described { positions: Some(array(&[2], &[0; 2])), ..trailing.clone() };
    assert_eq!(
        refused(&trailing, &trailing),
        "q: the ids have shape [2, 4] and the positions [2]; one must end the other"
    );
    assert_eq!(refused(&ids(&[2, 3], &ones), &four), "ids has 8 values, and its shape [2, 3] another number");
    assert_eq!(refused(&ids(&[], &[1]), &four), "ids has no dimension; the last one goes along the rows");
    assert_eq!(
        refused(&four, &ids(&[4, 1, 2], &[1, 1, -3, 1, 1, 1, 1, 1])),
        "kv: row 2 has the id -3; use 0 for padding and more for segments"
    );
    // A shape without elements may have any other dimensions.
    let none = ids(&[usize::MAX, 0], &[]);
    assert!(refused(&none, &none).contains("use at most"), "{}", refused(&none, &none));
    let empty = ids(&[3, 0], &[]);
    assert_eq!(lengths(&Segments::new(&empty, &empty).unwrap()), []);
}

#[test]
fn what_sequences_cannot_say_is_refused_with_the_row() {
    let refused =
        |side: Described| Segments::new(&side, &side).unwrap().sequences(9).unwrap_err().to_string();
    assert_eq!(
        refused(ids(&[5], &[1, 2, 2, 1, 0])),
        "q: the id 1 comes again in row 3, after other rows; a sequence's rows lie together"
    );
    assert_eq!(
        refused(ids(&[5], &[0, 4, 0, 4, 0])),
        "q: the id 4 comes again in row 3, after other rows; a sequence's rows lie together"
    );
    let jump = Described { positions: Some(array(&[3], &[0, 1, 5])), ..ids(&[3], &[1, 1, 1]) };
    assert_eq!(refused(jump), "q: row 2 has the position 5 in place of 2, its place in the sequence");
}

#[test]
fn omitted_positions_count_each_segment_from_0() {
    let values = [1, 1, 2, 2, 2, 0, 0, 3, 1, 1, 1, 1, 0, 0, 0, 0];
    let positions = positions_of(&array(&[2, 8], &values), None).unwrap();
    assert_eq!(positions, [0, 1, 0, 1, 2, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]);
    // Two ranks, each with the first and the last chunk that is its own: rows 0, 1, 6, 7 and then 2, 3, 4, 5.
    let order = [0, 1, 6, 7, 2, 3, 4, 5];
    let reordered = [1, 1, 2, 2, 1, 2, 2, 2];
    let positions = positions_of(&array(&[8], &reordered), Some(&order)).unwrap();
    assert_eq!(positions, [0, 1, 3, 4, 2, 0, 1, 2]);
}

#[test]
fn a_padded_batch_has_lengths() {
    let of = |values: &[i32]| lengths_of(&array(&[values.len() / 4, 4], values), Side::Kv);
    assert_eq!(of(&[1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]).unwrap(), [2, 4, 0]);
    assert_eq!(
        of(&[0, 1, 1, 0]).unwrap_err().to_string().split(';').next(),
        Some("kv: the id 1 comes again in row 1, after other rows")
    );
    assert!(matches!(of(&[1, 2, 0, 0]), Err(SegmentsError::Gap { row: 1, id: 2, .. })));
    assert_eq!(lengths_of(&array(&[3, 0], &[]), Side::Q).unwrap(), [0, 0, 0]);
}

#[test]
fn sequences_described_and_read_again_are_the_same_and_have_the_same_mask() {
    let run = Run::packed;
    let sequences = [
        Sequence { id: 0, q: run(1, 3, 4), kv: run(0, 5, 5) },
        Sequence { id: 1, q: run(5, 0, 2), kv: run(8, 2, 2) },
        Sequence { id: 2, q: run(7, 4, 4), kv: run(5, 3, 3) },
    ];
    let rows = TensorRows { q: 12, kv: 10 };
    let [q, kv] = described(&sequences, rows);
    let segments = Segments::new(&q, &kv).unwrap();
    let mut again = segments.sequences(3).unwrap();
    again.sort_by_key(|sequence| sequence.kv.offset);
    let tight = |run: Run| if run.len == 0 { (0, 0) } else { (run.offset, run.len) };
    let pairs = |all: &[Sequence]| all.iter().map(|s| (tight(s.q), tight(s.kv))).collect::<Vec<_>>();
    let mut own = sequences.to_vec();
    own.sort_by_key(|sequence| sequence.kv.offset);
    assert_eq!(pairs(&again), pairs(&own));
    for mask in [Mask::CAUSAL, Mask::FULL, Mask { left: Some(1), right: Some(1), ..Mask::CAUSAL }] {
        for (i, j) in (0..12).flat_map(|i| (0..10).map(move |j| (i, j))) {
            let sees = sequences.iter().any(|sequence| {
                let place = |run: Run, row| run.real_rows().position(|own| own == row);
                let (Some(at), Some(key)) = (place(sequence.q, i), place(sequence.kv, j)) else {
                    return false;
                };
                mask.visible(at, sequence.q.len, sequence.kv.len).contains(&key)
            });
            // These masks begin at the first query and key, so their band is that of equal lengths.
            assert_eq!(segments.sees(i, j, mask.band(1, 1).expect("a band")), sees, "{mask:?}: {i}, {j}");
        }
    }
}

#[test]
fn sequences_that_lie_in_batch_rows_are_described_in_batches() {
    let run = |offset, len| Run::packed(offset, len, len);
    let sequence = |id, q, kv| Sequence { id, q, kv };
    // A padded batch: three batch rows of 4 queries and of 2 keys.
    let keys = [run(0, 2), run(2, 2), run(4, 2)];
    let padded = [(0, 4), (4, 1), (8, 2)].map(|(offset, len)| run(offset, len));
    let of = |q: [Run; 3]| [0, 1, 2].map(|i| sequence(i as u32, q[i], keys[i]));
    let rows = TensorRows { q: 12, kv: 6 };
    let again = |sequences: &[Sequence]| {
        let [q, kv] = described(sequences, rows);
        (q.ids.shape.clone(), kv.ids.shape.clone(), Segments::new(&q, &kv).unwrap().sequences(1).unwrap())
    };
    let batch = of(padded);
    assert_eq!(again(&batch), (vec![3, 4], vec![2], batch.to_vec()), "kv, and all positions, are shared");
    // All batch rows are the same, and q's ids say how many there are.
    let whole = of([run(0, 4), run(4, 4), run(8, 4)]);
    assert_eq!(again(&whole), (vec![3, 4], vec![2], whole.to_vec()));
    let [q, _] = described(&batch, rows);
    assert_eq!(q.positions.unwrap(), array(&[4], &[0, 1, 2, 3]));
    // Two sequences in the first batch row, one in the second, whose positions differ.
    let sequences = [(0, 1), (1, 2), (3, 3)]
        .map(|(offset, len)| sequence(len as u32, run(offset, len), run(offset, len)));
    let [q, kv] = described(&sequences, TensorRows { q: 6, kv: 6 });
    assert_eq!((&q, &q.positions), (&kv, &Some(array(&[2, 3], &[0, 0, 1, 0, 1, 2]))));
    assert_eq!(q.ids, array(&[2, 3], &[1, 2, 2, 1, 1, 1]));
    // Nothing at all, and sequences without rows.
    let none = [sequence(0, run(0, 0), run(0, 0))];
    for sequences in [&none[..], &[]] {
        let [q, kv] = described(sequences, TensorRows { q: 0, kv: 3 });
        assert_eq!(lengths(&Segments::new(&q, &kv).unwrap()), []);
    }
}
