//! The JSON schema of a recording's manifest: it says what the reader takes, field by field.
//!
//! The schema is held against the reader by changes of a manifest that has every field. For each field, one change
//! removes it, one renames it and one gives it a value of another type. Schema and reader must agree on each.

use std::fs;
use std::path::Path;

use seamproof::recording::Manifest;
use serde_json::{Map, Value, json};

fn schema() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/recording.schema.json");
    serde_json::from_slice(&fs::read(path).expect("the schema is there")).expect("the schema is JSON")
}

/// Keywords that [`holds`] knows. A schema with another one would be read in part.
const KEYWORDS: [&str; 20] = [
    "$schema",
    "$id",
    "$defs",
    "$ref",
    "title",
    "description",
    "type",
    "properties",
    "required",
    "additionalProperties",
    "maxProperties",
    "items",
    "maxItems",
    "enum",
    "const",
    "anyOf",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
];

/// Whether a value holds under a schema.
fn holds(root: &Value, schema: &Value, value: &Value) -> bool {
    let rules = schema.as_object().expect("a schema is an object");
    assert!(rules.keys().all(|key| KEYWORDS.contains(&key.as_str())), "{schema}");
    rules.iter().all(|(keyword, rule)| match (keyword.as_str(), value) {
        ("$ref", _) => {
            let name = rule.as_str().and_then(|name| name.strip_prefix("#")).expect("a local reference");
            holds(root, root.pointer(name).expect("the reference leads somewhere"), value)
        }
        ("type", _) => is_of(rule.as_str().expect("one type"), value),
        ("enum", _) => rule.as_array().expect("a list").contains(value),
        ("const", _) => rule == value,
        ("anyOf", _) => rule.as_array().expect("a list").iter().any(|schema| holds(root, schema, value)),
        ("required", Value::Object(fields)) => rule
            .as_array()
            .expect("a list")
            .iter()
            .all(|name| fields.contains_key(name.as_str().expect("a name"))),
        ("additionalProperties", Value::Object(fields)) => {
            let known = rules.get("properties").and_then(Value::as_object);
            let mut others =
                fields.iter().filter(|(name, _)| known.is_none_or(|known| !known.contains_key(*name)));
            others.all(|(_, value)| rule.is_object() && holds(root, rule, value))
        }
        ("properties", Value::Object(fields)) => {
            fields.iter().all(|(name, value)| rule.get(name).is_none_or(|schema| holds(root, schema, value)))
        }
        ("items", Value::Array(items)) => items.iter().all(|item| holds(root, rule, item)),
        ("maxItems", Value::Array(items)) => items.len() as u64 <= rule.as_u64().expect("a number"),
        ("maxProperties", Value::Object(fields)) => fields.len() as u64 <= rule.as_u64().expect("a number"),
        ("maxLength", Value::String(text)) => text.chars().count() as u64 <= rule.as_u64().expect("a number"),
        ("minLength", Value::String(text)) => text.chars().count() as u64 >= rule.as_u64().expect("a number"),
        ("minimum", Value::Number(number)) => number.as_f64() >= rule.as_f64(),
        ("maximum", Value::Number(number)) => number.as_f64() <= rule.as_f64(),
        _ => true,
    })
}

fn is_of(name: &str, value: &Value) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        other => panic!("{other} is no type that the schema uses"),
    }
}

