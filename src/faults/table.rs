//! Faults in tables.

use seamproof_oracle::{Algorithm, Format, Inputs, PAGE_SIZE_MAX, Precision, Problem};
use seamproof_simulator::faults::{Catcher, Fault};

use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError, Sizes, Table};
use seamproof_judge::subjects::Emulated;

/// A planted fault of a table. The subject runs and refuses as before, but declares something else.
pub type TableFault = Fault<fn(&mut Table)>;

/// Tables that promise too much or too little. The judge's capability check must see both.
pub const TABLE_FAULTS: &[TableFault] = &[
    TableFault {
        id: "table-too-wide",
        imitates: "a gate lists what a backend has no code for: dispatch reaches it all the same",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[1, 10],
        caught_by: &[Catcher::Capability],
        edit: |table| {
            table.precisions.extend([Format::E4m3, Format::E5m2].map(Precision::uniform));
        },
    },
    TableFault {
        id: "table-too-narrow",
        imitates: "a gate is keyed on one head dimension and refuses what the backend runs",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[11, 202],
        caught_by: &[Catcher::Capability],
        edit: |table| table.dims.qk = Sizes::up_to(64),
    },
    TableFault {
        id: "table-without-padding",
        imitates: "padding between sequences is refused for every generation of a kernel, although one masks it",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: |table| table.layout.padding = false,
    },
    TableFault {
        id: "table-without-an-algorithm",
        imitates: "a list of refused algorithms still names all-gather, which the backend runs by now",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: |table| table.parallel.algorithms.retain(|name| *name != Algorithm::AllGather.name()),
    },
    TableFault {
        id: "table-of-equal-lengths",
        imitates: "a backend asserts equal maxima of queries and keys, and masks sequences of any lengths",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3063",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: |table| table.lengths.equal = true,
    },
    TableFault {
        id: "table-of-large-pages",
        imitates: "only pages of 256 rows are taken, as by an older kernel, although this one reads pages of any size",
        source: "https://github.com/Dao-AILab/flash-attention/issues/1627",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: |table| table.pages = Some(Sizes::only(PAGE_SIZE_MAX)),
    },
];

/// The emulated kernel behind a faulty table.
#[derive(Debug)]
pub struct Tabled {
    inner: Emulated,
    fault: &'static TableFault,
}

impl Tabled {
    /// Returns the kernel with a fault in its table.
    pub fn new(fault: &'static TableFault) -> Tabled {
        Tabled { inner: Emulated::default(), fault }
    }

    /// Whether the faulty table answers differently from the right one on a problem.
    pub fn shows(&self, problem: &Problem) -> bool {
        let said = |subject: &dyn Backend| subject.declaration().table.refusal(problem);
        said(self) != said(&self.inner)
    }
}

impl Backend for Tabled {
    fn declaration(&self) -> Declaration {
        let mut declaration = self.inner.declaration();
        (self.fault.edit)(&mut declaration.table);
        declaration
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.inner.run(problem, inputs)
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn name(&self) -> &str {
        self.fault.id
    }
}
