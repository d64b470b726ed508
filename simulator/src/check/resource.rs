//! The names of resources, and the error of one that grows too fast.

use std::fmt;

use seamproof_oracle::Pass;

use crate::schedule::Growth;

/// A resource of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Largest number of bytes that are live at once in a pass. Each pass has its own peak, because the larger one
    /// would hide the growth of the other.
    PeakBytes(Pass),
    /// Largest number of bytes of tensors that are live at a launch of an attention kernel, in a pass. Tables of
    /// segments are left out.
    BytesAtLaunches(Pass),
    /// Number of launches of attention kernels.
    Launches,
    /// Number of segments of all launches: the work that their grids enumerate.
    Segments,
    /// Number of times that the host waits for a device and reads.
    HostReads,
}

impl Resource {
    /// Every resource.
    pub const ALL: [Resource; 7] = [
        Resource::PeakBytes(Pass::Forward),
        Resource::PeakBytes(Pass::Backward),
        Resource::BytesAtLaunches(Pass::Forward),
        Resource::BytesAtLaunches(Pass::Backward),
        Resource::Launches,
        Resource::Segments,
        Resource::HostReads,
    ];

    /// Returns the name used in texts, a plural.
    pub fn name(self) -> &'static str {
        match self {
            Resource::PeakBytes(Pass::Forward) => "peak bytes of a rank",
            Resource::PeakBytes(Pass::Backward) => "peak bytes of a rank in the backward",
            Resource::BytesAtLaunches(Pass::Forward) => "bytes of a rank at its launches",
            Resource::BytesAtLaunches(Pass::Backward) => "bytes of a rank at its launches of the backward",
            Resource::Launches => "launches of a rank",
            Resource::Segments => "segments of a rank's launches",
            Resource::HostReads => "host reads of a rank",
        }
    }
}

/// A size of a problem that is doubled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Tokens of one sequence, over the same ranks.
    Tokens,
    /// Sequences of the same length, over the same ranks.
    Sequences,
    /// Ranks, each with as many rows as before.
    Ranks,
    /// Ranks of each sequence-parallel region, which share the same rows and heads.
    Region,
}

impl Axis {
    /// Every axis.
    pub const ALL: [Axis; 4] = [Axis::Tokens, Axis::Sequences, Axis::Ranks, Axis::Region];

    /// Returns the name used in texts.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Tokens => "tokens",
            Axis::Sequences => "sequences",
            Axis::Ranks => "ranks",
            Axis::Region => "ranks of a region",
        }
    }
}

/// A resource that grows faster than the algorithm declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrowthError {
    /// The resource.
    pub resource: Resource,
    /// The size that was doubled.
    pub axis: Axis,
    /// The three sizes.
    pub sizes: [usize; 3],
    /// The amount that the dearest rank takes at each size.
    pub amounts: [u64; 3],
    /// The fastest growth that is declared.
    pub declared: Growth,
}

impl std::error::Error for GrowthError {}

impl fmt::Display for GrowthError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (axis, [a, b, c], [x, y, z]) = (self.axis.name(), self.amounts, self.sizes);
        let rate = |from: u64, to: u64, sizes: usize| {
            (10.0 * (to as f64 - from as f64) / sizes as f64).round() / 10.0
        };
        let (first, then) = (rate(a, b, y - x), rate(b, c, z - y));
        write!(f, "{} grow as {axis} × {first}", self.resource.name())?;
        if then != first {
            write!(f, ", then as {axis} × {then}")?;
        }
        write!(f, " ({a}, {b}, {c} at {x}, {y}, {z} {axis}); the schedule of record grows as ")?;
        match self.declared {
            Growth::Falling => write!(f, "1 ÷ {axis}"),
            Growth::Flat => f.write_str("a constant"),
            Growth::Linear | Growth::Faster => write!(f, "{axis} × a constant"),
        }
    }
}
