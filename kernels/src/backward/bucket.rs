//! What depends on the largest head dim of a backward's instance: the rows of a tile, the parts of the workspace, and a
//! block's shared memory.

use crate::attend::CallTables;
use crate::forward::{ALIGNMENT, DIM_MAX, Instance, Tiled, WIDE_DIM};
use crate::view::View;

use super::walk::Form;

/// The keys of a tile with head dims up to 128: `KEYS` of the source.
pub(super) const KEYS: usize = 128;
/// The keys of a tile with head dims over 128, which both consumers share.
const SHARED_KEYS: usize = 64;
/// The largest head dims of instances.
const WIDTHS: [usize; 3] = [64, WIDE_DIM, DIM_MAX];
/// The query rows times lanes of a tile whose f32 sums are kept: `SUMS` of the source.
const SUMS: usize = 8192;
/// The bytes of `Plan`, `PlannedSegment` and `PlannedRun` of the source.
const PLAN_BYTES: usize = 16;
const PLANNED_SEGMENT_BYTES: usize = 80;
const PLANNED_RUN_BYTES: usize = 32;
/// The number of parts of the workspace: the *places* in the order of [`RawArguments`](super::RawArguments), and turned
/// copies of queries and of keys.
pub(super) const PARTS: usize = 11;
pub(super) const PLACES: usize = 9;
/// The bytes of a line of a turned copy, and of a row of codes in shared memory.
const LINE: usize = 128;
/// The factors behind the statistics of a tile in FP8, and the bytes of its place for rows on their way out.
const FACTORS: usize = 4;
const OUTWARD_BYTES: usize = 16384;

/// The largest head dim that an instance takes, and whether it is one in FP8.
#[derive(Clone, Copy)]
pub(crate) struct Bucket {
    pub(super) dim: usize,
    pub(super) codes: bool,
}

impl Bucket {
    pub(super) fn of(instance: Instance) -> Bucket {
        Bucket { dim: instance.dim(), codes: false }
    }

    /// Returns the bucket in FP8 of these head dims.
    pub(crate) fn of_codes(dims: [usize; 2]) -> Bucket {
        let width = WIDTHS.into_iter().find(|width| dims.into_iter().all(|dim| dim <= *width));
        Bucket { dim: width.unwrap_or(DIM_MAX), codes: true }
    }

    /// Returns whether both consumers have the same keys.
    fn shares_keys(self) -> bool {
        self.dim > WIDE_DIM
    }

    /// Returns the keys of a tile.
    pub(crate) fn keys(self) -> usize {
        if self.shares_keys() { SHARED_KEYS } else { KEYS }
    }

    /// Returns the query rows of a tile.
    pub(crate) fn rows(self) -> usize {
        SUMS / self.dim
    }

    /// Returns the largest head dim.
    pub(crate) fn dim(self) -> usize {
        self.dim
    }

    /// Returns the numbers of a tile of query rows: LSE and D of each row, and the factors of its products.
    fn statistics(self) -> usize {
        2 * self.rows() + if self.codes { FACTORS } else { 0 }
    }

    /// Returns the bytes of shared memory, from a multiple of 1024 on: barriers, K and V, two stages of Q, dout and
    /// their statistics, dS twice, dQ, and out where tiles describe rows.
    pub(super) fn shared_bytes(self, form: Form) -> usize {
        if self.codes {
            return self.shared_bytes_of_codes();
        }
        let queries = 2 * (2 * SUMS * 2 + self.rows() * 8);
        let out = if form == Form::Short { SUMS * 2 } else { 0 };
        let keys = 2 * self.keys() * self.dim * 2;
        // Each of two consumers that share keys has its own, in rows of twice as many bytes.
        let ds = 2 * self.keys() * self.rows() * 2 * if self.shares_keys() { 4 } else { 1 };
        1024 + 1024 + keys + queries + ds + SUMS * 4 + out
    }

    /// Returns the same in FP8, with turned copies and a place for rows on their way out.
    fn shared_bytes_of_codes(self) -> usize {
        let keys = KEYS * (2 * LINE + self.dim);
        let queries = 2 * (2 * self.rows() * LINE + 2 * SUMS + self.statistics() * 4);
        1024 + 1024 + keys + queries + 2 * KEYS * self.rows() + SUMS * 4 + OUTWARD_BYTES
    }

    /// Returns the most tiles of query rows and of keys that a call's owned rows make, however they are dealt to
    /// segments and runs.
    pub(crate) fn capacities(self, call: &CallTables) -> [usize; 2] {
        [call.owned[0] / self.rows() + call.segments, call.owned[1] / self.keys() + call.runs]
    }

