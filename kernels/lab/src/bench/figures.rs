//! Lines of a table of cells, each with the ratio to a peer's figure, and the means of the ratios.

use std::io::Write;

use super::error::BenchError;
use super::peer::{BackwardRequest, Peer, PeerFigure};
use super::timing::Timing;
use super::tracks::{BenchCell, LONG};

/// The largest relative difference between a sequence's gradients of two computations of the same thing: four times
/// the spacing of bf16. P, dS and results are rounded once each, by half a spacing, which adds up to about one.
const SAME: f64 = 4.0 / 256.0;

/// A table in the making.
pub(super) struct Figures<'a> {
    peer: Option<Peer>,
    to: &'a mut dyn Write,
    ratios: Vec<Ratio>,
}

/// The peer's time divided by ours.
#[derive(Clone, Debug)]
struct Ratio {
    /// The mode that the cell is measured in.
    mode: &'static str,
    group: String,
    ratio: f64,
}

/// A figure of ours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figure {
    /// The mode that the cell is measured in; empty where there is only one.
    pub(super) mode: &'static str,
    pub(super) operations: f64,
    pub(super) ms: f64,
}

impl Figure {
    fn text(&self, ms: f64) -> String {
        format!("{ms:>9.4} ms {:>7.1} TFLOP/s", self.operations / ms / 1e9)
    }
}

impl<'a> Figures<'a> {
    /// Starts the peer. If it cannot be started, a line says so, and only its own figures are missing.
    pub(super) fn new(peer: Option<&str>, to: &'a mut dyn Write) -> Result<Figures<'a>, BenchError> {
        let peer = peer.map(Peer::start).transpose().or_else(|what| {
            writeln!(to, "peer: {what}")?;
            Ok::<_, BenchError>(None)
        })?;
        Ok(Figures { peer, to, ratios: Vec::new() })
    }

    pub(super) fn has_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// Prints a line without figures.
    pub(super) fn say(&mut self, line: &str) -> Result<(), BenchError> {
        Ok(writeln!(self.to, "{line}")?)
    }

    /// Prints a cell's figure with the peer's, which is asked for now. The ratio counts where both computed the same.
    pub(super) fn line(
        &mut self,
        cell: &BenchCell,
        figure: Figure,
        (timing, backward): (Timing, Option<&BackwardRequest>),
    ) -> Result<(), BenchError> {
        let Figure { mode, ms: ours, .. } = figure;
        write!(self.to, "{:<12} {:<12} {mode:<6}{}", cell.track, cell.column.name, figure.text(ours))?;
        match self.peer.as_mut().map(|peer| peer.time(cell, timing, backward)) {
            None => writeln!(self.to)?,
            Some(Err(what)) => writeln!(self.to, "   peer: {what}")?,
            Some(Ok(PeerFigure { ms, difference })) => {
                write!(self.to, "   peer {}", figure.text(ms))?;
                let same = difference.is_none_or(|difference| difference <= SAME);
                if let Some(difference) = difference {
                    write!(self.to, "   differs by {difference:.5}")?;
                }
                if same {
                    writeln!(self.to, "   ratio {:.3}", ms / ours)?;
                    self.ratios.push(Ratio { mode, group: group(cell), ratio: ms / ours });
                } else {
                    writeln!(self.to, ": not the same computation, no ratio")?;
                }
            }
        }
        Ok(self.to.flush()?)
    }

    /// Prints the geometric mean and the least of the ratios, for long cells together and for each other track by
    /// mask.
    pub(super) fn means(mut self) -> Result<(), BenchError> {
        self.ratios.sort_by_key(|ratio| ratio.mode);
        for same in self.ratios.chunk_by(|a, b| (a.mode, &a.group) == (b.mode, &b.group)) {
            let least = same.iter().map(|cell| cell.ratio).fold(f64::INFINITY, f64::min);
            let mean = (same.iter().map(|cell| cell.ratio.ln()).sum::<f64>() / same.len() as f64).exp();
            let (Ratio { mode, group, .. }, cells) = (&same[0], same.len());
            writeln!(
                self.to,
                "{group:<20} {mode:<6}{cells:>2} cells: ratio {mean:.3} in the geometric mean, {least:.3} at least"
            )?;
        }
        Ok(())
    }
}

fn group(cell: &BenchCell) -> String {
    match LONG.contains(&cell.track.as_str()) {
        true => "long tracks".to_owned(),
        false => format!("{} {}", cell.track, cell.column.mask_name()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::timing::TIMING;
    use super::super::tracks::{cells, tracks};
    use super::*;

    /// Returns what is printed for all cells of one column, each with a figure of 1 ms, beside a peer that gives
    /// these answers.
    fn printed(column: &str, answers: &str) -> Vec<String> {
        let cells = cells(&tracks().unwrap(), [&[], &[column.to_owned()]]).unwrap();
        let peer = format!("for answer in {answers}; do read line; echo \"$answer\"; done");
        let mut text = Vec::new();
        let mut figures = Figures::new(Some(&peer), &mut text).unwrap();
        for cell in &cells {
            figures.line(cell, Figure { mode: "", operations: 1e9, ms: 1.0 }, (TIMING, None)).unwrap();
        }
        figures.means().unwrap();
        String::from_utf8(text).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn means_are_of_long_tracks_together_and_of_others_apart() {
        let times = [1.0, 2.0, 4.0, 3.0, 5.0].map(|ms| format!("'{{\"ms\": {ms}}}'")).join(" ");
        let lines = printed("mha-d64", &times);
        assert_eq!(lines.len(), 8, "{lines:?}");
        let long = "long tracks                 3 cells: ratio 2.000 in the geometric mean, 1.000 at least";
        assert_eq!(lines[5], long);
        assert!(lines[6].starts_with("short128 causal") && lines[6].contains("3.000"), "{lines:?}");
    }

    #[test]
    fn a_peer_that_computes_something_else_has_no_ratio() {
        let answer = |difference: f64| format!("'{{\"ms\": 2, \"difference\": {difference}}}'");
        let answers = [0.004, 0.1, 0.004, 0.004, 0.5].map(answer).join(" ");
        let lines = printed("full-d128", &answers);
        assert!(lines[0].ends_with("differs by 0.00400   ratio 2.000"), "{lines:?}");
        assert!(lines[1].ends_with("differs by 0.10000: not the same computation, no ratio"), "{lines:?}");
        assert!(lines[5].contains(" 2 cells"), "{lines:?}");
        assert_eq!(lines.len(), 7, "{lines:?}");
    }
}
