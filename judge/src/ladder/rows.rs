//! Rows: one row of a result, and what each row of the other side adds to it. A row of out is the sum of weighed values
//! divided by that of the weights, and a row of a gradient a plain sum.

use seamproof_oracle::{SavedViews, Side, TensorName};

use super::pairs::{Pairs, widened};

/// A row of out, dq, dk or dv, for one head.
pub(super) struct Row<'a> {
    pairs: Pairs<'a>,
    tensor: TensorName,
    head: usize,
    position: usize,
    /// LSE to which the weights of a row of out relate: the right one.
    lse: f64,
    /// Out and LSE with which a gradient begins.
    saved: Option<SavedViews<'a>>,
    got: Finished,
}

/// A row as it comes out: its lanes, and for out its LSE.
pub(super) struct Finished {
    /// Values of the lanes.
    pub(super) lanes: Vec<f64>,
    /// LSE of the row; `None` in a gradient, and where it was not returned.
    pub(super) lse: Option<f64>,
}

impl<'a> Row<'a> {
    /// Returns a row of out, with what was returned for it; `None` where it sees no key.
    pub(super) fn of_out(pairs: Pairs<'a>, head: usize, query: usize, got: Finished) -> Option<Row<'a>> {
        let lse = pairs.lse(query, head);
        let row = Row { pairs, tensor: TensorName::Out, head, position: query, lse, saved: None, got };
        lse.is_finite().then_some(row)
    }

    /// Returns a row of dq, dk or dv, with what was returned for it.
    pub(super) fn of_gradient(
        pairs: Pairs<'a>,
        (tensor, head, position): (TensorName, usize, usize),
        saved: SavedViews<'a>,
        got: Vec<f64>,
    ) -> Row<'a> {
        let got = Finished { lanes: got, lse: None };
        Row { pairs, tensor, head, position, lse: 0.0, saved: Some(saved), got }
    }

    pub(super) fn tensor(&self) -> TensorName {
        self.tensor
    }

    pub(super) fn side(&self) -> Side {
        self.tensor.side()
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// Returns what was returned for the row.
    pub(super) fn got(&self) -> &Finished {
        &self.got
    }

    /// Returns the row in words.
    pub(super) fn words(&self) -> String {
        let what = if self.side() == Side::Q { "query" } else { "key" };
        format!("{what} {} of sequence {}", self.position, self.pairs.sequence)
    }

    /// Returns the number of values of a sum.
    pub(super) fn width(&self) -> usize {
        self.got.lanes.len() + usize::from(self.tensor == TensorName::Out)
    }

    /// Returns the work of one row of the other side, in lanes.
    pub(super) fn work(&self) -> usize {
        let heads = if self.side() == Side::Q { 1 } else { self.pairs.problem.group() };
        4 * heads * (self.width() + self.got.lanes.len())
    }

    /// Whether the row is made of rows that travel in a ring: keys and values.
    pub(super) fn reads_travelling_rows(&self) -> bool {
        self.side() == Side::Q
    }

    /// Whether the mask joins the row to a row of the other side.
    pub(super) fn sees(&self, other: usize) -> bool {
        match self.side() {
            Side::Q => self.pairs.sees(self.position, other),
            Side::Kv => self.pairs.sees(other, self.position),
        }
    }

    /// Adds what a row of the other side contributes.
    pub(super) fn add(&self, other: usize, sum: &mut [f64]) {
        let Row { pairs, head, position, .. } = self;
        let mut add = |times: f64, lanes: &[f32]| {
            sum.iter_mut().zip(widened(lanes)).for_each(|(sum, lane)| *sum += times * lane);
        };
        match (self.tensor, &self.saved) {
            (TensorName::Dq, Some(saved)) => {
                let gradient = pairs.logit_gradient((*position, *head, other), saved);
                add(gradient, &pairs.of_key(&pairs.inputs.k, other, *head));
            }
            (TensorName::Dk | TensorName::Dv, Some(saved)) => {
                for head in pairs.heads(*head) {
                    let pair = (other, head, *position);
                    let (times, lanes) = match self.tensor {
                        TensorName::Dk => (pairs.logit_gradient(pair, saved), &pairs.inputs.q),
                        _ => (pairs.weight(pair, pairs.saved_lse(other, head, saved)), &pairs.inputs.dout),
                    };
                    add(times, &pairs.of_query(lanes, other, head));
                }
            }
            _ => {
                let weight = pairs.weight((*position, *head, other), self.lse);
                add(weight, &pairs.of_key(&pairs.inputs.v, other, *head));
                sum[self.got.lanes.len()] += weight;
            }
        }
    }

    /// Adds what a row of zeros of the other side contributes: to out the weight of a logit of 0.
    pub(super) fn add_zeros(&self, sum: &mut [f64]) {
        if self.tensor == TensorName::Out {
            sum[self.got.lanes.len()] += libm::exp(-self.lse);
        }
    }

    /// Returns the row that a sum gives; `None` for out without a weight.
    pub(super) fn finished(&self, sum: &[f64]) -> Option<Finished> {
        if self.tensor != TensorName::Out {
            return Some(Finished { lanes: sum.to_vec(), lse: None });
        }
        let (weights, lanes) = sum.split_last()?;
        let weights = weights + self.pairs.sink_weight(self.head, self.lse);
        let lanes = lanes.iter().map(|lane| lane / weights).collect();
        (weights > 0.0).then(|| Finished { lanes, lse: Some(self.lse + libm::log(weights)) })
    }
}

impl Finished {
    /// Returns the length of the lanes.
    pub(super) fn norm(&self) -> f64 {
        self.lanes.iter().map(|lane| lane * lane).sum::<f64>().sqrt()
    }

    /// Returns the distance between the lanes of two rows.
    pub(super) fn distance(&self, other: &Finished) -> f64 {
        self.lanes.iter().zip(&other.lanes).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt()
    }
}
