//! Classes of problems that campaigns must reach, with the share of all cases that each had when it was measured.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::LazyLock;

use seamproof_oracle::envelope::{Accumulation, Arithmetic, MergeBy};
use seamproof_oracle::sharding::{RankLayout, layouts, run_of};
use seamproof_oracle::{
    Algorithm, Alignment, Balance, Blocks, Form, Format, InputMode, Mask, Pass, Problem, Run, Scaling,
    Sequence, Side, Sink,
};

use crate::exact::{Merging, eligible, parts};
use crate::generate::Profile;
use crate::subject::{Needs, ParallelRule, broken_rule};
use crate::values::{Poison, real_kv_rows, real_q_rows};

/// A kind of problem that campaigns must reach.
pub struct Class {
    /// Name of the class.
    pub name: &'static str,
    members: Members,
    /// Share of all cases in each profile, in the order of [`Profile::ALL`], in tenths of a percent, as measured. It
    /// is 0 where the class is too rare to be asked for.
    pub(super) rates: [u16; 3],
    /// Whether the members are legal; otherwise they are problems that must be refused.
    legal: bool,
}

/// Members of a class, among the legal problems or among the illegal ones.
enum Members {
    /// Problems of which this holds.
    Where(fn(&Problem) -> bool),
    /// Problems of the algorithm of this number.
    OfAlgorithm(usize),
}

/// Smallest distance of a floor below the expected count, in standard deviations. One campaign in fifty million falls
/// below that by chance.
const FLOOR_SIGMAS: f64 = 5.5;

impl Class {
    /// Returns the class of an algorithm's problems.
    fn of_algorithm(algorithm: Algorithm) -> Class {
        let name = if algorithm == Algorithm::Single { "one rank" } else { algorithm.name() };
        let (members, rates) = (Members::OfAlgorithm(algorithm.number()), Needs::of(algorithm, 1).rates);
        Class { name, members, rates, legal: true }
    }

    /// Whether a problem, which is legal or not, belongs to the class.
    pub(super) fn has(&self, problem: &Problem, is_legal: bool) -> bool {
        self.legal == is_legal
            && match self.members {
                Members::Where(holds) => holds(problem),
                Members::OfAlgorithm(number) => problem.parallel.algorithm.number() == number,
            }
    }

    /// Returns the fewest members that `total` cases of a profile must have: half of the expected count, or 5.5
    /// standard deviations below it where that is less, and at least 1. A class that the profile does not ask for has
    /// the floor 0.
    pub fn floor(&self, profile: Profile, total: u64) -> u64 {
        floor(self.rates[profile as usize], total)
    }
}

/// Returns the floor among `total` cases for a rate in tenths of a percent (see [`Class::floor`]).
pub fn floor(rate: u16, total: u64) -> u64 {
    if rate == 0 {
        return 0;
    }
    let expected = f64::from(rate) / 1000.0 * total as f64;
    let least = (expected / 2.0).min(expected - FLOOR_SIGMAS * expected.sqrt());
    (least.ceil() as u64).max(1)
}

impl fmt::Debug for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

pub(super) const fn class(name: &'static str, rates: [u16; 3], holds: fn(&Problem) -> bool) -> Class {
    Class { name, members: Members::Where(holds), rates, legal: true }
}

/// Returns a class of problems that must be refused.
const fn refused(name: &'static str, rates: [u16; 3], holds: fn(&Problem) -> bool) -> Class {
    Class { name, members: Members::Where(holds), rates, legal: false }
}

/// Every class, in the table's order.
pub static CLASSES: LazyLock<Vec<Class>> = LazyLock::new(|| {
    OF_PROBLEMS.into_iter().chain(Algorithm::ALL.map(Class::of_algorithm)).chain(OF_GROUPS).collect()
});

