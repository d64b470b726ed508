use seamproof_judge::ndarray::{Array1, s};
use seamproof_judge::prelude::*;

struct Mine;

impl Backend for Mine {
    fn name(&self) -> &str {
        "mine"
    }

    fn declaration(&self) -> Declaration {
        Declaration::single_rank(Format::Bf16, Format::F32).forward_only() // formats of tensors and of weights
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.declaration().table.check(problem)?;
        let mut got = RankOutputs::unwritten(problem);
        for Sequence { q, kv, .. } in &problem.sequences {
            for (i, head) in (0..q.len).flat_map(|i| (0..problem.heads.q).map(move |head| (i, head))) {
                let (row, kv_head) = (q.row(i), head / problem.group());
                let query = inputs.q.slice(s![row, head, ..]);
                let (mut sum, mut out) = (0.0, Array1::<f32>::zeros(problem.dims.v));
                for key in problem.mask.visible(i, q.len, kv.len).map(|key| kv.row(key)) {
                    let logit = problem.softmax.scale * query.dot(&inputs.k.slice(s![key, kv_head, ..]));
                    sum += logit.exp(); // a bug: nothing keeps this within f32
                    out.scaled_add(logit.exp(), &inputs.v.slice(s![key, kv_head, ..]));
                }
                let weighed = |value: f32| if sum == 0.0 { 0.0 } else { Format::Bf16.round_f32(value / sum) };
                got.out.slice_mut(s![row, head, ..]).assign(&out.mapv(weighed));
                got.lse.as_mut().unwrap()[[head, row]] = sum.ln();
            }
        }
        Ok(got.into())
    }
}

#[test]
#[should_panic = "2 failures"] // the bug
fn it_is_right() {
    let summary = Campaign::quick(300).run(&Mine);
    assert!(summary.holds(), "{summary}");
}
