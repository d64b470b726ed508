//! Which kernel runs a call: a *shape* is how many query rows and keys are multiplied at once, an [`Instance`] which
//! calls a kernel was compiled for.

use std::ops::Range;

use seamproof_oracle::{Format, Softmax};
use seamproof_simulator::{AttentionCall, Segment};

use super::{DIM_MAX, ForwardOperands, LATENT_DIMS, WIDE_DIM, refusal, split};
use crate::attend::{CallSummary, CallTables};
use crate::device::TileLaunch;
use crate::view::View;

/// The elements on whose multiples the copy engine's addresses lie.
const LANES: usize = 8;
/// Rows of an average segment up to which the short shape is faster, with head dims up to 64 and over.
pub(crate) const SHORT_ROWS: [usize; 2] = [1024, 96];
/// Rows of an average segment, or keys that a row of it sees, up to which the middle shape is faster than the long
/// one.
const MIDDLE_ROWS: usize = 1024;
/// Rows of the longest segment from which short ones beside it have a launch of their own.
const MIXED_ROWS: usize = 2048;
/// Rows of an average segment, and keys that a row of it sees, from which clusters are faster: where some row does not see
/// all keys, and where all do.
const PAIRED_ROWS: [usize; 2] = [16_384, 4096];
/// Rows times heads from which there are several waves of clusters. Fewer were not measured in full masks.
const PAIRED_WORK: usize = 264 * 256;
/// The most query heads of a KV head, a power of two, whose rows share a tile of the middle shape or the long one, that of latent heads among them.
const PACKED_MAX: usize = 4;
/// The fewest rows of a sequence in a tile of every shape but the split one: where a tile has as many heads.
pub(super) const TILE_ROWS_LEAST: usize = 64 / PACKED_MAX;

/// The number of query rows and keys that are multiplied at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileShape {
    /// 192 query rows and 80 keys, or 128 keys with head dims up to 64. In a general instance the middle shape. The widest
    /// instance has this shape alone, with 128 query rows, and the latent one with 64 rows and 32 keys.
    Long,
    /// With head dims over 64: 128 query rows and 176 keys, and two blocks of threads share keys and values. With others
    /// the long shape, and in a general instance the middle one.
    Paired,
    /// 192 query rows and 64 keys, with head dims over 64.
    Middle,
    /// 64 query rows and 64 keys, and several tiles at once in a block of threads.
    Short,
    /// 16 query rows and 16 keys. Keys are cut into pieces, whose results are put together.
    Split,
    /// The short shape for short segments, and behind it what stands for the long one for the others.
    Mixed,
}

/// The kernels that run forwards and backwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionKernels {
    /// The simple kernels.
    #[default]
    Simple,
    /// The kernels on tensor cores where they take the call, with the forward in the shape that fits the call.
    Tuned,
    /// The kernels on tensor cores where they take the call, with the forward in one shape.
    Of(TileShape),
}

/// The calls that kernels on tensor cores were compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instance {
    /// Calls with head dims up to 64, as [`Instance::Wide`].
    Narrow,
    /// Calls whose rows the copy engine brings: head dims are multiples of 8, and tensors lie on 16 bytes.
    Wide,
    /// All calls with head dims up to 128: with a soft cap, with sink tokens beside a window, with a prefix in a backward, and
    /// with rows that threads have to bring.
    General,
    /// All calls with head dims over 128, up to 256.
    Widest,
    /// Forwards with head dims over 256.
    Latent,
}

