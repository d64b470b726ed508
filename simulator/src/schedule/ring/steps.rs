//! The steps of a member of a ring: what a step launches, the buffers of its partial results, and how they enter the
//! running ones.

use seamproof_oracle::Format;

use super::super::build::{self, Builder, Local, LocalBackward};
use super::super::program::{Attend, AttendBackward, BufferId, EventId, Merge, MergeOrder, MergeStyle, Work};
use super::{COMPUTE, Launch, MAIN, Member, RingCore, Tables, owned, wait};

/// Buffers in which a member finds the KV of each step: its own first, then two slots in turn.
pub(super) struct Travelling {
    own: [BufferId; 2],
    slots: Vec<[BufferId; 2]>,
}

impl Travelling {
    pub(super) fn new(builder: &mut Builder, local: &Local, steps: usize) -> Travelling {
        let own = [local.k, local.v];
        let mut slot = |index: usize| {
            let mut receive = |buffer: BufferId, name: &str| {
                let format = builder.describe(buffer).format;
                builder.like(buffer, &format!("{name} received, slot {index}"), format)
            };
            [receive(local.k, "k"), receive(local.v, "v")]
        };
        let slots = (0..2.min(steps - 1)).map(&mut slot).collect();
        Travelling { own, slots }
    }

    pub(super) fn at(&self, step: usize) -> [BufferId; 2] {
        if step == 0 { self.own } else { self.slots[(step - 1) % 2] }
    }
}

/// Forward steps of a member: partial outs and LSEs, folded into the running ones.
pub(super) struct ForwardStep {
    member: Member,
    /// The running out. The running LSE is the result itself.
    pub(super) out: BufferId,
    /// The buffer through which the final out goes to its codes.
    pub(super) through: Option<BufferId>,
    partials: Partials,
    tables: Option<Tables>,
}

/// Buffers to which launches write.
enum Partials {
    /// Out and LSE of a step, for each compute stream.
    Reused(Vec<[BufferId; 2]>),
    /// Merges of the kept outs, and whether their products are rounded to the result's format. Every launch has its own
    /// out and LSE.
    Kept(Vec<Merge>, bool),
}

impl ForwardStep {
    pub(super) fn new(builder: &mut Builder, core: &RingCore, place: usize) -> ForwardStep {
        let member = core.members[place];
        let Local { out, lse, .. } = member.local;
        let tables = Tables::new(builder, core, place);
        if core.order == MergeOrder::Deferred {
            let sum = builder.sum_of(out, ("out, running", Format::F32));
            let through = builder.nominal_of(out, "out");
            let partials = Partials::Kept(Vec::new(), sum == out);
            return ForwardStep { member, out: sum, through, partials, tables };
        }
        let of_step = build::partial(builder.describe(out).format);
        let mut partial = |stream: usize| {
            [
                builder.like(out, &format!("out of a step, stream {stream}"), of_step),
                builder.like(lse, &format!("lse of a step, stream {stream}"), Format::F32),
            ]
        };
        let partials = Partials::Reused((0..2.min(core.steps())).map(&mut partial).collect());
        let sum = builder.like(out, "out, running", Format::F32);
        ForwardStep { member, out: sum, through: None, partials, tables }
    }

    /// Launches a step and folds it in once the event `turn` lets it write the running result. A step without a visible
    /// pair waits for its turn too, and passes it on.
    pub(super) fn push(
        &mut self,
        builder: &mut Builder,
        core: &RingCore,
        ends: (usize, usize),
        step: usize,
        [k, v]: [BufferId; 2],
        mut turn: Option<EventId>,
    ) {
        let Member { rank, local } = self.member;
        let stream = COMPUTE[step % 2];
        let Local { q, lse, max_logit, .. } = local;
        let parts = core.forward_parts();
        let launches = core.launches(builder, (rank, stream), ends, self.tables.as_ref(), parts);
        for (part, Launch { call, table }) in launches {
            let [step_out, step_lse] = self.partial(builder, step, part);
            let rows = owned(call.segments.iter().map(|segment| segment.q));
            let (step, out) = (core.step(ends, step, part), step_out);
            let attend = Attend {
                step,
                call,
                table,
                descales: Vec::new(),
                q,
                k,
                v,
                sink: None,
                out,
                lse: step_lse,
                max_logit,
            };
            builder.push(rank, stream, Work::Attend(attend));
            wait(builder, rank, stream, turn.take());
            let style = core.order.style();
            let merge = Merge { style, step_out, step_lse, out: self.out, lse, rows };
            let merge = self.keep(merge);
            builder.push(rank, stream, Work::Merge(merge));
        }
        wait(builder, rank, stream, turn);
    }

    /// Returns the buffers to which a launch writes its out and LSE.
    fn partial(&self, builder: &mut Builder, step: usize, part: usize) -> [BufferId; 2] {
        match &self.partials {
            Partials::Reused(partials) => partials[step % 2],
            Partials::Kept(..) => {
                [("out", self.member.local.out), ("lse", self.member.local.lse)].map(|(name, model)| {
                    let format = builder.describe(model).format;
                    builder.like(model, &format!("{name} of step {step}, part {part}"), format)
                })
            }
        }
    }

