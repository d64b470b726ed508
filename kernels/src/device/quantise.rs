//! Quantising on the device: all ranks of a group, one after the other on one GPU.
//!
//! Ranks hand each other nothing but magnitudes. Each has memory of its own for them, so that one which missed another's
//! would show.

use std::ops::Range;

use ndarray::Array3;
use seamproof_oracle::groups::Groups;
use seamproof_oracle::quantise::{Delayed, Quantisation};
use seamproof_oracle::{Format, Scaling, TensorName};
use seamproof_simulator::quantiser::{RankCodes, RankQuantised, RankValues};

use super::stretch::{Banded, Stretch};
use super::workspace::Workspace;
use crate::codec::{element_bytes, store};
use crate::error::KernelError;
use crate::memory::Area;
use crate::quantise::{DeviceHistory, DeviceRecipe, GroupTable, QuantiseKernels, row_groups};
use crate::turned::TurnedShape;
use crate::view::View;

/// The copy that codes are read back from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodesFrom {
    /// The copy in rows.
    Rows,
    /// The turned copy, where head dims and groups of lanes are multiples of 16; else the copy in rows.
    Turned,
    /// The copy in rows that is written beside a turned one; where there is none, the copy in rows.
    Beside,
}

/// Scales in a rank's memory. Tensors that share a scale have one of these.
struct Factors {
    amax: Banded,
    scale: Banded,
    descale: Banded,
}

impl Factors {
    fn areas<'a>(&self, memory: Area<'a>) -> Result<[Area<'a>; 3], KernelError> {
        let area = |place: &Banded| memory.part(place.inner.clone());
        Ok([area(&self.amax)?, area(&self.scale)?, area(&self.descale)?])
    }
}

/// Returns the recipe, without a history.
fn recipe(asked: &Quantisation) -> DeviceRecipe<'static> {
    let (format, scale, margin) = (asked.element.format, asked.scale, asked.margin);
    DeviceRecipe { format, scale, margin, delayed: None }
}

/// A tensor in a rank's memory.
struct Tensor {
    shape: [usize; 3],
    groups: Groups,
    each: [usize; 2],
    format: Format,
    values: Banded,
    row_group: Range<usize>,
    /// Whether each row group has a row here.
    has_all_groups: bool,
    codes: Banded,
    turned: Option<Banded>,
}

/// A rank's memory.
struct Rank {
    tensors: Vec<Tensor>,
    factors: Vec<Factors>,
    history: Option<[Banded; 2]>,
}

impl Workspace {
    /// Quantises the tensors of all ranks. The answer has the bits that the device wrote.
    pub fn quantise(
        &self,
        asked: &Quantisation,
        ranks: &[RankValues],
        from: CodesFrom,
    ) -> Result<Vec<RankQuantised>, KernelError> {
        let mut stretch = Stretch::default();
        let placed: Vec<Rank> =
            ranks.iter().map(|rank| Rank::place(asked, rank, from, &mut stretch)).collect();
        let image = stretch.into_bytes();
        self.run.set(self.run.get() + 1);
        self.memory.reserve(&self.gpu, image.len())?;
        let got = self.memory.with(|memory| {
            let memory = memory.part(0..image.len())?;
            self.gpu.send(memory, &image)?;
            self.launch(asked, &placed, memory, from)?;
            self.gpu.read(memory)
        })?;
        placed.iter().map(|rank| rank.answer(&got, from)).collect()
    }

    fn launch(
        &self,
        asked: &Quantisation,
        ranks: &[Rank],
        memory: Area,
        from: CodesFrom,
    ) -> Result<(), KernelError> {
        let of_ranks = || ranks.iter().flat_map(Rank::with_factors);
        of_ranks().try_for_each(|(tensor, factors)| self.look(asked, tensor, factors, memory))?;
        self.take_largest(ranks, memory)?;
        ranks.iter().try_for_each(|rank| self.make_factors(asked, rank, ranks.len() == 1, memory))?;
        of_ranks().try_for_each(|(tensor, factors)| self.make_codes(asked, tensor, factors, memory, from))
    }

