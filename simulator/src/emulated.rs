//! A FlashAttention-style tiled attention kernel on the CPU, with the roundings of the real ones.
//!
//! Inputs in a narrow format, products and sums in f32 one after the other, an online softmax over tiles of keys,
//! P rounded before the product with the values; the backward recomputes P from the saved LSE, takes
//! `D = rowsum(dout · out)` from the stored out, and rounds dS. Rows are addressed through runs alone (offset, step,
//! real length, span): padding rows are never read, and are zeroed or left as the call says. It is the CPU twin that
//! production kernels are held to, and itself held to the oracle; it shares no code with it.

use std::ops::Range;

use seamproof_oracle::{Format, Sink};

use crate::{AttentionCall, RowPolicy, Segment, Tensor};

/// Tile sizes; parameters, so that tile edges are hit with few tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Query rows of a tile; at least 1.
    pub q: usize,
    /// Keys of a tile; at least 1.
    pub kv: usize,
}

/// Tensors of a forward launch. q, out `[rows, heads, dim]`; lse `[heads, rows, 1]`; max_logit `[heads, 1, 1]`.
pub struct Forward<'a> {
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
    /// Learnable sink of each query head; empty otherwise.
    pub sink: &'a [f32],
    /// The output.
    pub out: &'a mut Tensor,
    /// The log-sum-exp.
    pub lse: &'a mut Tensor,
    /// The largest logit of each head.
    pub max_logit: &'a mut Tensor,
}

/// Tensors of a backward launch.
pub struct Backward<'a> {
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
    /// Learnable sink of each query head; empty otherwise.
    pub sink: &'a [f32],
    /// Gradient of the output.
    pub dout: &'a Tensor,
    /// The forward's output.
    pub out: &'a Tensor,
    /// The forward's LSE.
    pub lse: &'a Tensor,
    /// Gradient of the queries.
    pub dq: &'a mut Tensor,
    /// Gradient of the keys.
    pub dk: &'a mut Tensor,
    /// Gradient of the values.
    pub dv: &'a mut Tensor,
    /// Gradient of the learnable sink, `[heads, 1, 1]`; no heads otherwise.
    pub dsink: &'a mut Tensor,
}

/// The forward kernel. `p` is the format that weights are rounded to before the product with the values.
pub fn forward(call: &AttentionCall, tiles: Tiles, p: Format, mut tensors: Forward<'_>) {
    let heads = tensors.q.shape()[1];
    tensors.max_logit.values_mut().fill(f32::NEG_INFINITY);
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
                    tensors.out.lane_mut(row, head).fill(0.0);
                    tensors.lse.lane_mut(head, row).fill(f32::NEG_INFINITY);
                }
            }
        }
    }
}

/// Running state of one query row.
struct Online {
    max: f32,
    sum: f32,
    acc: Vec<f32>,
}

impl Online {
    /// Makes room for logits up to `max`.
    fn grow(&mut self, max: f32) {
        if max > self.max {
            let factor = libm::expf(self.max - max);
            self.sum *= factor;
            self.acc.iter_mut().for_each(|acc| *acc *= factor);
            self.max = max;
        }
    }
}

/// One tile of query rows against all keys that any of them sees.
fn forward_tile(
    call: &AttentionCall,
    segment: &Segment,
    keys: &[usize],
    kv_tile: usize,
    p: Format,
    head: usize,
    rows: Range<usize>,
    tensors: &mut Forward<'_>,
) {
    let kv_head = head / (tensors.q.shape()[1] / tensors.k.shape()[1]);
    let fresh = || Online { max: f32::NEG_INFINITY, sum: 0.0, acc: vec![0.0; tensors.v.shape()[2]] };
    let mut states: Vec<Online> = rows.clone().map(|_| fresh()).collect();
    let mut scores = vec![0.0; kv_tile];
    let mut largest = f32::NEG_INFINITY;
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
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            largest = largest.max(max);
            state.grow(max);
            for (&score, &key) in scores.iter().zip(&keys[columns.clone()][visible]) {
                let weight = libm::expf(score - state.max);
                state.sum += weight;
                add_scaled(&mut state.acc, p.round_f32(weight), tensors.v.lane(key, kv_head));
            }
        }
    }
    for (i, mut state) in rows.zip(states) {
        let row = segment.q.row(i);
        if let Some(sink) = sink(call.softmax.sink, tensors.sink, head) {
            state.grow(sink);
            state.sum += libm::expf(sink - state.max);
        }
        let sees_nothing = state.sum == 0.0;
        let inverse = if sees_nothing { 0.0 } else { 1.0 / state.sum };
        let format = tensors.out.format();
        for (out, acc) in tensors.out.lane_mut(row, head).iter_mut().zip(&state.acc) {
            *out = format.round_f32(acc * inverse);
        }
        let lse = if sees_nothing { f32::NEG_INFINITY } else { state.max + libm::logf(state.sum) };
        tensors.lse.lane_mut(head, row)[0] = lse;
    }
    let max_logit = &mut tensors.max_logit.lane_mut(head, 0)[0];
    *max_logit = max_logit.max(largest);
}