/// Returns a manifest that has every field.
fn whole() -> Value {
    let run = |offset: usize| json!({"offset": offset, "step": 1, "len": 6, "span": 8});
    let precision: Map<String, Value> = ["q", "k", "v", "p", "out", "dout", "ds", "gradients"]
        .map(|name| (name.to_owned(), "bf16".into()))
        .into_iter()
        .collect();
    let rank = |rank: usize| json!({"file": format!("rank-{rank:04}.safetensors"), "blake2b": "0".repeat(64), "world_rank": rank});
    json!({
        "seamproof_recording": 1,
        "run": "a run",
        "subject": {"name": "a subject", "versions": {"torch": "2"}},
        "problem": {
            "sequences": [{"id": 0, "q": run(0), "kv": run(0)}, {"id": 1, "q": run(8), "kv": run(8)}],
            "rows": {"q": 16, "kv": 16},
            "heads": {"q": 2, "kv": 1},
            "dims": {"qk": 4, "v": 4},
            "mask": {
                "left": 3, "right": 0, "align": "top-left", "blocks": {"documents": [4]}, "prefix": 2,
                "sink_tokens": 1
            },
            "softmax": {"scale": 0.5, "softcap": 30.0, "sink": "learnable"},
            "precision": precision,
            "parallel": {"algorithm": "ring", "balance": "dual-chunk", "world": 2, "ranks": [0, 1]},
            "pass": "backward",
            "sharing": [{"sequence": 1, "with": 0, "keys": 2}]
        },
        "placement": "rule",
        "padding": {"inputs": "anything", "outputs": "zero"},
        "lse": {"base": "e", "order": "ht", "empty": "-inf"},
        "dsink": "partial",
        "arithmetic": {
            "accumulation": {"f32-tree": 4}, "tile": {"q": 64, "kv": 64}, "merge": "f32",
            "merge_by": "difference", "wire": "bf16",
            "weights": "unknown", "delta": "stored-out", "group_sums": "f32", "soft_cap": "accurate",
            "ds_weights": "rounded"
        },
        "scales": [],
        "ranks": [rank(0), rank(1)],
        "note": "a note"
    })
}

/// Returns the path of every value of a document.
fn paths(value: &Value, path: &str, found: &mut Vec<String>) {
    let mut down = |name: &str, value: &Value| {
        let path = format!("{path}/{name}");
        found.push(path.clone());
        paths(value, &path, found);
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| down(name, value)),
        Value::Array(items) => items.iter().enumerate().for_each(|(i, value)| down(&i.to_string(), value)),
        _ => {}
    }
}

/// Returns the document with one value changed by each of the changes, with words for it.
fn changed(whole: &Value, path: &str) -> Vec<(String, Value)> {
    let (parent, name) = path.rsplit_once('/').expect("a path has a parent");
    let mut changes: Vec<(String, Value)> =
        [json!(null), json!(-1), json!("nonsense"), json!({}), json!([[]])]
            .into_iter()
            .map(|other| {
                let mut document = whole.clone();
                *document.pointer_mut(path).expect("the path is there") = other.clone();
                (format!("{path} = {other}"), document)
            })
            .collect();
    for renamed in [false, true] {
        let mut document = whole.clone();
        if let Some(Value::Object(fields)) = document.pointer_mut(parent) {
            let value = fields.remove(name).expect("the field is there");
            if renamed {
                fields.insert(format!("{name}_"), value);
            }
            changes.push((format!("{path} {}", if renamed { "renamed" } else { "removed" }), document));
        }
    }
    changes
}

#[test]
fn schema_and_reader_take_the_same_fields() {
    let (schema, whole) = (schema(), whole());
    let read = |document: &Value| Manifest::parse(Path::new("M"), document.to_string().as_bytes());
    assert!(holds(&schema, &schema, &whole), "the schema refuses a manifest");
    read(&whole).expect("the reader refuses the manifest that has every field");
    let mut all = Vec::new();
    paths(&whole, "", &mut all);
    let mut taken = [0; 2];
    for (what, document) in all.iter().flat_map(|path| changed(&whole, path)) {
        let (by_schema, by_reader) = (holds(&schema, &schema, &document), read(&document));
        // The reader asks more of texts, and of lists that belong together.
        let is_further = what.contains("blake2b") || what.contains("/file") || what.contains("/run = ");
        if !is_further {
            assert_eq!(
                by_schema,
                by_reader.is_ok(),
                "{what}: {:?}",
                by_reader.err().map(|error| error.to_string())
            );
        }
        taken[usize::from(by_schema)] += 1;
    }
    assert!(taken[0] > 300 && taken[1] > 10, "{taken:?}");
}

#[test]
fn what_is_recorded_holds_under_the_schema() {
    let schema = schema();
    let example = include_str!("../../src/fuzz/recording.json");
    assert!(holds(&schema, &schema, &serde_json::from_str(example).expect("JSON")));
    for index in 0..20 {
        let Some(written) = super::recordings::manifest_of_draw(index) else { continue };
        let document = serde_json::from_str(&written).expect("JSON");
        assert!(holds(&schema, &schema, &document), "case {index}");
    }
}
