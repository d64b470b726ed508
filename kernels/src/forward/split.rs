//! The split shape: few query rows against many keys (see `forward_split.cuh`), its memory and its launch.
//!
//! A tile has [`ROWS`] rows: query heads of a KV head, of one row of the sequence or of several. Its keys are cut into
//! *pieces*. What pieces of one tile leave is put together by the block that ends the last of them, or, where there are many
//! pieces, by a launch of its own. A call of few segments and tiles is planned by each block for itself.
//!
//! Where pieces begin follows from the segment's number of keys alone, as long as there is room for what all of them may
//! leave: for [`LEFT_MAX`] pieces of a tile, those of 512 sequences with one row and eight packs of heads. Pieces of
//! larger calls are two, four, eight or sixteen times as long.

use seamproof_simulator::Segment;

use super::shape::TileShape;
use super::{PlanPieces, PlanPlaces, PlanTiles, RawArguments, WIDE_DIM};
use crate::attend::CallTables;
use crate::error::KernelError;
use crate::gpu::{Gpu, Launch};
use crate::memory::{Area, Argument};

/// The rows of a tile.
pub(super) const ROWS: usize = 16;
/// The keys that a warp multiplies at once.
const KEYS: usize = 16;
/// The most pieces that a segment's keys make, and the fewest keys of one.
const PIECES: usize = 16;
const PIECE_KEYS: usize = 64;
/// The most pieces for whose results there is room, which take 0.5 GB.
const LEFT_MAX: usize = 1 << 16;
/// The bytes of `TilePieces` of the source, and of what a piece leaves.
const TILE_PIECES_BYTES: usize = 16;
const LEFT_BYTES: usize = ROWS * (WIDE_DIM + 4) * 4;
/// The warps of a block, and its threads.
const WARPS: usize = 4;
pub(crate) const THREADS: usize = 32 * WARPS;
/// The blocks that a multiprocessor holds at once.
const RESIDENT: usize = 2;
/// The blocks that put together what is left: so many tiles and heads at once, and rows of one for each warp.
const MERGES: (usize, usize) = (264, ROWS / WARPS);
/// The most pieces that are put together by the blocks that end them: one for each block. Where blocks take several, the waits
/// cost more than a launch, as measured.
const ENDED_MAX: usize = 264;
/// The most segments, and tiles, of a plan that blocks make for themselves.
const FEW_TILES: usize = 32;

/// The most rows of a segment for which this shape is chosen.
const LONGEST: usize = 64;
/// Segments times heads that are too few tiles for a GPU, and the keys of a row from which this shape then is faster.
const TOO_FEW_TILES: usize = 264;
const FEW_KEYS: usize = 512;
/// The keys of a row from which this shape is faster where heads share tiles.
const SHARED_KEYS: usize = 2048;

#[repr(C)]
#[derive(Clone, Copy)]
struct RawSplit {
    tile_pieces: u64,
    left: u64,
    ended: u64,
    pack: i32,
    tile_rows: i32,
    longer: i32,
}
// SAFETY: repr(C), the fields of `SplitArgs` in forward_split.cuh.
unsafe impl Argument for RawSplit {}

/// Query heads as tiles have them.
#[derive(Clone, Copy, Debug)]
struct Packs {
    /// The query heads of a tile.
    heads: usize,
    /// The packs of all heads.
    count: usize,
    /// The rows of the sequence in a tile.
    rows: usize,
}

impl Packs {
    fn of([heads, kv_heads]: [usize; 2]) -> Packs {
        let pack = packed(heads / kv_heads.max(1));
        Packs { heads: pack, count: heads / pack, rows: ROWS / pack }
    }
}

/// Returns the number of query heads that share a tile, where so many have one KV head: a divisor.
pub(super) fn packed(group: usize) -> usize {
    (1..=ROWS.min(group)).rev().find(|pack| group.is_multiple_of(*pack)).unwrap_or(1)
}

/// Returns whether this shape is the fastest for a call, by the lengths that the host knows: as measured, where there
/// are too few tiles of other shapes for a GPU, and where heads that share keys fit one tile, which reads these once.
pub(super) fn is_faster(call: &CallTables, [heads, kv_heads]: [usize; 2]) -> bool {
    let (rows, group, keys) = (call.mean_rows(), heads / kv_heads.max(1), call.summary.seen);
    let are_few = rows <= ROWS && call.summary.filled * heads <= TOO_FEW_TILES && keys >= FEW_KEYS;
    let share = group > 1 && rows * group <= ROWS && keys >= SHARED_KEYS;
    // Each tile of a longer segment would read all its keys.
    call.summary.longest <= LONGEST && (are_few || share)
}

