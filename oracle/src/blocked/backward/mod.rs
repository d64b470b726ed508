//! The backward pass of one group: a sequence, a KV head and that head's query heads.
//!
//! A group's pieces are computed by themselves, tile by tile ([`tiles`]), and added in order ([`gradients`]). Errors of a
//! tile become those of its sums, or those that a replay leaves ([`strips`]). Sums of a matrix unit in FP8 are replayed
//! launch by launch ([`launches`], [`unit`]).

mod gradients;
mod launches;
mod strips;
mod tiles;
pub(super) mod unit;

use ndarray::Array2;

use super::pieces::{Group, Keys, QueryRange, Sides, lanes_hash, map};
use crate::envelope::dither::copies_of;
use crate::envelope::{Model, NumericProfile};
use crate::{InputViews, SavedErrors, SavedViews, TensorName, amax};
use gradients::{Errors, GroupBounds, GroupGradients, bounds};
use tiles::Context;
use unit::{Followed, GroupCodes};

/// `Σ p_sink · D` of one head, with the quantities that its bound needs.
#[derive(Clone, Debug, Default)]
pub(super) struct SinkSum {
    pub(super) value: f64,
    pub(super) terms: f64,
    pub(super) errors: f64,
    pub(super) rows: usize,
}

impl SinkSum {
    pub(super) fn add(&mut self, other: &SinkSum) {
        self.value += other.value;
        self.terms += other.terms;
        self.errors += other.errors;
        self.rows += other.rows;
    }
}

/// The results of a group: gradients, their bounds, and each piece's sum for dsink with its head.
pub(super) struct GroupBackward {
    pub(super) exact: GroupGradients,
    pub(super) bound: Option<GroupBounds>,
    pub(super) sinks: Vec<(usize, SinkSum)>,
}

/// The most pieces whose gradients are held before they are added. Each holds the gradients of all keys that it sees.
const HELD: usize = 16;

/// What the gradients of all groups are made of.
#[derive(Clone, Copy)]
pub(super) struct Backward<'a, 'i, 's> {
    pub(super) inputs: &'a InputViews<'i>,
    pub(super) saved: &'a SavedViews<'s>,
    pub(super) errors: SavedErrors<'a>,
    pub(super) model: Option<&'a Model>,
    /// The profile whose roundings are replayed. The bounds are then the errors that are left.
    pub(super) replay: Option<&'a NumericProfile>,
    /// The tiles that are followed, where those of a matrix unit are replayed.
    pub(super) followed: Option<Followed<'a>>,
}

impl<'a, 'i, 's> Backward<'a, 'i, 's> {
    /// Returns the gradients of exact arithmetic from saved values without errors.
    pub(super) fn new(inputs: &'a InputViews<'i>, saved: &'a SavedViews<'s>) -> Backward<'a, 'i, 's> {
        let errors = SavedErrors::default();
        Backward { inputs, saved, errors, model: None, replay: None, followed: None }
    }

    /// Returns the range of the largest magnitude of dS in a group.
    pub(super) fn largest_gradient(&self, group: &Group<'_>, sides: Sides) -> amax::Range {
        let Some(model) = self.model else { return amax::Range::default() };
        let keys = &Keys::new(*group, self.inputs, self.model);
        let (copies, query_sums, ds_most) = (&[][..], &[][..], Vec::new());
        let context =
            Context { of: self, problem: group.problem, group, sides, keys, copies, query_sums, ds_most };
        let pieces = group.pieces();
        pieces
            .iter()
            .map(|piece| context.largest_gradient(model, piece))
            .fold(amax::Range::default(), amax::Range::or)
    }

    /// Returns a group's gradients. Pieces are computed by themselves and then added in order.
    pub(super) fn group(&self, group: &Group<'_>, sides: Sides, parallel: bool) -> GroupBackward {
        let problem = group.problem;
        // Nothing is dithered where roundings are replayed.
        let dithers = self.model.filter(|_| self.replay.is_none());
        let mut context = Context {
            of: self,
            problem,
            group,
            sides,
            keys: &Keys::new(*group, self.inputs, dithers),
            copies: &if dithers.is_some() && sides.kv {
                query_copies(self.inputs, group)
            } else {
                Vec::new()
            },
            query_sums: &self.model.map_or(Vec::new(), |model| query_sums(model, group, sides)),
            ds_most: Vec::new(),
        };
        let needs_most =
            |model: &&Model| model.scales_tiles() && self.errors.ds_most.is_none() && self.followed.is_none();
        if let Some(model) = self.model.filter(needs_most) {
            context.ds_most = context.largest_gradients(model, parallel);
        }
        let followed = self.followed.zip(self.model);
        let followed =
            followed.map(|(followed, model)| (followed, GroupCodes::of(self.inputs, group, model)));
        let pieces = match &followed {
            Some(_) => group.heads().map(|head| QueryRange { head, rows: 0..group.q.len() }).collect(),
            None => group.pieces(),
        };
        let of_piece = |piece: &QueryRange| match &followed {
            Some((followed, codes)) => context.followed(piece, (*followed, codes)),
            None => context.piece(piece),
        };
        let rows = if sides.kv { group.kv.len() } else { 0 };
        let empty = || GroupGradients {
            dq: Vec::new(),
            dk: Array2::zeros((rows, problem.dims.qk)),
            dv: Array2::zeros((rows, problem.dims.v)),
        };
        let (mut exact, mut errors) =
            (empty(), self.model.map(|_| Errors { linear: empty(), dithered: None }));
        let mut sinks = Vec::new();
        for held in pieces.chunks(HELD) {
            let results = map(parallel, held.to_vec(), |piece| (of_piece(&piece), piece));
            for ((from, from_errors, sink), piece) in results {
                sinks.push((piece.head, sink));
                exact.add(&piece, from);
                if let (Some(to), Some(from)) = (&mut errors, from_errors) {
                    to.add(&piece, from);
                }
            }
        }
        let bound = self.model.zip(errors).map(|(model, errors)| bounds(group, model, &exact, errors));
        GroupBackward { exact, bound, sinks }
    }
}

/// Returns the number of copies of each query of a group, head after head.
fn query_copies(inputs: &InputViews<'_>, group: &Group<'_>) -> Vec<f64> {
    let of_head = |head: usize| {
        (0..group.q.len()).map(move |query| lanes_hash(inputs, TensorName::Q, group, query, head))
    };
    copies_of(group.heads().flat_map(of_head))
}

/// Returns `g` of the sums over queries, for each key of a group; none where these sums are not wanted.
fn query_sums(model: &Model, group: &Group<'_>, sides: Sides) -> Vec<f64> {
    let keys = if sides.kv { 0..group.kv.len() } else { 0..0 };
    keys.map(|key| model.query_sum(group.queries_of(key))).collect()
}
