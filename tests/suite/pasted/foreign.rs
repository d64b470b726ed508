/// 1 sequence (7 of 8); heads 1/1; dims 8/8; causal top-left; fp16 flat; forward and backward.
///
/// Seamproof has no subject "my \"kernel\"" of its own: paste this into the crate that has it, and make its
/// backend where `your_backend` stands.
#[test]
fn foreign() {
    let case = seamproof_judge::case::Case::parse(r#"{
  "version": 1,
  "subject": {
    "name": "my \"kernel\"",
    "options": {
      "q_tile": "16"
    }
  },
  "schedule_seed": 0,
  "inputs": "generated",
  "problem": {
    "sequences": [
      {
        "id": 0,
        "q": {
          "offset": 0,
          "len": 7,
          "span": 8
        },
        "kv": {
          "offset": 0,
          "len": 7,
          "span": 8
        }
      }
    ],
    "rows": {
      "q": 8,
      "kv": 8
    },
    "heads": {
      "q": 1,
      "kv": 1
    },
    "dims": {
      "qk": 8,
      "v": 8
    },
    "mask": {
      "right": 0,
      "align": "top-left"
    },
    "softmax": {
      "scale": 0.35355338,
      "sink": "none"
    },
    "precision": {
      "q": "fp16",
      "k": "fp16",
      "v": "fp16",
      "p": "fp16",
      "out": "fp16",
      "dout": "fp16",
      "ds": "fp16",
      "gradients": "fp16"
    },
    "parallel": {
      "algorithm": "single",
      "balance": "contiguous",
      "world": 1,
      "ranks": [
        0
      ]
    },
    "mode": "flat",
    "data_seed": 1,
    "pass": "backward"
  }
}
"#.as_bytes());
    let case = case.expect("the case is valid");
    let backend = your_backend(&case.subject.options); // your `Backend`, made with these options
    let verdict = seamproof_judge::evaluate::evaluate(&backend, &case.problem);
    assert!(matches!(verdict, seamproof_judge::verdict::Verdict::Pass(_)), "{verdict}");
}
