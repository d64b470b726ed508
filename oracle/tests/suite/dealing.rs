//! Ids, positions and lengths that are dealt to ranks: what each is given, the way back, and what says no problem.

use std::collections::HashSet;

use seamproof_oracle::dealing::{BatchPart, DealingError, Dealt, Labels};
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Form, Given, Problem, ProblemFields, Run, Sequence, Side, TensorRows,
};

const BALANCES: [Balance; 4] =
    [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 1 }, Balance::Striped { stripe: 2 }];

/// Returns a pack over ranks, each sequence given by its queries and keys, with as little padding as they share. Before
/// each sequence, and behind the last, are as many free rows as `gap` says for each rank. Keys lie in the opposite order.
fn pack(lengths: &[(usize, usize)], balance: Balance, cp: usize, gap: usize) -> ProblemFields {
    let unit = span_multiple(balance, cp);
    let ends = |lengths: &mut dyn Iterator<Item = usize>| {
        let mut end = 0;
        let runs: Vec<Run> = lengths
            .map(|len| {
                let run = Run::packed(end + gap * cp, len, len.next_multiple_of(unit));
                end = run.offset + run.span;
                run
            })
            .collect();
        (runs, end + gap * cp)
    };
    let (q, q_rows) = ends(&mut lengths.iter().map(|(q, _)| *q));
    let (mut kv, kv_rows) = ends(&mut lengths.iter().rev().map(|(_, kv)| *kv));
    kv.reverse();
    let sequence = |(id, (q, kv))| Sequence { id, q, kv };
    let sequences = (0..).zip(q.into_iter().zip(kv)).map(sequence).collect();
    ProblemFields {
        rows: TensorRows { q: q_rows, kv: kv_rows },
        parallel: ContextParallel::over(cp, Algorithm::Ring, balance),
        form: Form::Segments,
        ..ProblemFields::of(sequences, 8)
    }
}

fn segments(problem: &Problem) -> Vec<[Labels; 2]> {
    match Dealt::segments(problem).expect("the spans can be cut") {
        Dealt::Segments(ranks) => ranks,
        Dealt::Lengths(_) => panic!("ids were asked for"),
    }
}

#[test]
fn ids_and_positions_are_dealt_as_drawn() {
    let given = |balance| {
        let ranks = segments(&Problem::new(pack(&[(8, 1), (3, 1)], balance, 2, 0)).unwrap());
        ranks.into_iter().map(|[q, _]| (q.ids, q.positions)).collect::<Vec<_>>()
    };
    let one = |ids: [i32; 6], positions: [i32; 6]| (ids.to_vec(), positions.to_vec());
    assert_eq!(
        given(Balance::Contiguous),
        [one([1, 1, 1, 1, 2, 2], [0, 1, 2, 3, 0, 1]), one([1, 1, 1, 1, 2, 0], [4, 5, 6, 7, 2, 0])]
    );
    assert_eq!(
        given(Balance::DualChunk),
        [one([1, 1, 1, 1, 2, 0], [0, 1, 6, 7, 0, 0]), one([1, 1, 1, 1, 2, 2], [2, 3, 4, 5, 1, 2])]
    );
    assert_eq!(
        given(Balance::Striped { stripe: 1 }),
        [one([1, 1, 1, 1, 2, 2], [0, 2, 4, 6, 0, 2]), one([1, 1, 1, 1, 2, 0], [1, 3, 5, 7, 1, 0])]
    );
}

/// Returns the elements of one batch row in the order in which a framework lays them out for its ranks: as it says, by
/// reshaping the whole row.
fn reordered(row: &[i32], balance: Balance, cp: usize) -> Vec<i32> {
    let (part, order): (usize, Vec<usize>) = match balance {
        Balance::Contiguous => (row.len(), vec![0]),
        Balance::DualChunk => {
            (row.len() / (2 * cp), (0..cp).flat_map(|rank| [rank, 2 * cp - 1 - rank]).collect())
        }
        Balance::Striped { stripe } => {
            let rounds = row.len() / (cp * stripe);
            (stripe, (0..cp).flat_map(|rank| (0..rounds).map(move |round| round * cp + rank)).collect())
        }
    };
    order.into_iter().flat_map(|index| row[index * part..(index + 1) * part].to_vec()).collect()
}