impl Instance {
    /// All instances.
    pub const ALL: [Instance; 5] =
        [Instance::Narrow, Instance::Wide, Instance::General, Instance::Widest, Instance::Latent];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Instance::Narrow => "narrow",
            Instance::Wide => "wide",
            Instance::General => "general",
            Instance::Widest => "widest",
            Instance::Latent => "latent",
        }
    }

    /// Returns the instance of a name.
    pub fn by_name(name: &str) -> Option<Instance> {
        Instance::ALL.into_iter().find(|instance| instance.name() == name)
    }

    /// Returns the instance for a call on tensors that lie on 16 bytes, by the head dims of q and k, and of v.
    pub fn of(call: &CallTables, dims: [usize; 2]) -> Instance {
        let are_bands = !call.has_sink_tokens() && !call.has_bands_of_keys();
        match Instance::of_bands(&call.softmax, dims) {
            Instance::Narrow | Instance::Wide if !are_bands => Instance::General,
            instance => instance,
        }
    }

    /// Returns the instance for a call whose segments are bands, on tensors that lie on 16 bytes.
    pub fn of_bands(softmax: &Softmax, dims: [usize; 2]) -> Instance {
        if dims.into_iter().any(|dim| dim > DIM_MAX) {
            Instance::Latent
        } else if dims.into_iter().any(|dim| dim > WIDE_DIM) {
            Instance::Widest
        } else if softmax.softcap.is_some() || !are_vectors(dims) {
            Instance::General
        } else if dims.into_iter().all(|dim| dim <= 64) {
            Instance::Narrow
        } else {
            Instance::Wide
        }
    }

    /// Returns this instance for tensors that lie on 16 bytes, and one that takes all calls for others.
    pub(crate) fn at<const N: usize>(self, tensors: [&View; N]) -> Instance {
        match self {
            Instance::Narrow | Instance::Wide if !are_on_vectors(tensors) => Instance::General,
            instance => instance,
        }
    }

    /// Returns the instance for a call on tensors that lie anywhere, and whether threads bring their rows.
    pub(crate) fn on<const N: usize>(
        call: &CallTables,
        dims: [usize; 2],
        tensors: [&View; N],
    ) -> (Instance, bool) {
        let by_threads = !are_on_vectors(tensors) || !are_vectors(dims);
        (Instance::of(call, dims).at(tensors), by_threads)
    }

    /// Returns whether it takes all calls with head dims that it takes.
    pub(crate) fn takes_all(self) -> bool {
        matches!(self, Instance::General | Instance::Widest | Instance::Latent)
    }

    /// Returns the largest head dim.
    pub fn dim(self) -> usize {
        match self {
            Instance::Narrow => 64,
            Instance::Wide | Instance::General => WIDE_DIM,
            Instance::Widest => DIM_MAX,
            Instance::Latent => LATENT_DIMS[0],
        }
    }

    /// Returns the end of its kernels' names, for q in a format.
    pub(crate) fn suffix(self, format: Format) -> String {
        let number = if format == Format::Bf16 { 1 } else { 2 };
        let general = if self.takes_all() { "_general" } else { "" };
        format!("{}_{number}{general}", self.dim())
    }
}

/// Returns whether a call has enough short segments beside a long one that each kind has its own launch.
fn is_mixed(call: &CallTables, wide: bool) -> bool {
    let CallSummary { longest, short_rows, .. } = *call.summary();
    longest >= MIXED_ROWS && 4 * short_rows[usize::from(wide)] >= call.owned()[0]
}

/// Returns whether rows of these head dims are vectors of 16 bytes.
fn are_vectors(dims: [usize; 2]) -> bool {
    dims.into_iter().all(|dim| dim.is_multiple_of(LANES))
}

/// Returns whether tensors lie on vectors of 16 bytes.
fn are_on_vectors<const N: usize>(tensors: [&View; N]) -> bool {
    tensors.into_iter().all(View::is_on_vectors)
}

impl TileShape {
    /// All shapes.
    pub const ALL: [TileShape; 6] = [
        TileShape::Long,
        TileShape::Paired,
        TileShape::Middle,
        TileShape::Short,
        TileShape::Split,
        TileShape::Mixed,
    ];

    /// Returns the fastest shape for a call, by the lengths that the host knows and the heads of q and of k.
    pub fn of(call: &CallTables, instance: Instance, heads: [usize; 2]) -> TileShape {
        let (rows, wide) = (call.mean_rows(), instance != Instance::Narrow);
        let both = rows.min(call.summary.seen);
        let in_full = call.summary.all_seen && call.owned()[0] * heads[0] >= PAIRED_WORK;
        if split::is_faster(call, heads) {
            TileShape::Split
        } else if is_mixed(call, wide) {
            TileShape::Mixed
        } else if rows <= SHORT_ROWS[usize::from(wide)] {
            TileShape::Short
        } else if instance == Instance::Wide && both >= PAIRED_ROWS[usize::from(in_full)] {
            TileShape::Paired
        } else if wide && both <= MIDDLE_ROWS {
            TileShape::Middle
        } else {
            TileShape::Long
        }
    }

