//! Planted faults: edits of a source's text that give a kernel a real bug.
//!
//! An edit replaces a text that is in its source exactly once, with the headers put in. Every edited source must
//! compile (`seamproof kernels build --faults`), so that no edit outlives the code that it is about. On a GPU each
//! fault must be caught where it says (`seamproof kernels check --plant all`, and `seamproof faults --gpu --score`).

mod attention;
mod backward;
mod barriers;
mod blocks;
mod entry;
mod forward;
mod fp8;
mod helpers;
mod quantise;
mod split;

use seamproof_simulator::faults::find;

pub use entry::{BugClass, Detector, Launched, SourceEdit, SourceFault};

/// Returns every planted fault of a kernel.
pub fn source_faults() -> impl Iterator<Item = &'static SourceFault> {
    let tables = [
        helpers::HELPER_FAULTS,
        attention::ATTENTION_FAULTS,
        forward::FORWARD_FAULTS,
        forward::PACKED_FAULTS,
        forward::PAIRED_FAULTS,
        forward::SHORT_FAULTS,
        forward::WIDEST_FAULTS,
        forward::LATENT_FAULTS,
        split::SPLIT_FAULTS,
        split::MIXED_FAULTS,
        fp8::FP8_FAULTS,
        fp8::FP8_ROW_FAULTS,
        fp8::FP8_BACKWARD_FAULTS,
        backward::BACKWARD_FAULTS,
        backward::WALK_FAULTS,
        backward::WIDEST_FAULTS,
        barriers::HELPER_BARRIER_FAULTS,
        barriers::SPLIT_BARRIER_FAULTS,
        barriers::BACKWARD_BARRIER_FAULTS,
        barriers::WALK_BARRIER_FAULTS,
        barriers::FP8_BARRIER_FAULTS,
        blocks::FEW_BLOCKS_FAULTS,
        blocks::FEW_BLOCKS_FP8_FAULTS,
        quantise::QUANTISER_FAULTS,
    ];
    tables.into_iter().flatten()
}

/// Returns the planted fault of this name.
pub fn by_id(id: &str) -> Option<&'static SourceFault> {
    find(source_faults(), id)
}

#[cfg(test)]
mod tests {
    use super::entry::whole;
    use super::*;

    #[test]
    fn every_edit_is_about_one_text_that_is_there() {
        for fault in source_faults() {
            assert_eq!(fault.edit.matches(), 1, "{}: {:?} in {}", fault.id, fault.edit.find, fault.edit.file);
            let edited = fault.edit.edited().and_then(|edited| Some(edited.first()?.text.clone()));
            assert_ne!(edited, whole(fault.edit.file), "{}", fault.id);
            assert!(fault.edit.edited().is_some_and(|edited| edited.iter().all(|source| source.planted)));
        }
    }

    #[test]
    fn names_are_unique_and_every_kind_has_an_example() {
        let mut ids: Vec<_> = source_faults().map(|fault| fault.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), source_faults().count());
        let mut kinds: Vec<_> = source_faults().map(|fault| fault.edit.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        assert_eq!(kinds.len(), 8);
        assert!(source_faults().all(|fault| fault.source.starts_with("https://")));
    }
}