    /// Returns the part of a merge that is done at once. If outs are kept, [`ForwardStep::add_kept`] does the rest.
    fn keep(&mut self, merge: Merge) -> Merge {
        match &mut self.partials {
            Partials::Reused(_) => merge,
            Partials::Kept(kept, product_rounded) => {
                let style = MergeStyle::Weighted { product_rounded: *product_rounded };
                kept.push(Merge { style, ..merge.clone() });
                Merge { style: MergeStyle::Statistics, ..merge }
            }
        }
    }

    /// Adds the outs that were kept, in order of steps, once the LSE is final.
    pub(super) fn add_kept(&mut self, builder: &mut Builder) {
        if let Partials::Kept(kept, _) = &mut self.partials {
            for merge in kept.drain(..) {
                builder.push(self.member.rank, MAIN, Work::Merge(merge));
            }
        }
    }
}

/// Backward steps of a member: partial gradients on each compute stream, added to the running dq and to the travelling
/// dk and dv.
pub(super) struct BackwardStep {
    member: Member,
    pub(super) results: LocalBackward,
    /// The running dq.
    pub(super) dq: BufferId,
    /// The buffers through which the sums of dq, dk and dv go to their codes.
    pub(super) through: [Option<BufferId>; 3],
    /// The travelling dk and dv: two slots in turn, of which the first is filled with zeros at home. Or the kept ones,
    /// one for each step.
    dkv: Vec<[BufferId; 2]>,
    /// Whether dk and dv of each step are kept until the last one.
    pub(super) keeps: bool,
    /// dq, dk and dv of a step, for each compute stream.
    partial: Vec<[BufferId; 3]>,
    tables: Option<Tables>,
}

impl BackwardStep {
    pub(super) fn new(
        builder: &mut Builder,
        core: &RingCore,
        place: usize,
        results: LocalBackward,
    ) -> BackwardStep {
        let (slots, is_deferred) = (2.min(core.steps()), core.order == MergeOrder::Deferred);
        let keeps = is_deferred && builder.is_coded(results.dk) && core.steps() > 1;
        let dq = builder.like(results.dq, "dq, running", Format::F32);
        let through = [(results.dq, "dq"), (results.dk, "dk"), (results.dv, "dv")]
            .map(|(of, name)| if is_deferred { builder.nominal_of(of, name) } else { None });
        let mut like = |buffer: BufferId, name: String| builder.like(buffer, &name, Format::F32);
        let dkv = (0..if keeps { core.steps() } else { slots })
            .map(|slot| {
                let kind = if keeps { "of step" } else { "travelling, slot" };
                let name = |tensor: &str| format!("{tensor} {kind} {slot}");
                [like(results.dk, name("dk")), like(results.dv, name("dv"))]
            })
            .collect();
        let partial = (0..slots)
            .map(|stream| {
                [(results.dq, "dq"), (results.dk, "dk"), (results.dv, "dv")].map(|(of, name)| {
                    let format = build::partial(builder.describe(of).format);
                    builder.like(of, &format!("{name} of a step, stream {stream}"), format)
                })
            })
            .collect();
        let tables = Tables::new(builder, core, place);
        BackwardStep { member: core.members[place], results, dq, through, dkv, keeps, partial, tables }
    }

    /// Returns the dk and dv that begin with zeros.
    pub(super) fn dkv_at_first(&self) -> Vec<BufferId> {
        let count = if self.keeps { self.dkv.len() } else { 1 };
        self.dkv[..count].iter().flatten().copied().collect()
    }

    /// Returns the travelling dk and dv of a step; after the last step, those that have come home.
    pub(super) fn dkv_at(&self, step: usize) -> [BufferId; 2] {
        self.dkv[step % self.dkv.len()]
    }

    /// Launches a step and adds its gradients once the travelling gradients have arrived. The same event gives the step
    /// its turn on dq.
    pub(super) fn push(
        &self,
        builder: &mut Builder,
        core: &RingCore,
        ends: (usize, usize),
        step: usize,
        [k, v]: [BufferId; 2],
        mut turn: Option<EventId>,
    ) {
        let Member { rank, local } = self.member;
        let (stream, [dq, dk, dv]) = (COMPUTE[step % 2], self.partial[step % 2]);
        let (Local { q, out, lse, .. }, dout) = (local, self.results.dout);
        let [travelling_dk, travelling_dv] = self.dkv_at(step);
        let parts = core.backward_parts();
        let launches = core.launches(builder, (rank, stream), ends, self.tables.as_ref(), parts);
        for (part, Launch { call, table }) in launches {
            let q_rows = owned(call.segments.iter().map(|segment| segment.q));
            let kv_rows = owned(call.segments.iter().flat_map(|segment| segment.kv.iter().copied()));
            let step = core.step(ends, step, part);
            let launch = AttendBackward {
                step,
                call,
                table,
                descales: Vec::new(),
                q,
                k,
                v,
                dout,
                out,
                lse,
                sink: None,
                dq,
                dk,
                dv,
            };
            builder.push(rank, stream, Work::AttendBackward(launch));
            wait(builder, rank, stream, turn.take());
            let sums =
                [(dq, self.dq, q_rows), (dk, travelling_dk, kv_rows.clone()), (dv, travelling_dv, kv_rows)];
            for (from, to, rows) in sums {
                builder.push(rank, stream, Work::Accumulate { from, to, rows });
            }
        }
        wait(builder, rank, stream, turn);
    }
}