/// Test against the reordering of whole axes: of each batch row of a batch, and of a pack that is dealt in stripes.
#[test]
fn what_is_dealt_is_the_reordered_axis_cut_into_parts() {
    for (cp, balance) in (1..=4).flat_map(|cp| BALANCES.map(|balance| (cp, balance))) {
        let unit = span_multiple(balance, cp);
        let batch = [(3 * unit, 1); 3];
        let striped = [(unit - 1, 1), (3 * unit, 1), (0, 1), (unit + 1, 1)];
        let is_striped = matches!(balance, Balance::Striped { .. });
        for (lengths, rows) in
            [(&batch[..], 3), (&striped[..], 1)].into_iter().take(1 + usize::from(is_striped))
        {
            let fields = pack(lengths, balance, cp, 0);
            let whole = ProblemFields { parallel: ContextParallel::single(), ..fields.clone() };
            let [whole] =
                &segments(&Problem::new(ProblemFields { form: Form::CuSeqlens, ..whole }).unwrap())[..]
            else {
                panic!("one rank")
            };
            let ranks = segments(&Problem::new(fields).unwrap());
            let arrays: [fn(&Labels) -> &Vec<i32>; 2] = [|labels| &labels.ids, |labels| &labels.positions];
            for array in arrays {
                let whole = array(&whole[0]);
                let own = |rank: usize| {
                    let parts = whole.chunks(whole.len() / rows).flat_map(move |row| {
                        let part = row.len() / cp;
                        reordered(row, balance, cp)[rank * part..(rank + 1) * part].to_vec()
                    });
                    parts.collect::<Vec<i32>>()
                };
                for (rank, labels) in ranks.iter().enumerate() {
                    assert_eq!(array(&labels[0]), &own(rank), "{balance:?} over {cp}, rank {rank}");
                }
            }
        }
    }
}

/// Returns a side's run without the place of one that has no rows.
fn placed(run: Run) -> Run {
    if run.span == 0 { Run::packed(0, 0, 0) } else { run }
}

#[test]
fn what_all_ranks_are_given_is_the_problem() {
    let lengths = [(5, 8), (0, 3), (1, 0), (12, 1), (0, 0), (7, 7)];
    for (cp, balance) in (1..=5).flat_map(|cp| BALANCES.map(|balance| (cp, balance))) {
        for gap in 0..3 {
            let problem = Problem::new(pack(&lengths, balance, cp, gap)).expect("ids say it");
            let again = Given::of(&problem).unwrap().sequences(problem.rows).expect("it is read");
            let said = problem.sequences.iter().filter(|sequence| sequence.q.len + sequence.kv.len > 0);
            let said: Vec<[Run; 2]> = said.map(|sequence| [sequence.q, sequence.kv].map(placed)).collect();
            let again: Vec<[Run; 2]> = again.iter().map(|sequence| [sequence.q, sequence.kv]).collect();
            assert_eq!(again, said, "{balance:?} over {cp}");
        }
        let unit = span_multiple(balance, cp);
        let spans = [(3, 2 * unit), (0, 2 * unit), (2 * unit, 2 * unit)];
        let parallel = ContextParallel::over(cp, Algorithm::AllGather, balance);
        let fields = ProblemFields { parallel, form: Form::Lengths, ..ProblemFields::padded(&spans[1..], 8) };
        let problem = Problem::new(fields).expect("lengths say it");
        let given = Given::of(&problem).unwrap();
        assert!(matches!(&given, Given::Dealt { dealt: Dealt::Lengths(ranks), .. } if ranks.len() == cp));
        assert_eq!(given.sequences(problem.rows).unwrap(), problem.sequences);
    }
}

/// Test that no id and no position of any rank can change without an error or other sequences.
#[test]
fn every_id_and_every_position_counts() {
    let (mut errors, mut others) = (HashSet::new(), 0);
    for balance in BALANCES {
        let problem = Problem::new(pack(&[(5, 2), (8, 3)], balance, 2, 1)).unwrap();
        let right = segments(&problem);
        let expected = Dealt::Segments(right.clone()).sequences(balance).unwrap();
        for (rank, side, row, to) in (0..2).flat_map(|rank| {
            (0..2).flat_map(move |side| {
                (0..20).flat_map(move |row| (-1..10).map(move |to| (rank, side, row, to)))
            })
        }) {
            for array in 0..2 {
                let mut wrong = right.clone();
                let Labels { ids, positions } = &mut wrong[rank][side];
                let counts = array == 0 || ids.get(row).is_some_and(|id| *id != 0);
                let values = if array == 0 { ids } else { positions };
                let Some(value) = values.get_mut(row).filter(|value| **value != to && counts) else {
                    continue;
                };
                *value = to;
                match Dealt::Segments(wrong).sequences(balance) {
                    Ok(sequences) => {
                        assert_ne!(sequences, expected, "{balance:?}: rank {rank}, row {row}, {to}");
                        others += 1;
                    }
                    Err(error) => drop(errors.insert(std::mem::discriminant(&error))),
                }
            }
        }
    }
    assert!(others > 0 && errors.len() == 3, "{others} {}", errors.len());
}

