//! Mistakes of programs on several ranks that explain a whole case: each is told by its words.

use ndarray::s;
use seamproof_judge::ladder::judge;
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::Emulated;
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{Algorithm, Balance, InputMode, Mask};

/// A row of queries or of keys, as a program knows it.
#[derive(Clone, Copy)]
struct Row {
    rank: usize,
    /// Its number among the rank's rows.
    own: usize,
    position: usize,
}

/// Logits and values of a block.
type Block = Vec<(f64, Vec<f64>)>;

/// A program on ranks that attends block by block, over one sequence.
#[derive(Clone, Copy)]
struct Program {
    /// Whether a query sees a key, in a span of so many rows on so many ranks.
    sees: fn(Row, Row, usize, usize) -> bool,
    /// Returns out and the LSE of blocks of logits and values.
    merge: fn(&[Block]) -> (Vec<f64>, f64),
}

/// A causal mask, and keys that are real: `LENGTH` of them.
const LENGTH: usize = 13;

fn is_seen(query: Row, key: Row, _: usize, _: usize) -> bool {
    key.position <= query.position && key.position < LENGTH
}

fn weighed(block: &[(f64, Vec<f64>)], base: f64) -> (Vec<f64>, f64) {
    let mut out = vec![0.0; block[0].1.len()];
    for (logit, value) in block {
        out.iter_mut().zip(value).for_each(|(out, value)| *out += (logit - base).exp() * value);
    }
    (out, block.iter().map(|(logit, _)| (logit - base).exp()).sum())
}

fn softmax(blocks: &[Block]) -> (Vec<f64>, f64) {
    let all = blocks.concat();
    let (out, sum) = weighed(&all, 0.0);
    (out.iter().map(|out| out / sum).collect(), sum.ln())
}

/// Returns the sum of the blocks' own results, times a factor that follows from their number.
fn sum_of_own(blocks: &[Block], factor: f64) -> (Vec<f64>, f64) {
    let mut out = vec![0.0; blocks[0][0].1.len()];
    for block in blocks {
        let (own, _) = softmax(std::slice::from_ref(block));
        out.iter_mut().zip(own).for_each(|(out, own)| *out += factor * own);
    }
    (out, softmax(blocks).1)
}

fn running(blocks: &[Block]) -> (Vec<f64>, f64) {
    let (mut out, mut sum, mut top) = (vec![0.0; blocks[0][0].1.len()], 0.0, f64::NEG_INFINITY);
    for block in blocks {
        top = block.iter().map(|(logit, _)| *logit).fold(top, f64::max);
        let (own, weights) = weighed(block, top);
        out.iter_mut().zip(own).for_each(|(out, own)| *out += own);
        sum += weights;
    }
    (out.iter().map(|out| out / sum).collect(), top + sum.ln())
}

const RIGHT: Program = Program { sees: is_seen, merge: softmax };

impl Program {
    fn row(
        &self,
        (problem, inputs): (&Problem, &Inputs),
        ranks: &[Vec<usize>],
        query: Row,
        head: usize,
    ) -> (Vec<f64>, f64) {
        let n = ranks.len();
        let block = |step: usize| {
            let rank = (query.rank + n - step) % n;
            let rows =
                ranks[rank].iter().enumerate().map(move |(own, &position)| Row { rank, own, position });
            let span = ranks.concat().len();
            let seen = rows.filter(|key| (self.sees)(query, *key, span, n));
            seen.map(|key| self.pair((problem, inputs), query.position, key.position, head))
                .collect::<Vec<_>>()
        };
        let blocks: Vec<_> = (0..n).map(block).filter(|block| !block.is_empty()).collect();
        (self.merge)(&blocks)
    }

