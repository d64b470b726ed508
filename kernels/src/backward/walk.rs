//! In which order tiles are taken, and in which form of the kernel: by what the host knows of a call's lengths and masks.

use seamproof_oracle::Format;

use crate::attend::CallTables;
use crate::forward::Instance;
use crate::summary::CallSummary;

use super::DqOrder;
use super::bucket::{Bucket, KEYS};

/// Query rows, with what is made of them, that stay in the L2 cache while all tiles of their heads are taken.
const CACHED_BYTES: usize = 40 << 20;
/// Rows of an average segment up to which walks are short.
pub const SHORT_ROWS: usize = 1024;
/// The multiprocessors of an H100 or H200 with NVLink.
const MULTIPROCESSORS: usize = 132;
/// The bit that says that all heads walk down: `EVERY` of the source.
const EVERY: i32 = 1 << 30;
/// The most tiles of keys of a segment that go around: `MOST_AROUND` of the source.
const MOST_AROUND: usize = 8;

/// KV heads of groups that are taken together in a fixed order, where the longest segment has so many keys: a tile has twice
/// the time until the one before it has added, and of more heads the rows would leave the cache.
const HEADS_OF_GROUPS: usize = 2;
const KEYS_OF_GROUPS: usize = 4096;
/// Keys of the longest segment from which on heads may walk up and down by turns ([`Walks::ByTurns`]). Which of them a
/// head does then depends on its number.
pub const KEYS_BY_TURNS: usize = 4096;

/// Returns the number of KV heads that are taken together, their tiles in turns. 0: as many as have all their tiles taken
/// at once, so that none waits long for those before it. `heads` are the query heads of a KV head, and the KV heads.
pub(super) fn heads_together(
    order: DqOrder,
    form: Form,
    route: Route,
    call: &CallTables,
    [group, kv_heads]: [usize; 2],
    bucket: Bucket,
) -> usize {
    match order {
        _ if route.turning > 0 => route.turning,
        DqOrder::AsTheyCome => head_chunk(call, group, kv_heads, bucket),
        // Tiles that go around are neighbours.
        DqOrder::Fixed if form == Form::Short && goes_around(call) => 1,
        DqOrder::Fixed if group > 1 && call.summary.keys >= KEYS_OF_GROUPS => HEADS_OF_GROUPS,
        DqOrder::Fixed => 0,
    }
}

/// Returns the number of KV heads that are taken together, in chunks of one size: as many as have their query rows in
/// the cache.
fn head_chunk(call: &CallTables, group: usize, kv_heads: usize, bucket: Bucket) -> usize {
    // These are Q, dout and f32 sums, as if there were as many query rows as keys.
    let bytes = (call.summary.keys * group * bucket.dim * 8).max(1);
    let chunks = kv_heads.div_ceil((CACHED_BYTES / bytes).max(1));
    kv_heads.div_ceil(chunks)
}

/// The walks over tiles of query rows, and so which tile of keys adds first.
///
/// Up, every tile begins with rows of its own, and the longest tiles are taken last. That is best where each
/// multiprocessor has a head of a sequence to itself, and in a fixed order, where no tile waits then. Down, all tiles
/// begin with the last rows, and the longest are taken first. That is best for few sequences, and for groups, whose
/// tiles are as many times as long. By turns, as many heads as have all their tiles taken at once walk up, and as many
/// down: multiprocessors that are done with short tiles of the one go on with those of the other, and few are left
/// without work at the end. The figures are in `kernels/NOTES.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walks {
    /// All heads walk up.
    Up,
    /// All heads walk down.
    Down,
    /// Chunks of heads walk up and down by turns.
    ByTurns,
}

impl Walks {
    /// All walks.
    pub const ALL: [Walks; 3] = [Walks::Up, Walks::Down, Walks::ByTurns];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Walks::Up => "up",
            Walks::Down => "down",
            Walks::ByTurns => "by-turns",
        }
    }

    /// Returns the walks of a name.
    pub fn by_name(name: &str) -> Option<Walks> {
        Walks::ALL.into_iter().find(|walks| walks.name() == name)
    }

    /// Returns the walks that fit a call, of a kernel that may go by turns or may not. `heads` are the query heads of a KV
    /// head, and the KV heads.
    pub fn fitting(
        order: DqOrder,
        call: &CallTables,
        [group, kv_heads]: [usize; 2],
        multiprocessors: usize,
        may_turn: bool,
    ) -> Walks {
        let even = order == DqOrder::Fixed || call.summary.filled * kv_heads >= multiprocessors;
        match group == 1 && even {
            true if order == DqOrder::Fixed && may_turn && turns_fit(call) => Walks::ByTurns,
            true => Walks::Up,
            false => Walks::Down,
        }
    }
}

/// The walks of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(super) walks: Walks,
    /// The KV heads of a chunk that walks up or down by turns, a power of two; 0 where none does.
    pub(super) turning: usize,
}

impl Route {
    /// Returns the route of walks that fit a call, in chunks of heads that do.
    pub(super) fn fitting(walks: Walks, call: &CallTables, bucket: Bucket) -> Route {
        Route { walks, turning: if walks == Walks::ByTurns { heads_by_turns(call, bucket) } else { 0 } }
    }