#[test]
fn what_does_not_go_together_is_an_error_with_the_value() {
    let problem = Problem::new(pack(&[(8, 1), (3, 1)], Balance::DualChunk, 2, 0)).unwrap();
    let said = |edit: &dyn Fn(&mut Vec<[Labels; 2]>)| {
        let mut ranks = segments(&problem);
        edit(&mut ranks);
        Dealt::Segments(ranks).sequences(Balance::DualChunk).unwrap_err().to_string()
    };
    assert_eq!(
        said(&|ranks| ranks[1][0].positions = vec![0, 1, 2, 3, 0, 1]),
        "rank 1: row 0 of q has position 0 of id 1, of which there are 8 rows; deal ids and positions like the tokens, \
         and keep the positions of the whole sequence"
    );
    assert_eq!(
        said(&|ranks| ranks[0][0].positions.pop().map_or((), drop)),
        "rank 0 has 6 ids and 5 positions of q; give one of each for every row"
    );
    assert_eq!(
        said(&|ranks| ranks[1][1] = Labels::default()),
        "rank 1 has 0 rows of kv and rank 0 4; deal all ranks equally many"
    );
    assert_eq!(
        said(&|ranks| ranks[1][0].ids[2] = -4),
        "rank 1: row 2 of q has the id -4; use 0 for padding and more for segments"
    );
    assert_eq!(
        said(&|ranks| ranks[0][0].ids[4] = 0),
        "no rank has the position 0 of id 2 of q; positions count from 0 in the whole sequence"
    );
    let stripes = Balance::Striped { stripe: 0 };
    let error = Dealt::Segments(segments(&problem)).sequences(stripes).unwrap_err();
    assert_eq!(error.to_string(), "stripes have 0 rows; use 1 to 67108864");
    assert_eq!(Dealt::Segments(Vec::new()).sequences(Balance::DualChunk), Ok(Vec::new()));

    let rows = TensorRows { q: 4, kv: 6 };
    let batch = |edit: &dyn Fn(&mut BatchPart)| {
        let part = BatchPart { lengths: [vec![3, 4], vec![2, 6]], rows };
        let mut ranks = vec![part; 2];
        edit(&mut ranks[1]);
        Dealt::Lengths(ranks).sequences(Balance::DualChunk).unwrap_err()
    };
    let part = |lengths: [usize; 2], rows| {
        let lengths = lengths.map(|count| vec![1; count]);
        Dealt::Lengths(vec![BatchPart { lengths, rows }; 2]).sequences(Balance::DualChunk).unwrap_err()
    };
    let side = Side::Kv;
    assert_eq!(batch(&|part| part.lengths[1][1] = 3), DealingError::Lengths { rank: 1, side });
    assert_eq!(batch(&|part| part.rows.kv = 3), DealingError::Rows { rank: 1, side, rows: 3, expected: 6 });
    assert_eq!(part([2, 1], rows), DealingError::Count { q: 2, kv: 1 });
    let odd = TensorRows { q: 4, kv: 7 };
    assert_eq!(part([2, 2], odd), DealingError::BatchRows { side, rows: 7, batch_rows: 2 });
}

/// Test that what dealt ids cannot say is refused with the value: rows of which ranks have unequal shares, and more
/// padding than they need.
#[test]
fn what_dealt_ids_cannot_say_is_refused() {
    let refused = |edit: &dyn Fn(&mut ProblemFields)| {
        let mut fields = pack(&[(8, 8), (3, 4)], Balance::DualChunk, 2, 1);
        edit(&mut fields);
        Problem::new(fields).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&|fields| fields.sequences[0].q.offset = 1),
        "form segments: sequences[0].q has offset 1, which 2 ranks do not divide; use cu_seqlens"
    );
    assert_eq!(
        refused(&|fields| fields.rows.kv += 1),
        "form segments: rows.kv is 19, which 2 ranks do not divide; use cu_seqlens"
    );
    assert_eq!(
        refused(&|fields| fields.sequences[1].q = Run::packed(12, 3, 6)),
        "form segments: sequences[1].q has offset 12, step 1 and span 6, not 12, 1 and 4; use cu_seqlens"
    );
    let parallel = ContextParallel::over(2, Algorithm::Ring, Balance::DualChunk);
    let batch = |spans: &[(usize, usize)]| {
        let form = Form::Lengths;
        Problem::new(ProblemFields { form, parallel: parallel.clone(), ..ProblemFields::padded(spans, 8) })
    };
    assert!(batch(&[(2, 4), (4, 4)]).is_ok());
    assert_eq!(
        batch(&[(2, 6), (4, 6)]).unwrap_err().to_string(),
        "form lengths: sequences[0].q has offset 0, step 1 and span 6, not 0, 1 and 8; use cu_seqlens"
    );
}