/// Classes of what a problem on one rank has as well.
const OF_PROBLEMS: [Class; 139] = [
    // Number of sequences.
    class("no sequence", [26, 26, 26], |p| p.sequences.is_empty()),
    class("1 sequence", [123, 122, 123], |p| p.sequences.len() == 1),
    class("2 sequences", [222, 223, 222], |p| p.sequences.len() == 2),
    class("3 or more sequences", [584, 583, 584], |p| p.sequences.len() >= 3),
    class("31 to 33 sequences", [51, 51, 51], |p| (31..=33).contains(&p.sequences.len())),
    // Lengths.
    class("empty sequence", [458, 462, 454], |p| any(p, is_empty)),
    class("empty run at the head", [163, 166, 162], |p| is_seam_of_empties(p, p.sequences.first())),
    class("empty run in the middle", [165, 167, 162], empties_inside),
    class("empty run at the tail", [148, 150, 144], |p| is_seam_of_empties(p, p.sequences.last())),
    class("every sequence empty", [55, 56, 55], |p| {
        !p.sequences.is_empty() && p.sequences.iter().all(is_empty)
    }),
    class("length 1", [412, 501, 381], |p| any_run(p, |run| run.len == 1)),
    class("length below 2·cp", [542, 687, 446], |p| any_run(p, |run| (1..4).contains(&run.len))),
    class("length 1 off 2·cp of 4, 8, 16", [759, 723, 751], |p| near(p, &[4, 8, 16])),
    class("length 1 off a tile of 32, 64, 128", [229, 112, 515], |p| near(p, &[32, 64, 128])),
    class("length a multiple of 16", [258, 99, 461], |p| any_run(p, |run| run.len > 0 && run.len % 16 == 0)),
    class("a giant among tiny ones", [49, 25, 65], giant),
    // Queries against keys.
    class("q and kv equal", [618, 645, 609], |p| any(p, |s| s.q.len == s.kv.len && s.q.len > 0)),
    class("q shorter than kv", [389, 384, 395], |p| any(p, |s| s.q.len < s.kv.len)),
    class("q longer than kv", [276, 268, 274], |p| any(p, |s| s.q.len > s.kv.len)),
    class("q much shorter than kv", [125, 87, 158], |p| any(p, |s| s.q.len > 0 && s.q.len * 8 <= s.kv.len)),
    class("q much longer than kv", [47, 22, 84], |p| any(p, |s| s.kv.len > 0 && s.kv.len * 8 <= s.q.len)),
    class("one query, many keys", [127, 112, 129], |p| any(p, |s| s.q.len == 1 && s.kv.len >= 4)),
    class("queries without keys", [153, 158, 148], |p| any(p, |s| s.q.len > 0 && s.kv.len == 0)),
    class("keys without queries", [148, 149, 148], |p| any(p, |s| s.q.len == 0 && s.kv.len > 0)),
    // Padding and layout.
    class("no padding", [264, 262, 258], |p| !any_run(p, |run| run.span > run.len)),
    class("padding below a chunk", [261, 128, 389], |p| any_run(p, |run| padding_chunks(run) == Some(0))),
    class("a chunk of padding", [257, 259, 173], |p| any_run(p, |run| padding_chunks(run) == Some(1))),
    class("two or more chunks of padding", [409, 454, 380], |p| {
        any_run(p, |run| padding_chunks(run) >= Some(2))
    }),
    class("padding only at the end", [59, 56, 59], |p| padded_places(p) == (false, true)),
    class("padding only inside", [94, 89, 93], |p| padded_places(p) == (true, false)),
    class("padding of an empty sequence", [254, 258, 261], |p| {
        any_run(p, |run| run.len == 0 && run.span > 0)
    }),
    class("padding differs, q and kv", [463, 446, 486], |p| any(p, |s| padding(&s.q) != padding(&s.kv))),
    class("first offset above 0", [403, 375, 449], |p| first_offsets(p).0 > 0),
    class("first offsets differ, q and kv", [406, 376, 449], |p| first_offsets(p).0 != first_offsets(p).1),
    class("gap between sequences", [123, 118, 120], gap_inside),
    class("slack after the end", [480, 471, 484], |p| slack(p) != [0, 0]),
    // Poison in rows without a token: infinities in these cases, NaN in all others.
    class("infinities in padding rows", [220, 220, 221], |p| {
        Poison::strongest(p) == Poison::Infinity
            && (real_q_rows(p).contains(&false) || real_kv_rows(p).contains(&false))
    }),
    class("padding in the saved out and lse", [588, 583, 596], |p| {
        p.pass == Pass::Backward && real_q_rows(p).contains(&false)
    }),
    class("an empty row in the saved out and lse", [142, 143, 140], |p| {
        p.pass == Pass::Backward && any(p, |s| blind_query(p.mask, s) || (s.q.len > 0 && s.kv.len == 0))
    }),
    class("equal spans (BSHD)", [131, 175, 109], equal_spans),
    class("interleaved (SBHD)", [106, 115, 117], |p| p.sequences.len() > 1 && any(p, |s| s.q.step > 1)),
    class("q in SBHD, kv in BSHD", [27, 30, 28], |p| interleaved(p, Side::Q) && blocked(p, Side::Kv)),
    class("q in BSHD, kv in SBHD", [31, 35, 29], |p| blocked(p, Side::Q) && interleaved(p, Side::Kv)),
    class("q or kv alone in SBHD, over ranks", [36, 38, 39], |p| parallel(p) && one_side_interleaved(p)),
    class("q in THD, kv in BSHD", [29, 31, 26], |p| ragged(p, Side::Q) && padded_batch(p, Side::Kv)),
    class("q in BSHD, kv in THD", [39, 42, 34], |p| padded_batch(p, Side::Q) && ragged(p, Side::Kv)),
    class("spans twice as long as what they hold", [330, 442, 275], twice_padded),
    class("slack of one row", [99, 150, 9], |p| slack(p).contains(&1)),
    class("slack of 32 rows and more", [15, 10, 477], |p| slack(p).iter().any(|&rows| rows >= 32)),
    class("257 sequences and more", [12, 12, 12], |p| p.sequences.len() >= 257),
    class("lengths 1 off 64 or 128, both sides", [114, 0, 438], |p| {
        any(p, |s| [s.q.len, s.kv.len].iter().all(|&rows| off_tile(rows)))
    }),
    class("one query, 63 keys and more", [38, 0, 112], |p| any(p, |s| s.q.len == 1 && s.kv.len >= 63)),
    // Forms in which problems are given.
    class("given as segment ids and positions", [115, 113, 112], |p| p.form == Form::Segments),
    class("given as batched segment ids", [11, 12, 10], |p| p.form == Form::BatchedSegments),
    class("given as lengths of a padded batch", [24, 28, 22], |p| p.form == Form::Lengths),
    class("said to have padding", [193, 193, 194], |p| p.form == Form::PadBetweenSeqs),
    class("said to have padding, with none", [15, 15, 14], |p| {
        p.form == Form::PadBetweenSeqs && Form::NoPadBetweenSeqs.check(p).is_ok()
    }),
    class("said to have no padding", [15, 15, 14], |p| p.form == Form::NoPadBetweenSeqs),
    // Steps on a cache.
    class("in steps on a cache", [48, 47, 49], |p| !p.steps.is_empty()),
    class("in steps, keys cached at first", [36, 33, 38], |p| {
        !p.steps.is_empty() && any(p, |s| s.kv.len > s.q.len)
    }),
    // Pages of keys and values.
    class("in pages", [49, 48, 53], |p| p.pages.is_some()),
    class("in pages, in steps", [21, 19, 23], |p| p.pages.is_some() && !p.steps.is_empty()),
    class("in pages, in another order than the sequences'", [38, 36, 43], |p| {
        let of_table = p.pages.iter().flat_map(|pages| pages.table.iter().flatten());
        of_table.enumerate().any(|(index, page)| index != *page)
    }),
    class("in pages of a size that is no power of two", [13, 13, 13], |p| {
        p.pages.as_ref().is_some_and(|pages| !pages.size.is_power_of_two())
    }),
    class("in pages, some of them shared", [8, 7, 10], |p| {
        p.pages.as_ref().is_some_and(|pages| !pages.shared.is_empty())
    }),
    // Keys that sequences share outside of pages.
    class("keys shared by sequences", [40, 40, 41], |p| !p.sharing.is_empty()),
    class("keys shared by sequences, over ranks", [24, 24, 24], |p| {
        !p.sharing.is_empty() && p.parallel.size() > 1
    }),
    class("keys shared by sequences, in a ring", [6, 7, 7], |p| {
        !p.sharing.is_empty() && p.parallel.algorithm == Algorithm::Ring
    }),
    class("keys shared by sequences, in an all-to-all or a hierarchy", [12, 13, 13], |p| {
        let dealt = matches!(p.parallel.algorithm, Algorithm::AllToAll | Algorithm::Hierarchical { .. });
        !p.sharing.is_empty() && dealt
    }),
    class("keys shared by sequences, in a region", [8, 8, 9], |p| {
        !p.sharing.is_empty() && p.parallel.region > 1
    }),
    class("keys shared by three sequences", [31, 31, 32], |p| p.sharing.0.len() > 1),
    // Masks.
    class("full mask", [256, 254, 254], |p| p.mask.is_band() && unbounded(p.mask) == (true, true)),
    class("causal top-left", [151, 151, 153], |p| causal(p, Alignment::TopLeft)),
    class("causal bottom-right", [205, 207, 206], |p| causal(p, Alignment::BottomRight)),
    class("causal, window to the left", [119, 118, 117], |p| p.mask.is_causal() && p.mask.left.is_some()),
    class("window on both sides", [59, 61, 60], |p| p.mask.left.is_some() && p.mask.right > Some(0)),
    class("window to the left only", [26, 27, 27], |p| unbounded(p.mask) == (false, true)),
    class("window to the right only", [25, 25, 26], |p| p.mask.left.is_none() && p.mask.right > Some(0)),
    class("window of left 0", [38, 40, 38], |p| p.mask.left == Some(0)),
    class("window of a few keys", [95, 129, 94], |p| edges(p, |keys| (1..=2).contains(&keys))),
    class("window 1 off a tile", [91, 72, 92], |p| edges(p, |keys| off_multiple(keys, &[4, 8, 16, 32, 64]))),
    class("window at a length's edge", [65, 66, 46], window_at_length),
    class("window past every length", [43, 44, 44], |p| edges(p, |keys| keys > 1 << 20)),
    class("bottom-right, lengths differ", [300, 292, 303], |p| {
        p.mask.align == Alignment::BottomRight && any(p, |s| s.q.len != s.kv.len)
    }),
    class("a query that sees no key", [59, 57, 61], |p| any(p, |s| blind_query(p.mask, s))),
    class("documents that cut a sequence", [41, 39, 41], |p| {
        matches!(p.mask.blocks, Some(Blocks::Documents(_))) && any(p, |s| is_cut(p.mask, s))
    }),
    class("chunks that cut a sequence", [41, 38, 42], |p| {
        matches!(p.mask.blocks, Some(Blocks::Chunks(_))) && any(p, |s| is_cut(p.mask, s))
    }),
    class("chunks of one key", [15, 20, 13], |p| p.mask.blocks == NonZeroU32::new(1).map(Blocks::Chunks)),
    class("a prefix that shows a key", [60, 49, 65], |p| any(p, |s| prefix_shows(p.mask, s))),
    class("a prefix of each document or chunk", [25, 18, 27], |p| {
        p.mask.blocks.is_some() && any(p, |s| is_cut(p.mask, s) && prefix_shows(p.mask, s))
    }),
    class("sink tokens beside a window", [43, 39, 44], |p| any(p, |s| sink_tokens_show(p.mask, s))),
    // Heads.
    class("MHA, several heads", [156, 160, 163], |p| p.heads.kv > 1 && p.group() == 1),
    class("GQA", [96, 95, 118], |p| p.heads.kv > 1 && p.group() > 1),
    class("MQA", [339, 341, 315], |p| p.heads.kv == 1 && p.group() > 1),
    class("group of 3 or 5", [141, 157, 152], |p| [3, 5].contains(&p.group())),
    class("group of 8 and more", [55, 35, 46], |p| p.group() >= 8),
    class("head dim below 8", [101, 180, 6], |p| p.dims.qk.min(p.dims.v) < 8),
    class("head dim not a multiple of 8", [271, 286, 172], |p| p.dims.qk % 8 != 0 || p.dims.v % 8 != 0),
    class("head dim 64 and more", [193, 172, 348], |p| p.dims.qk >= 64),
    class("head dim 128 and more", [78, 66, 166], |p| p.dims.qk.max(p.dims.v) >= 128),
    class("head dim above 128", [66, 56, 120], |p| p.dims.qk.max(p.dims.v) > 128),
    class("head dim above 256", [10, 10, 10], |p| p.dims.qk.max(p.dims.v) > 256),
    class("dv 80, 96, 112 or 192", [37, 35, 81], |p| [80, 96, 112, 192].contains(&p.dims.v)),
    class("dv below dqk", [171, 172, 161], |p| p.dims.v < p.dims.qk),
    class("dv above dqk", [166, 166, 156], |p| p.dims.v > p.dims.qk),
    // Softmax, numbers, direction.
    class("scale not 1/√dqk", [452, 453, 447], |p| {
        p.softmax.scale != (1.0 / (p.dims.qk as f64).sqrt()) as f32
    }),
    class("softcap", [404, 404, 404], |p| p.softmax.softcap.is_some()),
    class("sink, off by one", [160, 160, 160], |p| p.softmax.sink == Sink::OffByOne),
    class("sink, learnable", [164, 164, 164], |p| p.softmax.sink == Sink::Learnable),
    class("sink, with padding", [234, 235, 236], |p| {
        p.softmax.sink != Sink::None && any_run(p, |run| run.span > run.len)
    }),
    class("bf16", [477, 477, 477], |p| p.precision.q.format == Format::Bf16),
    class("fp16", [477, 477, 477], |p| p.precision.q.format == Format::Fp16),
    class("P in f32", [239, 239, 239], |p| p.precision.p.format == Format::F32),
    class("values: integers", [129, 128, 131], |p| p.mode == InputMode::Integers),
    class("values: flat or peaked", [256, 255, 256], |p| {
        matches!(p.mode, InputMode::Flat | InputMode::Peaked)
    }),
    class("values: large", [39, 38, 38], |p| p.mode == InputMode::Large),
    class("values: heavy-tailed", [38, 38, 39], |p| p.mode == InputMode::HeavyTailed),
    class("values: equal", [37, 37, 38], |p| p.mode == InputMode::Equal),
    class("values: tiny", [39, 39, 39], |p| p.mode == InputMode::Tiny),
    class("values: sunk", [41, 41, 40], |p| p.mode == InputMode::Sunk),
    class("values: shadowed", [20, 20, 19], |p| p.mode == InputMode::Shadowed),
    class("values: rising", [19, 19, 19], |p| p.mode == InputMode::Rising),
    class("values: offset", [19, 19, 19], |p| p.mode == InputMode::Offset),
    class("values: zeros", [19, 20, 19], |p| p.mode == InputMode::Zeros),
    class("values: uniform-count", [122, 116, 122], |p| p.mode == InputMode::UniformCount),
    class("values: endpoints", [111, 112, 114], |p| p.mode == InputMode::Endpoints),
    class("values: routing", [45, 49, 40], |p| p.mode == InputMode::Routing),
    class("values: pairs", [68, 73, 66], |p| p.mode == InputMode::Pairs),
    class("values: staircase", [29, 28, 33], |p| p.mode == InputMode::Staircase),
    class("exact backward: routing", [27, 30, 25], |p| exact_backward(p, InputMode::Routing)),
    class("exact backward: pairs", [42, 44, 40], |p| exact_backward(p, InputMode::Pairs)),
    class("several ranks: uniform-count", [44, 42, 45], |p| exact_ranks(p, InputMode::UniformCount)),
    class("several ranks: endpoints", [41, 43, 43], |p| exact_ranks(p, InputMode::Endpoints)),
    class("several ranks: routing", [17, 19, 15], |p| exact_ranks(p, InputMode::Routing)),
    class("several ranks: pairs", [25, 27, 26], |p| exact_ranks(p, InputMode::Pairs)),
    class("several ranks: staircase", [11, 10, 12], |p| exact_ranks(p, InputMode::Staircase)),
    class("forward and backward", [651, 650, 648], |p| p.pass == Pass::Backward),
    class("forward only", [303, 305, 306], |p| p.pass == Pass::Forward),
    class("gradient of the sink", [112, 112, 111], |p| {
        p.pass == Pass::Backward && p.softmax.sink == Sink::Learnable
    }),
];

