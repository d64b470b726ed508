//! The names that TransformerEngine (TE) and FlashAttention (FA) have for a [`Mask`], and the translation both ways.
//!
//! A *window pair* is `(left, right)` in both libraries, inclusive as in [`Mask`], with −1 for an unbounded side.
//! *Alignment* is the place of the diagonal. It means nothing where query and key lengths are equal, or where neither
//! side is bounded.
//!
//! TE's arguments are a kind, an optional pair and an optional flag `bottom_right_diagonal`:
//!
//! | kind | alignment | pairs | no pair |
//! |---|---|---|---|
//! | `no_mask`, `padding` | the flag: bottom-right by default, top-left where it is false | (−1, −1), (l, r) | (−1, −1) |
//! | `causal`, `padding_causal` | top-left, whatever the flag | (−1, 0), (l, 0) | (−1, 0) |
//! | `causal_bottom_right`, `padding_causal_bottom_right` | bottom-right, whatever the flag | (−1, 0), (l, 0) | (−1, 0) |
//! | `arbitrary` | refused: arbitrary masks are out of scope | | |
//!
//! In this table l, r ≥ 0. TE repairs some other pairs, and this module repairs them alike. A causal kind turns
//! (−1, −1) into (−1, 0), and (l, anything) into (l, 0). `no_mask` and `padding` turn (−1, 0) into (−1, −1). Any other
//! negative number is refused. The `padding` kinds hide the rows past each sequence's real lengths, and align by real
//! lengths. The other kinds know one length for the whole batch, and are right for a dense batch only
//! ([`Lengths::dense`]). Under context parallelism TE does not pass the flag on, and aligns top-left by default. This
//! module describes TE without context parallelism.
//!
//! FA's arguments are a flag and a pair. FA always aligns to the bottom right:
//!
//! | causal | meaning of (left, right) |
//! |---|---|
//! | false | as it stands; either side may be −1 |
//! | true | (left, 0), whatever `right` is |
//!
//! A mask that a library cannot express is refused: in TE a window that is bounded on one side and not causal, in FA a
//! top-left diagonal for sequences whose query and key lengths differ, in both documents, chunks, a prefix and sink
//! tokens.

use std::fmt;
use std::str::FromStr;

use crate::{Alignment, Mask, Sequence};

/// A TE mask kind, `attn_mask_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TeKind {
    /// Everything is visible.
    NoMask,
    /// Every real key is visible.
    Padding,
    /// A causal mask, top-left.
    Causal,
    /// A causal mask over real keys, top-left.
    PaddingCausal,
    /// A causal mask, bottom-right.
    CausalBottomRight,
    /// A causal mask over real keys, bottom-right by real lengths.
    PaddingCausalBottomRight,
}

impl TeKind {
    /// Every kind.
    pub const ALL: [TeKind; 6] = [
        TeKind::NoMask,
        TeKind::Padding,
        TeKind::Causal,
        TeKind::PaddingCausal,
        TeKind::CausalBottomRight,
        TeKind::PaddingCausalBottomRight,
    ];

    /// Returns TE's name of the kind.
    pub fn name(self) -> &'static str {
        match self {
            TeKind::NoMask => "no_mask",
            TeKind::Padding => "padding",
            TeKind::Causal => "causal",
            TeKind::PaddingCausal => "padding_causal",
            TeKind::CausalBottomRight => "causal_bottom_right",
            TeKind::PaddingCausalBottomRight => "padding_causal_bottom_right",
        }
    }

    /// Returns the alignment of a causal kind. The other kinds take theirs from the flag.
    fn causal_alignment(self) -> Option<Alignment> {
        match self {
            TeKind::NoMask | TeKind::Padding => None,
            TeKind::Causal | TeKind::PaddingCausal => Some(Alignment::TopLeft),
            TeKind::CausalBottomRight | TeKind::PaddingCausalBottomRight => Some(Alignment::BottomRight),
        }
    }
}

impl fmt::Display for TeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TeKind {
    type Err = NameError;

    /// Reads TE's name. As in TE, a comma stands for `_`, and `causal,padding` for `padding_causal`.
    fn from_str(text: &str) -> Result<TeKind, NameError> {
        let name = match text.replace(',', "_") {
            name if name == "causal_padding" => "padding_causal".to_owned(),
            name if name == "arbitrary" => return Err(NameError::Arbitrary),
            name => name,
        };
        TeKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| NameError::UnknownKind(text.chars().take(40).collect()))
    }
}

