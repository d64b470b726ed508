//! Declarations as the protocol writes them.

use seamproof_judge::oracle::envelope::Arithmetic;
use seamproof_judge::subject::{Declaration, Partials, Promises, Stored};
use std::num::NonZeroUsize;

use seamproof_judge::oracle::envelope::{
    Accumulation, Delta, DsFold, DsScale, DsWeights, GroupSums, MergeBy, SoftCap, WeightRounding,
};
use seamproof_judge::oracle::{Alignment, Sink};

use seamproof_judge::subject::{Backend, BalanceKind, MaskForm, Sizes};
use seamproof_judge::subjects::Emulated;

const FOUR: NonZeroUsize = NonZeroUsize::new(4).unwrap();
const THIRTY_TWO: NonZeroUsize = NonZeroUsize::new(32).unwrap();

fn refused(json: &str) -> String {
    Declaration::from_json(json).expect_err("it is wrong").to_string()
}

#[test]
fn nothing_declared_is_the_default() {
    let declaration = Declaration::from_json("{}").expect("all fields have defaults");
    let formats = [seamproof_judge::oracle::Format::Bf16, seamproof_judge::oracle::Format::F32];
    let mut expected = Declaration::single_rank(formats[0], formats[1]);
    (expected.arithmetic, expected.refuses) = (Arithmetic::default(), false);
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
    narrow.arithmetic.accumulation = Accumulation::F32Tree(THIRTY_TWO);
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
                        "no_sequences": false, "multiple_q": 4, "multiple_kv": 8, "least_kv": 2, "most": 8192,
                        "sequences_most": 64, "rows_most": 65536},
            "layout": {"padding": false, "gaps": false, "first_offset": false, "slack": false, "steps": false,
                       "order": false},
            "softcap": true, "sinks": ["none", "off-by-one", "learnable"], "backward": false,
            "statistics": ["lse", "max_logit"],
            "parallel": {"algorithms": ["single", "ring", "all-gather", "all-to-all", "hierarchical"],
                         "balances": ["contiguous", "dual-chunk", "striped"], "ranks_least": 1,
                         "ranks_most": 8, "sub_groups": true, "order": true,
                         "world_most": 16}
        },
        "padding": {"inputs": "anything", "outputs": "untouched"},
        "promises": {"deterministic_backward": true, "sequences_alone": true, "heads_alone": true,
                     "groups_alone": true, "rows_alone": true},
        "arithmetic": {"accumulation": {"f32-tree": 4}, "weights": "after-normalisation",
                       "delta": "weighted-dots", "group_sums": "stored", "soft_cap": "approximate", "ds_weights": "rounded",
                       "ds_scale": "tile", "ds_fold": "after"},
        "partials": {"merge": "io", "merge_by": "difference", "wire": "f32"},
        "refuses": true, "start_seconds": 300
    }"#;
    let declaration = Declaration::from_json(json).expect("the protocol's own fields");
    assert!(declaration.promises == Promises::ALL && declaration.refuses);
    let expected = Arithmetic {
        accumulation: Accumulation::F32Tree(FOUR),
        weights: WeightRounding::AfterNormalisation,
        delta: Delta::WeightedDots,
        group_sums: GroupSums::Stored,
        soft_cap: SoftCap::Approximate,
        ds_weights: DsWeights::Rounded,
        weight_exponent: 0,
        ds_scale: DsScale::Tile,
        ds_fold: DsFold::After,
    };
    assert_eq!(declaration.arithmetic, expected);
    let partials = Partials { merge: Stored::Io, merge_by: MergeBy::Difference, wire: Stored::F32 };
    assert_eq!(declaration.partials, partials);
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
        (r#"{"table": {"dims": {"qk": [577]}}}"#, "table.dims.qk: 577 is out of range"),
        (r#"{"table": {"dims": {"qk": [64], "v": [32], "equal": true}}}"#, "table.dims.equal: no size"),
        (r#"{"table": {"heads": {"groups": [8], "most": 4}}}"#, "table.heads.groups: every group"),
        (r#"{"table": {"lengths": {"most": 0}}}"#, "table.lengths.most: 0 is out of range"),
        (r#"{"table": {"masks": {"window_most": 0}}}"#, "table.masks.window_most: 0 leaves no bound"),
        (r#"{"table": {"statistics": ["out"]}}"#, "table.statistics: out is no statistic"),
        (r#"{"table": {"parallel": {"algorithms": ["rings"]}}}"#, "table.parallel.algorithms: 'rings' is no"),
        (
            r#"{"table": {"parallel": {"algorithms": ["ring"], "balances": ["dual-chunk"]}}}"#,
            "table.parallel.balances: without single",
        ),
        (r#"{"padding": {"inputs": "nan"}}"#, "padding.inputs: unknown variant"),
        (r#"{"promises": {"all": true}}"#, "promises.all: unknown field"),
        (r#"{"arithmetic": {"accumulation": {"f32-tree": 0}}}"#, "arithmetic.accumulation"),
        (r#"{"arithmetic": {"weights": "never"}}"#, "arithmetic.weights: unknown variant"),
        (r#"{"partials": {"merge_by": "sums"}}"#, "partials.merge_by: unknown variant"),
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
