//! Lanes: numbers that are computed side by side in vector code.

/// Replaces each number by a function of it.
///
/// Compilers turn blocks of constant length into vector code, and do number by number what a loop leaves over. Many
/// slices here are short, so that most numbers would be left over. So a last block covers the end, together with
/// numbers of the block before it.
#[inline(always)]
pub fn map_blocks<T: Copy>(values: &mut [T], of: impl Fn(T) -> T) {
    match values.len() {
        0 => (),
        1 => map_blocks_of::<T, 1>(values, of),
        2 | 3 => map_blocks_of::<T, 2>(values, of),
        4..8 => map_blocks_of::<T, 4>(values, of),
        _ => map_blocks_of::<T, 8>(values, of),
    }
}

/// Replaces each number by a function of it, in blocks of N. There are N numbers at least.
#[inline(always)]
fn map_blocks_of<T: Copy, const N: usize>(values: &mut [T], of: impl Fn(T) -> T) {
    // The last block is read before another changes the numbers that both have.
    let last = match values.last_chunk::<N>() {
        Some(last) if !values.len().is_multiple_of(N) => Some(map_block(*last, &of)),
        _ => None,
    };
    for block in values.as_chunks_mut::<N>().0 {
        *block = map_block(*block, &of);
    }
    if let (Some(last), Some(to)) = (last, values.last_chunk_mut::<N>()) {
        *to = last;
    }
}

#[inline(always)]
fn map_block<T: Copy, const N: usize>(mut block: [T; N], of: &impl Fn(T) -> T) -> [T; N] {
    for value in &mut block {
        *value = of(*value);
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_met_once_whatever_the_length() {
        for length in 0..20 {
            let mut values: Vec<f32> = (0..length).map(|n| n as f32).collect();
            map_blocks(&mut values, |x| 2.0 * x + 1.0);
            let right: Vec<f32> = (0..length).map(|n| 2.0 * n as f32 + 1.0).collect();
            assert_eq!(values, right);
        }
    }
}