/// Classes of context parallelism, except those of the algorithms.
const OF_GROUPS: [Class; 35] = [
    class("group of one rank", [86, 86, 85], |p| {
        p.parallel.algorithm != Algorithm::Single && p.parallel.size() == 1
    }),
    class("cp 2", [109, 109, 108], |p| p.parallel.size() == 2),
    class("cp 3, 5, 6 or 7", [93, 93, 93], |p| matches!(p.parallel.size(), 3 | 5 | 6 | 7)),
    class("cp 3", [40, 41, 40], |p| p.parallel.size() == 3),
    class("cp 8", [51, 50, 53], |p| p.parallel.size() == 8),
    class("cp 4 or 8", [136, 135, 140], |p| matches!(p.parallel.size(), 4 | 8)),
    class("dual-chunk", [85, 85, 86], |p| parallel(p) && p.parallel.balance == Balance::DualChunk),
    class("contiguous", [82, 84, 86], |p| parallel(p) && p.parallel.balance == Balance::Contiguous),
    class("striped", [172, 169, 169], |p| {
        parallel(p) && matches!(p.parallel.balance, Balance::Striped { .. })
    }),
    class("larger world", [204, 204, 203], |p| p.parallel.world > p.parallel.size()),
    class("two groups of one world", [104, 104, 102], |p| p.parallel.neighbour().is_some()),
    class("ranks out of order", [137, 138, 140], |p| !p.parallel.ranks.is_sorted()),
    class("BSHD, several ranks", [103, 136, 83], |p| {
        parallel(p) && (padded_batch(p, Side::Q) || padded_batch(p, Side::Kv))
    }),
    class("SBHD, several ranks", [62, 65, 67], |p| {
        parallel(p) && (interleaved(p, Side::Q) || interleaved(p, Side::Kv))
    }),
    class("a rank without real rows", [83, 135, 47], idle_rank),
    class("length below 2·cp, several ranks", [213, 271, 154], |p| {
        parallel(p) && any_run(p, |run| run.len > 0 && run.len < 2 * p.parallel.size())
    }),
    class("KV heads on several ranks", [32, 32, 31], |p| {
        p.parallel.algorithm == Algorithm::AllToAll && p.heads.kv < p.parallel.size()
    }),
    class("right window, all-gather", [11, 11, 11], |p| gathers(p) && p.mask.right > Some(0)),
    class("padding, all-gather", [101, 100, 99], |p| gathers(p) && any_run(p, |run| run.span > run.len)),
    class("no padding, all-gather", [0, 0, 0], |p| gathers(p) && !any_run(p, |run| run.span > run.len)),
    class("full mask, all-gather", [31, 31, 30], |p| {
        gathers(p) && p.mask.is_band() && unbounded(p.mask) == (true, true)
    }),
    class("causal, all-gather", [39, 38, 38], |p| gathers(p) && p.mask.is_causal() && p.mask.left.is_none()),
    class("documents, several ranks", [14, 13, 15], |p| {
        parallel(p) && matches!(p.mask.blocks, Some(Blocks::Documents(_))) && any(p, |s| is_cut(p.mask, s))
    }),
    class("chunks, several ranks", [15, 14, 15], |p| {
        parallel(p) && matches!(p.mask.blocks, Some(Blocks::Chunks(_))) && any(p, |s| is_cut(p.mask, s))
    }),
    class("a prefix, several ranks", [21, 17, 23], |p| parallel(p) && any(p, |s| prefix_shows(p.mask, s))),
    class("sink tokens, several ranks", [15, 14, 16], |p| {
        parallel(p) && any(p, |s| sink_tokens_show(p.mask, s))
    }),
    class("ids and positions dealt to ranks", [18, 19, 18], |p| parallel(p) && p.form == Form::Segments),
    class("lengths of a padded batch, several ranks", [11, 13, 8], |p| {
        parallel(p) && p.form == Form::Lengths
    }),
    class("sequence-parallel region", [38, 38, 39], |p| p.parallel.region > 1),
    class("sequence-parallel region, several members", [16, 15, 16], |p| {
        p.parallel.region > 1 && parallel(p)
    }),
    class("KV heads on several ranks of a region", [17, 16, 13], |p| p.heads.kv < p.parallel.region),
    // These problems are about three in a thousand: too few for a floor in a short campaign.
    refused("heads that cannot be dealt", [0, 0, 0], |p| {
        matches!(broken_rule(p), Some(ParallelRule::QueryHeads | ParallelRule::KvHeads))
    }),
    refused("spans that cannot be cut", [0, 0, 0], |p| {
        matches!(broken_rule(p), Some(ParallelRule::SpanMultiple))
    }),
    refused("extra shapes of segment ids that differ", [0, 0, 0], |p| p.form == Form::MisshapenSegments),
    refused("lists of lengths that differ", [0, 0, 0], |p| p.form == Form::UnequalLengths),
];

