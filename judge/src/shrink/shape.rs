//! The memory layout of a problem as numbers that can be lowered one by one.
//!
//! Each side (q, kv) is a [`Layout`]: `first` rows, then the sequences' *pieces* in memory order, then `slack` rows.
//! A piece is `gap` rows that nobody owns, `len` real rows and `pad` owned padding rows. Runs and offsets are rebuilt
//! from these numbers. Dropping or shortening a sequence thus closes up the rows behind it, and every remaining seam
//! stays: a first offset, a gap, padding, slack, interleaving, a memory order that is not the listed one.
//!
//! Two things are lost: free rows inside an interleaved layout beyond its own step, and a mixture of steps (all
//! become one).

use seamproof_oracle::{ContextParallel, Form, Problem, ProblemFields, Run, Sequence, TensorRows};

/// Sequences of a problem by size and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrangement {
    /// Ids, in the problem's order.
    pub(crate) ids: Vec<u32>,
    /// Layout of the rows of q, out, dout, dq.
    pub(crate) q: Layout,
    /// Layout of the rows of k, v, dk, dv.
    pub(crate) kv: Layout,
}

/// One side of an [`Arrangement`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Number of rows before the first piece.
    pub(crate) first: usize,
    /// Number of rows after the last piece.
    pub(crate) slack: usize,
    /// Whether position p of every piece lies next to position p of the others, as in an SBHD tensor.
    pub(crate) interleaved: bool,
    /// Pieces, one per sequence, in the problem's order.
    pub(crate) pieces: Vec<SequenceRows>,
}

/// Rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequenceRows {
    /// Number of free rows between the preceding piece in memory and this one; 0 for the first.
    pub(crate) gap: usize,
    /// Number of real rows.
    pub(crate) len: usize,
    /// Number of owned rows past the real ones.
    pub(crate) pad: usize,
    /// Place of the piece in memory order.
    pub(crate) place: usize,
}

impl SequenceRows {
    /// Makes a piece hold at least `least` real rows. Those that it lacks are padding rows, or new ones.
    pub(crate) fn hold(&mut self, least: usize) {
        let lacks = least.saturating_sub(self.len);
        (self.len, self.pad) = (self.len + lacks, self.pad.saturating_sub(lacks));
    }
}

/// Smallest step of an interleaved layout. A sequence left alone keeps its stride.
const STEP_MIN: usize = 2;

impl Arrangement {
    /// Reads a problem's layout.
    pub(crate) fn of(problem: &Problem) -> Arrangement {
        let side = |run: fn(&Sequence) -> Run, rows| {
            Layout::of(&problem.sequences.iter().map(run).collect::<Vec<_>>(), rows)
        };
        Arrangement {
            ids: problem.sequences.iter().map(|sequence| sequence.id).collect(),
            q: side(|sequence| sequence.q, problem.rows.q),
            kv: side(|sequence| sequence.kv, problem.rows.kv),
        }
    }

    /// Adds a sequence of one query and one key where there is none.
    pub(crate) fn add_one(&mut self) {
        self.ids.push(0);
        self.sides().into_iter().for_each(Layout::hold_one_piece);
    }

    /// Returns both sides.
    pub(crate) fn sides(&mut self) -> [&mut Layout; 2] {
        [&mut self.q, &mut self.kv]
    }

    /// Removes every seam on both sides.
    pub(crate) fn plain(&mut self) {
        self.sides().into_iter().for_each(Layout::plain);
    }

    /// Keeps the sequences whose index passes.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        retain(&mut self.ids, &keep);
        for side in self.sides() {
            retain(&mut side.pieces, &keep);
        }
    }

    /// Cuts every length of either side to at most `most`.
    pub(crate) fn cap_lengths(&mut self, most: usize) {
        for piece in self.sides().into_iter().flat_map(|side| &mut side.pieces) {
            piece.len = piece.len.min(most);
        }
    }

    /// Gives every sequence with real rows `span` rows on that side, real ones as far as it has them. A sequence
    /// without real rows owns none.
    pub(crate) fn own(&mut self, span: usize) {
        for piece in self.sides().into_iter().flat_map(|side| &mut side.pieces) {
            piece.len = piece.len.min(span);
            piece.pad = if piece.len > 0 { span - piece.len } else { 0 };
        }
    }

    /// Makes the layout one that a form says: without padding of the sequences' own for segments, in batch rows of one
    /// sequence each for batched ones, with spans that are all as long as the longest and no other rows for lengths,
    /// with rows that follow each other from row 0 on where the caller says that there is no padding. What several
    /// ranks are dealt in segments and in lengths gets the padding that they need to share it.
    pub(crate) fn bring_into(&mut self, form: Form, parallel: &ContextParallel) {
        let (ranks, unit) = parallel.shares();
        for side in self.sides() {
            match form {
                Form::CuSeqlens | Form::PadBetweenSeqs => {}
                Form::NoPadBetweenSeqs => side.follow(),
                Form::Segments => {
                    side.pack();
                    side.cap_padding(0);
                    side.round_spans(unit);
                    side.round_free(ranks);
                }
                Form::BatchedSegments | Form::MisshapenSegments => side.lie_in_batch_rows(),
                Form::Lengths | Form::UnequalLengths => {
                    side.round_spans(unit);
                    side.pad_alike();
                }
            }
        }
    }

    /// Makes the layout one that a form says, with as little padding as it can have.
    pub(crate) fn cut_padding_of(&mut self, form: Form, parallel: &ContextParallel) {
        if !matches!(form, Form::CuSeqlens | Form::PadBetweenSeqs) {
            self.sides().into_iter().for_each(|side| side.cap_padding(0));
            self.bring_into(form, parallel);
        }
    }

    /// Puts this layout into a problem's fields, as their form can say it.
    pub(crate) fn write(&self, fields: &mut ProblemFields) {
        let mut shape = self.clone();
        shape.bring_into(fields.form, &fields.parallel);
        let (q, q_rows) = shape.q.runs();
        let (kv, kv_rows) = shape.kv.runs();
        let runs = q.into_iter().zip(kv);
        fields.sequences = self.ids.iter().zip(runs).map(|(&id, (q, kv))| Sequence { id, q, kv }).collect();
        fields.rows = TensorRows { q: q_rows, kv: kv_rows };
    }
}