    /// Returns the route of walks that were asked for, in chunks of half of the heads at most, so that there are two.
    pub(super) fn forced(walks: Walks, kv_heads: usize) -> Route {
        let half = 1 << (kv_heads / 2).max(1).ilog2();
        Route { walks, turning: if walks == Walks::ByTurns { half } else { 0 } }
    }

    /// Returns `down` of the source's `Args`.
    pub(super) fn down(self) -> i32 {
        match self.walks {
            Walks::Up => 0,
            Walks::Down => EVERY,
            Walks::ByTurns => self.turning as i32,
        }
    }
}

/// Returns whether heads that would walk up in a fixed order do so by turns: sequences are long and of about one length,
/// so that one chunk fits all, and tiles have from few rows to all of them.
fn turns_fit(call: &CallTables) -> bool {
    let CallSummary { keys, seen, first_seen, .. } = call.summary;
    let alike = call.mean_rows() * 8 >= keys * 7;
    keys >= KEYS_BY_TURNS && alike && first_seen <= KEYS && seen == keys
}

/// Returns the KV heads of a chunk by turns, a power of two: as many as have all their tiles taken at once. With 64 lanes
/// they are twice as many, and four at least: a turn is shorter there, and a tile has more time until it is waited for.
/// They follow from the keys alone, so that gradients have the same bits on every GPU.
fn heads_by_turns(call: &CallTables, bucket: Bucket) -> usize {
    let taken_at_once = MULTIPROCESSORS / call.summary.keys.div_ceil(KEYS).max(1);
    let heads = 1 << taken_at_once.max(1).ilog2();
    if bucket.dim() > 64 { heads } else { (2 * heads).max(4) }
}

/// Returns whether the tiles of keys of segments go around (`backward.cu`) in walks up: all rows see all keys, and
/// the tiles are few.
fn goes_around(call: &CallTables) -> bool {
    let keys = call.summary.keys;
    call.summary.all_seen && keys > KEYS && keys <= MOST_AROUND * KEYS
}

/// The form of the kernel on tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The kernel before has made D of all rows.
    Tiles,
    /// The tiles make D themselves, so that dout is read once less. This is for tiles of keys that come to a tile of
    /// rows one after the other.
    Short,
}

impl Form {
    pub(super) const ALL: [Form; 2] = [Form::Tiles, Form::Short];

    pub(super) fn name(self) -> &'static str {
        match self {
            Form::Tiles => "tiles",
            Form::Short => "short",
        }
    }

    /// Returns the form for a call with an out of this format. The copy engine must bring out as it brings dout.
    pub(super) fn of(call: &CallTables, walks: Walks, out: Format, instance: Instance) -> Form {
        let of_one_tile = call.summary.keys <= KEYS;
        // The first rows see one tile of keys, so that all others begin later.
        let staggered = call.summary.first_seen <= KEYS;
        let short = walks == Walks::Up && call.mean_rows() <= SHORT_ROWS && (staggered || goes_around(call));
        let served = !instance.takes_all() && out != Format::F32;
        if served && (of_one_tile || short) { Form::Short } else { Form::Tiles }
    }
}

#[cfg(test)]
mod tests {
    use super::super::bucket::tests::BUCKETS;
    use super::super::tests::{bounded, call};
    use super::*;

    #[test]
    fn heads_are_cut_into_chunks_of_one_size() {
        let mut long = call(&[(64, 64)], None);
        assert_eq!(head_chunk(&long, 1, 16, BUCKETS[1]), 16, "short rows all stay");
        // A head has 16 MiB, so that 2 fit.
        long.summary.keys = 16384;
        assert_eq!(head_chunk(&long, 1, 16, BUCKETS[1]), 2);
        assert_eq!(head_chunk(&long, 4, 8, BUCKETS[1]), 1, "one head at least");
    }

    /// Whether tiles wait for each other decides in a fixed order, and the cache in any.
    #[test]
    fn heads_of_long_groups_are_taken_by_twos_in_a_fixed_order() {
        let mut drawn = call(&[(64, 64)], None);
        let mut together = |order, group, keys| {
            drawn.summary.keys = keys;
            heads_together(order, Form::Tiles, Route::forced(Walks::Up, 8), &drawn, [group, 8], BUCKETS[1])
        };
        assert_eq!(together(DqOrder::Fixed, 4, 4096), 2);
        assert_eq!(together(DqOrder::Fixed, 4, 4095), 0, "as many as have room");
        assert_eq!(together(DqOrder::Fixed, 1, 4096), 0, "as many as have room");
        assert_eq!(together(DqOrder::AsTheyCome, 1, 4096), 8, "all stay in the cache");
    }

