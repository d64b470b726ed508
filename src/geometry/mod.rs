//! A problem as options of a command: `--lengths 17,0,300 --padded 32,16,304 --heads 8/2 --causal --cp ring:4`.
//!
//! Every problem can be written so, and the options of a problem give the same problem again. An option that is left
//! out has the value that most problems have: packed sequences, one head of 64 lanes, every key visible, bf16, one
//! rank.

mod words;

use std::fmt::{self, Display};
use std::num::NonZeroU32;

use seamproof_oracle::{
    Algorithm, Alignment, Balance, Blocks, Borders, BordersError, ContextParallel, Dims, Form, Format, Heads,
    InputMode, Mask, Pass, Precision, Problem, ProblemError, ProblemFields, Run, ScaleValues, Sequence,
    Sharing, Side, Sink, Softmax, Steps, TensorRows,
};

use seamproof_judge::prose;
use seamproof_judge::subject::Table;

use words::{Dealing, Group, List, Paging, Pair, Quantity, Ratio, SharedOf, Sides, Window, field, word};

/// Head dimension that is left out.
const DIM: usize = 64;
/// Options that make a problem.
#[derive(clap::Args, Clone, Debug, Default, PartialEq)]
pub struct Geometry {
    /// Real rows of each sequence: of queries and keys alike, or QUERIESxKEYS; '' is no sequence
    #[arg(long, value_name = "17,0x5,300")]
    lengths: Sides,
    /// Owned rows of each sequence, its padding included [default: the real ones]
    #[arg(long, value_name = "32,16,304")]
    padded: Option<Sides>,
    /// First row of each sequence [default: behind the one before]
    #[arg(long, value_name = "0,32,48")]
    offsets: Option<Sides>,
    /// Rows from one position of a sequence to the next; the batch size in SBHD [default: 1]
    #[arg(long, value_name = "1,1,1")]
    steps: Option<Sides>,
    /// Rows of the tensors [default: all that a sequence owns]
    #[arg(long, value_name = "ROWS")]
    rows: Option<Pair>,
    /// Names of the sequences' values [default: 0,1,2,…]
    #[arg(long, value_name = "0,1,2")]
    ids: Option<List<u32>>,
    /// Query heads, or query heads/KV heads [default: 1]
    #[arg(long, value_name = "8/2")]
    heads: Option<Ratio>,
    /// Head dimension, or that of queries and keys/that of values [default: 64]
    #[arg(long, value_name = "128")]
    dim: Option<Ratio>,
    /// Keys visible to the left and right of the diagonal; 'inf' is no bound
    #[arg(long, value_name = "3,0", conflicts_with = "causal")]
    window: Option<Window>,
    /// No key to the right of the diagonal is visible
    #[arg(long)]
    causal: bool,
    /// The last query sits on the last key, not the first on the first
    #[arg(long)]
    bottom_right: bool,
    /// First keys of the documents of a sequence but the first; documents do not see each other
    #[arg(long, value_name = "3,10", conflicts_with = "chunks")]
    documents: Option<List<u32>>,
    /// Keys of a chunk; chunks do not see each other
    #[arg(long, value_name = "KEYS")]
    chunks: Option<NonZeroU32>,
    /// First keys of each sequence, document or chunk that all its queries see, whatever is right of the diagonal
    #[arg(long, value_name = "KEYS")]
    prefix: Option<u32>,
    /// First keys of each sequence, document or chunk that its queries see whatever the window's left side hides
    #[arg(long, value_name = "KEYS")]
    sink_tokens: Option<u32>,
    /// Factor of the logits [default: 1/√dim]
    #[arg(long)]
    scale: Option<f32>,
    /// Soft cap
    #[arg(long)]
    softcap: Option<f32>,
    /// Sink: none, off-by-one, learnable
    #[arg(long, value_parser = word::<Sink>)]
    sink: Option<Sink>,
    /// Format of all tensors [default: bf16, or the subject's first where it has none]
    #[arg(long)]
    format: Option<Format>,
    /// Formats of single quantities: q, k, v, p, out, dout, ds, gradients
    #[arg(long, value_name = "p=f32,…")]
    precision: Option<List<Quantity>>,
    /// Algorithm of context parallelism and number of ranks; ranks of one all-to-all in hierarchical:4:2
    #[arg(long, value_name = "ring:4")]
    cp: Option<Group>,
    /// Rows of each rank: contiguous, dual-chunk, striped:ROWS [default: dual-chunk over several ranks]
    #[arg(long)]
    balance: Option<Dealing>,
    /// Ranks of the world [default: those of the group]
    #[arg(long)]
    world: Option<usize>,
    /// Members of the group, in order [default: 0,1,2,…]
    #[arg(long, value_name = "0,1,2,3")]
    ranks: Option<List<usize>>,
    /// Ranks of the sequence-parallel region that each rank of the group is [default: 1, none]
    #[arg(long)]
    region: Option<usize>,
    /// Kind of values: flat, peaked, large, uniform-count, …
    #[arg(long, value_parser = word::<InputMode>)]
    mode: Option<InputMode>,
    /// Seed of the values
    #[arg(long)]
    data_seed: Option<u64>,
    /// Scales of what is scaled: powers-of-two, three-times-powers, any, delayed [default: powers-of-two]
    #[arg(long, value_parser = word::<ScaleValues>)]
    scales: Option<ScaleValues>,
    /// Judge the forward alone
    #[arg(long)]
    forward: bool,
    /// Form in which the subject is given the problem: cu_seqlens, segments, lengths [default: cu_seqlens]
    #[arg(long, value_parser = word::<Form>)]
    form: Option<Form>,
    /// Tokens that each of several calls appends to a KV cache [default: one call, without a cache]
    #[arg(long, value_name = "100,1,1")]
    append: Option<List<usize>>,
    /// Pages of keys and values: rows of a page, pages, and the pages of each sequence; those of a prefix may be shared
    #[arg(long, value_name = "16/5:3.0.4:1")]
    pages: Option<Paging>,
    /// First keys that a sequence shares with an earlier one: the sequence, the other one, and the keys
    #[arg(long, value_name = "1:0:16,2:0:16")]
    share: Option<List<SharedOf>>,
}