    /// Finds a tensor's magnitudes. Where its groups are single rows, it makes their factors and codes, too.
    fn look(
        &self,
        asked: &Quantisation,
        tensor: &Tensor,
        factors: &Factors,
        memory: Area,
    ) -> Result<(), KernelError> {
        let (values, table) = (tensor.view(memory)?, tensor.table(memory)?);
        let [amax, scale, descale] = factors.areas(memory)?;
        if !tensor.is_read_once(asked, &table, &values) {
            return self.gpu.largest(&values, &table, amax);
        }
        let codes = tensor.codes_view(asked, memory)?;
        let codes = tensor.turned.is_none().then_some(&codes);
        self.gpu.encode_rows(&values, &table, &recipe(asked), [amax, scale, descale], codes)
    }

    /// Makes a rank's factors, but for those that are made already: of a rank alone, which has a row of each group.
    fn make_factors(
        &self,
        asked: &Quantisation,
        rank: &Rank,
        is_alone: bool,
        memory: Area,
    ) -> Result<(), KernelError> {
        let area = |place: &Banded| memory.part(place.inner.clone());
        let of_history = |(delayed, [history, next]): (&Delayed, &[Banded; 2])| {
            let (takes, previous) = (delayed.takes, delayed.previous);
            Ok::<_, KernelError>(DeviceHistory {
                history: area(history)?,
                next: area(next)?,
                takes,
                previous,
            })
        };
        let delayed = asked.delayed.as_ref().zip(rank.history.as_ref()).map(of_history).transpose()?;
        let recipe = DeviceRecipe { delayed, ..recipe(asked) };
        for (tensor, factors) in rank.tensors.iter().zip(&rank.factors) {
            let is_once = tensor.is_read_once(asked, &tensor.table(memory)?, &tensor.view(memory)?);
            if !(is_alone && is_once && tensor.has_all_groups) {
                let [amax, scale, descale] = factors.areas(memory)?;
                self.gpu.factors(&recipe, amax, scale, descale)?;
            }
        }
        Ok(())
    }

    /// Makes the codes of a tensor that are not made yet.
    fn make_codes(
        &self,
        asked: &Quantisation,
        tensor: &Tensor,
        factors: &Factors,
        memory: Area,
        from: CodesFrom,
    ) -> Result<(), KernelError> {
        let (values, table) = (tensor.view(memory)?, tensor.table(memory)?);
        let ([_, scale, _], codes) = (factors.areas(memory)?, tensor.codes_view(asked, memory)?);
        match &tensor.turned {
            Some(turned) => {
                let turned = (asked.element.format, memory.part(turned.inner.clone())?);
                let rows = (from == CodesFrom::Beside).then_some(&codes);
                self.gpu.encode_turned(&values, &table, scale, turned, rows)
            }
            None if tensor.is_read_once(asked, &table, &values) => Ok(()),
            None => self.gpu.encode(&values, &table, scale, &codes),
        }
    }

    /// Gives each rank the largest magnitudes of all.
    fn take_largest(&self, ranks: &[Rank], memory: Area) -> Result<(), KernelError> {
        let Some(first) = ranks.first().filter(|_| ranks.len() > 1) else { return Ok(()) };
        for (index, factors) in first.factors.iter().enumerate() {
            let amax = |rank: &Rank| memory.part(rank.factors[index].amax.inner.clone());
            let of_all = self.gpu.allocate(factors.amax.inner.len())?;
            self.gpu.fill(of_all.area(), 0)?;
            ranks.iter().try_for_each(|rank| self.gpu.take_larger(of_all.area(), amax(rank)?))?;
            ranks.iter().try_for_each(|rank| self.gpu.copy(of_all.area(), amax(rank)?))?;
        }
        Ok(())
    }
}