    /// Returns a logit and a value: those of a row of 0 behind the sequence.
    fn pair(
        &self,
        (problem, inputs): (&Problem, &Inputs),
        query: usize,
        key: usize,
        head: usize,
    ) -> (f64, Vec<f64>) {
        if key >= LENGTH {
            return (0.0, vec![0.0; problem.dims.v]);
        }
        let of_key = head / problem.group();
        let product = inputs.q.slice(s![query, head, ..]).dot(&inputs.k.slice(s![key, of_key, ..]));
        let value = inputs.v.slice(s![key, of_key, ..]).iter().map(|value| f64::from(*value)).collect();
        (f64::from(problem.softmax.scale) * f64::from(product), value)
    }
}

impl Backend for Program {
    fn declaration(&self) -> Declaration {
        let mut declaration = Emulated::default().declaration();
        declaration.table.statistics = vec![seamproof_oracle::TensorName::Lse];
        declaration
    }

    fn name(&self) -> &str {
        "program"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = Emulated::default().run(problem, inputs)?;
        let ranks = positions(problem);
        let round = |value: f64| {
            problem.precision.out.format.decode(problem.precision.out.format.encode(value)) as f32
        };
        for (rank, results) in outputs.ranks.iter_mut().enumerate() {
            results.max_logit = None;
            for (own, &position) in ranks[rank].iter().enumerate().filter(|(_, position)| **position < LENGTH)
            {
                for head in 0..problem.heads.q {
                    let (out, lse) = self.row((problem, inputs), &ranks, Row { rank, own, position }, head);
                    results
                        .out
                        .slice_mut(s![own, head, ..])
                        .iter_mut()
                        .zip(out)
                        .for_each(|(to, from)| *to = round(from));
                    results.lse.as_mut().expect("it is declared")[[head, own]] = lse as f32;
                }
            }
        }
        Ok(outputs)
    }
}

/// Returns the positions of each rank's rows.
fn positions(problem: &Problem) -> Vec<Vec<usize>> {
    let (n, span) = (problem.parallel.size(), problem.sequences[0].q.span);
    let chunk = |count: usize, index: usize| index * span / count..(index + 1) * span / count;
    (0..n)
        .map(|rank| match problem.parallel.balance {
            Balance::DualChunk => chunk(2 * n, rank).chain(chunk(2 * n, 2 * n - 1 - rank)).collect(),
            _ => chunk(n, rank).collect(),
        })
        .collect()
}

/// Returns the position of a row if second chunks were in the order of ranks.
fn ascending(row: Row, span: usize, ranks: usize) -> usize {
    let (chunk, rows) = (span / (2 * ranks), row.own);
    if rows < chunk { row.rank * chunk + rows } else { (ranks + row.rank) * chunk + rows - chunk }
}

/// Returns a causal sequence with padding, dealt to three ranks.
fn problem(algorithm: Algorithm, balance: Balance) -> Problem {
    let parallel = ContextParallel::over(3, algorithm, balance);
    let span = LENGTH.next_multiple_of(span_multiple(balance, 3));
    let run = Run::packed(0, LENGTH, span);
    let fields = ProblemFields {
        heads: Heads { q: 4, kv: 2 },
        softmax: Softmax::scaled(0.25),
        pass: Pass::Forward,
        mode: InputMode::Flat,
        mask: Mask::CAUSAL,
        parallel,
        data_seed: 3,
        ..ProblemFields::of(vec![Sequence { id: 0, q: run, kv: run }], 16)
    };
    Problem::new(fields).expect("it is legal")
}