/// Reason why options make no problem.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GeometryError {
    /// A list with a value too many or too few.
    #[error("--{option} has {got} values; write one for each of the {expected} in --{of}")]
    Count {
        /// Option of the list.
        option: &'static str,
        /// Number of its values.
        got: usize,
        /// Option that the list goes with.
        of: &'static str,
        /// Number of the values of that option.
        expected: usize,
    },
    /// Rows beyond every bound.
    #[error("the rows of sequence {0} overflow; use fewer")]
    Overflow(usize),
    /// Documents that are none.
    #[error("--documents: {0}")]
    Borders(#[from] BordersError),
    /// A problem that is none.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

impl Geometry {
    /// Returns the options that make a problem.
    pub fn of(problem: &Problem) -> Geometry {
        let sides = |of: fn(&Run) -> usize| {
            let pairs = problem.sequences.iter().map(|s| Pair { q: of(&s.q), kv: of(&s.kv) });
            List(pairs.collect())
        };
        let ProblemFields { heads, dims, mask, softmax, precision, parallel, .. } = &**problem;
        let format = precision.q.format;
        let size = parallel.size();
        let is_causal = (mask.left, mask.right) == (None, Some(0));
        let is_bounded = (mask.left, mask.right) != (None, None) && !is_causal;
        let whole = Geometry {
            lengths: sides(|run| run.len),
            padded: Some(sides(|run| run.span)),
            offsets: Some(sides(|run| run.offset)),
            steps: Some(sides(|run| run.step)),
            rows: Some(Pair { q: problem.rows.q, kv: problem.rows.kv }),
            ids: Some(List(problem.sequences.iter().map(|sequence| sequence.id).collect())),
            heads: Some(Ratio(heads.q, heads.kv)),
            dim: Some(Ratio(dims.qk, dims.v)),
            window: is_bounded.then_some(Window { left: mask.left, right: mask.right }),
            causal: is_causal,
            bottom_right: mask.align == Alignment::BottomRight,
            documents: match mask.blocks {
                Some(Blocks::Documents(borders)) => Some(List(borders.into())),
                _ => None,
            },
            chunks: match mask.blocks {
                Some(Blocks::Chunks(keys)) => Some(keys),
                _ => None,
            },
            prefix: Some(mask.prefix),
            sink_tokens: Some(mask.sink_tokens),
            scale: Some(softmax.scale),
            softcap: softmax.softcap,
            sink: Some(softmax.sink),
            format: Some(format),
            precision: Geometry::quantities(precision),
            cp: Some(Group { algorithm: parallel.algorithm, size }),
            balance: Some(Dealing(parallel.balance)),
            world: Some(parallel.world),
            ranks: Some(List(parallel.ranks.clone())),
            region: Some(parallel.region),
            mode: Some(problem.mode),
            data_seed: Some(problem.data_seed),
            scales: Some(problem.scales),
            forward: problem.pass == Pass::Forward,
            form: Some(problem.form),
            append: (!problem.steps.is_empty()).then(|| List(problem.steps.0.clone())),
            pages: problem.pages.clone().map(Paging),
            share: (!problem.sharing.is_empty())
                .then(|| List(problem.sharing.0.iter().copied().map(SharedOf).collect())),
        };
        whole.without_defaults(problem)
    }

    /// Returns the options for a subject with this table. Formats that were not given are ones that it takes together,
    /// with bf16 before others; a subject without a backward is asked for the forward. Where both corners mean the same,
    /// the diagonal is aligned to the one that it takes.
    pub fn for_table(&self, table: &Table) -> Geometry {
        let takes = |precision: &&Precision| self.format.is_none_or(|format| precision.q.format == format);
        let is_taken = self.precision.is_some() || table.precisions.contains(&self.precision());
        let plainest = |precision: &&Precision| precision.q.format != Format::Bf16;
        let other = table.precisions.iter().filter(takes).min_by_key(plainest).filter(|_| !is_taken);
        let asked = Geometry {
            format: other.map(|precision| precision.q.format).or(self.format),
            precision: other.map_or_else(|| self.precision.clone(), Geometry::quantities),
            forward: self.forward || !table.backward,
            ..self.clone()
        };
        let turned = Geometry { bottom_right: !asked.bottom_right, ..asked.clone() };
        let takes =
            |geometry: &Geometry| geometry.problem().is_ok_and(|problem| table.refusal(&problem).is_none());
        let same = asked.problem().is_ok_and(|problem| has_one_corner(&problem));
        if same && !takes(&asked) && takes(&turned) { turned } else { asked }
    }

    /// Returns the quantities whose format is not that of q.
    fn quantities(precision: &Precision) -> Option<List<Quantity>> {
        let plain = Precision::uniform(precision.q.format).elements();
        let both = plain.into_iter().zip(precision.elements());
        let other: Vec<Quantity> = both
            .filter(|(plain, own)| plain != own)
            .map(|(_, (name, element))| Quantity { name, element })
            .collect();
        (!other.is_empty()).then_some(List(other))
    }

    /// Returns the options without those that change nothing.
    fn without_defaults(self, problem: &Problem) -> Geometry {
        let drops: [fn(&mut Geometry); 21] = [
            |g| g.ranks = None,
            |g| g.world = None,
            |g| g.region = None,
            |g| g.balance = None,
            |g| g.cp = None,
            |g| g.rows = None,
            |g| g.offsets = None,
            |g| g.steps = None,
            |g| g.padded = None,
            |g| g.ids = None,
            |g| g.heads = None,
            |g| g.dim = None,
            |g| g.prefix = None,
            |g| g.sink_tokens = None,
            |g| g.scale = None,
            |g| g.sink = None,
            |g| g.format = None,
            |g| g.mode = None,
            |g| g.data_seed = None,
            |g| g.scales = None,
            |g| g.form = None,
        ];
        drops.into_iter().fold(self, |geometry, drop| {
            let mut fewer = geometry.clone();
            drop(&mut fewer);
            if fewer.problem().as_ref() == Ok(problem) { fewer } else { geometry }
        })
    }

    /// Returns the problem that the options make.
    pub fn problem(&self) -> Result<Problem, GeometryError> {
        let Ratio(qk, v) = self.dim.unwrap_or(Ratio(DIM, DIM));
        let Ratio(q, kv) = self.heads.unwrap_or(Ratio(1, 1));
        let fields = ProblemFields::of(self.sequences()?, qk);
        let rows = self.rows.map_or(fields.rows, |rows| TensorRows { q: rows.q, kv: rows.kv });
        let scale = self.scale.unwrap_or(fields.softmax.scale);
        Ok(Problem::new(ProblemFields {
            rows,
            heads: Heads { q, kv },
            dims: Dims { qk, v },
            mask: self.mask()?,
            softmax: Softmax { scale, softcap: self.softcap, sink: self.sink.unwrap_or(Sink::None) },
            precision: self.precision(),
            parallel: self.parallel()?,
            mode: self.mode.unwrap_or(InputMode::Flat),
            data_seed: self.data_seed.unwrap_or(0),
            scales: self.scales.unwrap_or_default(),
            pass: if self.forward { Pass::Forward } else { Pass::Backward },
            form: self.form.unwrap_or_default(),
            steps: Steps(self.append.as_ref().map(|list| list.0.clone()).unwrap_or_default()),
            pages: self.pages.as_ref().map(|Paging(pages)| pages.clone()),
            sharing: Sharing(
                self.share.iter().flat_map(|list| list.0.iter().map(|SharedOf(of)| *of)).collect(),
            ),
            ..fields
        })?)
    }

    fn sequences(&self) -> Result<Vec<Sequence>, GeometryError> {
        let lengths = &self.lengths.0;
        let count = |option, got: usize| match got == lengths.len() {
            true => Ok(()),
            false => Err(GeometryError::Count { option, got, of: "lengths", expected: lengths.len() }),
        };
        for (option, list) in [("padded", &self.padded), ("offsets", &self.offsets), ("steps", &self.steps)] {
            list.as_ref().map_or(Ok(()), |list| count(option, list.0.len()))?;
        }
        self.ids.as_ref().map_or(Ok(()), |ids| count("ids", ids.0.len()))?;
        let mut sequences = Vec::with_capacity(lengths.len());
        let mut ends = Pair::default();
        for (index, &length) in lengths.iter().enumerate() {
            let at =
                |list: &Option<Sides>, default: Pair| list.as_ref().map_or(default, |list| list.0[index]);
            let (spans, steps) = (at(&self.padded, length), at(&self.steps, Pair { q: 1, kv: 1 }));
            let offsets = at(&self.offsets, ends);
            let run = |side| {
                let run = Run {
                    offset: offsets.of(side),
                    step: steps.of(side),
                    len: length.of(side),
                    span: spans.of(side),
                };
                let end = run.end().ok_or(GeometryError::Overflow(index))?;
                Ok::<_, GeometryError>((run, end))
            };
            let ((q, q_end), (kv, kv_end)) = (run(Side::Q)?, run(Side::Kv)?);
            ends = Pair { q: q_end, kv: kv_end };
            let id = self.ids.as_ref().map_or(index as u32, |ids| ids.0[index]);
            sequences.push(Sequence { id, q, kv });
        }
        Ok(sequences)
    }

    fn mask(&self) -> Result<Mask, GeometryError> {
        let align = if self.bottom_right { Alignment::BottomRight } else { Alignment::TopLeft };
        let Window { left, right } = match self.window {
            Some(window) => window,
            None => Window { left: None, right: self.causal.then_some(0) },
        };
        let documents = self.documents.as_ref().map(|List(keys)| Borders::new(keys)).transpose()?;
        let blocks = documents.map(Blocks::Documents).or(self.chunks.map(Blocks::Chunks));
        let (prefix, sink_tokens) = (self.prefix.unwrap_or(0), self.sink_tokens.unwrap_or(0));
        Ok(Mask { left, right, align, blocks, prefix, sink_tokens })
    }

    fn precision(&self) -> Precision {
        let mut precision = Precision::uniform(self.format.unwrap_or(Format::Bf16));
        for Quantity { name, element } in self.precision.iter().flat_map(|list| &list.0) {
            if let Some(quantity) = field(&mut precision, name) {
                *quantity = *element;
            }
        }
        precision
    }

    fn parallel(&self) -> Result<ContextParallel, GeometryError> {
        let Group { algorithm, size } = self.cp.unwrap_or(Group { algorithm: Algorithm::Single, size: 1 });
        let default = if size > 1 { Balance::DualChunk } else { Balance::Contiguous };
        let balance = self.balance.map_or(default, |Dealing(balance)| balance);
        let whole = ContextParallel::over(size, algorithm, balance);
        let ranks = self.ranks.as_ref().map_or(whole.ranks, |ranks| ranks.0.clone());
        match ranks.len() == size {
            true => Ok(ContextParallel {
                world: self.world.unwrap_or(size),
                ranks,
                region: self.region.unwrap_or(1),
                ..whole
            }),
            false => {
                Err(GeometryError::Count { option: "ranks", got: ranks.len(), of: "cp", expected: size })
            }
        }
    }
}

impl Display for Geometry {
    /// Writes the options as a shell takes them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--lengths {}", self.lengths)?;
        option(f, "padded", self.padded.as_ref())?;
        option(f, "offsets", self.offsets.as_ref())?;
        option(f, "steps", self.steps.as_ref())?;
        option(f, "rows", self.rows)?;
        option(f, "ids", self.ids.as_ref())?;
        option(f, "heads", self.heads)?;
        option(f, "dim", self.dim)?;
        option(f, "window", self.window)?;
        f.write_str(if self.causal { " --causal" } else { "" })?;
        f.write_str(if self.bottom_right { " --bottom-right" } else { "" })?;
        option(f, "documents", self.documents.as_ref())?;
        option(f, "chunks", self.chunks)?;
        option(f, "prefix", self.prefix)?;
        option(f, "sink-tokens", self.sink_tokens)?;
        option(f, "scale", self.scale)?;
        option(f, "softcap", self.softcap)?;
        option(f, "sink", self.sink.map(|sink| prose::word(&sink)))?;
        option(f, "format", self.format)?;
        option(f, "precision", self.precision.as_ref())?;
        option(f, "cp", self.cp)?;
        option(f, "balance", self.balance)?;
        option(f, "world", self.world)?;
        option(f, "ranks", self.ranks.as_ref())?;
        option(f, "region", self.region)?;
        option(f, "mode", self.mode.map(|mode| prose::word(&mode)))?;
        option(f, "data-seed", self.data_seed)?;
        option(f, "scales", self.scales.map(|scales| prose::word(&scales)))?;
        f.write_str(if self.forward { " --forward" } else { "" })?;
        option(f, "form", self.form.map(Form::name))?;
        option(f, "append", self.append.as_ref())?;
        option(f, "pages", self.pages.as_ref())?;
        option(f, "share", self.share.as_ref())
    }
}