/// A mask as TE's arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TeMask {
    /// The argument `attn_mask_type`.
    pub kind: TeKind,
    /// The argument `window_size`; absent means the kind's default.
    pub window: Option<(i32, i32)>,
    /// The argument `bottom_right_diagonal`; absent means the default, and a causal kind ignores the flag.
    pub bottom_right_diagonal: Option<bool>,
}

/// A mask as FA's arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FaMask {
    /// The argument `causal`.
    pub causal: bool,
    /// The argument `window_size`.
    pub window: (i32, i32),
}

/// Two facts about the sequences that share a mask, on which the mask's name depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lengths {
    /// Whether each sequence has as many real keys as real queries. Both alignments then mean the same.
    pub square: bool,
    /// Whether all sequences have the same lengths and own no padding. A batch of tensors then needs no lengths at all.
    pub dense: bool,
}

impl Lengths {
    /// Returns the facts about these sequences.
    pub fn of(sequences: &[Sequence]) -> Lengths {
        let lengths = |s: &Sequence| (s.q.len, s.kv.len);
        let padded = |s: &Sequence| (s.q.span, s.kv.span) != lengths(s);
        Lengths {
            square: sequences.iter().all(|s| s.q.len == s.kv.len),
            dense: sequences.iter().all(|s| !padded(s) && lengths(s) == lengths(&sequences[0])),
        }
    }
}

/// The reason why a name makes no [`Mask`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// A kind that TE does not have.
    #[error(
        "'{0}' is no TransformerEngine mask; use no_mask, padding, causal, padding_causal, causal_bottom_right or \
         padding_causal_bottom_right"
    )]
    UnknownKind(String),
    /// A mask given as a tensor.
    #[error("the mask 'arbitrary' is outside the scope; say it as a window")]
    Arbitrary,
    /// A window pair that TE refuses.
    #[error("window ({left}, {right}) does not go with the mask '{kind}'; use {rule}")]
    TeWindow {
        /// The kind.
        kind: TeKind,
        /// The left side.
        left: i32,
        /// The right side.
        right: i32,
        /// The windows that go with the kind.
        rule: &'static str,
    },
    /// A window pair with a number below −1.
    #[error("window ({left}, {right}) has a side below -1; use -1 for an unbounded side")]
    FaWindow {
        /// The left side.
        left: i32,
        /// The right side.
        right: i32,
    },
}

/// The reason why a [`Mask`] has no name in a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NamelessError {
    /// A window that is bounded on one side and not causal, which TE cannot express.
    #[error("TransformerEngine has no window that is bounded on one side only, unless its right side is 0")]
    OneSided,
    /// A top-left diagonal, which FA cannot express.
    #[error(
        "FlashAttention's diagonal is bottom-right, and a top-left one differs where query and key lengths do"
    )]
    TopLeft,
    /// Blocks, a prefix or sink tokens, which neither library has an argument for.
    #[error(
        "neither library has an argument for documents, chunks, a prefix or sink tokens; give each block as a sequence"
    )]
    NoBand,
    /// A side that does not fit the library's integer.
    #[error("a window side of {0} is more than the form's 32-bit integer holds; leave it unbounded")]
    TooWide(u32),
}

impl TeMask {
    /// Returns the mask that TE's arguments name.
    pub fn to_mask(self) -> Result<Mask, NameError> {
        let flag = match self.bottom_right_diagonal {
            None | Some(true) => Alignment::BottomRight,
            Some(false) => Alignment::TopLeft,
        };
        Ok(mask_of(self.repaired_window()?, self.kind.causal_alignment().unwrap_or(flag)))
    }

    /// Returns TE's arguments for this mask, in the shortest form.
    pub fn from_mask(mask: &Mask, lengths: Lengths) -> Result<TeMask, NamelessError> {
        check_band(mask)?;
        let top_left = mask.align == Alignment::TopLeft || lengths.square;
        let (kind, window, flag) = match (mask.left, mask.right) {
            (None, None) => (TeKind::NoMask, None, None),
            (left, Some(0)) => {
                let kind = if top_left { TeKind::Causal } else { TeKind::CausalBottomRight };
                (kind, left.map(|left| (left, 0)), None)
            }
            (Some(left), Some(right)) => {
                let needed = mask.align == Alignment::TopLeft && !lengths.square;
                (TeKind::NoMask, Some((left, right)), needed.then_some(false))
            }
            _ => return Err(NamelessError::OneSided),
        };
        let window =
            window.map(|(left, right)| Ok((side_to(Some(left))?, side_to(Some(right))?))).transpose()?;
        let kind = if lengths.dense { kind } else { with_padding(kind) };
        Ok(TeMask { kind, window, bottom_right_diagonal: flag })
    }

