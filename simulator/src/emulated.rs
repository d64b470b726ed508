//! A FlashAttention-style tiled attention kernel on the CPU, with the roundings of the real ones.
//!
//! Inputs in a narrow format, products and sums in f32 one after the other, an online softmax over tiles of keys,
//! P rounded before the product with the values; the backward recomputes P from the saved LSE, takes
//! `D = rowsum(dout · out)` from the stored out, and rounds dS. Rows are addressed through runs alone (offset, step,
//! real length, span): padding rows are never read, and are zeroed or left as the call says. It is the CPU twin that
//! production kernels are held to, and itself held to the oracle; it shares no code with it.

use std::ops::Range;

use seamproof_oracle::{Format, Sink};

use crate::{AttentionCall, Real, RowPolicy, Segment, Tensor};

/// Tile sizes; parameters, so that tile edges are hit with few tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Query rows of a tile; at least 1.
    pub q: usize,
    /// Keys of a tile; at least 1.
    pub kv: usize,
}

/// Tensors of a forward launch. q, out `[rows, heads, dim]`; lse `[heads, rows, 1]`; max_logit `[heads, 1, 1]`.
pub struct Forward<'a, T> {
    /// Queries.
    pub q: &'a Tensor<T>,
    /// Keys.
    pub k: &'a Tensor<T>,
    /// Values.
    pub v: &'a Tensor<T>,
    /// Learnable sink of each query head; empty otherwise.
    pub sink: &'a [T],
    /// The output.
    pub out: &'a mut Tensor<T>,
    /// The log-sum-exp.
    pub lse: &'a mut Tensor<T>,
    /// The largest logit of each head: raised, never lowered; filled before.
    pub max_logit: &'a mut Tensor<T>,
}

/// Tensors of a backward launch.
pub struct Backward<'a, T> {
    /// Queries.
    pub q: &'a Tensor<T>,
    /// Keys.
    pub k: &'a Tensor<T>,
    /// Values.
    pub v: &'a Tensor<T>,
    /// Learnable sink of each query head; empty otherwise.
    pub sink: &'a [T],
    /// Gradient of the output.
    pub dout: &'a Tensor<T>,
    /// The forward's output.
    pub out: &'a Tensor<T>,
    /// The forward's LSE.
    pub lse: &'a Tensor<T>,
    /// Gradient of the queries.
    pub dq: &'a mut Tensor<T>,
    /// Gradient of the keys.
    pub dk: &'a mut Tensor<T>,
    /// Gradient of the values.
    pub dv: &'a mut Tensor<T>,
    /// Gradient of the learnable sink, `[heads, 1, 1]`; no heads otherwise.
    pub dsink: &'a mut Tensor<T>,
}

/// The forward kernel. `p` is the format that weights are rounded to before the product with the values.
pub fn forward<T: Real>(call: &AttentionCall, tiles: Tiles, p: Format, mut tensors: Forward<'_, T>) {
    let heads = tensors.q.shape()[1];
    for segment in &call.segments {
        let keys = key_rows(segment);
        for head in 0..heads {
            for rows in tiles_of(0..segment.q.len, tiles.q) {
                forward_tile(call, segment, &keys, tiles.kv, p, head, rows, &mut tensors);
            }
        }
        if call.policy == RowPolicy::Overwrite {
            for row in segment.q.padding_rows() {
                for head in 0..heads {
                    tensors.out.lane_mut(row, head).fill(T::ZERO);
                    tensors.lse.lane_mut(head, row).fill(T::NEG_INFINITY);
                }
            }
        }
    }
}

/// Running state of one query row.
struct Online<T> {
    max: T,
    sum: T,
    acc: Vec<T>,
}

impl<T: Real> Online<T> {
    /// Makes room for logits up to `max`.
    fn grow(&mut self, max: T) {
        if max > self.max {
            let factor = (self.max - max).exp();
            self.sum *= factor;
            self.acc.iter_mut().for_each(|acc| *acc *= factor);
            self.max = max;
        }
    }
}