fn option(f: &mut fmt::Formatter<'_>, name: &str, value: Option<impl Display>) -> fmt::Result {
    value.map_or(Ok(()), |value| write!(f, " --{name} {value}"))
}

/// Whether the diagonal lies alike from both corners, or bounds nothing.
fn has_one_corner(problem: &Problem) -> bool {
    let unbounded = problem.mask.left.is_none() && problem.mask.right.is_none();
    unbounded || problem.sequences.iter().all(|sequence| sequence.q.len == sequence.kv.len)
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};
    use seamproof_judge::generate::{self, Draw, Limits};

    use super::*;

    fn read(options: &str) -> Result<Geometry, clap::Error> {
        let words = options.split_whitespace().map(|word| if word == "''" { "" } else { word });
        let command = Geometry::augment_args(Command::new("try").no_binary_name(true));
        Geometry::from_arg_matches(&command.try_get_matches_from(words)?)
    }

    fn problem(options: &str) -> Result<Problem, GeometryError> {
        read(options).expect("options").problem()
    }

    /// Test that the diagonal goes to the corner that a subject takes where both mean the same, and stays elsewhere.
    #[test]
    fn a_diagonal_is_aligned_as_the_subject_takes_it() {
        let mut table = seamproof_judge::subject::Declaration::single_rank(Format::Bf16, Format::Bf16).table;
        table.masks.alignments = vec![Alignment::BottomRight];
        for (options, expected) in [
            ("--lengths 3,5", Alignment::BottomRight),
            ("--lengths 3,5 --causal", Alignment::BottomRight),
            ("--lengths 3x5", Alignment::BottomRight),
            ("--lengths 3x5 --causal", Alignment::TopLeft),
        ] {
            let problem = read(options).expect("options").for_table(&table).problem().expect("a problem");
            assert_eq!(problem.mask.align, expected, "{options}");
        }
        table.masks.alignments = vec![Alignment::TopLeft];
        let asked = read("--lengths 3x5 --causal").expect("options");
        assert_eq!(asked.for_table(&table), asked);
    }

    /// Test that the options of every problem give the problem again, its layout and its group included.
    #[test]
    fn every_problem_is_read_as_it_is_written() {
        for (limits, seed) in [(Limits::fuzz(), 5), (Limits::seams(), 6)] {
            for index in 0..500 {
                let Draw::Problem(drawn) = generate::draw(seed, index, &limits) else { continue };
                let scales = ScaleValues::ALL[index as usize % ScaleValues::ALL.len()];
                let drawn = Problem::new(ProblemFields { scales, ..drawn.into() }).expect("a problem");
                let options = Geometry::of(&drawn).to_string();
                assert_eq!(problem(&options), Ok(drawn), "{options}");
            }
        }
    }

    #[test]
    fn what_is_usual_is_left_out() {
        let usual = "--lengths 17,0x5,300 --padded 32,16x5,304 --heads 8/2 --dim 128 --causal --cp ring:4";
        let there = problem("--lengths 16,0x8,304 --heads 8/2 --dim 128 --causal --cp ring:4").unwrap();
        assert_eq!(
            Geometry::of(&there).to_string(),
            "--lengths 16,0x8,304 --heads 8/2 --dim 128 --causal --cp ring:4"
        );
        assert_eq!(problem(usual).unwrap().tokens(), 317);
        assert_eq!(problem("--lengths ''").unwrap().sequences, []);
    }

    #[test]
    fn wrong_options_are_told_with_what_to_do() {
        for (wrong, said) in [
            ("--lengths 3,x", "'x': '' is not a number"),
            ("--lengths 3 --window 3", "a comma and the right one"),
            ("--lengths 3 --cp rings:4", "there is no algorithm 'rings'; known: single, ring"),
            ("--lengths 3 --cp ring:99999999999", "ranks are too many; use at most"),
            ("--lengths 3 --cp ring:4:2", "ring has no parameter; write ring:4"),
            ("--lengths 3 --precision w=f32", "there is no quantity 'w'; known: q, k"),
            ("--lengths 3 --sink many", "unknown variant `many`, expected one of `none`"),
            ("--lengths 3 --share 1:0", "the one that it shares keys with, and their number, as in 1:0:16"),
            ("--lengths 3 --pages 4", "write the rows of a page, '/' and the pages"),
            ("--lengths 3 --pages 4/2:0.x", "'x' is not a number that fits"),
            ("--lengths 3,x", "write rows as in 17, or queries and keys as in 17x20"),
        ] {
            let error = read(wrong).expect_err(wrong).to_string();
            assert!(error.contains(said), "{error}");
        }
        for (wrong, said) in [
            ("--lengths 3,4 --padded 3", "--padded has 1 values; write one for each of the 2 in --lengths"),
            (
                "--lengths 3 --cp ring:2 --ranks 0",
                "--ranks has 1 values; write one for each of the 2 in --cp",
            ),
            ("--lengths 3 --padded 2", "sequences[0].q: len 3 is more than span 2"),
            ("--lengths 1,1 --padded 18446744073709551615,1", "the rows of sequence"),
            ("--lengths 9 --forward --pages 4/2:0.1", "pages: table[0] is too short: it names 2 pages"),
            ("--lengths 9,9 --share 1:0:10", "sharing: sequence 1 shares 10 keys; use 1 to 9, which both"),
            ("--lengths 9 --documents 5,3", "--documents: border 1 of the documents is 3; use more than 5"),
        ] {
            let error = problem(wrong).expect_err(wrong).to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