fn any(problem: &Problem, holds: impl Fn(&Sequence) -> bool) -> bool {
    problem.sequences.iter().any(holds)
}

fn any_run(problem: &Problem, holds: impl Fn(&Run) -> bool) -> bool {
    any(problem, |sequence| holds(&sequence.q) || holds(&sequence.kv))
}

fn is_empty(sequence: &Sequence) -> bool {
    sequence.q.len == 0 || sequence.kv.len == 0
}

/// Whether the sequence at one end of a pack is empty on a side while some sequence of the pack is not.
fn is_seam_of_empties(problem: &Problem, at: Option<&Sequence>) -> bool {
    at.is_some_and(is_empty) && any(problem, |sequence| !is_empty(sequence))
}

fn empties_inside(problem: &Problem) -> bool {
    let mut inner = problem.sequences.iter().skip_while(|s| is_empty(s)).skip_while(|s| !is_empty(s));
    inner.any(|sequence| !is_empty(sequence))
}

fn off_multiple(n: usize, sizes: &[usize]) -> bool {
    sizes.iter().any(|size| n > 1 && (n % size == 1 || n % size == size - 1))
}

fn near(problem: &Problem, sizes: &[usize]) -> bool {
    any_run(problem, |run| off_multiple(run.len, sizes))
}