impl Rank {
    fn place(asked: &Quantisation, rank: &RankValues, from: CodesFrom, stretch: &mut Stretch) -> Rank {
        let tensors = asked.tensors.iter().zip(&rank.tensors).map(|(name, values)| {
            let side = rank.layout.side(name.side());
            Tensor::place(asked, *name, values, &row_groups(&asked.groups(*name), side), from, stretch)
        });
        let tensors: Vec<Tensor> = tensors.collect();
        let of_scales = if asked.shares_scale() { &tensors[..1] } else { &tensors[..] };
        let factors = of_scales.iter().map(|tensor| {
            let bytes = 4 * tensor.groups.shape().iter().product::<usize>();
            let [amax, scale, descale] = [true, false, false].map(|zero| {
                let place = stretch.banded(bytes);
                if zero {
                    stretch.write(&place, &vec![0; bytes]);
                }
                place
            });
            Factors { amax, scale, descale }
        });
        let factors = factors.collect();
        let history = asked.delayed.as_ref().map(|delayed| {
            let [history, next] = [(); 2].map(|()| stretch.banded(4 * delayed.history.len()));
            let mut bytes = vec![0; 4 * delayed.history.len()];
            store(Format::F32, &delayed.history, &mut bytes);
            stretch.write(&history, &bytes);
            [history, next]
        });
        Rank { tensors, factors, history }
    }

    /// Returns each tensor with its factors.
    fn with_factors(&self) -> impl Iterator<Item = (&Tensor, &Factors)> {
        let last = self.factors.len().saturating_sub(1);
        self.tensors.iter().enumerate().map(move |(index, tensor)| (tensor, &self.factors[index.min(last)]))
    }

    /// Returns a rank's answer, from what is in memory now. An error is a byte that was written outside of a result.
    fn answer(&self, image: &[u8], from: CodesFrom) -> Result<RankQuantised, KernelError> {
        let of_factors = self
            .factors
            .iter()
            .flat_map(|of| [("amax", &of.amax), ("scale", &of.scale), ("descale", &of.descale)]);
        let of_tensors = self.tensors.iter().flat_map(|of| {
            [Some(("codes", &of.codes)), of.turned.as_ref().map(|turned| ("the turned copy", turned))]
        });
        let next = self.history.as_ref().map(|[_, next]| ("the history", next));
        for (name, place) in of_factors.chain(of_tensors.flatten()).chain(next) {
            if place.is_overrun(image) {
                return Err(KernelError::shape(format!("{name}: memory around it was written to")));
            }
        }
        let tensors = self.with_factors().map(|(tensor, factors)| {
            let [amax, descale] = [&factors.amax, &factors.descale].map(|place| numbers(image, place));
            Ok(RankCodes {
                codes: tensor.codes(image, from)?,
                amax: shaped(tensor.groups.shape(), amax)?,
                descale: shaped(tensor.groups.shape(), descale)?,
            })
        });
        let history = self.history.as_ref().map(|[_, next]| numbers(image, next));
        Ok(RankQuantised { tensors: tensors.collect::<Result<_, KernelError>>()?, history })
    }
}

