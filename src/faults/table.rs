//! Faults in tables.
//!
//! A subject has two tables: the one that it declares, and the one that it refuses by, its *gate*. In a right subject
//! both are the same. A row that lets a problem through which the gate refuses is too wide, and one that refuses what
//! the gate lets through is too narrow. Seen from the table, these are a subject that refuses what its row takes, and
//! one that computes what its row refuses.

use seamproof_oracle::{Algorithm, Form, Format, Inputs, PAGE_SIZE_MAX, Precision, Problem, ProblemFields};
use seamproof_simulator::faults::{Catcher, Fault};

use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError, SideLayout, Sizes, Table, Unpadded};
use seamproof_judge::subjects::Emulated;

/// A planted fault of a table.
pub type TableFault = Fault<Tables>;

/// Edits of the emulated kernel's table that make a subject's two tables.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// The table that is declared.
    declared: fn(&mut Table),
    /// The table that the subject refuses by.
    gate: fn(&mut Table),
    /// What the subject makes of a problem that its gate lets through.
    reads: fn(&mut ProblemFields),
}

/// Returns the tables of a subject that refuses as the emulated kernel does, but declares something else.
const fn only_declared(declared: fn(&mut Table)) -> Tables {
    Tables { declared, gate: |_| {}, reads: |_| {} }
}

/// Returns the tables of a subject that takes a contradiction by mistake, and what it reads from it.
const fn overlooked(gate: fn(&mut Table), reads: fn(&mut ProblemFields)) -> Tables {
    Tables { declared: |_| {}, gate, reads }
}

/// Returns what refuses padding in a layout under an algorithm.
fn unpadded(algorithm: Option<Algorithm>, layout: Option<SideLayout>) -> Unpadded {
    Unpadded { algorithm: algorithm.map(Algorithm::name), layout }
}

/// Source of ids with more dimensions than positions, and of shapes that differ.
const VMAP: &str = "https://github.com/NVIDIA/TransformerEngine/pull/2692";

/// Tables that promise too much or too little. The judge's capability check must see both.
pub const TABLE_FAULTS: &[TableFault] = &[
    TableFault {
        id: "table-too-wide",
        imitates: "a gate lists what a backend has no code for: dispatch reaches it all the same",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[1, 10],
        caught_by: &[Catcher::Capability],
        edit: only_declared(|table| {
            table.precisions.extend([Format::E4m3, Format::E5m2].map(Precision::uniform));
        }),
    },
    TableFault {
        id: "table-too-narrow",
        imitates: "a gate is keyed on one head dimension and refuses what the backend runs",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[11, 202],
        caught_by: &[Catcher::Capability],
        edit: only_declared(|table| table.dims.qk = Sizes::up_to(64)),
    },
    TableFault {
        id: "table-without-padding",
        imitates: "padding between sequences is refused for every generation of a kernel, although one masks it",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: only_declared(|table| table.layout.padding = false),
    },
    TableFault {
        id: "table-without-an-algorithm",
        imitates: "a list of refused algorithms still names all-gather, which the backend runs by now",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: only_declared(|table| {
            table.parallel.algorithms.retain(|name| *name != Algorithm::AllGather.name());
        }),
    },
    TableFault {
        id: "table-of-equal-lengths",
        imitates: "a backend asserts equal maxima of queries and keys, and masks sequences of any lengths",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3063",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: only_declared(|table| table.lengths.equal = true),
    },
    TableFault {
        id: "padding-in-thd-not-refused",
        imitates: "a backend is refused for padding between packed sequences by the table alone: a call computes it",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: only_declared(|table| {
            table.layout.padding_except = vec![unpadded(None, Some(SideLayout::Thd))];
        }),
    },
    TableFault {
        id: "padding-under-all-gather-not-refused",
        imitates: "tests skip a backend for padding under all-gather, and nothing refuses it at run time",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: only_declared(|table| {
            table.layout.padding_except = vec![unpadded(Some(Algorithm::AllGather), None)];
        }),
    },
    TableFault {
        id: "padding-in-a-batch-not-refused",
        imitates: "masks of padding are refused in BSHD and SBHD by the table alone: a call computes them",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: only_declared(|table| {
            table.layout.padding_except =
                [SideLayout::Bshd, SideLayout::Sbhd].map(|layout| unpadded(None, Some(layout))).to_vec();
        }),
    },
    TableFault {
        id: "padding-refused-under-all-algorithms",
        imitates: "padding is refused under a ring, and the gate asks only whether there are several ranks",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: Tables {
            declared: |table| table.layout.padding_except = vec![unpadded(Some(Algorithm::Ring), None)],
            gate: |table| {
                let all = Algorithm::of_several_ranks();
                table.layout.padding_except = all.map(|algorithm| unpadded(Some(algorithm), None)).collect();
            },
            reads: |_| {},
        },
    },
    TableFault {
        id: "padding-refused-in-all-layouts",
        imitates: "padding is refused under a ring in BSHD, and the gate asks for the algorithm alone",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: Tables {
            declared: |table| {
                table.layout.padding_except = vec![unpadded(Some(Algorithm::Ring), Some(SideLayout::Bshd))];
            },
            gate: |table| table.layout.padding_except = vec![unpadded(Some(Algorithm::Ring), None)],
            reads: |_| {},
        },
    },
    TableFault {
        id: "table-of-large-pages",
        imitates: "only pages of 256 rows are taken, as by an older kernel, although this one reads pages of any size",
        source: "https://github.com/Dao-AILab/flash-attention/issues/1627",
        entries: &[],
        caught_by: &[Catcher::Capability],
        edit: only_declared(|table| table.pages = Some(Sizes::only(PAGE_SIZE_MAX))),
    },
    TableFault {
        id: "differing-extra-shapes-accepted",
        imitates: "extra dimensions of both sides are compared by their product: (4) beside (2, 2) is computed",
        source: VMAP,
        entries: &[16],
        caught_by: &[Catcher::Capability],
        edit: overlooked(
            |table| table.forms.push(Form::MisshapenSegments),
            |fields| {
                if fields.form == Form::MisshapenSegments {
                    fields.form = Form::Segments;
                }
            },
        ),
    },
    TableFault {
        id: "unequal-lists-zipped",
        imitates: "lists of lengths of both sides are zipped, and the longer one is cut without a word",
        source: VMAP,
        entries: &[16],
        caught_by: &[Catcher::Capability],
        edit: overlooked(
            |table| table.forms.push(Form::UnequalLengths),
            |fields| {
                if fields.form == Form::UnequalLengths {
                    fields.form = Form::CuSeqlens;
                    fields.sequences.pop();
                }
            },
        ),
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

    /// Whether the declared table answers differently from the gate on a problem.
    pub fn shows(&self, problem: &Problem) -> bool {
        let said = |edit| self.table(edit).refusal(problem);
        said(self.fault.edit.declared) != said(self.fault.edit.gate)
    }

    /// Returns the kernel's table after an edit.
    fn table(&self, edit: fn(&mut Table)) -> Table {
        let mut table = self.inner.declaration().table;
        edit(&mut table);
        table
    }
}

impl Backend for Tabled {
    fn declaration(&self) -> Declaration {
        self.inner.declaration().with_table(self.table(self.fault.edit.declared))
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.table(self.fault.edit.gate).check(problem)?;
        let mut fields = ProblemFields::from(problem.clone());
        (self.fault.edit.reads)(&mut fields);
        let read = Problem::new(fields).map_err(|error| RunError::Crash(error.to_string()))?;
        self.inner.run(&read, inputs)
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn name(&self) -> &str {
        self.fault.id
    }
}
