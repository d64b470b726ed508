//! The quantiser's kernels against the definition, bit for bit, by the judge of quantisers.

use seamproof_judge::generate::Limits;
use seamproof_judge::quantise::{Judged, draw, judge};
use seamproof_kernels::device::CodesFrom;
use seamproof_kernels::{Gpu, KernelError};

use super::mismatch::Mismatch;
use crate::quantiser::CudaQuantiser;

/// Judges drawn quantisations, each with its codes read back from every copy that the kernels write. Returns at most so
/// many findings.
pub fn check_quantise(gpu: &Gpu, cases: u64, seed: u64, most: usize) -> Result<Vec<Mismatch>, KernelError> {
    let (limits, mut found) = (Limits::quick(), Vec::new());
    let copies = [CodesFrom::Rows, CodesFrom::Turned, CodesFrom::Beside];
    let subjects = copies.map(|from| CudaQuantiser::new(gpu, from));
    let subjects = subjects.into_iter().collect::<Result<Vec<_>, _>>()?;
    for case in 0..cases {
        let Some(asked) = draw(seed, case, &limits) else { continue };
        for (subject, from) in subjects.iter().zip(copies) {
            let Judged::Wrong(finding) = judge(subject, &asked) else { continue };
            found.push(Mismatch {
                operation: "quantise",
                case,
                place: finding.to_string(),
                what: format!("codes from {from:?}"),
                bytes: finding.failed,
            });
            if found.len() >= most {
                return Ok(found);
            }
        }
    }
    Ok(found)
}
