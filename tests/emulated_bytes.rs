//! The emulated kernel's results are the same bytes on every machine, and after every change that does not mean to change
//! its numbers.

use seamproof::backend::{Backend, Outputs};
use seamproof::backends::{Arithmetic, Emulated};
use seamproof::generate::{self, Draw, Limits};
use seamproof::values::{self, Poison};
use seamproof_simulator::emulated::Tiles;

/// Cases of a digest.
const CASES: u64 = 400;

fn absorb(hasher: &mut blake3::Hasher, outputs: &Outputs) {
    let mut add = |values: &mut dyn Iterator<Item = &f32>| {
        values.for_each(|value| {
            hasher.update(&value.to_bits().to_le_bytes());
        });
    };
    for rank in &outputs.ranks {
        add(&mut rank.out.iter());
        add(&mut rank.lse.iter().flatten());
        add(&mut rank.max_logit.iter().flatten());
        if let Some(gradients) = &rank.gradients {
            add(&mut gradients.dq.iter().chain(&gradients.dk).chain(&gradients.dv).chain(&gradients.dsink));
        }
    }
}

/// Of everything that the subject returns on the first cases of a seed, padding poisoned.
fn digest(arithmetic: Arithmetic) -> String {
    let (mut hasher, mut ran) = (blake3::Hasher::new(), 0);
    for index in 0..CASES {
        let Draw::Problem(problem) = generate::draw(7, index, &Limits::seams()) else { continue };
        let tiles =
            [Tiles { q: 4, kv: 4 }, Tiles { q: 1, kv: 16 }, Tiles { q: 64, kv: 1 }][index as usize % 3];
        let mut inputs = values::inputs(&problem);
        values::poison(&mut inputs, &problem, Poison::Nan);
        if let Ok(outputs) =
            (Emulated { tiles, order: index, arithmetic, ..Emulated::default() }).run(&problem, &inputs)
        {
            absorb(&mut hasher, &outputs);
            ran += 1;
        }
    }
    assert!(ran > CASES / 2, "only {ran} cases ran");
    hasher.finalize().to_hex()[..16].to_owned()
}

#[test]
fn serial_f32_gives_the_bytes_that_it_gave() {
    assert_eq!(digest(Arithmetic::F32), "3576ee1c67343c0c");
}

#[test]
fn the_tensor_core_model_gives_the_bytes_that_it_gave() {
    assert_eq!(digest(Arithmetic::Hopper), "5781f3b1b3ec3b94");
}
