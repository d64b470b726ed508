//! `seamproof census`: what the generator produces.

use rayon::prelude::*;

use super::CliError;
use super::exit::Exit;
use super::options::seed;
use super::output::{complain, print_line};
use seamproof_judge::census::Census;
use seamproof_judge::generate::{self, Profile};

/// Default number of cases, enough for every class to come close to its share.
const CASES: u64 = 20_000;

const EXAMPLES: &str = "\
Examples:
  seamproof census
  seamproof census --profile seams --cases 100000 --seed 7";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Number of cases to draw
    #[arg(long, value_name = "N", default_value_t = CASES)]
    cases: u64,
    /// Seed of all cases: a number, 0x and hex digits, or a whole commit hash
    #[arg(long, value_name = "S", value_parser = seed, default_value = "0")]
    seed: u64,
    /// Sizes of the cases
    #[arg(long, value_name = "quick|seams|large", default_value = "quick")]
    profile: Profile,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    let limits = args.profile.limits();
    let count = |mut census: Census, index| {
        census.add_draw(&generate::draw(args.seed, index, &limits));
        census
    };
    let merge = |mut all: Census, part: Census| {
        all.merge(&part);
        all
    };
    let census = (0..args.cases).into_par_iter().fold(Census::default, count).reduce(Census::default, merge);
    print_line(&format_args!(
        "seed      {:#x} · profile {} · cases {}",
        args.seed,
        args.profile.name(),
        args.cases
    ));
    print_line(&census);
    let missed = census.missed(args.profile);
    missed.iter().for_each(|missed| complain(&format_args!("too little: {missed}")));
    Ok(if missed.is_empty() { Exit::Held } else { Exit::TooLittle })
}
