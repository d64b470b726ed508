//! Entries of the list of real bugs that could be planted on a CPU but are not in the catalogue.

/// Entries that are absent for one reason, by their numbers in the list of real bugs.
#[derive(Clone, Copy, Debug)]
pub struct Absent {
    /// The entries.
    pub entries: &'static [u16],
    /// The reason.
    pub reason: &'static str,
}

/// Entries of the list of real bugs that can be planted without a GPU (marked H, alone or beside another mark). Each is
/// imitated by a fault or is in [`ABSENT`].
pub const PLANTABLE: &[u16] = &[
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28,
    30, 31, 33, 34, 35, 36, 37, 38, 39, 41, 42, 43, 44, 48, 49, 50, 51, 53, 54, 55, 56, 59, 62, 64, 65, 66,
    70, 71, 72, 73, 75, 78, 79, 80, 81, 82, 84, 90, 92, 93, 94, 95, 96, 97, 99, 100, 102, 103, 104, 105, 106,
    107, 108, 111, 112, 113, 114, 115, 116, 117, 119, 127, 128, 129, 130, 131, 133, 135, 138, 139, 140, 142,
    144, 145, 148, 149, 152, 153, 156, 159, 164, 165, 171, 175, 176, 177, 181, 183, 188, 190, 191, 192, 194,
    195, 196, 197, 199, 200, 201, 202, 203, 204, 206,
];

/// Plantable entries that no fault imitates.
pub const ABSENT: &[Absent] = &[
    Absent {
        entries: &[93, 115, 116, 164, 199],
        reason: "choice between backends, recipes or devices: there is one backend; tables too wide and too narrow are planted",
    },
    Absent {
        entries: &[106, 191],
        reason: "tables of rotary angles: a rotation names positions, and makes its angles of them in f64",
    },
    Absent {
        entries: &[6, 9, 36, 44, 130, 131, 138],
        reason: "signatures, layouts and tracing of a framework, or its tests: a schedule has none",
    },
    Absent {
        entries: &[165],
        reason: "an index table read out of bounds inside a helper kernel: tables are runs here, checked as such",
    },
    Absent {
        entries: &[43, 59, 149, 152, 153, 156, 159],
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
        entries: &[54, 64, 65, 73, 188],
        reason: "arithmetic inside a kernel: an edit of a source text",
    },
    Absent { entries: &[102, 133, 140, 142], reason: "strides: buffers of a schedule are dense" },
    Absent {
        entries: &[129, 135],
        reason: "custom masks, dropout and determinism switches: outside the scope, or planted once as an option lost",
    },
    Absent {
        entries: &[176, 181, 183],
        reason: "counters, graphs and allocators; their missing orders are planted once",
    },
    Absent {
        entries: &[139],
        reason: "formats and scales of FP8 that change under saved tensors: a schedule has one set of them",
    },
    Absent {
        entries: &[194, 195, 196, 197, 200, 201],
        reason: "caches and compile keys: a schedule is made anew for each problem",
    },
];