/// Whether one sequence has at least eight times the queries of any other, and at least two others have some.
fn giant(problem: &Problem) -> bool {
    let mut lengths: Vec<usize> = problem.sequences.iter().map(|sequence| sequence.q.len).collect();
    lengths.sort_unstable_by(|a, b| b.cmp(a));
    matches!(lengths[..], [first, second, third, ..] if third > 0 && first >= 8 * second)
}

fn padding(run: &Run) -> usize {
    run.span - run.len
}

/// Returns the whole chunks of padding when the span is cut into four (cp 2); `None` without padding or where the
/// span cannot be cut so.
fn padding_chunks(run: &Run) -> Option<usize> {
    (padding(run) > 0 && run.span.is_multiple_of(4)).then(|| padding(run) * 4 / run.span)
}

/// Whether sequences before the last one have padding, and whether the last one has. Both are false for a single
/// sequence.
fn padded_places(problem: &Problem) -> (bool, bool) {
    let padded = |s: &Sequence| padding(&s.q) > 0 || padding(&s.kv) > 0;
    match problem.sequences.split_last() {
        Some((last, others)) if !others.is_empty() => (others.iter().any(padded), padded(last)),
        _ => (false, false),
    }
}

fn first_offsets(problem: &Problem) -> (usize, usize) {
    problem.sequences.first().map_or((0, 0), |first| (first.q.offset, first.kv.offset))
}

