//! Faults of a caller that keeps a cache: what it writes there before a step, and what it tells the kernel of it.
//!
//! They do nothing to a problem without steps.

use seamproof_oracle::{Alignment, Inputs, Problem};

use super::miscall::{Miscall, ROWS, VALUES};
use super::stepwise::{Caller, RIGHT, called};
use crate::subject::{Backend, Outputs, RunError};

/// Source of a fast path for packed input that was not made for a cache: with one the keys grow from call to call.
const FAST_PATH: &str = "https://github.com/NVIDIA/TransformerEngine/pull/3063";
/// Source of the change of the causal mask's corner, which a decode step with a cache sees.
const CORNER: &str = "https://github.com/Dao-AILab/flash-attention/blob/main/README.md";

/// A caller that tells the kernel of the other corner.
const TOP_LEFT: Caller = Caller { tells: |_, fields| fields.mask.align = Alignment::TopLeft, ..RIGHT };
/// A caller that appends a step's last token after its launch.
const LATE: Caller = Caller {
    place: |call, append, token| {
        let late = call > 0 && token + 1 == append.tokens;
        (!late).then_some(append.cached + token)
    },
    ..RIGHT
};
/// A caller that begins at the last cached row.
const EARLY: Caller =
    Caller { place: |_, append, token| Some(append.cached.saturating_sub(1) + token), ..RIGHT };
/// A caller that forgets what was cached at first.
const AT_THE_QUERY: Caller = Caller { place: |_, append, token| Some(append.first + token), ..RIGHT };

/// Every fault of a caller that keeps a cache.
pub(super) const MISSTEPS: [Miscall; 4] = [
    Miscall {
        id: "call-top-left-on-a-cache",
        imitates: "causal is taken from the top-left corner, so that a step's first query sees the first key alone",
        source: CORNER,
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| misstep(backend, problem, inputs, TOP_LEFT),
    },
    Miscall {
        id: "call-cache-row-unwritten",
        imitates: "a step's last token is appended after its launch, which reads a row that nobody has written",
        source: FAST_PATH,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misstep(backend, problem, inputs, LATE),
    },
    Miscall {
        id: "call-appended-one-row-early",
        imitates: "a step appends from the last cached row on and not behind it, so that a key is lost",
        source: FAST_PATH,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misstep(backend, problem, inputs, EARLY),
    },
    Miscall {
        id: "call-appended-at-the-query",
        imitates: "a token is appended at its place among the queries, as if the cache had been empty at first",
        source: FAST_PATH,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misstep(backend, problem, inputs, AT_THE_QUERY),
    },
];

/// Whether a fault at the call shows only on problems with steps.
pub fn needs_steps(miscall: &Miscall) -> bool {
    MISSTEPS.iter().any(|of_steps| of_steps.id == miscall.id)
}

/// Runs a problem with steps as this caller makes them, and any other as it is.
fn misstep(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs,
    caller: Caller,
) -> Result<Outputs, RunError> {
    if problem.steps.is_empty() {
        return backend.run(problem, inputs);
    }
    called(backend, problem, inputs, caller)
}