impl Layout {
    /// Puts one piece of one row where there is none; a free row becomes its own.
    fn hold_one_piece(&mut self) {
        self.slack = self.slack.saturating_sub(1);
        self.pieces.push(SequenceRows { gap: 0, len: 1, pad: 0, place: self.pieces.len() });
    }

    /// Makes every span a multiple of `unit`.
    pub(crate) fn round_spans(&mut self, unit: usize) {
        for piece in &mut self.pieces {
            piece.pad += (piece.len + piece.pad).next_multiple_of(unit) - (piece.len + piece.pad);
        }
    }

    /// Makes the number of rows that nobody owns a multiple of `unit` wherever there are any.
    fn round_free(&mut self, unit: usize) {
        let gaps = self.pieces.iter_mut().map(|piece| &mut piece.gap);
        gaps.chain([&mut self.first, &mut self.slack]).for_each(|rows| *rows -= *rows % unit);
    }

    /// Gives each piece a batch row of its own, which all have as many rows: in order, without padding of the pieces'
    /// own. Free rows between two pieces count as rows of the batch row before them.
    fn lie_in_batch_rows(&mut self) {
        self.pack();
        self.sort();
        let after = self.pieces.iter().skip(1).map(|piece| piece.gap).chain([0]);
        let lengths = self.pieces.iter().zip(after).map(|(piece, gap)| piece.len + piece.pad + gap);
        let length = lengths.max().unwrap_or(0);
        let mut free = 0;
        for piece in &mut self.pieces {
            (piece.gap, piece.pad) = (free, 0);
            free = length - piece.len;
        }
        (self.first, self.slack) = (0, free);
    }

    /// Makes the pieces a padded batch: in order, with spans as long as the longest, and nothing else.
    fn pad_alike(&mut self) {
        let span = self.pieces.iter().map(|piece| piece.len + piece.pad).max().unwrap_or(0);
        self.pieces.iter_mut().for_each(|piece| piece.pad = span - piece.len);
        self.cap_gaps(0);
        self.cap_first(0);
        self.cap_slack(0);
        self.pack();
        self.sort();
    }

    /// Returns the number of rows of the tensor.
    pub(crate) fn rows(&self) -> usize {
        self.runs().1
    }

    /// Whether rows between two interleaved pieces belong to none.
    pub(crate) fn leaves_rows_between(&self) -> bool {
        let owned: usize = self.pieces.iter().map(|piece| piece.len + piece.pad).sum();
        self.interleaved && self.first + owned + self.slack != self.rows()
    }

    fn of(runs: &[Run], rows: usize) -> Layout {
        let mut order: Vec<usize> = (0..runs.len()).collect();
        // An empty run may share its offset with the one behind it.
        order.sort_by_key(|&index| (runs[index].offset, runs[index].span));
        let interleaved = runs.iter().any(|run| run.step > 1);
        let first = order.first().map_or(0, |&index| runs[index].offset);
        let mut pieces = vec![SequenceRows { gap: 0, len: 0, pad: 0, place: 0 }; runs.len()];
        let mut end = first;
        for (place, &index) in order.iter().enumerate() {
            let run = runs[index];
            let gap = if interleaved { 0 } else { run.offset.saturating_sub(end) };
            pieces[index] = SequenceRows { gap, len: run.len, pad: run.span - run.len, place };
            end = end.max(run.end().unwrap_or(rows));
        }
        Layout { first, slack: rows.saturating_sub(end), interleaved, pieces }
    }