    /// Returns the shapes that run this one's launches in an instance, each with the real rows of its segments.
    pub(super) fn parts(self, instance: Instance) -> Vec<(TileShape, Range<usize>)> {
        let end = SHORT_ROWS[usize::from(instance != Instance::Narrow)] + 1;
        match self.served(instance) {
            TileShape::Mixed => {
                vec![(TileShape::Short, 0..end), (TileShape::Long.served(instance), end..usize::MAX)]
            }
            shape => vec![(shape, 0..usize::MAX)],
        }
    }

    /// Returns the shape that stands for this one in an instance.
    pub(super) fn served(self, instance: Instance) -> TileShape {
        match (self, instance) {
            (_, Instance::Widest | Instance::Latent) => TileShape::Long,
            (TileShape::Paired, Instance::Narrow) => TileShape::Long,
            (TileShape::Paired | TileShape::Long, Instance::General) => TileShape::Middle,
            (TileShape::Middle, Instance::Narrow) => TileShape::Short,
            _ => self,
        }
    }

    /// Returns how many query heads share a tile, where so many have one KV head.
    pub fn packed(self, group: usize, instance: Instance) -> usize {
        match self.served(instance) {
            TileShape::Long if !matches!(instance, Instance::Wide | Instance::Latent) => 1,
            TileShape::Long | TileShape::Middle => {
                1 << group.trailing_zeros().min(PACKED_MAX.trailing_zeros())
            }
            TileShape::Split => split::packed(group),
            _ => 1,
        }
    }

    /// Returns what the blocks of a launch share: each item is a tile of a segment's real rows and a head, or as many
    /// heads as share a tile. There are `heads` of q and of k, and head dims of q and k, and of v. Of two launches it is
    /// the one whose teams take more.
    pub(crate) fn launch(self, call: &AttentionCall, heads: [usize; 2], dims: [usize; 2]) -> TileLaunch {
        let instance = Instance::of_bands(&call.softmax, dims);
        let launches = self.parts(instance).into_iter().map(|(shape, rows)| {
            let taken = call.segments.iter().filter(|segment| rows.contains(&segment.q.len));
            shape.shared_by(taken, heads, instance)
        });
        let most = launches.max_by_key(|(items, _, teams)| items.div_ceil(*teams));
        let (items, cluster, teams) = most.unwrap_or((0, 1, 1));
        // A plan has all segments, whichever it cuts into tiles.
        TileLaunch { items, cluster, teams, segments: call.segments.len(), turns: 0 }
    }

    /// Returns the items of some segments, and how many blocks and teams of a block take them.
    fn shared_by<'a>(
        self,
        segments: impl Iterator<Item = &'a Segment>,
        heads: [usize; 2],
        instance: Instance,
    ) -> (usize, usize, usize) {
        let packed = self.packed(heads[0] / heads[1].max(1), instance);
        let Some(config) = self.config(instance.dim()) else { return (split::items(segments, heads), 1, 1) };
        let tiles = |rows: usize| rows.div_ceil(config.rows() / packed);
        let tiles: usize = segments.map(|segment| tiles(segment.q.len)).sum();
        (heads[0] / packed * tiles, config.cluster, config.teams)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            TileShape::Long => "long",
            TileShape::Paired => "paired",
            TileShape::Middle => "middle",
            TileShape::Short => "short",
            TileShape::Split => "split",
            TileShape::Mixed => "mixed",
        }
    }

    /// Returns the configuration of the shape in the instance for head dims up to `dim`; `None` for the split one, which
    /// has neither teams nor rings of tiles, and for the mixed one, which has kernels of two others.
    pub(super) fn config(self, dim: usize) -> Option<Config> {
        let shares_rows = dim > DIM_MAX;
        let long = Config { teams: 1, groups: 3, shares_rows, keys: 128, stages: [2, 2, 2], cluster: 1 };
        Some(match self {
            TileShape::Long if dim <= 64 => long,
            TileShape::Long if shares_rows => Config { groups: 2, keys: 32, stages: [1, 2, 2], ..long },
            TileShape::Long if dim > WIDE_DIM => Config { groups: 2, keys: 80, stages: [1, 2, 2], ..long },
            TileShape::Long => Config { keys: 80, stages: [1, 4, 4], ..long },
            TileShape::Paired => Config { groups: 2, keys: 176, stages: [1, 2, 2], cluster: 2, ..long },
            TileShape::Middle => Config { keys: 64, stages: [1, 4, 4], ..long },
            TileShape::Short if dim <= 64 => Config { teams: 4, groups: 1, keys: 64, ..long },
            TileShape::Short => Config { teams: 3, groups: 1, keys: 64, stages: [1, 2, 1], ..long },
            TileShape::Split | TileShape::Mixed => return None,
        })
    }

    /// Returns the bytes of shared memory of a block, in the instance for head dims up to `dim`.
    pub(super) fn shared_bytes(self, dim: usize) -> usize {
        self.config(dim).map_or_else(|| split::shared_bytes(dim), |config| config.shared_bytes(dim))
    }
}

