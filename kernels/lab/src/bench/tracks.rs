//! The packs that attention is measured on (`bench/tracks.json`), and the heads and masks that it is measured with.
//!
//! A *track* is a pack of sequences, a *column* a choice of heads, head dim and mask; a *cell* is both.

use seamproof_oracle::{Heads, Mask, Pass, Problem, ProblemFields};
use serde::Deserialize;

use super::error::BenchError;
use crate::problem::packed;

/// A pack: `times` times the lengths, each padded to a multiple of `align`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Track {
    pub(super) name: String,
    times: usize,
    align: usize,
    lengths: Vec<usize>,
}

/// Heads, head dim and mask.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) heads: Heads,
    pub(super) dim: usize,
    pub(super) mask: Mask,
}

const MHA: Heads = Heads { q: 16, kv: 16 };
const WINDOW: Mask = Mask { left: Some(512), ..Mask::CAUSAL };
pub(super) const COLUMNS: [Column; 5] = [
    Column { name: "mha-d128", heads: MHA, dim: 128, mask: Mask::CAUSAL },
    Column { name: "gqa-d128", heads: Heads { q: 32, kv: 8 }, dim: 128, mask: Mask::CAUSAL },
    Column { name: "mha-d64", heads: MHA, dim: 64, mask: Mask::CAUSAL },
    Column { name: "full-d128", heads: MHA, dim: 128, mask: Mask::FULL },
    Column { name: "window-d128", heads: MHA, dim: 128, mask: WINDOW },
];

/// A column that is measured where it is named. The backward in FP8 does not take its head dim.
const WIDE: Column = Column { name: "mha-d256", heads: Heads { q: 8, kv: 8 }, dim: 256, mask: Mask::CAUSAL };

/// A column of latent attention, of forwards alone: values have 512 lanes.
const LATENT: Column =
    Column { name: "latent-d576", heads: Heads { q: 16, kv: 1 }, dim: 576, mask: Mask::CAUSAL };

/// The tracks whose cells count as long: their ratios are averaged.
pub(super) const LONG: [&str; 3] = ["even_4x4096", "one_16384", "ragged32"];

/// A pack with heads and a mask.
#[derive(Clone, Debug)]
pub(super) struct BenchCell {
    pub(super) track: String,
    pub(super) column: Column,
    pub(super) problem: Problem,
}

impl Column {
    /// Returns the name of the mask.
    pub(super) fn mask_name(&self) -> &'static str {
        match self.mask {
            Mask { right: None, .. } => "full",
            Mask { left: Some(_), .. } => "window",
            _ => "causal",
        }
    }
}

impl Track {
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> {
        (0..self.times).flat_map(|_| self.lengths.iter().copied())
    }

    fn problem(&self, column: &Column) -> Result<Problem, BenchError> {
        let lengths = self.lengths().map(|length| (length, length.next_multiple_of(self.align)));
        let fields = packed(lengths, column.heads, column.dim, column.mask);
        Problem::new(ProblemFields { pass: Pass::Forward, ..fields })
            .map_err(|error| BenchError::Tracks(error.to_string()))
    }
}

impl BenchCell {
    /// Returns the floating-point operations of the forward on visible pairs of real tokens: two products.
    pub(super) fn operations(&self) -> f64 {
        let lanes = self.problem.dims.qk + self.problem.dims.v;
        2.0 * (lanes * self.column.heads.q) as f64 * self.problem.pairs() as f64
    }
}

/// Returns the tracks of this project.
pub(super) fn tracks() -> Result<Vec<Track>, BenchError> {
    let text = include_str!("../../bench/tracks.json");
    serde_json::from_str(text).map_err(|error| BenchError::Tracks(error.to_string()))
}

/// Returns the cells of the named tracks and columns, of all where none is named, track by track.
pub(super) fn cells(tracks: &[Track], names: [&[String]; 2]) -> Result<Vec<BenchCell>, BenchError> {
    cells_among(tracks, &COLUMNS, names)
}