    /// Returns where the workspace's parts begin, in the order that [`PARTS`] tells, and where it ends.
    pub(super) fn layout(self, call: &CallTables, [heads, kv_heads]: [usize; 2]) -> [usize; PARTS + 1] {
        let [q_tiles, kv_tiles] = self.capacities(call);
        let parts = q_tiles * heads;
        let turned =
            if self.codes { [2 * SUMS * parts, KEYS * self.dim * kv_tiles * kv_heads] } else { [0; 2] };
        let bytes: [usize; PARTS] = [
            PLAN_BYTES,
            PLANNED_SEGMENT_BYTES * call.segments,
            PLANNED_RUN_BYTES * call.runs,
            4 * q_tiles,
            4 * kv_tiles,
            4 * SUMS * parts,
            4 * self.statistics() * parts,
            4 * parts,
            4 * parts,
            turned[0],
            turned[1],
        ];
        let mut ends = [0; PARTS + 1];
        for (index, bytes) in bytes.into_iter().enumerate() {
            ends[index + 1] = ends[index] + bytes.next_multiple_of(ALIGNMENT);
        }
        ends
    }

    /// Returns the bytes of the workspace of a call with so many query heads and KV heads.
    pub(crate) fn workspace_bytes(self, call: &CallTables, heads: [usize; 2]) -> usize {
        self.layout(call, heads)[PARTS]
    }

    /// Returns q, k, v and dout in the boxes in which they come to shared memory.
    pub(crate) fn tiled<'a>(self, call: &CallTables, [q, k, v, dout]: [&'a View<'a>; 4]) -> [Tiled<'a>; 4] {
        let ([q_step, kv_step], [q_box, kv_box]) = (steps(call), [[1, self.rows()], [1, self.keys()]]);
        [
            ("q", q, q_step, q_box),
            ("k", k, kv_step, kv_box),
            ("v", v, kv_step, kv_box),
            ("dout", dout, q_step, q_box),
        ]
    }
}

/// Returns the dynamic shared memory of a block of the kernel on tiles; `None` for any other kernel.
pub(crate) fn shared_of(kernel: &str) -> Option<usize> {
    let kernel = kernel.strip_prefix("backward_")?;
    let of_codes = kernel.strip_prefix("fp8_");
    let mut parts = of_codes.unwrap_or(kernel).split('_');
    let (name, dim) = (parts.next()?, parts.next()?.parse().ok()?);
    let form = Form::ALL.into_iter().find(|form| form.name() == name)?;
    Some(Bucket { dim, codes: of_codes.is_some() }.shared_bytes(form))
}

impl CallTables {
    /// Returns the bytes of a backward's workspace, whose address is a multiple of 16, for tensors that lie on 16 bytes,
    /// with head dims that the backward takes. Others take as many as with head dims of 128 at least. It is linear in rows and
    /// heads.
    pub fn workspace_bytes(&self, heads: usize, dims: [usize; 2]) -> usize {
        Bucket::of(Instance::of(self, dims)).workspace_bytes(self, [heads, 0])
    }
}

/// Returns the steps of query rows and of keys.
pub(super) fn steps(call: &CallTables) -> [usize; 2] {
    call.summary.step.map(|step| step.unwrap_or(1).max(1))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::call;
    use super::*;

    pub(in super::super) const BUCKETS: [Bucket; 2] =
        [Bucket { dim: 64, codes: false }, Bucket { dim: 128, codes: false }];
    const WIDEST: Bucket = Bucket { dim: 256, codes: false };

    /// Twice the tokens take twice the workspace, apart from a constant, at any length of the sequences.
    #[test]
    fn the_workspace_is_linear_in_rows() {
        let heads = 3;
        for dims in [[64, 64], [128, 40], [40, 200]] {
            let of = |len: usize| call(&[(len, len)], None);
            let bytes = |len: usize| of(len).workspace_bytes(heads, dims);
            let [one, two, four] = [bytes(1 << 14), bytes(1 << 15), bytes(1 << 16)];
            assert_eq!(four - two, 2 * (two - one));
            let of_lane = 4 * (1 << 14) * heads * Instance::of(&of(1), dims).dim();
            assert!((two - one) - of_lane < of_lane / 16, "{} bytes beside {of_lane}", two - one);
        }
    }

    #[test]
    fn parts_of_the_workspace_are_aligned_and_hold_every_tile() {
        let ragged = call(&[(1, 1), (130, 131), (64, 64)], None);
        for bucket in BUCKETS.into_iter().chain([WIDEST]) {
            let layout = bucket.layout(&ragged, [5, 5]);
            assert!(layout.into_iter().all(|at| at.is_multiple_of(ALIGNMENT)));
            let [q_tiles, kv_tiles] = bucket.capacities(&ragged);
            let tiles =
                |rows: usize| [1_usize, 131, 64].map(|span| span.div_ceil(rows)).iter().sum::<usize>();
            assert!(q_tiles >= tiles(bucket.rows()) && kv_tiles >= tiles(bucket.keys()));
            assert!(layout[6] - layout[5] >= q_tiles * 5 * SUMS * 4);
        }
    }

    /// A block's shared memory fits a multiprocessor.
    #[test]
    fn shared_memory_fits() {
        for bucket in BUCKETS {
            assert!(Form::ALL.into_iter().all(|form| bucket.shared_bytes(form) <= 232_448));
            assert!(Bucket { codes: true, ..bucket }.shared_bytes(Form::Tiles) <= 232_448);
        }
        assert_eq!(
            WIDEST.shared_bytes(Form::Tiles),
            2048 + (32 + 32 + 4 * 16 + 2 * 16 + 32) * 1024 + 2 * 256
        );
    }
}