/// The struct `Config` of forward.cu.
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    /// The number of teams, each with its own tiles and shared memory.
    pub(super) teams: usize,
    /// The number of groups of a team, of 64 query rows each.
    pub(super) groups: usize,
    /// Whether groups have the same rows, and each its part of the values' lanes.
    pub(super) shares_rows: bool,
    /// The keys of a block.
    pub(super) keys: usize,
    /// The tiles of Q, and the blocks of K and V, that shared memory holds.
    pub(super) stages: [usize; 3],
    /// The number of blocks of threads that share keys and values, and take tiles that follow each other.
    pub(super) cluster: usize,
}

impl Config {
    /// Returns the query rows of a tile.
    pub(super) fn rows(self) -> usize {
        if self.shares_rows { 64 } else { 64 * self.groups }
    }

    /// Returns the rows that the first of a sequence's tiles may have instead of all, for a whole cluster: those of a
    /// group where a tile has three.
    pub(super) fn part_rows(self) -> usize {
        if self.groups == 3 { 64 } else { self.rows() * self.cluster }
    }

    /// Returns the threads of a block: the consumers, and a group with the producers.
    pub(super) fn threads(self) -> usize {
        128 * (self.teams * self.groups + 1)
    }

    /// Returns the bytes of shared memory, from a multiple of 1024 on: barriers and rings for each team.
    pub(super) fn shared_bytes(self, dim: usize) -> usize {
        let ([q, k, v], dim_v) = (self.stages, dim.min(LATENT_DIMS[1]));
        let lanes = (q * self.rows() + k * self.keys) * dim + v * self.keys * dim_v;
        1024 + self.teams * (1024 + lanes * 2)
    }
}

/// Returns the dynamic shared memory of a block of this module's kernels; `None` for any other kernel.
pub(crate) fn shared_of(kernel: &str) -> Option<usize> {
    let mut parts = kernel.strip_prefix("forward_")?.split('_');
    let (name, dim) = (parts.next()?, parts.next()?.parse().ok()?);
    let shape = TileShape::ALL.into_iter().find(|shape| shape.name() == name)?;
    Some(shape.shared_bytes(dim))
}