/// Returns the same where the columns of wide heads may be named, that of latent ones too where only `forwards` are meant.
pub(super) fn cells_and_wide(
    tracks: &[Track],
    names: [&[String]; 2],
    forwards: bool,
) -> Result<Vec<BenchCell>, BenchError> {
    let more: &[Column] = match (names[1].is_empty(), forwards) {
        (true, _) => &[],
        (false, false) => &[WIDE],
        (false, true) => &[WIDE, LATENT],
    };
    cells_among(tracks, &[&COLUMNS[..], more].concat(), names)
}

fn cells_among(
    tracks: &[Track],
    known: &[Column],
    [rows, columns]: [&[String]; 2],
) -> Result<Vec<BenchCell>, BenchError> {
    let rows = chosen("track", tracks, |track| &track.name, rows)?;
    let columns = chosen("column", known, |column| column.name, columns)?;
    let all = rows.iter().flat_map(|track| columns.iter().map(move |column| (track, column)));
    all.map(|(track, column)| {
        let problem = track.problem(column)?;
        Ok(BenchCell { track: track.name.clone(), column: **column, problem })
    })
    .collect()
}

fn chosen<'a, T>(
    what: &'static str,
    all: &'a [T],
    name_of: impl Fn(&T) -> &str,
    names: &[String],
) -> Result<Vec<&'a T>, BenchError> {
    for name in names {
        if !all.iter().any(|one| name_of(one) == name) {
            let known = all.iter().map(&name_of).collect::<Vec<_>>().join(", ");
            return Err(BenchError::Unknown { what, name: name.clone(), known });
        }
    }
    Ok(all.iter().filter(|one| names.is_empty() || names.iter().any(|name| name_of(one) == name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tracks_are_those_that_peers_were_measured_on() {
        let tokens: Vec<_> = tracks()
            .unwrap()
            .iter()
            .map(|track| {
                let problem = track.problem(&COLUMNS[0]).unwrap();
                (track.name.clone(), problem.sequences.len(), track.lengths().sum(), problem.rows.q)
            })
            .collect();
        let expected = [
            ("even_4x4096", 4, 16_384, 16_384),
            ("one_16384", 1, 16_384, 16_384),
            ("ragged32", 32, 60_090, 61_824),
            ("short128", 128, 58_856, 66_944),
            ("tiny1024x64", 1024, 65_536, 65_536),
        ];
        assert_eq!(tokens, expected.map(|(name, count, real, rows)| (name.to_owned(), count, real, rows)));
    }

    #[test]
    fn operations_count_visible_pairs_of_real_tokens() {
        let tracks = tracks().unwrap();
        let cell = |track: &str, column: &str| {
            let names = [[track.to_owned()], [column.to_owned()]];
            cells_and_wide(&tracks, [&names[0], &names[1]], true).unwrap().remove(0).operations()
        };
        let causal = |length: f64| length * (length + 1.0) / 2.0;
        assert_eq!(cell("one_16384", "full-d128"), 4.0 * 128.0 * 16.0 * 16_384.0 * 16_384.0);
        assert_eq!(cell("even_4x4096", "mha-d64"), 4.0 * 64.0 * 16.0 * 4.0 * causal(4096.0));
        let window = causal(512.0) + 513.0 * (16_384.0 - 512.0);
        assert_eq!(cell("one_16384", "window-d128"), 4.0 * 128.0 * 16.0 * window);
        assert_eq!(cell("one_16384", "mha-d256"), 4.0 * 256.0 * 8.0 * causal(16_384.0));
        assert_eq!(cells_and_wide(&tracks, [&[], &[]], true).unwrap().len(), 25);
        assert!(cells(&tracks, [&[], &["mha-d256".to_owned()]]).is_err());
        let unknown = cells(&tracks, [&["big".to_owned()], &[]]);
        assert!(matches!(unknown, Err(BenchError::Unknown { .. })));
    }
}