/// One tile of query rows against all keys that any of them sees.
fn forward_tile<T: Real>(
    call: &AttentionCall,
    segment: &Segment,
    keys: &[usize],
    kv_tile: usize,
    p: Format,
    head: usize,
    rows: Range<usize>,
    tensors: &mut Forward<'_, T>,
) {
    let kv_head = head / (tensors.q.shape()[1] / tensors.k.shape()[1]);
    let fresh = || Online { max: T::NEG_INFINITY, sum: T::ZERO, acc: vec![T::ZERO; tensors.v.shape()[2]] };
    let mut states: Vec<Online<T>> = rows.clone().map(|_| fresh()).collect();
    let mut scores = vec![T::ZERO; kv_tile];
    let mut largest = T::NEG_INFINITY;
    for columns in key_tiles(segment, &rows, kv_tile) {
        let k = transposed(tensors.k, &keys[columns.clone()], kv_head);
        for (i, state) in rows.clone().zip(&mut states) {
            let visible = clip(segment.visible(i), &columns);
            if visible.is_empty() {
                continue;
            }
            products(tensors.q.lane(segment.q.row(i), head), &k, &mut scores[..columns.len()]);
            let scores = &mut scores[visible.clone()];
            scores.iter_mut().for_each(|score| *score = logit(call, *score));
            let max = scores.iter().copied().fold(T::NEG_INFINITY, T::larger);
            largest = largest.larger(max);
            state.grow(max);
            for (&score, &key) in scores.iter().zip(&keys[columns.clone()][visible]) {
                let weight = (score - state.max).exp();
                state.sum += weight;
                add_scaled(&mut state.acc, weight.round(p), tensors.v.lane(key, kv_head));
            }
        }
    }
    for (i, mut state) in rows.zip(states) {
        let row = segment.q.row(i);
        if let Some(sink) = sink(call.softmax.sink, tensors.sink, head) {
            state.grow(sink);
            state.sum += (sink - state.max).exp();
        }
        let sees_nothing = state.sum == T::ZERO;
        let inverse = if sees_nothing { T::ZERO } else { T::ONE / state.sum };
        let format = tensors.out.format();
        for (out, acc) in tensors.out.lane_mut(row, head).iter_mut().zip(&state.acc) {
            *out = (*acc * inverse).round(format);
        }
        let lse = if sees_nothing { T::NEG_INFINITY } else { state.max + state.sum.ln() };
        tensors.lse.lane_mut(head, row)[0] = lse;
    }
    let max_logit = &mut tensors.max_logit.lane_mut(head, 0)[0];
    *max_logit = max_logit.larger(largest);
}

/// The backward kernel. `p` and `ds` are the formats of the rounded weights and logit gradients.
pub fn backward<T: Real>(
    call: &AttentionCall,
    tiles: Tiles,
    p: Format,
    ds: Format,
    mut tensors: Backward<'_, T>,
) {
    let (heads, kv_heads) = (tensors.q.shape()[1], tensors.k.shape()[1]);
    tensors.dsink.values_mut().fill(T::ZERO);
    for segment in &call.segments {
        let keys = key_rows(segment);
        for kv_head in 0..kv_heads {
            backward_segment(call, segment, &keys, tiles, (p, ds), kv_head, &mut tensors);
        }
        if call.policy == RowPolicy::Overwrite {
            for row in segment.q.padding_rows() {
                (0..heads).for_each(|head| tensors.dq.lane_mut(row, head).fill(T::ZERO));
            }
            for row in segment.kv.iter().flat_map(seamproof_oracle::Run::padding_rows) {
                for head in 0..kv_heads {
                    tensors.dk.lane_mut(row, head).fill(T::ZERO);
                    tensors.dv.lane_mut(row, head).fill(T::ZERO);
                }
            }
        }
    }
}

/// All query heads of one KV head: dk and dv are summed over them in f32 and rounded once.
fn backward_segment<T: Real>(
    call: &AttentionCall,
    segment: &Segment,
    keys: &[usize],
    tiles: Tiles,
    formats: (Format, Format),
    kv_head: usize,
    tensors: &mut Backward<'_, T>,
) {
    let group = tensors.q.shape()[1] / tensors.k.shape()[1];
    let (dim_qk, dim_v) = (tensors.k.shape()[2], tensors.v.shape()[2]);
    let mut dk = vec![T::ZERO; keys.len() * dim_qk];
    let mut dv = vec![T::ZERO; keys.len() * dim_v];
    for head in kv_head * group..(kv_head + 1) * group {
        for rows in tiles_of(0..segment.q.len, tiles.q) {
            backward_tile(
                call,
                segment,
                keys,
                tiles.kv,
                formats,
                (head, kv_head),
                rows,
                &mut dk,
                &mut dv,
                tensors,
            );
        }
    }
    for (j, &key) in keys.iter().enumerate() {
        let from = &dk[j * dim_qk..(j + 1) * dim_qk];
        store_scaled(tensors.dk, [key, kv_head], T::from_f32(call.softmax.scale), from);
        store_scaled(tensors.dv, [key, kv_head], T::ONE, &dv[j * dim_v..(j + 1) * dim_v]);
    }
}