/// Returns one past the last row that a sequence owns on a side.
fn end(problem: &Problem, side: Side) -> usize {
    problem.sequences.iter().filter_map(|sequence| run_of(sequence, side).end()).max().unwrap_or(0)
}

/// Returns the number of rows after the last sequence, of q and of kv.
fn slack(problem: &Problem) -> [usize; 2] {
    [problem.rows.q - end(problem, Side::Q), problem.rows.kv - end(problem, Side::Kv)]
}

/// Whether the spans of a side are together at least twice as long as what they hold, which is something.
fn twice_padded(problem: &Problem) -> bool {
    [Side::Q, Side::Kv].into_iter().any(|side| {
        let runs = || problem.sequences.iter().map(|sequence| run_of(sequence, side));
        let (held, owned): (usize, usize) =
            (runs().map(|run| run.len).sum(), runs().map(|run| run.span).sum());
        held > 0 && owned >= 2 * held
    })
}

/// Whether a number of rows is 63, 64 or 65, or as close to a larger multiple of 64.
fn off_tile(rows: usize) -> bool {
    rows >= 63 && (rows + 1) % 64 <= 2
}

fn gap_inside(problem: &Problem) -> bool {
    let gap = |before: &Run, after: &Run| before.step == 1 && before.end() < Some(after.offset);
    problem.sequences.windows(2).any(|pair| gap(&pair[0].q, &pair[1].q) || gap(&pair[0].kv, &pair[1].kv))
}

