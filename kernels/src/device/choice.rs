//! The choice of the attention kernels that a schedule's launches go to.

use std::num::NonZeroUsize;

use seamproof_oracle::Format;
use seamproof_simulator::AttentionCall;
use seamproof_simulator::schedule::{Attend, BufferId, Schedule, Work};

use crate::attend::{CallTables, WeightFormats};
use crate::backward::{self, BackwardOperands};
use crate::error::KernelError;
use crate::forward::{AttentionKernels, ForwardOperands, TileShape};
use crate::forward_fp8::Fp8Shape;
use crate::gpu::whole_clusters;

/// Returns the operands of a forward from the formats and head dims of q, k, v and out.
pub(super) fn operands([q, k, v, out]: [(Format, usize); 4], formats: WeightFormats) -> ForwardOperands {
    ForwardOperands { formats: [q.0, k.0, v.0], out: out.0, p: formats.p, dims: [q.1, v.1] }
}

/// Returns the operands of a backward from those of its forward and the formats of dout, dq, dk and dv.
pub(super) fn backward_operands(
    forward: ForwardOperands,
    [dout, dq, dk, dv]: [Format; 4],
    formats: WeightFormats,
) -> BackwardOperands {
    BackwardOperands { forward, ds: formats.ds, dout, gradients: [dq, dk, dv] }
}

/// What the blocks of a launch on tensor cores share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileLaunch {
    /// The number of items, a tile and a head each. Tiles of padding alone are not counted.
    pub items: usize,
    /// The number of blocks that take items together.
    pub cluster: usize,
    /// The number of teams of a block, each of which takes items.
    pub teams: usize,
    /// The number of segments that are planned.
    pub segments: usize,
    /// The most turns that an item of a backward takes, each a tile of query rows and a head, at least; 0 in a forward.
    pub turns: usize,
}

impl TileLaunch {
    /// Whether some team takes several items where there are so many blocks at most.
    pub fn repeats_in(self, blocks: NonZeroUsize) -> bool {
        let blocks = whole_clusters(blocks.get(), self.cluster);
        self.items > blocks * self.teams
    }
}

/// Returns for each forward launch of a schedule what the blocks of a kernel on tensor cores share, and for each backward
/// launch; `None` for a launch that goes to the simple kernels.
pub fn tile_launches(
    schedule: &Schedule,
    formats: WeightFormats,
    attention: AttentionKernels,
) -> Result<[Vec<Option<TileLaunch>>; 2], KernelError> {
    let buffer = |id: BufferId| &schedule.buffers[id.0];
    let operand = |id: BufferId| (buffer(id).format, buffer(id).dim);
    let tables = |call: &AttentionCall, q, k, backward| {
        CallTables::new(call, [buffer(q).rows, buffer(k).rows], backward)
    };
    let mut taken = [Vec::new(), Vec::new()];
    for operation in schedule.ranks.iter().flat_map(|rank| &rank.operations) {
        let (pass, here) = match &operation.work {
            Work::Attend(a) => {
                let operands = operands([a.q, a.k, a.v, a.out].map(operand), formats);
                let heads = [a.q, a.k].map(|id| buffer(id).heads);
                let shape = attention.shape(&tables(&a.call, a.q, a.k, false)?, &operands, heads);
                (0, shape.map(|shape| shape.launch(&a.call, heads, operands.dims)))
            }
            Work::AttendBackward(a) => {
                let forward = operands([a.q, a.k, a.v, a.out].map(operand), formats);
                let gradients = [a.dout, a.dq, a.dk, a.dv].map(|id| buffer(id).format);
                let operands = backward_operands(forward, gradients, formats);
                let takes = attention.takes_backward(&tables(&a.call, a.q, a.k, true)?, &operands);
                let heads = [a.q, a.k].map(|id| buffer(id).heads);
                (1, takes.then(|| backward::launch(&a.call, heads, operands.forward.dims)))
            }
            _ => continue,
        };
        taken[pass].push(here);
    }
    Ok(taken)
}

/// Returns for each forward launch in FP8 of a schedule what its blocks share, in this shape or the one that fits the call, and
/// for each backward launch.
pub fn tile_launches_fp8(
    schedule: &Schedule,
    shape: Option<Fp8Shape>,
) -> Result<[Vec<TileLaunch>; 2], KernelError> {
    let buffer = |id: BufferId| &schedule.buffers[id.0];
    let mut taken = [Vec::new(), Vec::new()];
    for operation in schedule.ranks.iter().flat_map(|rank| &rank.operations) {
        match &operation.work {
            Work::Attend(a) => {
                let [q, k, v] = [a.q, a.k, a.v].map(buffer);
                let dims = [q.dim, v.dim];
                let shape = match shape {
                    Some(shape) => shape,
                    None => Fp8Shape::of(&CallTables::new(&a.call, [q.rows, k.rows], false)?, dims),
                };
                taken[0].push(shape.launch(&a.call, q.heads, dims));
            }
            Work::AttendBackward(a) => {
                let [q, k, v] = [a.q, a.k, a.v].map(buffer);
                taken[1].push(backward::launch(&a.call, [q.heads, k.heads], [q.dim, v.dim]));
            }
            _ => {}
        }
    }
    Ok(taken)
}

/// Returns the shape of each forward launch of a schedule on tensor cores; `None` for one that the simple kernels
/// run.
pub fn shapes(
    schedule: &Schedule,
    formats: WeightFormats,
    attention: AttentionKernels,
) -> Result<Vec<Option<TileShape>>, KernelError> {
    let buffer = |id: BufferId| &schedule.buffers[id.0];
    let forwards = schedule.ranks.iter().flat_map(|rank| &rank.operations);
    let forwards = forwards.filter_map(|operation| match &operation.work {
        Work::Attend(attend) => Some(attend),
        _ => None,
    });
    let shape = |a: &Attend| {
        let operands =
            operands([a.q, a.k, a.v, a.out].map(|id| (buffer(id).format, buffer(id).dim)), formats);
        let tables = CallTables::new(&a.call, [buffer(a.q).rows, buffer(a.k).rows], false)?;
        Ok(attention.shape(&tables, &operands, [a.q, a.k].map(|id| buffer(id).heads)))
    };
    forwards.map(shape).collect()
}
