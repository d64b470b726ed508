//! Device memory of one call: tensors with what lies around them, tables and room, in one stretch.

use std::ops::Range;

use seamproof_oracle::Format;
use seamproof_simulator::GuardedTensor;

use super::workspace::ALIGNMENT;
use crate::codec::{element_bytes, store};

/// The byte of memory that nothing was written to: a NaN in e4m3, and a part of one in f32.
const UNWRITTEN: u8 = 0xff;

/// The bytes of a band around a result.
const BAND: usize = 64;

/// Device memory in the making: tensors with their guard bands, tables, and room.
#[derive(Default)]
pub(super) struct Stretch(Vec<u8>);

/// A tensor's bytes in a stretch, with the guard bands and without them.
#[derive(Clone)]
pub(super) struct Banded {
    pub(super) whole: Range<usize>,
    pub(super) inner: Range<usize>,
}

impl Stretch {
    /// Appends bytes on a multiple of [`ALIGNMENT`].
    pub(super) fn push(&mut self, bytes: &[u8]) -> Range<usize> {
        self.0.resize(self.0.len().next_multiple_of(ALIGNMENT), UNWRITTEN);
        let start = self.0.len();
        self.0.extend_from_slice(bytes);
        start..self.0.len()
    }

    /// Returns everything that was appended.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// Appends room for so many bytes.
    pub(super) fn room(&mut self, bytes: usize) -> Range<usize> {
        self.push(&vec![UNWRITTEN; bytes])
    }

    /// Appends room for a result of so many bytes, with guard bands of [`BAND`] bytes.
    pub(super) fn banded(&mut self, bytes: usize) -> Banded {
        let whole = self.room(bytes + 2 * BAND);
        Banded { inner: whole.start + BAND..whole.end - BAND, whole }
    }

    /// Writes the contents of what has room already.
    pub(super) fn write(&mut self, place: &Banded, bytes: &[u8]) {
        self.0[place.inner.clone()].copy_from_slice(bytes);
    }

    /// Appends numbers of f32.
    pub(super) fn numbers(&mut self, numbers: &[f32]) -> Range<usize> {
        let mut bytes = vec![0; 4 * numbers.len()];
        store(Format::F32, numbers, &mut bytes);
        self.push(&bytes)
    }

    /// Appends a tensor with its guard bands, so that its first element lies on a multiple of [`ALIGNMENT`].
    pub(super) fn tensor(&mut self, tensor: &GuardedTensor) -> Banded {
        let element = element_bytes(tensor.format());
        let mut bytes = vec![0; tensor.raw().len() * element];
        store(tensor.format(), tensor.raw(), &mut bytes);
        let guard = tensor.guard() * element;
        let before = guard.next_multiple_of(ALIGNMENT) - guard;
        let placed = self.push(&[vec![UNWRITTEN; before], bytes].concat());
        let whole = placed.start + before..placed.end;
        Banded { inner: whole.start + guard..whole.end - guard, whole }
    }
}

impl Banded {
    /// Whether a band around a result was written to.
    pub(super) fn is_overrun(&self, image: &[u8]) -> bool {
        let around = [self.whole.start..self.inner.start, self.inner.end..self.whole.end];
        around.into_iter().any(|band| image[band].iter().any(|byte| *byte != UNWRITTEN))
    }
}