fn equal_spans(problem: &Problem) -> bool {
    let same = |pair: &[Sequence]| pair[0].q.span == pair[1].q.span && pair[0].kv.span == pair[1].kv.span;
    problem.sequences.len() > 1
        && problem.sequences.windows(2).all(same)
        && any(problem, |s| s.q.step == 1 && s.q.len < s.q.span)
}

/// Whether rows of one position lie side by side, as in SBHD.
fn interleaved(problem: &Problem, side: Side) -> bool {
    problem.sequences.len() > 1 && problem.sequences.iter().all(|s| run_of(s, side).step > 1)
}

/// Whether rows of one position lie side by side on one side, and on the other one sequence follows the other.
fn one_side_interleaved(problem: &Problem) -> bool {
    let [q, kv] = [Side::Q, Side::Kv].map(|side| interleaved(problem, side));
    let follow = |side: Side| problem.sequences.iter().all(|s| run_of(s, side).step <= 1);
    q && follow(Side::Kv) || kv && follow(Side::Q)
}

/// Whether several sequences have equal spans of rows that follow each other, as in BSHD.
fn blocked(problem: &Problem, side: Side) -> bool {
    let mut runs = problem.sequences.iter().map(|s| run_of(s, side));
    let span = runs.clone().next().map_or(0, |run| run.span);
    runs.len() > 1 && span > 1 && runs.all(|run| run.step == 1 && run.span == span)
}

/// Whether a side in BSHD has padding.
fn padded_batch(problem: &Problem, side: Side) -> bool {
    blocked(problem, side) && any(problem, |s| run_of(s, side).len < run_of(s, side).span)
}

