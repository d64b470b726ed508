//! What the tests of tier R in FP8 share: a kernel's results beside what replays the right kernel's, and kernels with other
//! numerics.

use std::num::NonZeroUsize;

use seamproof_judge::generate::{self, Draw};
use seamproof_judge::ladder::Judge;
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::{Fp8, Fp8Fault, Recipe};
use seamproof_judge::values;
use seamproof_oracle::Saved;
use seamproof_oracle::envelope::Model;
use seamproof_oracle::replay::Replay;
use seamproof_simulator::emulated::{HeadRows, Pair, Right, Stages, TensorCore, UnitArithmetic};

/// A kernel without a locked profile.
pub(crate) struct Unlocked(pub(crate) Fp8);

impl Backend for Unlocked {
    fn name(&self) -> &str {
        "unlocked"
    }

    fn declaration(&self) -> Declaration {
        self.0.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.0)
    }

    fn replay(&self, _: &Problem) -> Option<Replay> {
        None
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.0.run(problem, inputs)
    }
}

/// Returns drawn problems with gradients.
pub(crate) fn with_gradients(kernel: &Fp8, seed: u64) -> impl Iterator<Item = Problem> + use<> {
    let table = kernel.declaration().table;
    (0..).filter_map(move |index| match generate::draw(seed, index, &Limits::quick()) {
        Draw::Problem(problem) => {
            let asked = table.asked(problem);
            let is_taken = table.refusal(&asked).is_none() && asked.pass == Pass::Backward;
            (is_taken && asked.pairs() > 0).then_some(asked)
        }
        _ => None,
    })
}

/// Whole results of a kernel, and what replays those of the right one.
pub(crate) struct Ran {
    pub(crate) inputs: Inputs,
    pub(crate) rank: RankOutputs,
    /// The kernel's own out and LSE.
    pub(crate) saved: Saved,
    pub(crate) model: Model,
    pub(crate) replay: Replay,
}

impl Ran {
    /// Runs a kernel on a problem that its table takes.
    pub(crate) fn new(kernel: &Fp8, problem: &Problem) -> Ran {
        let right = Fp8 { fault: None, ..*kernel };
        let inputs = values::inputs(problem);
        let Judge { layouts, assemble, .. } = Judge::default();
        let layouts = layouts(problem).expect("rows that can be dealt");
        let ranks = kernel.run(problem, &inputs).expect("what the table takes").ranks;
        let rank = assemble(problem, &layouts, ranks).expect("a whole result");
        let lse = rank.lse.as_ref().expect("an LSE").mapv(f64::from);
        let saved = Saved { out: rank.out.mapv(f64::from), lse };
        let model = Model::new(problem, right.declaration().arithmetic, right.partition(problem));
        let replay = right.replay(problem).expect("a locked profile");
        Ran { inputs, rank, saved, model, replay }
    }
}

/// Defines kernels with one other stage.
macro_rules! kernels {
    ($($name:ident { $($stage:item)* })*) => {
        $(
            #[derive(Debug)]
            struct $name;

            impl<A: UnitArithmetic<f32>> Stages<f32, A> for $name {
                $($stage)*
            }
        )*
    };
}
pub(crate) use kernels;

/// Returns the right kernel.
pub(crate) fn right<A: UnitArithmetic<f32>>() -> impl Stages<f32, A> {
    Right
}

kernels! {
    DotsInBf16 {
        fn row_dots(&self, units: &A, dout: HeadRows<'_, f32>, out: HeadRows<'_, f32>) -> Vec<f32> {
            let mut dots = right::<A>().row_dots(units, dout, out);
            Format::Bf16.round_all(&mut dots);
            dots
        }
    }
    DpInBf16 {
        fn logit_gradient(&self, units: &A, softmax: &Softmax, pair: Pair<f32>) -> f32 {
            let dp = Format::Bf16.round_f32(pair.dp);
            right::<A>().logit_gradient(units, softmax, Pair { dp, ..pair })
        }
    }
}

/// Returns other numerics as an edit of the kernel's recipe.
pub(crate) const fn other(id: &'static str, edit: fn(&mut Recipe)) -> Fp8Fault {
    Fp8Fault { id, imitates: "", source: "", entries: &[], caught_by: &[], edit }
}

/// Numerics that are not those of the locked profile of any sequence.
pub(crate) static OF_ANY_SEQUENCE: [Fp8Fault; 8] = [
    other("D in bf16", |recipe| recipe.stages = &DotsInBf16),
    other("dP in bf16", |recipe| recipe.stages = &DpInBf16),
    other("dS of rounded weights", |recipe| recipe.backward.rounds_ds_weights = true),
    other("tiles of 32 keys", |recipe| recipe.tiles.kv = 32),
    other("promotion after 1 step", |recipe| recipe.promoted_after = NonZeroUsize::new(1)),
    other("promotion after 2 steps", |recipe| recipe.promoted_after = NonZeroUsize::new(2)),
    other("14 bits below the largest", |recipe| {
        recipe.core = TensorCore { fraction_bits: 14, ..TensorCore::FP8 };
    }),
    other("sums of 25 bits", |recipe| {
        recipe.core = TensorCore { fraction_bits: 25, result_bits: 23, ..TensorCore::FP8 };
    }),
];
