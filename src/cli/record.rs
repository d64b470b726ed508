//! `seamproof record`: runs a stored case's subject once, and writes a recording.

use std::path::PathBuf;

use super::exit::Exit;
use super::output::{complain, note, print_line};
use super::{CliError, load, worker};
use crate::recording::{self, Made};
use crate::replay::run_once;
use seamproof_judge::ladder::ELEMENTS_MAX;
use seamproof_judge::prose::{self, counted};
use seamproof_judge::subject::{Outputs, RunError};
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::values::{self, Poison};

const EXAMPLES: &str = "\
Examples:
  seamproof record case.json --out run
  seamproof record case.json --backend emulated+window-off-by-one --tables --out run";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The case
    file: PathBuf,
    /// Directory of the recording, a new or an empty one
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Run this subject instead of the case's own
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Write tables that say which rank holds which position in which row
    #[arg(long)]
    tables: bool,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    args.workers.configure();
    recording::check_free(&args.out)?;
    let (case, backend) = load(&args.file, args.backend.as_deref())?;
    let (problem, file) = (&case.problem, args.file.display().to_string());
    let elements = problem.elements();
    if elements > ELEMENTS_MAX {
        let what = format!("the case has {elements} tensor elements; at most {ELEMENTS_MAX} are recorded");
        return Err(CliError::TooLarge { file, what });
    }
    let elements = problem.precision.elements();
    if let Some((name, element)) = elements.iter().find(|(_, element)| element.is_scaled()) {
        let what = format!("{name} is {element}, and a recording holds no scales");
        return Err(CliError::NotRecorded { file, what });
    }
    let declaration = backend.declaration();
    if let Some(refusal) = declaration.table.refusal(problem) {
        return Err(CliError::Refused { file, what: refusal.to_string() });
    }
    let mut inputs = values::inputs(problem);
    let [strongest, _] = Poison::fills(declaration.padding.inputs, problem);
    values::poison(&mut inputs, problem, strongest);
    let ran = run_once(&case, backend.as_ref(), &inputs);
    let outputs = match ran.map_err(|source| CliError::Replay { file: file.clone(), source })? {
        Ok(outputs) => outputs,
        Err(RunError::Refused(refusal)) => return Err(CliError::Refused { file, what: refusal.to_string() }),
        Err(RunError::RefusedByName(what)) => return Err(CliError::Refused { file, what }),
        Err(error) => return Ok(failed(&file, &error)),
    };
    note_what_is_lost(&outputs);
    let name = SubjectName::from(&case.subject).to_string();
    let made =
        Made { backend: backend.as_ref(), name, problem, inputs: &inputs, outputs, tables: args.tables };
    let manifest = recording::write(&args.out, made)?;
    let (dir, ranks) = (args.out.display(), counted(manifest.ranks.len() as u64, "rank"));
    print_line(&format_args!("recorded {dir} · {ranks} · {}", prose::describe(problem)));
    Ok(Exit::Held)
}

/// Says why there are no results to record.
fn failed(file: &str, error: &RunError) -> Exit {
    complain(&format_args!("{file}: nothing was recorded: {error}"));
    match error {
        RunError::Infrastructure(_) | RunError::OutOfMemory(_) => Exit::Internal,
        _ => Exit::Crash,
    }
}

/// Says what the run did that no recording holds.
fn note_what_is_lost(outputs: &Outputs) {
    if !outputs.damage.is_empty() || !outputs.changed.is_empty() {
        note(
            &"the run wrote outside of its results, which a recording does not hold; seamproof replay judges that",
        );
    }
}