/// Whether spans differ, which only THD can have.
fn ragged(problem: &Problem, side: Side) -> bool {
    problem.sequences.windows(2).any(|pair| run_of(&pair[0], side).span != run_of(&pair[1], side).span)
}

/// Whether the left side of the window is unbounded, and whether the right side is.
fn unbounded(mask: Mask) -> (bool, bool) {
    (mask.left.is_none(), mask.right.is_none())
}

fn causal(problem: &Problem, align: Alignment) -> bool {
    let mask = problem.mask;
    mask.is_causal() && mask.left.is_none() && mask.align == align
}

/// Whether queries of a sequence lie in several blocks of the mask.
fn is_cut(mask: Mask, sequence: &Sequence) -> bool {
    let (lq, lk) = (sequence.q.len, sequence.kv.len);
    mask.blocks.is_some() && mask.sight(lq, lk).tiles(0..lq, 0..0).nth(1).is_some()
}

/// Whether a prefix shows a query of a sequence a key that it would not see without.
fn prefix_shows(mask: Mask, sequence: &Sequence) -> bool {
    let (lq, lk) = (sequence.q.len, sequence.kv.len);
    let causal = Mask { prefix: 0, ..mask };
    mask.prefix > 0 && (0..lq).any(|i| mask.visible(i, lq, lk).len() > causal.visible(i, lq, lk).len())
}

/// Whether a query of a sequence sees a sink token that the window would hide.
fn sink_tokens_show(mask: Mask, sequence: &Sequence) -> bool {
    let (lq, lk) = (sequence.q.len, sequence.kv.len);
    let window = Mask { sink_tokens: 0, ..mask };
    mask.sink_tokens > 0 && (0..lq).any(|i| mask.visible(i, lq, lk).len() > window.visible(i, lq, lk).len())
}

/// Whether a bound of the window has a property.
fn edges(problem: &Problem, holds: impl Fn(usize) -> bool) -> bool {
    [problem.mask.left, problem.mask.right].into_iter().flatten().any(|keys| holds(keys as usize))
}

fn window_at_length(problem: &Problem) -> bool {
    edges(problem, |keys| any(problem, |s| s.kv.len > 2 && s.kv.len.abs_diff(keys) <= 1))
}

/// Whether the gradients of a case are known bit for bit, provided that no partial result is stored in 16 bits.
fn exact_backward(problem: &Problem, mode: InputMode) -> bool {
    let count = if parallel(problem) { problem.parallel.size() + 1 } else { 0 };
    let merging = Merging { count, narrow_out: false, narrow_sums: false, by: MergeBy::Weights };
    let flash = Arithmetic::flash_attention(Accumulation::Unknown);
    let seen = problem.pairs() > 0;
    seen && problem.mode == mode
        && eligible(mode, problem).is_ok()
        && parts(mode, problem, merging, &flash).gradients
}

fn exact_ranks(problem: &Problem, mode: InputMode) -> bool {
    parallel(problem) && problem.mode == mode
}

fn gathers(problem: &Problem) -> bool {
    problem.parallel.algorithm == Algorithm::AllGather
}

fn parallel(problem: &Problem) -> bool {
    problem.parallel.size() > 1
}

/// Whether some rank owns only padding while another has real queries.
fn idle_rank(problem: &Problem) -> bool {
    let real = |rank: &RankLayout| rank.q.runs.iter().any(|placed| placed.local.len > 0);
    parallel(problem) && problem.tokens() > 0 && layouts(problem).is_ok_and(|ranks| !ranks.iter().all(real))
}

/// Whether a sequence has keys, and some query in it sees none of them. The first and the last query decide, because
/// the queries that see a key are neighbours.
fn blind_query(mask: Mask, sequence: &Sequence) -> bool {
    let (lq, lk) = (sequence.q.len, sequence.kv.len);
    let blind = |query: usize| mask.visible(query, lq, lk).is_empty();
    lq > 0 && lk > 0 && (blind(0) || blind(lq - 1))
}

/// Whether the problem has one unscaled 16-bit format, with P in that or in f32, its algorithm can cut and deal it, and
/// its form says it.
pub fn is_legal(problem: &Problem) -> bool {
    let io = problem.precision.q.format;
    let inside = |(quantity, format, scaling): (&str, Format, Scaling)| {
        scaling == Scaling::None && (format == io || quantity == "p" && format == Format::F32)
    };
    matches!(io, Format::Bf16 | Format::Fp16)
        && problem.precision.elements().into_iter().all(|(name, e)| inside((name, e.format, e.scaling)))
        && broken_rule(problem).is_none()
        && !problem.form.is_contradiction()
}