/// Returns the bytes of shared memory of a block, from a multiple of a row's on: a ring for each warp.
pub(super) fn shared_bytes(dim: usize) -> usize {
    let (stages, row) = (if dim <= 64 { 6 } else { 3 }, 2 * dim);
    row + WARPS * stages * 2 * KEYS * row
}

/// Returns the keys of a segment's pieces.
fn piece_keys(keys: usize) -> usize {
    (keys.saturating_sub(1) / PIECES + 1).next_power_of_two().max(PIECE_KEYS)
}

/// Returns the items of a launch on some segments: pieces of tiles.
pub(super) fn items<'a>(segments: impl Iterator<Item = &'a Segment>, heads: [usize; 2]) -> usize {
    let packs = Packs::of(heads);
    packs.count * segments.map(|segment| pieces_of(segment, packs.rows)).sum::<usize>()
}

/// Returns the pieces of a segment's tiles with real rows, where pieces are not longer than they need be.
fn pieces_of(segment: &Segment, tile_rows: usize) -> usize {
    let (keys, rows) = (segment.keys() as i64, segment.q.len as i64);
    let each = piece_keys(segment.keys()) as i64;
    let of_tile = |first: i64| {
        let last = (first + tile_rows as i64).min(rows) - 1;
        let to = segment.hi.map_or(keys, |hi| last.saturating_add(hi).saturating_add(1).min(keys));
        let from =
            segment.lo.filter(|_| segment.sink_tokens == 0).map_or(0, |lo| first.saturating_add(lo).max(0));
        if from < to { ((to - 1) / each - from / each + 1) as usize } else { 1 }
    };
    (0..rows).step_by(tile_rows).map(of_tile).sum()
}

impl CallTables {
    /// Returns the bytes of a forward's plan and of what its launches leave for each other, whose address is a multiple
    /// of 16. There are `heads` of q and of k.
    pub fn forward_bytes(&self, shape: TileShape, heads: [usize; 2]) -> usize {
        match shape {
            TileShape::Split => SplitRoom::of(self, heads).bytes(self).max(self.plan_bytes()),
            _ => self.plan_bytes(),
        }
    }

    /// Returns whether each block of the split shape plans for itself, and whether the blocks put pieces together: where
    /// the owned rows make few tiles and pieces. There are `heads` of q and of k.
    pub fn is_split_by_blocks(&self, heads: [usize; 2]) -> bool {
        let room = SplitRoom::of(self, heads);
        room.is_planned_by_blocks(self) && room.ended() > 0
    }
}

/// Room for the tiles of a launch, and for what pieces leave, however the owned rows are dealt to the segments.
#[derive(Clone, Copy, Debug)]
struct SplitRoom {
    packs: Packs,
    tiles: usize,
    /// The pieces of a pack that leave something, at most.
    left: usize,
    /// Pieces are 2^longer times as long as they need be.
    longer: u32,
}

impl SplitRoom {
    fn of(call: &CallTables, heads: [usize; 2]) -> SplitRoom {
        let packs = Packs::of(heads);
        let [rows, keys] = call.owned;
        // Every tile but a segment's last one has all its rows, and the last one has one.
        let tiles = rows.min(rows / packs.rows + call.segments);
        let fits = |left: &usize| left.saturating_mul(packs.count) <= LEFT_MAX;
        // A tile of one piece leaves nothing, and pieces of all keys are one.
        let most = |longer: u32| keys.div_ceil(PIECE_KEYS << longer).min(PIECES >> longer);
        let left = |longer: u32| if most(longer) > 1 { tiles * most(longer) } else { 0 };
        let longer = (0..PIECES.ilog2()).find(|&longer| fits(&left(longer))).unwrap_or(PIECES.ilog2());
        SplitRoom { packs, tiles, left: left(longer), longer }
    }

    /// Returns the bytes before the tables of pieces, before what pieces leave, and before the numbers of those that have
    /// ended.
    fn starts(&self, call: &CallTables) -> [usize; 3] {
        let pieces = call.plan_bytes_for(self.tiles).next_multiple_of(16);
        let left = pieces + TILE_PIECES_BYTES * self.tiles;
        [pieces, left, left + LEFT_BYTES * self.left * self.packs.count]
    }

    fn bytes(&self, call: &CallTables) -> usize {
        self.starts(call)[2] + 4 * self.ended()
    }

