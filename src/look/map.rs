//! Picture 2 for a terminal: who sees whom, in Unicode blocks. Marks differ in shape, and no colour is needed.

use std::fmt::Write;

use seamproof_oracle::Side;
use seamproof_oracle::sharding::RankLayout;

use super::mask::{self, Matrix};

/// Largest number of tiles on each side of a map, each two letters wide.
pub(super) const TILES_MAX: usize = 24;
/// Largest number of maps.
const MAPS_MAX: usize = 4;

/// Returns the maps of a case, and the key to them; nothing of a case without pairs.
pub(super) fn map(layouts: &[RankLayout], matrices: &[Matrix]) -> String {
    let drawn: Vec<&Matrix> = matrices.iter().filter(|matrix| matrix.tiles() > 0).take(MAPS_MAX).collect();
    if drawn.is_empty() {
        return String::new();
    }
    let mut text = String::from("map       █ visible  ▒ some of a tile’s pairs  · hidden");
    if drawn.iter().any(|matrix| matrix.is_wrong()) {
        text += "  ╳ missing  + too many  = more than once";
    }
    text += "\n";
    if layouts.len() > 1 {
        text += "          numbers at the sides: ranks that own them\n";
    }
    for matrix in &drawn {
        one(layouts, matrix, &mut text);
    }
    let left = matrices.len() - drawn.len();
    if left > 0 {
        let _ = writeln!(text, "  … and {left} more that are empty or have no room");
    }
    text
}

fn one(layouts: &[RankLayout], matrix: &Matrix, text: &mut String) {
    let [rows, columns] = matrix.shape();
    let owners = |side: Side, first: &dyn Fn(usize) -> usize, count: usize| -> Vec<String> {
        let pieces =
            mask::pieces(layouts, matrix.sequence, side).filter(|_| layouts.len() > 1).unwrap_or_default();
        let owner = |tile: usize| {
            let at = first(tile);
            pieces.iter().find(|(start, end, _)| (*start..*end).contains(&at)).map(|(.., rank)| *rank)
        };
        let is_new = |tile: usize| tile == 0 || owner(tile) != owner(tile - 1);
        (0..count)
            .map(|tile| owner(tile).filter(|_| is_new(tile)).map_or(String::new(), |rank| rank.to_string()))
            .collect()
    };
    let of_queries = owners(Side::Q, &|tile| matrix.first_query(tile), rows);
    let of_keys = owners(Side::Kv, &|tile| matrix.first_key(tile), columns);
    let _ = writeln!(text, "  {}, queries ↓, keys →", matrix.title());
    if of_keys.iter().any(|rank| !rank.is_empty()) {
        let line: String = of_keys.iter().map(|rank| format!("{rank:<2}")).collect();
        let _ = writeln!(text, "       {}", line.trim_end());
    }
    for (row, rank) in of_queries.iter().enumerate() {
        let tiles: String = (0..columns).map(|column| letters(matrix.class(row, column))).collect();
        let _ = writeln!(text, "  {rank:>4} {tiles}");
    }
}

/// Returns the two letters of a tile.
fn letters(class: Option<&str>) -> &'static str {
    match class {
        Some("visible") => "██",
        Some("partly") => "▒▒",
        Some("missing") => "╳╳",
        Some("extra") => "++",
        Some("twice") => "==",
        Some(_) => "??",
        None => "··",
    }
}