    /// These walks were the faster ones on a machine of 132 multiprocessors.
    #[test]
    fn walks_go_up_where_tiles_are_many_or_in_a_fixed_order_without_groups() {
        for (order, group, kv_heads, up) in [
            (DqOrder::AsTheyCome, 1, 16, false),
            (DqOrder::AsTheyCome, 1, 64, false),
            (DqOrder::AsTheyCome, 1, 512, true),
            (DqOrder::AsTheyCome, 4, 1024, false),
            (DqOrder::Fixed, 1, 16, true),
            (DqOrder::Fixed, 4, 1024, false),
        ] {
            let walks = Walks::fitting(order, &call(&[(64, 64)], None), [group, kv_heads], 132, true);
            assert_eq!(walks, if up { Walks::Up } else { Walks::Down }, "{order:?}, {group}, {kv_heads}");
        }
    }

    /// Test that long causal sequences of one length, and no others, have their heads walk up and down by turns.
    #[test]
    fn long_sequences_of_one_length_walk_by_turns() {
        let of = |call: &CallTables, order, group, may_turn| {
            Walks::fitting(order, call, [group, 8], 132, may_turn) == Walks::ByTurns
        };
        let fits = |call: &CallTables| of(call, DqOrder::Fixed, 1, true);
        let alike = call(&[(4096, 4096), (4000, 4000)], None);
        assert!(fits(&alike));
        assert!(!of(&alike, DqOrder::AsTheyCome, 1, true), "tiles add as they come");
        assert!(!of(&alike, DqOrder::Fixed, 4, true), "a group");
        assert!(!of(&alike, DqOrder::Fixed, 1, false), "a kernel that may not");
        assert!(!fits(&call(&[(4095, 4095), (4000, 4000)], None)), "short");
        assert!(!fits(&call(&[(4096, 4096), (2048, 2048)], None)), "unlike");
        assert!(!fits(&bounded(&[(4096, 4096)], None, None)), "every tile has all rows");
        let mut window = call(&[(4096, 4096)], None);
        window.summary.seen = 1000;
        assert!(!fits(&window), "tiles have as many rows");
        for (keys, expected) in
            [(4096, [8, 4]), (5120, [4, 2]), (8192, [4, 2]), (16384, [4, 1]), (100_000, [4, 1])]
        {
            let of = |bucket| heads_by_turns(&call(&[(keys, keys)], None), bucket);
            assert_eq!(BUCKETS.map(of), expected, "{keys} keys");
        }
    }

    #[test]
    fn a_route_tells_the_kernel_which_heads_walk_down() {
        let forced = |walks, kv_heads| Route::forced(walks, kv_heads).down();
        assert_eq!(Walks::ALL.map(|walks| forced(walks, 1)), [0, EVERY, 1]);
        assert_eq!([2, 3, 4, 9, 16].map(|kv_heads| forced(Walks::ByTurns, kv_heads)), [1, 1, 2, 4, 8]);
        let long = call(&[(4096, 4096)], None);
        assert_eq!(Walks::ALL.map(|walks| Route::fitting(walks, &long, BUCKETS[1]).down()), [0, EVERY, 4]);
    }

    #[test]
    fn the_short_form_is_for_tiles_that_come_one_after_the_other() {
        let form = |call: &CallTables, walks| Form::of(call, walks, Format::Bf16, Instance::Wide);
        let whole = |lengths: &[usize]| lengths.iter().map(|&length| (length, length)).collect::<Vec<_>>();
        let causal = call(&whole(&[300, 1, 700]), None);
        assert_eq!(form(&causal, Walks::Up), Form::Short);
        let of = |out, instance| Form::of(&causal, Walks::Up, out, instance);
        assert_eq!(of(Format::F32, Instance::Wide), Form::Tiles, "the copy engine does not bring this out");
        assert_eq!(of(Format::Bf16, Instance::General), Form::Tiles, "one form is general");
        assert_eq!(form(&causal, Walks::Down), Form::Tiles, "a walk down waits");
        for (lengths, hi, expected) in [
            (vec![300, 700], Some(127), Form::Short),
            (vec![300, 700], Some(128), Form::Tiles),
            (vec![300, 700], Some(299), Form::Tiles),
            (vec![300, 700], Some(699), Form::Short),
            (vec![300, 700], None, Form::Short),
            (vec![300, 1024], None, Form::Short),
            (vec![300, 1025], None, Form::Tiles),
        ] {
            let seen = bounded(&whole(&lengths), None, hi);
            assert_eq!(form(&seen, Walks::Up), expected, "{lengths:?}, {hi:?}");
            assert_eq!(goes_around(&seen), expected == Form::Short && hi != Some(127), "{lengths:?}, {hi:?}");
            assert_eq!(form(&seen, Walks::Down), Form::Tiles);
        }
        let alone = bounded(&whole(&[128, 64]), None, None);
        assert_eq!([Walks::Up, Walks::Down].map(|walks| form(&alone, walks)), [Form::Short; 2]);
        assert!(!goes_around(&alone));
        assert_eq!(form(&call(&whole(&[4096]), None), Walks::Up), Form::Tiles);
        assert_eq!(form(&call(&[(4096, 4096), (0, 0), (0, 0), (0, 0)], None), Walks::Up), Form::Tiles);
        assert_eq!(form(&call(&[], None), Walks::Up), Form::Short, "no segment at all");
    }
}
