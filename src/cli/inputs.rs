//! `seamproof inputs`: the numbers of a stored case, for whoever makes a script of it.

use std::io::{self, Write};
use std::path::PathBuf;

use super::CliError;
use super::exit::Exit;
use crate::replay::ReplayError;
use crate::worker::frame::{self, Kind};
use crate::worker::message;
use seamproof_judge::case::{Case, InputSource};
use seamproof_judge::prose;
use seamproof_judge::subject::PaddingInputs;
use seamproof_judge::values::{self, Poison};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// The case
    file: PathBuf,
    /// Fill padding with finite numbers alone, as for a subject that asks for them
    #[arg(long)]
    finite: bool,
}

/// Writes the case in words, as a line of JSON, and two requests to run it, as a worker gets them: its inputs under
/// both fills of the padding, the stronger one first.
pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    let case = Case::load(&args.file)?;
    if let InputSource::Recorded { file, .. } = &case.inputs {
        let source = ReplayError::Recorded { file: file.clone() };
        return Err(CliError::Replay { file: args.file.display().to_string(), source });
    }
    let allowed = if args.finite { PaddingInputs::Finite } else { PaddingInputs::Anything };
    let mut inputs = values::inputs(&case.problem);
    let finding = case.found.as_ref().map(ToString::to_string).unwrap_or_default();
    let words = serde_json::json!({ "problem": prose::describe(&case.problem), "finding": finding });
    let mut out = io::stdout().lock();
    writeln!(out, "{words}").map_err(CliError::Pipes)?;
    for (sequence, fill) in (1..).zip(Poison::fills(allowed, &case.problem)) {
        values::poison(&mut inputs, &case.problem, fill);
        let body = message::encode_run(&case.problem, &inputs);
        frame::write(&mut out, Kind::Run, sequence, &body).map_err(CliError::Pipes)?;
    }
    out.flush().map_err(CliError::Pipes)?;
    Ok(Exit::Held)
}