    /// Returns the window after TE's defaults and repairs.
    fn repaired_window(self) -> Result<(i32, i32), NameError> {
        let causal = self.kind.causal_alignment().is_some();
        let unbounded = if causal { (-1, 0) } else { (-1, -1) };
        let (left, right) = self.window.unwrap_or(unbounded);
        match (left, right) {
            (-1, -1 | 0) => Ok(unbounded),
            (0.., _) if causal => Ok((left, 0)),
            (0.., 0..) => Ok((left, right)),
            _ => {
                let rule =
                    if causal { "(-1, 0) or (left, 0)" } else { "(-1, -1) or two sides of at least 0" };
                Err(NameError::TeWindow { kind: self.kind, left, right, rule })
            }
        }
    }
}

impl FaMask {
    /// Returns the mask that FA's arguments name.
    pub fn to_mask(self) -> Result<Mask, NameError> {
        let (left, right) = self.window;
        if left < -1 || right < -1 {
            return Err(NameError::FaWindow { left, right });
        }
        Ok(mask_of((left, if self.causal { 0 } else { right }), Alignment::BottomRight))
    }

    /// Returns FA's arguments for this mask. A mask with `right = 0` is named as causal.
    pub fn from_mask(mask: &Mask, lengths: Lengths) -> Result<FaMask, NamelessError> {
        check_band(mask)?;
        let bounded = mask.left.is_some() || mask.right.is_some();
        if bounded && mask.align == Alignment::TopLeft && !lengths.square {
            return Err(NamelessError::TopLeft);
        }
        Ok(FaMask { causal: mask.right == Some(0), window: (side_to(mask.left)?, side_to(mask.right)?) })
    }
}

fn check_band(mask: &Mask) -> Result<(), NamelessError> {
    if mask.is_band() { Ok(()) } else { Err(NamelessError::NoBand) }
}

/// Returns the mask of a checked pair. An unbounded one is [`Mask::FULL`] whatever the alignment: equal masks compare
/// equal.
fn mask_of((left, right): (i32, i32), align: Alignment) -> Mask {
    let mask = Mask::window(side_from(left), side_from(right), align);
    if mask.left.is_none() && mask.right.is_none() { Mask::FULL } else { mask }
}

/// Returns a side of a checked pair: −1 is unbounded.
fn side_from(side: i32) -> Option<u32> {
    u32::try_from(side).ok()
}

fn side_to(side: Option<u32>) -> Result<i32, NamelessError> {
    side.map_or(Ok(-1), |side| i32::try_from(side).map_err(|_| NamelessError::TooWide(side)))
}

