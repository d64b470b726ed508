//! Faults in capability tables.

use seamproof_oracle::{Format, Inputs, Problem};

use seamproof_judge::subject::{Backend, Capabilities, Declaration, Outputs, RunError};
use seamproof_judge::subjects::Emulated;

/// A planted fault of a capability table. The subject runs and refuses as before, but declares something else.
#[derive(Clone, Copy, Debug)]
pub struct TableFault {
    /// Name in reports.
    pub id: &'static str,
    /// Bug that the fault imitates.
    pub imitates: &'static str,
    /// Public place where the bug happened.
    pub source: &'static str,
    /// Entries of the bug in the list of known bugs.
    pub entries: &'static [u16],
    /// Function that edits the table.
    pub edit: fn(&mut Capabilities),
}

/// Tables that promise too much or too little. The judge's capability check must see both.
pub const TABLE_FAULTS: &[TableFault] = &[
    TableFault {
        id: "table-too-wide",
        imitates: "a gate lists what a backend has no code for: dispatch reaches it all the same",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[1, 10],
        edit: |table| {
            table.formats.extend([Format::E4m3, Format::E5m2]);
            table.weight_formats.extend([Format::E4m3, Format::E5m2]);
        },
    },
    TableFault {
        id: "table-too-narrow",
        imitates: "a gate is keyed on one head dimension and refuses what the backend runs",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[11, 202],
        edit: |table| table.head_dims = *table.head_dims.start()..=64,
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
        let said = |subject: &dyn Backend| subject.declaration().capabilities.refusal(problem);
        said(self) != said(&self.inner)
    }
}

impl Backend for Tabled {
    fn declaration(&self) -> Declaration {
        let mut declaration = self.inner.declaration();
        (self.fault.edit)(&mut declaration.capabilities);
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
