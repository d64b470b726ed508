//! [`RawProblem`]: a case as plain integers of any value, each a choice of the generator or of a fuzzer.

use serde::{Deserialize, Serialize};

use super::flaws::UNSUPPORTED;

/// Rows of one sequence: all counts, no positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawSequence {
    /// Number of real queries.
    pub q_len: u32,
    /// Number of padding rows after the queries.
    pub q_padding: u32,
    /// Number of rows before the queries that nobody owns.
    pub q_gap: u32,
    /// Number of real keys.
    pub kv_len: u32,
    /// Number of padding rows after the keys.
    pub kv_padding: u32,
    /// Number of rows before the keys that nobody owns.
    pub kv_gap: u32,
}

/// A case as plain integers. Every value of every field is meaningful to [`super::fixup`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawProblem {
    /// Sequences, in order of memory.
    pub sequences: Vec<RawSequence>,
    /// Layout of both sides, modulo 3: 0 packed (THD), 1 equal spans (BSHD), 2 equal spans interleaved (SBHD).
    pub layout: u32,
    /// Number of rows after the last sequence's queries.
    pub q_slack: u32,
    /// Number of rows after the last sequence's keys.
    pub kv_slack: u32,
    /// Number of KV heads.
    pub kv_heads: u32,
    /// Number of query heads of one KV head.
    pub group: u32,
    /// Head dimension of queries and keys.
    pub qk_dim: u32,
    /// Head dimension of values.
    pub v_dim: u32,
    /// Window to the left: 0 for unbounded, n for n − 1 keys.
    pub left: u32,
    /// Window to the right: 0 for unbounded, n for n − 1 keys.
    pub right: u32,
    /// Alignment: odd for bottom-right, even for top-left.
    pub bottom_right: u32,
    /// Scale: 0 for 1/√dqk, n for entry n − 1 of a table.
    pub scale: u32,
    /// Soft cap: 0 for none, n for entry n − 1 of a table.
    pub softcap: u32,
    /// Sink, modulo 3: none, off-by-one, learnable.
    pub sink: u32,
    /// Format of the tensors: odd for fp16, even for bf16.
    pub fp16: u32,
    /// Format of P: odd for f32, even for that of the tensors.
    pub weights_f32: u32,
    /// Index of an [`seamproof_oracle::InputMode`] that is not exact, modulo their number.
    pub mode: u32,
    /// Pass: odd for forward and backward, even for the forward alone.
    pub backward: u32,
    /// Seed of the values.
    pub data_seed: u64,
    /// Index of the entry of `Limits::products` that bounds the case, modulo their number. `u32::MAX` stands for the
    /// largest entry, of whatever table.
    pub budget: u32,
    /// Problem that the emulated kernel's table refuses: n for entry n − 1 of a table; none for any other value.
    pub unsupported: u32,
    /// Rule of validation to break: n for entry n − 1 of a table; none for any other value.
    pub malformed: u32,
    /// Variant of the refused problem or of the broken rule.
    pub detail: u32,
    /// Algorithm by its [number](seamproof_oracle::Algorithm::number), modulo the number of algorithms.
    pub algorithm: u32,
    /// Balance, modulo 4: contiguous, dual-chunk, stripes of 1, longer stripes.
    pub balance: u32,
    /// Number of rows of a longer stripe.
    pub stripe: u32,
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Parameter of an algorithm that has [one](seamproof_oracle::Algorithm::parameter).
    pub all_to_all: u32,
    /// Number of ranks of the world that are not in the group.
    pub others: u32,
    /// Order of the ranks: 0 for ascending; any other number shuffles them.
    pub order: u32,
    /// Exact mode: 0 for none. Otherwise it is an entry of the table of exact modes, or the next entry whose
    /// preconditions the problem meets.
    #[serde(default)]
    pub exact: u32,
    /// Form in which the problem is given: 0 for the plain one, n for the first form of entry n − 1 of a table that can
    /// say the problem, modulo the number of entries.
    #[serde(default)]
    pub form: u32,
    /// First keys of documents but the first, in any order; none for a mask without documents.
    #[serde(default)]
    pub borders: Vec<u32>,
    /// Number of keys of a chunk, where there are no documents; 0 for a mask without chunks.
    #[serde(default)]
    pub chunk: u32,
    /// Number of keys of a prefix.
    #[serde(default)]
    pub prefix: u32,
    /// Layout of keys and values: 0 for that of the queries, n for layout n − 1, modulo 3.
    #[serde(default)]
    pub kv_layout: u32,
    /// Steps: 0 for none. Otherwise an entry of a table of ways to cut the longest sequence's queries, where the
    /// problem can be made in steps.
    #[serde(default)]
    pub steps: u32,
    /// Pages of keys and values: 0 for none. Otherwise an entry of a table of page sizes, where keys and values can lie
    /// in pages.
    #[serde(default)]
    pub pages: u32,
    /// Order of the pages: 0 for that of the sequences; any other number shuffles them, and gives some sequences a page
    /// that holds no key.
    #[serde(default)]
    pub page_order: u32,
    /// Number of pages that no sequence owns, modulo 4.
    #[serde(default)]
    pub free_pages: u32,
    /// Whether sequences share the pages of a prefix: odd for yes.
    #[serde(default)]
    pub shared_pages: u32,
    /// Number of ranks of the sequence-parallel region that each rank of the group is, where a region can hold the
    /// heads; 0 or 1 for none.
    #[serde(default)]
    pub region: u32,
    /// Number of sink tokens.
    #[serde(default)]
    pub sink_tokens: u32,
    /// Number of first keys that later sequences share with the first one that has keys, where they can; 0 for none.
    #[serde(default)]
    pub shared_keys: u32,
}

impl RawProblem {
    /// Whether the integers ask for a problem that the emulated kernel's table refuses.
    pub(crate) fn is_unsupported(&self) -> bool {
        (1..=UNSUPPORTED.len()).contains(&(self.unsupported as usize))
    }
}