impl AttentionKernels {
    /// All choices.
    pub const ALL: [AttentionKernels; 8] = [
        AttentionKernels::Simple,
        AttentionKernels::Tuned,
        AttentionKernels::Of(TileShape::Long),
        AttentionKernels::Of(TileShape::Paired),
        AttentionKernels::Of(TileShape::Middle),
        AttentionKernels::Of(TileShape::Short),
        AttentionKernels::Of(TileShape::Split),
        AttentionKernels::Of(TileShape::Mixed),
    ];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            AttentionKernels::Simple => "simple",
            AttentionKernels::Tuned => "tuned",
            AttentionKernels::Of(shape) => shape.name(),
        }
    }

    /// Returns the choice of a name, or an error that lists the names.
    pub fn by_name(name: &str) -> Result<AttentionKernels, String> {
        let found = AttentionKernels::ALL.into_iter().find(|choice| choice.name() == name);
        found.ok_or_else(|| {
            format!("use one of: {}", AttentionKernels::ALL.map(AttentionKernels::name).join(", "))
        })
    }

    /// Returns the shape for a call on so many heads of q and of k; `None` where the simple kernel runs it.
    pub fn shape(
        self,
        call: &CallTables,
        operands: &ForwardOperands,
        heads: [usize; 2],
    ) -> Option<TileShape> {
        let instance = Instance::of(call, operands.dims);
        let shape = match self {
            AttentionKernels::Simple => return None,
            AttentionKernels::Tuned => TileShape::of(call, instance, heads),
            AttentionKernels::Of(shape) => shape,
        };
        refusal(call, operands).is_none().then_some(shape.served(instance))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::backward;
    use crate::source::{SHARING, sharing_threads};
    use seamproof_oracle::{Run, Sink};
    use seamproof_simulator::RowPolicy;

    fn plain() -> Softmax {
        Softmax { scale: 0.125, softcap: None, sink: Sink::None }
    }

    /// Returns the tables of a forward whose segments lie in so many rows.
    fn tables(segments: Vec<Segment>, rows: usize) -> CallTables {
        let call = AttentionCall { segments, softmax: plain(), policy: RowPolicy::Overwrite };
        CallTables::new(&call, [rows, rows], false).expect("segments in the rows")
    }

    /// The shapes that have a configuration, each with the head dims of its kernels.
    const CONFIGURED: [(TileShape, usize); 8] = [
        (TileShape::Long, 64),
        (TileShape::Long, 128),
        (TileShape::Long, 256),
        (TileShape::Long, 576),
        (TileShape::Paired, 128),
        (TileShape::Middle, 128),
        (TileShape::Short, 64),
        (TileShape::Short, 128),
    ];

    /// The registers of a kernel are counted for the threads that are launched.
    #[test]
    fn every_shape_is_launched_with_the_threads_that_share_its_registers() {
        for (shape, dim) in CONFIGURED {
            let kernel = format!("forward_{}_{dim}_1", shape.name());
            assert_eq!(sharing_threads(&kernel), shape.config(dim).map(Config::threads), "{kernel}");
        }
        // These are all, with the two of the backward and the seven in FP8.
        assert_eq!(SHARING.len(), CONFIGURED.len() + 9);
    }

    /// A plan without room for its tiles has none of them: the forward would write nothing.
    #[test]
    fn a_plan_has_room_for_the_tiles_of_every_shape() {
        for (shape, instance) in
            TileShape::ALL.into_iter().flat_map(|shape| Instance::ALL.map(|instance| (shape, instance)))
        {
            let packed = shape.packed(1 << 10, instance);
            let rows = shape.served(instance).config(instance.dim()).map_or(usize::MAX, Config::rows);
            assert!(rows / packed >= TILE_ROWS_LEAST, "{shape:?}, {instance:?}");
        }
    }

    /// A shape that is told other keys or stages than its kernel has would wait for bytes that never come.
    #[test]
    fn every_shape_is_configured_as_its_kernel_is() {
        let source = include_str!("../../cuda/forward.cu");
        for (shape, dim) in CONFIGURED {
            let Config { teams, groups, keys, stages: [q, k, v], cluster, .. } =
                shape.config(dim).expect("it has one");
            let more = match (cluster, teams) {
                (1, 1) => String::new(),
                (_, 1) => format!(", {cluster}"),
                _ => format!(", {cluster}, {teams}"),
            };
            let text = format!("using {shape:?} = Config<{groups}, {keys}, {q}, {k}, {v}{more}>;");
            assert!(source.contains(&text), "{text}");
        }
    }

    #[test]
    fn lengths_and_head_dims_choose_a_shape() {
        let beside = |empty: usize, rows: usize, lo: Option<i64>, dims: [usize; 2]| {
            let segment = |run| Segment { q: run, kv: vec![run], lo, hi: Some(0), prefix: 0, sink_tokens: 0 };
            let mut segments = vec![segment(Run::packed(0, rows, rows))];
            segments.resize(1 + empty, segment(Run::packed(rows, 0, 0)));
            let call = tables(segments, rows);
            TileShape::of(&call, Instance::of(&call, dims), [256, 256])
        };
        let of = |rows: usize, lo: Option<i64>, dims: [usize; 2]| beside(0, rows, lo, dims);
        assert_eq!([96, 97].map(|rows| of(rows, None, [64, 72])), [TileShape::Short, TileShape::Middle]);
        assert_eq!([1024, 1025].map(|rows| of(rows, None, [72, 64])), [TileShape::Middle, TileShape::Long]);
        assert_eq!([1024, 1025].map(|rows| of(rows, None, [64, 64])), [TileShape::Short, TileShape::Long]);
        let longest = [16_383, 16_384].map(|rows| of(rows, None, [128, 128]));
        assert_eq!(longest, [TileShape::Long, TileShape::Paired]);
        assert_eq!(of(16_384, Some(-512), [128, 128]), TileShape::Middle, "a window leaves few keys");
        let whole = |rows: usize| {
            let run = Run::packed(0, rows, rows);
            let segment = Segment { q: run, kv: vec![run], lo: None, hi: None, prefix: 0, sink_tokens: 0 };
            let call = tables(vec![segment], rows);
            [(Instance::Wide, 256), (Instance::General, 256), (Instance::Wide, 8)]
                .map(|(instance, heads)| TileShape::of(&call, instance, [heads; 2]))
        };
        assert_eq!(whole(4095), [TileShape::Long; 3]);
        assert_eq!(whole(4096), [TileShape::Paired, TileShape::Long, TileShape::Long], "all keys are seen");
        assert_eq!(of(8192, Some(-4096), [128, 128]), TileShape::Long);
        assert_eq!(of(8192, Some(-512), [64, 64]), TileShape::Long);
        assert_eq!(
            [TileShape::Paired, TileShape::Middle].map(|shape| shape.served(Instance::Narrow)),
            [TileShape::Long, TileShape::Short]
        );
        assert_eq!(
            beside(64, 16_384, None, [128, 128]),
            TileShape::Paired,
            "places without a sequence do not count"
        );
    }

    #[test]
    fn short_segments_beside_a_long_one_have_a_launch_of_their_own() {
        let of = |short: usize, long: usize, dims: [usize; 2]| {
            let mut end = 0;
            let mut segment = |rows: usize| {
                let run = Run::packed(end, rows, rows);
                end += rows;
                Segment { q: run, kv: vec![run], lo: None, hi: Some(0), prefix: 0, sink_tokens: 0 }
            };
            let mut segments: Vec<Segment> = (0..short).map(|_| segment(64)).collect();
            segments.push(segment(long));
            let call = tables(segments, end);
            TileShape::of(&call, Instance::of(&call, dims), [16, 16])
        };
        assert_eq!(of(1000, 16_384, [128, 128]), TileShape::Mixed);
        assert_eq!(of(1000, 2047, [128, 128]), TileShape::Short);
        // 85 of 64 rows are less than a third of 16384.
        assert_eq!([85, 86].map(|short| of(short, 16_384, [64, 64])), [TileShape::Short, TileShape::Mixed]);
        assert_eq!(TileShape::Mixed.parts(Instance::Narrow)[0].1.end, 1025);
    }

    #[test]
    fn every_segment_is_in_one_launch_of_a_shape() {
        for (shape, instance) in
            TileShape::ALL.into_iter().flat_map(|shape| Instance::ALL.map(|instance| (shape, instance)))
        {
            let mut next = 0;
            for (part, rows) in shape.parts(instance) {
                assert_eq!((rows.start, part), (next, part.served(instance)), "{shape:?}, {instance:?}");
                next = rows.end;
            }
            assert_eq!(next, usize::MAX, "{shape:?}, {instance:?}");
        }
    }

    /// The numbers are made by hand: 450 rows, and 8 query heads on 2 KV heads.
    #[test]
    fn teams_take_several_tiles_where_there_are_more() {
        let run = Run::packed(0, 450, 450);
        let segment = Segment { q: run, kv: vec![run], lo: None, hi: None, prefix: 0, sink_tokens: 0 };
        let call = AttentionCall { segments: vec![segment], softmax: plain(), policy: RowPolicy::Overwrite };
        let of = |shape: TileShape| shape.launch(&call, [8, 2], [128, 128]);
        let [long, paired, middle, short, split, mixed] = TileShape::ALL.map(of);
        assert_eq!([long, paired, middle, short].map(|launch| launch.items), [10 * 2, 4 * 8, 10 * 2, 8 * 8]);
        // 4 rows a tile, and 64 keys a piece.
        assert_eq!(split.items, 113 * 2 * 8);
        assert_eq!(mixed, long, "450 rows are not short");
        let blocks = |count| NonZeroUsize::new(count).expect("some blocks");
        let most = |launch: TileLaunch| (1..200).filter(|&count| launch.repeats_in(blocks(count))).count();
        // 64 items are 22 for three teams; of 32 and more blocks none of the paired shape has two.
        assert_eq!([long, paired, middle, short].map(most), [19, 31, 19, 21]);
        assert!(!TileLaunch { items: 2, ..paired }.repeats_in(blocks(1)), "one cluster is two blocks");
        assert_eq!(backward::launch(&call, [2, 2], [64, 64]).items, 4 * 2);
    }

    #[test]
    fn choices_have_names() {
        for choice in AttentionKernels::ALL {
            assert_eq!(AttentionKernels::by_name(choice.name()), Ok(choice));
        }
        let said = AttentionKernels::by_name("other").expect_err("there is none");
        assert_eq!(said, "use one of: simple, tuned, long, paired, middle, short, split, mixed");
    }
}