    /// Returns the runs in the problem's order, and the number of rows of the tensor.
    pub(crate) fn runs(&self) -> (Vec<Run>, usize) {
        let order = self.memory_order();
        let step = if self.interleaved { order.len().max(STEP_MIN) } else { 1 };
        let mut runs = vec![Run::packed(0, 0, 0); order.len()];
        let mut end = self.first;
        for (lane, &index) in order.iter().enumerate() {
            let piece = self.pieces[index];
            let offset = match (self.interleaved, lane) {
                (true, _) => self.first + lane,
                (false, 0) => end,
                (false, _) => end + piece.gap,
            };
            let run = Run { offset, step, len: piece.len, span: piece.len + piece.pad };
            end = end.max(run.end().unwrap_or(usize::MAX));
            runs[index] = run;
        }
        (runs, end.saturating_add(self.slack))
    }

    /// Packs the rows of an interleaved layout one sequence after the other.
    pub(crate) fn pack(&mut self) {
        self.interleaved = false;
    }

    /// Makes the memory order the listed one. Gaps stay where they are in memory.
    pub(crate) fn sort(&mut self) {
        let gaps: Vec<usize> = self.memory_order().iter().map(|&index| self.pieces[index].gap).collect();
        for (index, (piece, gap)) in self.pieces.iter_mut().zip(gaps).enumerate() {
            (piece.place, piece.gap) = (index, gap);
        }
    }

    fn memory_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.pieces.len()).collect();
        order.sort_by_key(|&index| self.pieces[index].place);
        order
    }

    /// Cuts padding to at most `most` rows a piece.
    pub(crate) fn cap_padding(&mut self, most: usize) {
        self.pieces.iter_mut().for_each(|piece| piece.pad = piece.pad.min(most));
    }

    /// Cuts gaps to at most `most` rows.
    pub(crate) fn cap_gaps(&mut self, most: usize) {
        self.pieces.iter_mut().for_each(|piece| piece.gap = piece.gap.min(most));
    }

    /// Cuts the first offset to at most `most`.
    pub(crate) fn cap_first(&mut self, most: usize) {
        self.first = self.first.min(most);
    }

    /// Cuts slack to at most `most` rows.
    pub(crate) fn cap_slack(&mut self, most: usize) {
        self.slack = self.slack.min(most);
    }

    /// Cuts the rows that are not real to at most `most` at each place.
    pub(crate) fn cap_all(&mut self, most: usize) {
        self.cap_padding(most);
        self.cap_gaps(most);
        self.cap_first(most);
        self.cap_slack(most);
    }

    /// Removes every seam: the rows are packed, in order, and all real.
    pub(crate) fn plain(&mut self) {
        self.follow();
        self.cap_slack(0);
    }

    /// Makes real rows follow each other from row 0 on, in order. Rows after the last stay.
    fn follow(&mut self) {
        self.cap_padding(0);
        self.cap_gaps(0);
        self.cap_first(0);
        self.pack();
        self.sort();
    }
}

fn retain<T>(items: &mut Vec<T>, keep: impl Fn(usize) -> bool) {
    let mut index = 0;
    items.retain(|_| {
        index += 1;
        keep(index - 1)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(runs: &[Run], rows: usize) -> Layout {
        Layout::of(runs, rows)
    }

    #[test]
    fn packed_runs_are_read_and_rebuilt_as_they_were() {
        // Memory order 1, 2, 0; an empty piece at the start of its neighbour; gap, padding, first offset, slack.
        let runs = [Run::packed(12, 3, 5), Run::packed(2, 4, 4), Run::packed(9, 0, 0), Run::packed(9, 1, 2)];
        let read = layout(&runs, 20);
        assert_eq!(read.runs(), (runs.to_vec(), 20));
        assert_eq!((read.first, read.slack), (2, 3));
        assert_eq!(read.pieces.iter().map(|piece| piece.gap).collect::<Vec<_>>(), [1, 0, 3, 0]);
    }

    #[test]
    fn interleaved_runs_are_read_and_rebuilt_as_they_were() {
        let runs = [0, 1, 2].map(|lane| Run { offset: 1 + lane, step: 3, len: 2, span: 4 });
        let read = layout(&runs, 14);
        assert!(read.interleaved);
        assert_eq!(read.runs(), (runs.to_vec(), 14));
    }

    #[test]
    fn dropping_a_sequence_closes_up_and_keeps_the_seams() {
        let runs = [Run::packed(1, 2, 3), Run::packed(6, 2, 4), Run::packed(11, 5, 5)];
        let mut read = layout(&runs, 18);
        retain(&mut read.pieces, |index| index != 1);
        assert_eq!(read.runs(), (vec![Run::packed(1, 2, 3), Run::packed(5, 5, 5)], 12));
        retain(&mut read.pieces, |index| index != 0);
        assert_eq!(read.runs(), (vec![Run::packed(1, 5, 5)], 8));
    }

    #[test]
    fn a_lone_interleaved_sequence_keeps_a_stride() {
        let mut read = layout(&[Run { offset: 0, step: 3, len: 2, span: 2 }], 6);
        assert_eq!(read.runs().0, [Run { offset: 0, step: STEP_MIN, len: 2, span: 2 }]);
        read.pack();
        assert_eq!(read.runs().0, [Run::packed(0, 2, 2)]);
    }

    #[test]
    fn no_sequence_leaves_slack_alone() {
        assert_eq!(layout(&[], 7).runs(), (vec![], 7));
    }
}