fn with_padding(kind: TeKind) -> TeKind {
    match kind {
        TeKind::NoMask | TeKind::Padding => TeKind::Padding,
        TeKind::Causal | TeKind::PaddingCausal => TeKind::PaddingCausal,
        TeKind::CausalBottomRight | TeKind::PaddingCausalBottomRight => TeKind::PaddingCausalBottomRight,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Run;

    const FLAGS: [Option<bool>; 3] = [None, Some(false), Some(true)];

    /// Returns no pair, then every window pair from −2 to 4.
    fn windows() -> impl Iterator<Item = Option<(i32, i32)>> + Clone {
        let sides = (-2..=4).flat_map(|left| (-2..=4).map(move |right| Some((left, right))));
        std::iter::once(None).chain(sides)
    }

    /// Returns every pair of lengths up to 5.
    fn shapes() -> impl Iterator<Item = (i32, i32)> {
        (0..6).flat_map(|lq| (0..6).map(move |lk| (lq, lk)))
    }

    /// Returns all facts that can hold for a batch with a sequence of this shape.
    fn facts((lq, lk): (i32, i32)) -> impl Iterator<Item = Lengths> {
        let all = [(false, false), (false, true), (true, false), (true, true)];
        all.into_iter()
            .filter(move |(square, _)| !square || lq == lk)
            .map(|(square, dense)| Lengths { square, dense })
    }

    /// Whether TE shows key j to query i, from the text of its options; `None` where TE refuses the window.
    fn te_sees(te: &TeMask, (i, j): (i32, i32), (lq, lk): (i32, i32)) -> Option<bool> {
        let name = te.kind.name();
        let causal = name.contains("causal");
        let (left, right) = match te.window {
            None if causal => (-1, 0),
            None => (-1, -1),
            Some((-1, -1)) if causal => (-1, 0),
            Some((left, right)) if causal && left >= 0 && right != 0 => (left, 0),
            Some((-1, 0)) if !causal => (-1, -1),
            Some(pair) => pair,
        };
        let legal = (left >= 0 && right >= 0) || (left, right) == if causal { (-1, 0) } else { (-1, -1) };
        let bottom_right = match name {
            "causal" | "padding_causal" => false,
            "causal_bottom_right" | "padding_causal_bottom_right" => true,
            _ => te.bottom_right_diagonal.unwrap_or(true),
        };
        let delta = if bottom_right { lk - lq } else { 0 };
        let above = left == -1 || j >= i + delta - left;
        let below = right == -1 || j <= i + delta + right;
        legal.then_some(above && below)
    }

    /// Whether FA shows key j to query i, from the text of its options; `None` where a side is below −1.
    fn fa_sees(fa: &FaMask, (i, j): (i32, i32), (lq, lk): (i32, i32)) -> Option<bool> {
        let (left, right) = (fa.window.0, if fa.causal { 0 } else { fa.window.1 });
        let above = left == -1 || i + lk - lq - left <= j;
        let below = right == -1 || j <= i + lk - lq + right;
        (fa.window.0 >= -1 && fa.window.1 >= -1).then_some(above && below)
    }

    /// Returns the pairs of one shape that a rule shows, in order.
    fn pairs((lq, lk): (i32, i32), sees: impl Fn(i32, i32) -> bool) -> Vec<(i32, i32)> {
        (0..lq).flat_map(|i| (0..lk).map(move |j| (i, j))).filter(|&(i, j)| sees(i, j)).collect()
    }

    fn mask_pairs(mask: &Mask, shape: (i32, i32)) -> Vec<(i32, i32)> {
        let (lq, lk) = (shape.0 as usize, shape.1 as usize);
        pairs(shape, |i, j| mask.visible(i as usize, lq, lk).contains(&(j as usize)))
    }

    fn te_masks() -> impl Iterator<Item = TeMask> {
        let flagged = windows().flat_map(|window| FLAGS.map(|flag| (window, flag)));
        TeKind::ALL.into_iter().flat_map(move |kind| {
            flagged.clone().map(move |(window, flag)| TeMask { kind, window, bottom_right_diagonal: flag })
        })
    }

    fn fa_masks() -> impl Iterator<Item = FaMask> {
        windows().flatten().flat_map(|window| [false, true].map(|causal| FaMask { causal, window }))
    }

    fn masks() -> impl Iterator<Item = Mask> {
        let sides = [None, Some(0), Some(1), Some(3), Some(i32::MAX as u32)];
        let both = sides.into_iter().flat_map(move |left| sides.map(|right| (left, right)));
        both.flat_map(|(left, right)| {
            [Alignment::TopLeft, Alignment::BottomRight].map(|align| Mask::window(left, right, align))
        })
    }

    #[test]
    fn te_names_mean_what_te_says() {
        for te in te_masks() {
            for shape in shapes() {
                match te.to_mask() {
                    Ok(mask) => {
                        let expected = pairs(shape, |i, j| te_sees(&te, (i, j), shape) == Some(true));
                        assert_eq!(mask_pairs(&mask, shape), expected, "{te:?} {shape:?}");
                    }
                    Err(error) => assert_eq!(te_sees(&te, (0, 0), shape), None, "{te:?} {error}"),
                }
            }
        }
    }

    #[test]
    fn fa_options_mean_what_fa_says() {
        for fa in fa_masks() {
            for shape in shapes() {
                match fa.to_mask() {
                    Ok(mask) => {
                        let expected = pairs(shape, |i, j| fa_sees(&fa, (i, j), shape) == Some(true));
                        assert_eq!(mask_pairs(&mask, shape), expected, "{fa:?} {shape:?}");
                    }
                    Err(error) => assert_eq!(fa_sees(&fa, (0, 0), shape), None, "{fa:?} {error}"),
                }
            }
        }
    }

    #[test]
    fn a_mask_told_and_read_back_shows_the_same() {
        for (mask, shape) in masks().flat_map(|mask| shapes().map(move |shape| (mask, shape))) {
            let one_sided = mask.left.is_some() != mask.right.is_some() && mask.right != Some(0);
            let bounded = mask.left.is_some() || mask.right.is_some();
            for lengths in facts(shape) {
                let same = |back: Mask| {
                    assert_eq!(
                        mask_pairs(&back, shape),
                        mask_pairs(&mask, shape),
                        "{mask:?} {shape:?} {lengths:?}"
                    );
                    // Where the alignment matters the mask itself comes back.
                    assert!(lengths.square || !bounded || back == mask, "{mask:?} {back:?}");
                };
                match TeMask::from_mask(&mask, lengths) {
                    Ok(te) => {
                        assert!(!one_sided, "{mask:?}");
                        assert_eq!(te.kind.name().contains("padding"), !lengths.dense);
                        same(te.to_mask().unwrap());
                    }
                    Err(error) => {
                        assert!(one_sided, "{mask:?}");
                        assert_eq!(error, NamelessError::OneSided);
                    }
                }
                let top_left = bounded && mask.align == Alignment::TopLeft && !lengths.square;
                match FaMask::from_mask(&mask, lengths) {
                    Ok(fa) => {
                        assert!(!top_left, "{mask:?}");
                        same(fa.to_mask().unwrap());
                    }
                    Err(error) => {
                        assert!(top_left, "{mask:?}");
                        assert_eq!(error, NamelessError::TopLeft);
                    }
                }
            }
        }
    }

    #[test]
    fn a_name_read_and_told_again_is_the_canonical_one() {
        let lengths = Lengths { square: false, dense: false };
        for te in te_masks().filter(|te| te.to_mask().is_ok()) {
            let mask = te.to_mask().unwrap();
            let canonical = TeMask::from_mask(&mask, lengths).unwrap();
            assert_eq!(canonical.to_mask(), Ok(mask), "{te:?}");
            assert_eq!(TeMask::from_mask(&canonical.to_mask().unwrap(), lengths), Ok(canonical), "{te:?}");
        }
        for fa in fa_masks().filter(|fa| fa.to_mask().is_ok()) {
            let mask = fa.to_mask().unwrap();
            let canonical = FaMask::from_mask(&mask, lengths).unwrap();
            assert_eq!(canonical.to_mask(), Ok(mask), "{fa:?}");
            assert_eq!(FaMask::from_mask(&canonical.to_mask().unwrap(), lengths), Ok(canonical), "{fa:?}");
        }
    }

    #[test]
    fn canonical_names_are_short() {
        let ragged = Lengths { square: false, dense: false };
        let dense = Lengths { square: true, dense: true };
        let plain = |kind| Ok(TeMask { kind, window: None, bottom_right_diagonal: None });
        assert_eq!(TeMask::from_mask(&Mask::FULL, dense), plain(TeKind::NoMask));
        assert_eq!(TeMask::from_mask(&Mask::CAUSAL, ragged), plain(TeKind::PaddingCausal));
        let bottom_right = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
        assert_eq!(TeMask::from_mask(&bottom_right, ragged), plain(TeKind::PaddingCausalBottomRight));
        assert_eq!(TeMask::from_mask(&bottom_right, dense), plain(TeKind::Causal));
        let window = Mask { left: Some(2), right: Some(3), align: Alignment::TopLeft, ..Mask::FULL };
        let flagged =
            TeMask { kind: TeKind::Padding, window: Some((2, 3)), bottom_right_diagonal: Some(false) };
        assert_eq!(TeMask::from_mask(&window, ragged), Ok(flagged));
        assert_eq!(FaMask::from_mask(&Mask::CAUSAL, dense), Ok(FaMask { causal: true, window: (-1, 0) }));
        let wide = Mask { left: Some(1 << 31), ..bottom_right };
        assert_eq!(TeMask::from_mask(&wide, ragged), Err(NamelessError::TooWide(1 << 31)));
        assert_eq!(FaMask::from_mask(&wide, ragged), Err(NamelessError::TooWide(1 << 31)));
    }

    #[test]
    fn kinds_are_written_and_read_back() {
        for kind in TeKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        for text in ["causal,padding", "padding,causal", "causal_padding"] {
            assert_eq!(text.parse(), Ok(TeKind::PaddingCausal));
        }
        assert_eq!("arbitrary".parse::<TeKind>(), Err(NameError::Arbitrary));
        for text in ["", "Causal", "padding_no_mask", "causal_top_left"] {
            assert_eq!(text.parse::<TeKind>(), Err(NameError::UnknownKind(text.to_owned())));
        }
    }

    #[test]
    fn lengths_see_padding_and_differences() {
        let sequence = |q: (usize, usize), kv: (usize, usize)| Sequence {
            id: 0,
            q: Run::packed(0, q.0, q.1),
            kv: Run::packed(0, kv.0, kv.1),
        };
        let of = |sequences: &[Sequence]| {
            let lengths = Lengths::of(sequences);
            (lengths.square, lengths.dense)
        };
        let same = sequence((3, 3), (3, 3));
        assert_eq!(of(&[]), (true, true));
        assert_eq!(of(&[same, same]), (true, true));
        assert_eq!(of(&[same, sequence((4, 4), (4, 4))]), (true, false));
        assert_eq!(of(&[sequence((3, 4), (3, 3))]), (true, false));
        assert_eq!(of(&[sequence((1, 1), (5, 5))]), (false, true));
    }
}