fn backward_tile<T: Real>(
    call: &AttentionCall,
    segment: &Segment,
    keys: &[usize],
    kv_tile: usize,
    (p_format, ds_format): (Format, Format),
    (head, kv_head): (usize, usize),
    rows: Range<usize>,
    dk: &mut [T],
    dv: &mut [T],
    tensors: &mut Backward<'_, T>,
) {
    let (dim_qk, dim_v) = (tensors.k.shape()[2], tensors.v.shape()[2]);
    let mut dq = vec![T::ZERO; rows.len() * dim_qk];
    let rowsums: Vec<T> = rows
        .clone()
        .map(|i| {
            let row = segment.q.row(i);
            dot(tensors.dout.lane(row, head), tensors.out.lane(row, head))
        })
        .collect();
    let (mut scores, mut dp) = (vec![T::ZERO; kv_tile], vec![T::ZERO; kv_tile]);
    for columns in key_tiles(segment, &rows, kv_tile) {
        let k = transposed(tensors.k, &keys[columns.clone()], kv_head);
        let v = transposed(tensors.v, &keys[columns.clone()], kv_head);
        for (local, i) in rows.clone().enumerate() {
            let row = segment.q.row(i);
            let (q, dout) = (tensors.q.lane(row, head), tensors.dout.lane(row, head));
            let lse = tensors.lse.lane(head, row)[0];
            products(q, &k, &mut scores[..columns.len()]);
            products(dout, &v, &mut dp[..columns.len()]);
            for column in clip(segment.visible(i), &columns) {
                let score = logit(call, scores[column]);
                let weight = (score - lse).exp();
                let derivative = cap_derivative(call, score);
                let ds = (weight * (dp[column] - rowsums[local]) * derivative).round(ds_format);
                let j = columns.start + column;
                let to = &mut dq[local * dim_qk..(local + 1) * dim_qk];
                add_scaled(to, ds, tensors.k.lane(keys[j], kv_head));
                add_scaled(&mut dk[j * dim_qk..(j + 1) * dim_qk], ds, q);
                add_scaled(&mut dv[j * dim_v..(j + 1) * dim_v], weight.round(p_format), dout);
            }
        }
    }
    for (local, i) in rows.enumerate() {
        let row = segment.q.row(i);
        let from = &dq[local * dim_qk..(local + 1) * dim_qk];
        store_scaled(tensors.dq, [row, head], T::from_f32(call.softmax.scale), from);
        let lse = tensors.lse.lane(head, row)[0];
        if let Some(dsink) = tensors.dsink.values_mut().get_mut(head).filter(|_| lse != T::NEG_INFINITY) {
            *dsink -= (tensors.sink[head] - lse).exp() * rowsums[local];
        }
    }
}

/// The tensor row of each local key.
fn key_rows(segment: &Segment) -> Vec<usize> {
    segment.kv.iter().flat_map(seamproof_oracle::Run::real_rows).collect()
}

fn tiles_of(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size.max(1)).map(move |start| start..end.min(start + size.max(1)))
}

/// Tiles of keys, cut at multiples of `size`, that some query of `rows` sees.
fn key_tiles(segment: &Segment, rows: &Range<usize>, size: usize) -> Vec<Range<usize>> {
    let seen: Vec<Range<usize>> =
        rows.clone().map(|i| segment.visible(i)).filter(|keys| !keys.is_empty()).collect();
    let first = seen.iter().map(|keys| keys.start).min().unwrap_or(0);
    let end = seen.iter().map(|keys| keys.end).max().unwrap_or(0);
    tiles_of(0..segment.keys(), size).filter(|tile| tile.start < end && first < tile.end).collect()
}

/// `keys` as columns of the tile `columns`.
fn clip(keys: Range<usize>, columns: &Range<usize>) -> Range<usize> {
    let place = |key: usize| key.clamp(columns.start, columns.end) - columns.start;
    place(keys.start)..place(keys.end)
}

/// `[dim][rows]`: the given rows of one head with the lane outermost, so that products run along keys.
fn transposed<T: Real>(tensor: &Tensor<T>, rows: &[usize], head: usize) -> Vec<T> {
    let dim = tensor.shape()[2];
    let mut columns = vec![T::ZERO; dim * rows.len()];
    for (j, &row) in rows.iter().enumerate() {
        for (c, &value) in tensor.lane(row, head).iter().enumerate() {
            columns[c * rows.len() + j] = value;
        }
    }
    columns
}

/// `to[j] = Σ_c a[c] · b[c][j]`, summed in order of c.
fn products<T: Real>(a: &[T], b: &[T], to: &mut [T]) {
    to.fill(T::ZERO);
    for (a, b) in a.iter().zip(b.chunks_exact(to.len())) {
        add_scaled(to, *a, b);
    }
}

fn add_scaled<T: Real>(to: &mut [T], factor: T, from: &[T]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * *from;
    }
}

fn store_scaled<T: Real>(to: &mut Tensor<T>, [row, head]: [usize; 2], factor: T, from: &[T]) {
    let format = to.format();
    for (to, from) in to.lane_mut(row, head).iter_mut().zip(from) {
        *to = (factor * *from).round(format);
    }
}

fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).fold(T::ZERO, |sum, (a, b)| sum + *a * *b)
}

fn logit<T: Real>(call: &AttentionCall, product: T) -> T {
    let scaled = T::from_f32(call.softmax.scale) * product;
    call.softmax.softcap.map(T::from_f32).map_or(scaled, |cap| cap * (scaled / cap).tanh())
}

fn cap_derivative<T: Real>(call: &AttentionCall, logit: T) -> T {
    call.softmax.softcap.map(T::from_f32).map_or(T::ONE, |cap| T::ONE - (logit / cap) * (logit / cap))
}

fn sink<T: Real>(kind: Sink, learnable: &[T], head: usize) -> Option<T> {
    match kind {
        Sink::None => None,
        Sink::OffByOne => Some(T::ZERO),
        Sink::Learnable => learnable.get(head).copied(),
    }
}