impl Tensor {
    fn place(
        asked: &Quantisation,
        name: TensorName,
        values: &Array3<f32>,
        row_group: &[i32],
        from: CodesFrom,
        stretch: &mut Stretch,
    ) -> Tensor {
        let (groups, shape) = (asked.groups(name), <[usize; 3]>::from(values.dim()));
        // Kernels read no values of 8 bits; bf16 has them all.
        let format = asked.problem.precision.of(name).format;
        let format = if format.bits() > 8 { format } else { Format::Bf16 };
        let mut bytes = vec![0; values.len() * element_bytes(format)];
        store(format, &values.iter().copied().collect::<Vec<f32>>(), &mut bytes);
        let place = stretch.banded(bytes.len());
        stretch.write(&place, &bytes);
        let each =
            [shape[1].div_ceil(groups.shape()[1].max(1)).max(1), lanes_each(asked.element.scaling, shape[2])];
        let turns = shape[2].is_multiple_of(16) && (groups.shape()[2] == 1 || each[1].is_multiple_of(16));
        let turned =
            (turns && from != CodesFrom::Rows).then(|| stretch.banded(TurnedShape::of(shape).bytes()));
        let table: Vec<u8> = row_group.iter().flat_map(|group| group.to_le_bytes()).collect();
        let mut has_group = vec![false; groups.shape()[0]];
        for group in row_group.iter().filter(|group| **group >= 0) {
            has_group[*group as usize] = true;
        }
        let has_all_groups = has_group.iter().all(|has| *has);
        let row_group = stretch.push(&table);
        let codes = stretch.banded(values.len());
        Tensor { shape, groups, each, format, values: place, row_group, has_all_groups, codes, turned }
    }

    /// Returns whether one launch makes magnitudes, factors, and codes in rows. A group has one row in all ranks then: of a
    /// longer one, a rank may have a single row, and another rank the rest.
    fn is_read_once(&self, asked: &Quantisation, table: &GroupTable, values: &View) -> bool {
        let alone = asked.delayed.is_none() && !asked.shares_scale();
        alone && asked.element.scaling.has_single_rows() && table.threads_of_row(values).is_some()
    }

    fn view<'a>(&self, memory: Area<'a>) -> Result<View<'a>, KernelError> {
        Ok(View::rows(memory.part(self.values.inner.clone())?, self.shape, self.format))
    }

    fn codes_view<'a>(&self, asked: &Quantisation, memory: Area<'a>) -> Result<View<'a>, KernelError> {
        Ok(View::rows(memory.part(self.codes.inner.clone())?, self.shape, asked.element.format))
    }

    fn table<'a>(&self, memory: Area<'a>) -> Result<GroupTable<'a>, KernelError> {
        let [heads_each, lanes_each] = self.each;
        let row_group = memory.part(self.row_group.clone())?;
        Ok(GroupTable { row_group, shape: self.groups.shape(), heads_each, lanes_each })
    }

    /// Returns the codes, those of the turned copy brought back to rows. An error is a code behind the last row.
    fn codes(&self, image: &[u8], from: CodesFrom) -> Result<Array3<u8>, KernelError> {
        let turned = self.turned.as_ref().filter(|_| from == CodesFrom::Turned);
        let Some(turned) = turned else {
            return shaped(self.shape, image[self.codes.inner.clone()].to_vec());
        };
        let (copy, [rows, heads, dim]) = (&image[turned.inner.clone()], self.shape);
        let positions = TurnedShape::of(self.shape).positions;
        let mut codes = Array3::zeros([rows, heads, dim]);
        for (column, of_lane) in copy.chunks_exact(positions.max(1)).enumerate() {
            for row in 0..positions {
                let code = of_lane[TurnedShape::position_of(row)];
                match codes.get_mut([row, column / dim, column % dim]) {
                    Some(to) => *to = code,
                    None if code != 0 => {
                        let what = format!("the turned copy has code {code:#04x} behind the last row");
                        return Err(KernelError::shape(what));
                    }
                    None => {}
                }
            }
        }
        Ok(codes)
    }
}

/// Returns the lanes of a group.
fn lanes_each(scaling: Scaling, dim: usize) -> usize {
    match scaling {
        Scaling::PerBlock { columns, .. } => columns.min(dim.max(1)),
        _ => dim.max(1),
    }
}

fn numbers(image: &[u8], place: &Banded) -> Vec<f32> {
    let bytes = image[place.inner.clone()].chunks_exact(4);
    bytes.map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect()
}

fn shaped<T>(shape: [usize; 3], elements: Vec<T>) -> Result<Array3<T>, KernelError> {
    Array3::from_shape_vec(shape, elements).map_err(|error| KernelError::shape(error.to_string()))
}