#[test]
fn mistakes_of_programs_on_ranks_are_told() {
    let [ring, gathered] = [Algorithm::Ring, Algorithm::AllGather];
    let [parts, chunks] = [Balance::Contiguous, Balance::DualChunk];
    let sees = |sees| Program { sees, ..RIGHT };
    let merges = |merge| Program { merge, ..RIGHT };
    let own: fn(Row, Row, usize, usize) -> bool = |query, key, _, _| key.own <= query.own;
    for (algorithm, balance, program, words) in [
        (ring, parts, sees(own), "ranks took positions among their own rows for those of the sequence"),
        (gathered, chunks, sees(own), "ranks took positions among their own rows for those of the sequence"),
        (
            ring,
            parts,
            sees(|query, key, _, _| key.own <= query.own && key.rank <= query.rank),
            "ranks took positions among their own rows for those of the sequence, and saw no key of a later rank",
        ),
        (
            gathered,
            chunks,
            sees(|query, key, span, ranks| key.rank * (span / ranks) + key.own <= query.position),
            "keys were taken in the order of ranks for keys in the order of positions",
        ),
        (
            ring,
            chunks,
            sees(|query, key, span, ranks| ascending(key, span, ranks) <= ascending(query, span, ranks)),
            "second chunks were taken to lie in the order of ranks, not in the opposite one",
        ),
        (ring, chunks, merges(|blocks| sum_of_own(blocks, 1.0)), "results of blocks were added"),
        (
            ring,
            chunks,
            merges(|blocks| sum_of_own(blocks, 1.0 / blocks.len() as f64)),
            "results of blocks were averaged",
        ),
        (
            ring,
            parts,
            merges(running),
            "sums of earlier blocks were not scaled when the row's largest logit grew",
        ),
    ] {
        let problem = problem(algorithm, balance);
        let Verdict::Finding(finding) = judge(&program, &problem) else { panic!("not seen: {words}") };
        let told = finding.what.split_once("looks as if ").map(|(_, told)| told);
        assert_eq!(told, Some(words), "{finding}");
    }
    assert!(matches!(judge(&RIGHT, &problem(ring, chunks)), Verdict::Pass(_)));
}

/// Test with a mask that hides nothing, where rows that fill a sequence up are seen as keys.
#[test]
fn padding_that_is_taken_for_keys_is_told() {
    let causal = problem(Algorithm::Ring, Balance::DualChunk);
    let full = Problem::new(ProblemFields { mask: Mask::FULL, ..causal.into() }).expect("it is legal");
    let program = Program { sees: |_, _, _, _| true, ..RIGHT };
    let Verdict::Finding(finding) = judge(&program, &full) else { panic!("not seen") };
    assert!(
        finding.what.ends_with("looks as if rows of 0 that fill a sequence up were taken for keys"),
        "{finding}"
    );
    let right = Program { sees: |_, key, _, _| key.position < LENGTH, ..RIGHT };
    assert!(matches!(judge(&right, &full), Verdict::Pass(_)));
}

/// Test that a wrong LSE beside a right out is not told as a merge, of whose LSE nothing is known.
#[test]
fn a_wrong_lse_alone_is_no_merge() {
    let doubled = |blocks: &[Block]| {
        let (out, lse) = softmax(blocks);
        (out, lse + 0.5)
    };
    let program = Program { merge: doubled, ..RIGHT };
    // The sum and the mean of one block are its own result.
    let one = ContextParallel::over(1, Algorithm::Ring, Balance::DualChunk);
    let fields = ProblemFields { parallel: one, ..problem(Algorithm::Ring, Balance::DualChunk).into() };
    let problem = Problem::new(fields).expect("it is legal");
    let Verdict::Finding(finding) = judge(&program, &problem) else { panic!("not seen") };
    assert!(!finding.what.contains("blocks"), "{finding}");
}

/// Test that outs of blocks which were averaged are not told where no block has such an LSE.
#[test]
fn a_mean_beside_an_lse_of_no_block_is_not_told() {
    let mean = |blocks: &[Block]| sum_of_own(blocks, 1.0 / blocks.len() as f64);
    let off = |blocks: &[Block]| {
        let (out, lse) = sum_of_own(blocks, 1.0 / blocks.len() as f64);
        (out, lse - 400.0)
    };
    for (merge, is_told) in [(mean as fn(&[Block]) -> (Vec<f64>, f64), true), (off, false)] {
        let program = Program { merge, ..RIGHT };
        let Verdict::Finding(finding) = judge(&program, &problem(Algorithm::Ring, Balance::DualChunk)) else {
            panic!("not seen")
        };
        assert_eq!(finding.what.contains("were averaged"), is_told, "{finding}");
    }
}
