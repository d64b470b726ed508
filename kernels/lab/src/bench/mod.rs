//! Speed of the kernels, each against a peer in the same run.

mod attention;
mod backward;
mod decode;
mod error;
mod figures;
mod fp8;
mod mixed;
mod peer;
mod pools;
mod quantise;
mod steadiness;
mod thd;
mod timing;
mod tracks;

pub use attention::{AttentionBench, BenchedPass, attention, problems};
pub use decode::decode;
pub use error::BenchError;
pub use mixed::mixed;
pub use quantise::quantise;
pub use steadiness::steadiness;
pub use thd::thd;
