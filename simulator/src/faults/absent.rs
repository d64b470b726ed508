//! Entries of the list of real bugs that could be planted on a CPU and are not in the catalogue.

/// Entries that are absent for one reason; numbers are those of the list of real bugs.
#[derive(Clone, Copy, Debug)]
pub struct Absent {
    /// The entries.
    pub entries: &'static [u16],
    /// Why.
    pub reason: &'static str,
}

/// What is not here.
pub const ABSENT: &[Absent] = &[
    Absent {
        entries: &[1, 10, 11, 20, 93, 115, 116, 164, 199, 202],
        reason: "choice between backends, recipes or devices: there is one backend, and the judge compares its table",
    },
    Absent {
        entries: &[106, 191],
        reason: "tables of rotary angles: a rotation names positions, and makes its angles of them in f64",
    },
    Absent {
        entries: &[6, 9, 15, 16, 36, 44, 130, 131, 138],
        reason: "signatures, layouts and tracing of a framework, or its tests: a schedule has none",
    },
    Absent {
        entries: &[7, 14, 22, 49, 203, 204, 206],
        reason: "host syncs, memory and time: the resource rung of the judge is to see them",
    },
    Absent {
        entries: &[19, 62, 165],
        reason: "an index table read out of bounds inside a helper kernel: tables are runs here, checked as such",
    },
    Absent {
        entries: &[43, 48, 59, 149, 152, 153, 156, 159],
        reason: "maxima, scratch, integers and grids of a device",
    },
    Absent {
        entries: &[34, 38, 71, 75, 79, 105, 148],
        reason: "valid input refused, or a crash of host arithmetic that no schedule holds",
    },
    Absent {
        entries: &[33, 50, 114],
        reason: "labels, rolls and decode lanes outside attention; their offset errors are planted once",
    },
    Absent {
        entries: &[37, 81],
        reason: "further reports of an edit that the catalogue plants under another source or under this one",
    },
    Absent {
        entries: &[53, 54, 64, 73, 117, 188, 192],
        reason: "arithmetic inside a kernel: an edit of a source text",
    },
    Absent {
        entries: &[102, 119, 133, 140, 142],
        reason: "strides: buffers of a schedule are dense, and statistics have one layout",
    },
    Absent {
        entries: &[129, 135],
        reason: "custom masks, dropout and determinism switches: outside the scope, or planted once as an option lost",
    },
    Absent {
        entries: &[176, 181, 183],
        reason: "counters, graphs and allocators; their missing orders are planted once",
    },
    Absent { entries: &[139], reason: "FP8 formats and scales: no subject runs them yet" },
    Absent {
        entries: &[194, 195, 196, 197, 200, 201],
        reason: "caches and compile keys: a schedule is made anew for each problem",
    },
];