    /// Whether a launch of its own puts pieces together.
    fn needs_merge(&self) -> bool {
        self.left * self.packs.count > ENDED_MAX
    }

    /// Returns how many tiles and packs have their ended pieces counted: those whose blocks put pieces together, if any
    /// leaves something.
    fn ended(&self) -> usize {
        if self.left == 0 || self.needs_merge() { 0 } else { self.tiles * self.packs.count }
    }

    /// Whether each block plans for itself.
    fn is_planned_by_blocks(&self, call: &CallTables) -> bool {
        !self.needs_merge() && call.segments <= FEW_TILES && self.tiles <= FEW_TILES
    }
}

impl Gpu {
    /// Launches the split shape: the plan, the pieces, and where there are many what puts them together. `arguments` are those
    /// of every shape, without packs of heads.
    pub(super) fn forward_split(
        &self,
        call: &CallTables,
        [tables, plan]: [Area; 2],
        heads: [usize; 2],
        (arguments, suffix, dim): (RawArguments, &str, usize),
    ) -> Result<(), KernelError> {
        let (room, bytes) = (SplitRoom::of(call, heads), call.forward_bytes(TileShape::Split, heads));
        if plan.bytes() < bytes {
            return Err(KernelError::shape(format!("{} bytes for the plan, not {bytes}", plan.bytes())));
        }
        let places = PlanPlaces::of(call, plan, room.tiles)?;
        let starts = room.starts(call).map(|start| plan.address() + start as u64);
        let (Packs { heads: pack, count, rows: tile_rows }, longer) = (room.packs, room.longer as i32);
        let arguments = RawArguments {
            plan: places.plan,
            rows: places.rows,
            keys: places.keys,
            tile_segment: places.tile_segment,
            heads: count as i32,
            group: arguments.group / pack as i32,
            ..arguments
        };
        let [tile_pieces, left, ended] = starts;
        let ended_count = room.ended();
        let ended = if ended_count > 0 { ended } else { 0 };
        let split =
            RawSplit { tile_pieces, left, ended, pack: pack as i32, tile_rows: tile_rows as i32, longer };
        let tiles = PlanTiles {
            of: 0..usize::MAX,
            rows: tile_rows,
            part_rows: tile_rows,
            capacity: room.tiles,
            pieces: Some(PlanPieces {
                table: tile_pieces,
                longer,
                ended: (ended, ended_count),
                by_blocks: room.is_planned_by_blocks(call),
            }),
        };
        let planned = self.plan_forward(call, tables, &places, tiles)?;
        let (blocks, shared) = (self.resident_blocks(RESIDENT)?, shared_bytes(dim));
        let name = |kernel: &str| format!("forward_{kernel}_{suffix}");
        self.launch_with(&name("split"), (blocks, 1, THREADS), shared, &[&arguments, &split, &planned])?;
        if room.needs_merge() {
            self.launch(&name("merge"), (MERGES.0, MERGES.1, THREADS), &[&arguments, &split])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_oracle::{Run, Sink, Softmax};
    use seamproof_simulator::{AttentionCall, RowPolicy};

    #[test]
    fn heads_share_tiles_by_a_divisor_of_their_group() {
        assert_eq!([1, 4, 6, 7, 16, 20, 17].map(packed), [1, 4, 6, 7, 16, 10, 1]);
        let Packs { heads, count, rows } = Packs::of([14, 2]);
        assert_eq!((heads, count, rows), (7, 2, 2));
    }

    /// The source has the same numbers, on which the room for pieces relies.
    #[test]
    fn sizes_are_those_of_the_source() {
        let text = concat!(
            include_str!("../../cuda/forward_split.cuh"),
            include_str!("../../cuda/forward_plan.cuh")
        );
        for said in [
            format!("constexpr int SPLIT_ROWS = {ROWS}, SPLIT_KEYS = {KEYS};"),
            format!("constexpr int PIECES = {PIECES}, PIECE_KEYS_LOG2 = {};", PIECE_KEYS.ilog2()),
            format!("constexpr int FEW_TILES = {FEW_TILES};"),
            format!("WARPS = {WARPS}, THREADS_ALL = 32 * WARPS, STAGES = DIM == 64 ? 6 : 3;"),
        ] {
            assert!(text.contains(&said), "{said}");
        }
        assert_eq!(size_of::<RawSplit>(), 3 * 8 + 3 * 4 + 4);
        assert_eq!(shared_bytes(128), 256 + 4 * 3 * 2 * 16 * 256);
    }

    /// The numbers are made by hand.
    #[test]
    fn pieces_follow_from_the_number_of_keys() {
        assert_eq!([0, 64, 65, 2048, 2049, 131_072].map(piece_keys), [64, 64, 64, 128, 256, 8192]);
        let of = |rows: usize, keys: usize, lo: Option<i64>, hi: Option<i64>, sink_tokens: usize| {
            let (q, kv) = (Run::packed(0, rows, rows), vec![Run::packed(0, keys, keys)]);
            pieces_of(&Segment { q, kv, lo, hi, prefix: 0, sink_tokens }, 4)
        };
        assert_eq!(of(1, 1000, None, Some(999), 0), 16);
        // Keys 899 to 999 lie in the pieces from 896 on and from 960 on.
        assert_eq!(of(1, 1000, Some(899), Some(999), 0), 2);
        assert_eq!(of(1, 1000, Some(899), Some(999), 1), 16, "all before the window are passed over, too");
        assert_eq!(of(5, 100, None, Some(-10), 0), 2, "tiles that see nothing have a piece");
        assert_eq!(of(0, 100, None, None, 0), 0);
    }

    #[test]
    fn few_rows_against_many_keys_are_split() {
        let of = |segments: usize, [rows, keys]: [usize; 2], heads: [usize; 2]| {
            let kv = Run::packed(0, keys, keys);
            let segment = |number: usize| {
                let q = Run::packed(number * rows, rows, rows);
                Segment { q, kv: vec![kv], lo: None, hi: None, prefix: 0, sink_tokens: 0 }
            };
            let softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
            let segments: Vec<Segment> = (0..segments).map(segment).collect();
            let rows = [segments.len() * rows, keys];
            let call = AttentionCall { segments, softmax, policy: RowPolicy::Overwrite };
            is_faster(&CallTables::new(&call, rows, false).expect("legal segments"), heads)
        };
        assert_eq!([511, 512].map(|keys| of(1, [16, keys], [16, 16])), [false, true]);
        assert!(!of(1, [17, 8192], [16, 16]), "rows of two tiles");
        assert_eq!([16, 17].map(|segments| of(segments, [1, 8192], [16, 16])), [true, false]);
        assert_eq!([2047, 2048].map(|keys| of(100, [4, keys], [16, 4])), [false, true]);
        assert!(!of(100, [5, 8192], [16, 4]), "20 rows of heads that share keys");
        let kv = Run::packed(0, 4096, 4096);
        let segment = |q| Segment { q, kv: vec![kv], lo: None, hi: None, prefix: 0, sink_tokens: 0 };
        let decoded = (0..100).map(|row| segment(Run::packed(row, 1, 1)));
        let segments = decoded.chain([segment(Run::packed(100, 65, 65))]).collect();
        let softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
        let call = AttentionCall { segments, softmax, policy: RowPolicy::Overwrite };
        let tables = CallTables::new(&call, [165, 4096], false).expect("legal segments");
        assert!(!is_faster(&tables, [16, 2]), "a sequence of more rows beside those that are decoded");
    }

    /// The numbers are made by hand: tiles have 2 rows of 8 heads that share keys, and 16 rows of heads that do not.
    #[test]
    fn pieces_are_longer_where_there_would_be_no_room() {
        let room = |rows: usize, keys: usize, heads: [usize; 2]| {
            let (q, kv) = (Run::packed(0, rows, rows), Run::packed(0, keys, keys));
            let segment = Segment { q, kv: vec![kv], lo: None, hi: None, prefix: 0, sink_tokens: 0 };
            let softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
            let call = AttentionCall { segments: vec![segment], softmax, policy: RowPolicy::Overwrite };
            let tables = CallTables::new(&call, [rows, keys], false).expect("one segment");
            let SplitRoom { left, longer, .. } = SplitRoom::of(&tables, heads);
            (left, longer)
        };
        assert_eq!(room(1, 64, [8, 1]), (0, 0));
        assert_eq!(room(1, 65, [8, 1]), (2, 0));
        assert_eq!(room(2, 131_072, [8, 1]), (2 * 16, 0));
        // 2^16 pieces of 8 packs are 8192 of each: 512 tiles of 16 pieces, one of which the segment may begin.
        assert_eq!(room(16 * 511, 2048, [8, 8]), (512 * 16, 0));
        assert_eq!(room(16 * 512, 2048, [8, 8]), (513 * 8, 1));
        assert_eq!(room(1 << 20, 1 << 20, [8, 8]), (0, 4));
    }
}
