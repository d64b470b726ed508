//! A declaration in JSON, as `docs/protocol.md` gives it.

use std::num::NonZeroUsize;

use seamproof_oracle::envelope::Accumulation;
use serde::{Deserialize, Serialize};

use super::{Declaration, PaddingContract, Promises, START_SECONDS, Table, TableError};

/// Largest number of seconds that opening a subject may take.
const START_SECONDS_MAX: u16 = 900;

/// Reason why a text is no declaration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the declaration's {0}")]
pub struct DeclarationError(String);

/// A declaration whose rows were not yet checked against each other.
#[derive(Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Declared {
    table: Table,
    padding: PaddingContract,
    promises: Promises,
    arithmetic: Arithmetic,
    refuses: bool,
    start_seconds: u16,
}

impl Default for Declared {
    fn default() -> Declared {
        Declared {
            table: Table::default(),
            padding: PaddingContract::default(),
            promises: Promises::default(),
            arithmetic: Arithmetic::default(),
            refuses: false,
            start_seconds: START_SECONDS,
        }
    }
}

/// The subject's arithmetic, of which the judge knows the accumulation so far.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Arithmetic {
    accumulation: AccumulationName,
    #[serde(skip_serializing)]
    weights: Weights,
    #[serde(skip_serializing)]
    delta: Delta,
    #[serde(skip_serializing)]
    group_sums: GroupSums,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Weights {
    BeforeNormalisation,
    AfterNormalisation,
    #[default]
    Unknown,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Delta {
    StoredOut,
    UnroundedOut,
    WeightedDots,
    #[default]
    Unknown,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum GroupSums {
    F32,
    Stored,
    #[default]
    Unknown,
}

/// An [`Accumulation`] by its name.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum AccumulationName {
    #[default]
    Unknown,
    #[serde(rename = "f32-serial")]
    F32Serial,
    #[serde(rename = "f32-tree")]
    F32Tree(NonZeroUsize),
    WgmmaTruncating,
}

impl From<AccumulationName> for Accumulation {
    fn from(name: AccumulationName) -> Accumulation {
        match name {
            AccumulationName::Unknown => Accumulation::Unknown,
            AccumulationName::F32Serial => Accumulation::F32Serial,
            AccumulationName::F32Tree(width) => Accumulation::F32Tree { width: width.get() },
            AccumulationName::WgmmaTruncating => Accumulation::WgmmaTruncating,
        }
    }
}

impl From<Accumulation> for AccumulationName {
    fn from(accumulation: Accumulation) -> AccumulationName {
        match accumulation {
            Accumulation::Unknown => AccumulationName::Unknown,
            Accumulation::F32Serial => AccumulationName::F32Serial,
            Accumulation::F32Tree { width } => {
                AccumulationName::F32Tree(NonZeroUsize::new(width).unwrap_or(NonZeroUsize::MIN))
            }
            Accumulation::WgmmaTruncating => AccumulationName::WgmmaTruncating,
        }
    }
}

/// Reason why rows of a declaration do not go together.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeclaredError {
    #[error(transparent)]
    Table(#[from] TableError),
    #[error("start_seconds: {0} is out of range; use 1 to {START_SECONDS_MAX}")]
    StartSeconds(u16),
}

impl TryFrom<Declared> for Declaration {
    type Error = DeclaredError;

    fn try_from(declared: Declared) -> Result<Declaration, DeclaredError> {
        let Declared { table, padding, promises, arithmetic, refuses, start_seconds } = declared;
        if !(1..=START_SECONDS_MAX).contains(&start_seconds) {
            return Err(DeclaredError::StartSeconds(start_seconds));
        }
        let accumulation = arithmetic.accumulation.into();
        let table = table.validated()?;
        Ok(Declaration { table, padding, promises, accumulation, refuses, start_seconds })
    }
}

impl From<Declaration> for Declared {
    fn from(declaration: Declaration) -> Declared {
        let Declaration { table, padding, promises, accumulation, refuses, start_seconds } = declaration;
        let arithmetic = Arithmetic { accumulation: accumulation.into(), ..Arithmetic::default() };
        Declared { table, padding, promises, arithmetic, refuses, start_seconds }
    }
}

impl Declaration {
    /// Reads a declaration. An error names the field that is wrong by its path, and says what to do.
    pub fn from_json(text: &str) -> Result<Declaration, DeclarationError> {
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let read: Result<Declared, _> = serde_path_to_error::deserialize(&mut deserializer);
        let declared = read.map_err(|error| {
            let at = error.path().to_string();
            DeclarationError(format!("{}: {}", if at == "." { "text" } else { &at }, error.inner()))
        })?;
        deserializer.end().map_err(|error| DeclarationError(format!("text: {error}")))?;
        Declaration::try_from(declared).map_err(|error| DeclarationError(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::{Alignment, Sink};

    use super::*;
    use crate::subject::{Backend, BalanceKind, MaskForm, Sizes};
    use crate::subjects::Emulated;

    fn refused(json: &str) -> String {
        Declaration::from_json(json).expect_err("it is wrong").to_string()
    }

    #[test]
    fn nothing_declared_is_the_default() {
        let declaration = Declaration::from_json("{}").expect("all fields have defaults");
        let formats = [seamproof_oracle::Format::Bf16, seamproof_oracle::Format::F32];
        let expected = Declaration {
            accumulation: Accumulation::Unknown,
            refuses: false,
            ..Declaration::single_rank(formats[0], formats[1])
        };
        assert_eq!(declaration, expected);
        assert_eq!((declaration.start_seconds, declaration.table.backward), (120, true));
    }

    #[test]
    fn declarations_read_back() {
        let mut narrow = Declaration::from_json("{}").expect("a declaration");
        narrow.table.dims.qk = Sizes::multiples(8, 128, 8).expect("sizes");
        narrow.table.masks.forms = vec![MaskForm::Causal, MaskForm::CausalWindow];
        narrow.table.masks.alignments = vec![Alignment::BottomRight];
        narrow.table.sinks = vec![Sink::Learnable];
        narrow.table.parallel.algorithms = vec!["ring", "hierarchical"];
        narrow.table.parallel.balances = vec![BalanceKind::DualChunk, BalanceKind::Contiguous];
        narrow.accumulation = Accumulation::F32Tree { width: 32 };
        for declaration in [narrow, Emulated::default().declaration()] {
            let json = serde_json::to_string(&declaration).expect("it is JSON");
            assert_eq!(Declaration::from_json(&json), Ok(declaration.clone()), "{json}");
            let value: Declaration = serde_json::from_str(&json).expect("it reads back");
            assert_eq!(value, declaration);
        }
    }

    #[test]
    fn the_fields_are_those_of_the_protocol() {
        let json = r#"{
            "table": {
                "precisions": [{"q": "bf16", "k": "bf16", "v": "bf16", "p": "bf16", "out": "bf16",
                                "dout": "bf16", "ds": "bf16", "gradients": "bf16"}],
                "dims": {"qk": {"from": 8, "to": 256, "multiple": 8}, "v": [64, 128], "equal": false},
                "heads": {"groups": {"from": 1, "to": 8}, "most": 64},
                "masks": {"forms": ["full", "causal", "left-window", "right-window", "causal-window", "two-sided"],
                          "alignments": ["top-left", "bottom-right"], "window_most": 2147483647},
                "lengths": {"equal": true, "empty_q": false, "empty_kv": false, "blind_queries": false,
                            "no_sequences": false, "most": 8192, "sequences_most": 64, "rows_most": 65536},
                "layout": {"padding": false, "gaps": false, "first_offset": false, "slack": false, "steps": false,
                           "order": false},
                "softcap": true, "sinks": ["none", "off-by-one", "learnable"], "backward": false,
                "statistics": ["lse", "max_logit"],
                "parallel": {"algorithms": ["single", "ring", "all-gather", "all-to-all", "hierarchical"],
                             "balances": ["contiguous", "dual-chunk", "striped"], "ranks_most": 8,
                             "sub_groups": true}
            },
            "padding": {"inputs": "anything", "outputs": "untouched"},
            "promises": {"deterministic_backward": true, "sequences_alone": true, "heads_alone": true,
                         "groups_alone": true, "rows_alone": true},
            "arithmetic": {"accumulation": {"f32-tree": 4}, "weights": "after-normalisation",
                           "delta": "weighted-dots", "group_sums": "stored"},
            "refuses": true, "start_seconds": 300
        }"#;
        let declaration = Declaration::from_json(json).expect("the protocol's own fields");
        assert!(declaration.promises == Promises::ALL && declaration.refuses);
        assert_eq!(declaration.accumulation, Accumulation::F32Tree { width: 4 });
    }

    #[test]
    fn a_wrong_field_is_named_by_its_path() {
        let cases = [
            (r#"{"table": {"softcaps": true}}"#, "table.softcaps: unknown field"),
            (r#"{"table": {"softcap": 1}}"#, "table.softcap: invalid type"),
            (
                r#"{"table": {"masks": {"forms": ["causal", "diagonal"]}}}"#,
                "table.masks.forms[1]: unknown variant",
            ),
            (r#"{"table": {"masks": {"forms": []}}}"#, "table.masks.forms: the list is empty"),
            (r#"{"table": {"dims": {"qk": []}}}"#, "table.dims.qk: there is no size in it"),
            (r#"{"table": {"dims": {"qk": "64"}}}"#, "table.dims.qk: write a list of sizes"),
            (r#"{"table": {"dims": {"qk": [512]}}}"#, "table.dims.qk: 512 is out of range"),
            (r#"{"table": {"dims": {"qk": [64], "v": [32], "equal": true}}}"#, "table.dims.equal: no size"),
            (r#"{"table": {"heads": {"groups": [8], "most": 4}}}"#, "table.heads.groups: every group"),
            (r#"{"table": {"lengths": {"most": 0}}}"#, "table.lengths.most: 0 is out of range"),
            (r#"{"table": {"masks": {"window_most": 0}}}"#, "table.masks.window_most: 0 leaves no bound"),
            (r#"{"table": {"statistics": ["out"]}}"#, "table.statistics: out is no statistic"),
            (
                r#"{"table": {"parallel": {"algorithms": ["rings"]}}}"#,
                "table.parallel.algorithms: 'rings' is no",
            ),
            (
                r#"{"table": {"parallel": {"algorithms": ["ring"], "balances": ["dual-chunk"]}}}"#,
                "table.parallel.balances: without single",
            ),
            (r#"{"padding": {"inputs": "nan"}}"#, "padding.inputs: unknown variant"),
            (r#"{"promises": {"all": true}}"#, "promises.all: unknown field"),
            (r#"{"arithmetic": {"accumulation": {"f32-tree": 0}}}"#, "arithmetic.accumulation"),
            (r#"{"arithmetic": {"weights": "never"}}"#, "arithmetic.weights: unknown variant"),
            (r#"{"start_seconds": 901}"#, "start_seconds: 901 is out of range"),
            (r#"{"refuses": true} 1"#, "text: trailing characters"),
            ("[", "text: "),
        ];
        for (json, expected) in cases {
            let said = refused(json);
            assert!(said.starts_with(&format!("the declaration's {expected}")), "{json}: {said}");
        }
        assert!(serde_json::from_str::<Declaration>(r#"{"table": {"sinks": []}}"#).is_err());
    }
}
