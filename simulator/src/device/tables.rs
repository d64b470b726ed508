//! Tables of segments on the CPU device: the numbers of each row, as elements of a buffer.

use std::borrow::Cow;

use super::buffers::Buffers;
use super::error::DeviceError;
use crate::helpers::SegmentRow;
use crate::schedule::{BufferId, Region, SegmentSource};
use crate::{AttentionCall, Real, Segment};

/// Largest number that an element of any format of the CPU device holds exactly: 2²⁴.
const NUMBER_MAX: f64 = 16_777_216.0;

/// Writes a table. Each row holds offset and length of queries and of keys, the two ends of the band (infinite where
/// there is none), the rows from a key to the next, and a zero.
pub(super) fn make<T: Real>(
    to: BufferId,
    from: &SegmentSource,
    buffers: &mut Buffers<T>,
) -> Result<(), DeviceError> {
    let no_band = || DeviceError::Shape("a table of segments is made where no band says them".into());
    let rows = from.rows().ok_or_else(no_band)?;
    if rows.len() != buffers.rows(to) || buffers.dim(to) != SegmentSource::WORDS {
        return Err(DeviceError::Shape(format!(
            "a table of {} segments does not fit its buffer",
            rows.len()
        )));
    }
    for (row, segment) in rows.iter().enumerate() {
        let SegmentRow { q, kv, key_step, lo, hi } = *segment;
        // No row is as far away as the largest number: a bound further away shows and hides the same keys.
        let near = |end: i64| (end as f64).clamp(-NUMBER_MAX, NUMBER_MAX);
        let end = |end: Option<i64>, none: f64| end.map_or(none, near);
        let rows = [q.0, q.1, kv.0, kv.1].map(|number| number as f64);
        let band = [end(lo, f64::NEG_INFINITY), end(hi, f64::INFINITY), key_step as f64, 0.0];
        if rows.iter().chain(&band[2..]).any(|number| *number > NUMBER_MAX) {
            let what = "a table of segments on the CPU device holds rows up to 2^24; use a smaller problem";
            return Err(DeviceError::Shape(what.into()));
        }
        let words = rows.into_iter().chain(band).map(T::from_f64);
        buffers.lane_mut(to, row, 0).iter_mut().zip(words).for_each(|(to, word)| *to = word);
    }
    Ok(())
}

/// Returns the segments that rows of a table say.
pub(super) fn read<T: Real>(table: &Region, buffers: &Buffers<T>) -> Result<Vec<Segment>, DeviceError> {
    buffers.check(table.buffer, &[table.rows], &table.heads)?;
    let row = |row: usize| {
        let words: Vec<f64> = buffers.lane(table.buffer, row, 0).iter().map(|word| word.to_f64()).collect();
        segment(&words).ok_or_else(|| {
            let name = buffers.tensor(table.buffer).name();
            DeviceError::Shape(format!("row {row} of {name} says no segment: the table has not been made"))
        })
    };
    table.rows.real_rows().map(row).collect()
}

/// Returns the segment that a row's numbers say; `None` if they say none.
fn segment(words: &[f64]) -> Option<Segment> {
    let &[q, q_len, kv, kv_len, lo, hi, key_step, ..] = words else { return None };
    let whole = |number: f64| number.fract() == 0.0 && number.abs() <= NUMBER_MAX;
    let count = |number: f64| (whole(number) && number >= 0.0).then_some(number as usize);
    let end = |number: f64, none: f64| match number {
        number if number == none => Some(None),
        number if whole(number) => Some(Some(number as i64)),
        _ => None,
    };
    let (lo, hi) = (end(lo, f64::NEG_INFINITY)?, end(hi, f64::INFINITY)?);
    let (q, kv) = ((count(q)?, count(q_len)?), (count(kv)?, count(kv_len)?));
    Some(SegmentRow { q, kv, key_step: count(key_step).filter(|step| *step > 0)?, lo, hi }.segment())
}

/// Returns a launch's call as its device knows it: with the segments of the table, if it reads one.
pub(super) fn told<'a, T: Real>(
    call: &'a AttentionCall,
    table: Option<&Region>,
    buffers: &Buffers<T>,
) -> Result<Cow<'a, AttentionCall>, DeviceError> {
    let Some(table) = table else { return Ok(Cow::Borrowed(call)) };
    let segments = read(table, buffers)?;
    Ok(Cow::Owned(AttentionCall { segments, ..call.clone() }))
}
