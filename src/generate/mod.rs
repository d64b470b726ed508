//! STUB of the command line's branch: the real generator is a colleague's. Drop this file when merging.
#![allow(missing_docs, clippy::all)]

use seamproof_oracle::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    Quick,
    Seams,
    Large,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no profile; use quick, seams or large")]
pub struct ProfileNameError(String);

impl Profile {
    pub const ALL: [Profile; 3] = [Profile::Quick, Profile::Seams, Profile::Large];
    pub fn name(self) -> &'static str {
        match self {
            Profile::Quick => "quick",
            Profile::Seams => "seams",
            Profile::Large => "large",
        }
    }
    pub fn limits(self) -> Limits {
        match self {
            Profile::Quick => Limits::quick(),
            Profile::Seams => Limits::seams(),
            Profile::Large => Limits::large(),
        }
    }
}

impl std::str::FromStr for Profile {
    type Err = ProfileNameError;
    fn from_str(text: &str) -> Result<Profile, ProfileNameError> {
        let named = Profile::ALL.into_iter().find(|profile| profile.name() == text);
        named.ok_or_else(|| ProfileNameError(text.to_owned()))
    }
}

#[derive(Clone, Debug)]
pub struct Limits {
    pub length: usize,
}

impl Limits {
    pub fn quick() -> Limits {
        Limits { length: 24 }
    }
    pub fn seams() -> Limits {
        Limits { length: 48 }
    }
    pub fn large() -> Limits {
        Limits { length: 400 }
    }
}

#[derive(Clone, Debug)]
pub struct Malformed {
    pub fields: ProblemFields,
    pub rule: &'static str,
}

pub enum Draw {
    Problem(Problem),
    Malformed(Malformed),
}

pub fn draw(seed: u64, index: u64, limits: &Limits) -> Draw {
    let digest = blake3::hash(&[seed.to_le_bytes(), index.to_le_bytes()].concat());
    let bytes = digest.as_bytes();
    let mut sequences = Vec::new();
    let mut offset = 0;
    for id in 0..u32::from(bytes[0] % 5) {
        let len = usize::from(bytes[1 + id as usize]) % limits.length;
        let span = len + usize::from(bytes[10 + id as usize] % 3);
        sequences.push(Sequence {
            id,
            q: Run::packed(offset, len, span),
            kv: Run::packed(offset, len, span),
        });
        offset += span;
    }
    let kv = usize::from(bytes[20] % 3 + 1);
    let fields = ProblemFields {
        sequences,
        rows: Rows { q: offset, kv: offset },
        heads: Heads { q: kv * usize::from(bytes[21] % 3 + 1), kv },
        dims: Dims { qk: usize::from(bytes[22] % 16 + 1), v: usize::from(bytes[23] % 16 + 1) },
        mask: if bytes[24] % 2 == 0 { Mask::FULL } else { Mask::CAUSAL },
        softmax: Softmax { scale: 0.25, softcap: None, sink: Sink::None },
        precision: Precision::uniform(Format::Bf16),
        parallel: ContextParallel::single(),
        mode: InputMode::Integers,
        data_seed: u64::from(bytes[25]),
        pass: if bytes[26] % 2 == 0 { Pass::Forward } else { Pass::Backward },
    };
    if bytes[27] % 20 == 0 {
        let mut fields = fields;
        fields.heads.kv = 0;
        return Draw::Malformed(Malformed { fields, rule: "zero heads" });
    }
    Draw::Problem(Problem::new(fields).expect("the stub's fields are legal"))
}
