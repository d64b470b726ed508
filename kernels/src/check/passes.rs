//! A forward and a backward on tensors of their own, by any of the kernels, for what launches them again and again.

use seamproof_oracle::Problem;
use seamproof_simulator::AttentionCall;

use crate::attend::CallTables;
use crate::backward::How;
use crate::error::KernelError;
use crate::forward::Shape;
use crate::gpu::{Buffer, Gpu};
use crate::ready::{Gradients, Numbers, weights};

/// Numbers that the largest logits of heads are raised from, in turn: none is smaller, and none is larger.
const LARGEST: [f32; 2] = [f32::NEG_INFINITY, 1e30];
/// What lies in all other results before a launch: a number of about 1 in every format, of which a sum differs.
const BEFORE: u8 = 0x3f;

/// Which kernels run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernels {
    /// The simple ones.
    Simple,
    /// Those on tensor cores.
    Tuned(Shape, How),
}

/// A forward and a backward, and what they are launched with.
pub(super) struct Passes<'g> {
    gpu: &'g Gpu,
    problem: &'g Problem,
    kernels: Kernels,
    tensors: Gradients,
    pub(super) call: CallTables,
    pub(super) tables: Buffer,
    /// The forward's plan, and the backward's workspace.
    rooms: [Buffer; 2],
}

impl<'g> Passes<'g> {
    /// Of a call on a problem's tensors.
    pub(super) fn new(
        gpu: &'g Gpu,
        (problem, call): (&'g Problem, &AttentionCall),
        kernels: Kernels,
        numbers: &Numbers,
    ) -> Result<Passes<'g>, KernelError> {
        let call = CallTables::new(call, [problem.rows.q, problem.rows.kv], true)?;
        let heads = problem.heads.q;
        let rooms = match kernels {
            Kernels::Simple => [0, call.scratch_bytes(heads)],
            Kernels::Tuned(..) => {
                [call.plan_bytes(), call.workspace_bytes(heads, [problem.dims.qk, problem.dims.v])]
            }
        };
        let [plan, workspace] = rooms.map(|bytes| gpu.allocate(bytes));
        let (tables, rooms) = (gpu.upload(&call.bytes)?, [plan?, workspace?]);
        let tensors = Gradients::new(gpu, problem, numbers)?;
        Ok(Passes { gpu, problem, kernels, tensors, call, tables, rooms })
    }

    /// Launches both.
    pub(super) fn launch(&self) -> Result<(), KernelError> {
        let Passes { gpu, problem, call, .. } = self;
        let (forward, backward) = (self.tensors.forward.forward(problem), self.tensors.backward(problem));
        let (tables, [plan, workspace]) = (self.tables.area(), self.rooms.each_ref().map(Buffer::area));
        let weights = weights(problem);
        match self.kernels {
            Kernels::Simple => {
                gpu.attend(call, tables, weights, &forward)?;
                gpu.attend_backward(call, [tables, workspace], weights, &backward)
            }
            Kernels::Tuned(shape, how) => {
                gpu.forward(call, [tables, plan], weights, shape, &forward)?;
                gpu.backward(call, [tables, workspace], weights, how, &backward)
            }
        }
    }

    /// What `launch` writes, and what it leaves, by the names of results.
    pub(super) fn results(
        &self,
        launch: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<Vec<(&'static str, Vec<u8>)>, KernelError> {
        let largest = (0..self.problem.heads.q).flat_map(|head| LARGEST[head % LARGEST.len()].to_le_bytes());
        let largest: Vec<u8> = largest.collect();
        for (name, area) in self.tensors.results() {
            let before = if name == "max_logit" { largest.clone() } else { vec![BEFORE; area.bytes()] };
            self.gpu.write(area, &before)?;
        }
        launch()?;
        let read = self.tensors.results().into_iter().map(|(name, area)| Ok((name, self.gpu.read(area)?)));
        read.collect()
    }
}