/// The backward kernel. `p` and `ds` are the formats of the rounded weights and logit gradients.
pub fn backward(call: &AttentionCall, tiles: Tiles, p: Format, ds: Format, mut tensors: Backward<'_>) {
    let (heads, kv_heads) = (tensors.q.shape()[1], tensors.k.shape()[1]);
    tensors.dsink.values_mut().fill(0.0);
    for segment in &call.segments {
        let keys = key_rows(segment);
        for kv_head in 0..kv_heads {
            backward_segment(call, segment, &keys, tiles, (p, ds), kv_head, &mut tensors);
        }
        if call.policy == RowPolicy::Overwrite {
            for row in segment.q.padding_rows() {
                (0..heads).for_each(|head| tensors.dq.lane_mut(row, head).fill(0.0));
            }
            for row in segment.kv.iter().flat_map(seamproof_oracle::Run::padding_rows) {
                for head in 0..kv_heads {
                    tensors.dk.lane_mut(row, head).fill(0.0);
                    tensors.dv.lane_mut(row, head).fill(0.0);
                }
            }
        }
    }
}

/// All query heads of one KV head: dk and dv are summed over them in f32 and rounded once.
fn backward_segment(
    call: &AttentionCall,
    segment: &Segment,
    keys: &[usize],
    tiles: Tiles,
    formats: (Format, Format),
    kv_head: usize,
    tensors: &mut Backward<'_>,
) {
    let group = tensors.q.shape()[1] / tensors.k.shape()[1];
    let (dim_qk, dim_v) = (tensors.k.shape()[2], tensors.v.shape()[2]);
    let mut dk = vec![0.0; keys.len() * dim_qk];
    let mut dv = vec![0.0; keys.len() * dim_v];
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
        store_scaled(tensors.dk, [key, kv_head], call.softmax.scale, from);
        store_scaled(tensors.dv, [key, kv_head], 1.0, &dv[j * dim_v..(j + 1) * dim_v]);
    }
}

fn backward_tile(
    call: &AttentionCall,
    segment: &Segment,
    keys: &[usize],
    kv_tile: usize,
    (p_format, ds_format): (Format, Format),
    (head, kv_head): (usize, usize),
    rows: Range<usize>,
    dk: &mut [f32],
    dv: &mut [f32],
    tensors: &mut Backward<'_>,
) {
    let (dim_qk, dim_v) = (tensors.k.shape()[2], tensors.v.shape()[2]);
    let mut dq = vec![0.0; rows.len() * dim_qk];
    let rowsums: Vec<f32> = rows
        .clone()
        .map(|i| {
            let row = segment.q.row(i);
            dot(tensors.dout.lane(row, head), tensors.out.lane(row, head))
        })
        .collect();
    let (mut scores, mut dp) = (vec![0.0; kv_tile], vec![0.0; kv_tile]);
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
                let weight = libm::expf(score - lse);
                let derivative = cap_derivative(call, score);
                let ds = ds_format.round_f32(weight * (dp[column] - rowsums[local]) * derivative);
                let j = columns.start + column;
                let to = &mut dq[local * dim_qk..(local + 1) * dim_qk];
                add_scaled(to, ds, tensors.k.lane(keys[j], kv_head));
                add_scaled(&mut dk[j * dim_qk..(j + 1) * dim_qk], ds, q);
                add_scaled(&mut dv[j * dim_v..(j + 1) * dim_v], p_format.round_f32(weight), dout);
            }
        }
    }
    for (local, i) in rows.enumerate() {
        let row = segment.q.row(i);
        let from = &dq[local * dim_qk..(local + 1) * dim_qk];
        store_scaled(tensors.dq, [row, head], call.softmax.scale, from);
        let lse = tensors.lse.lane(head, row)[0];
        if let Some(dsink) = tensors.dsink.values_mut().get_mut(head).filter(|_| lse != f32::NEG_INFINITY) {
            *dsink -= libm::expf(tensors.sink[head] - lse) * rowsums[local];
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
fn transposed(tensor: &Tensor, rows: &[usize], head: usize) -> Vec<f32> {
    let dim = tensor.shape()[2];
    let mut columns = vec![0.0; dim * rows.len()];
    for (j, &row) in rows.iter().enumerate() {
        for (c, &value) in tensor.lane(row, head).iter().enumerate() {
            columns[c * rows.len() + j] = value;
        }
    }
    columns
}

/// `to[j] = Σ_c a[c] · b[c][j]`, summed in order of c.
fn products(a: &[f32], b: &[f32], to: &mut [f32]) {
    to.fill(0.0);
    for (a, b) in a.iter().zip(b.chunks_exact(to.len())) {
        add_scaled(to, *a, b);
    }
}

fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

fn store_scaled(to: &mut Tensor, [row, head]: [usize; 2], factor: f32, from: &[f32]) {
    let format = to.format();
    for (to, from) in to.lane_mut(row, head).iter_mut().zip(from) {
        *to = format.round_f32(factor * from);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}

fn logit(call: &AttentionCall, product: f32) -> f32 {
    let scaled = call.softmax.scale * product;
    call.softmax.softcap.map_or(scaled, |cap| cap * libm::tanhf(scaled / cap))
}

fn cap_derivative(call: &AttentionCall, logit: f32) -> f32 {
    call.softmax.softcap.map_or(1.0, |cap| 1.0 - (logit / cap) * (logit / cap))
}

fn sink(kind: Sink, learnable: &[f32], head: usize) -> Option<f32> {
    match kind {
        Sink::None => None,
        Sink::OffByOne => Some(0.0),
        Sink::Learnable => learnable.get(head).copied(),
    }
}
