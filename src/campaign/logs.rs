//! Files that a campaign leaves: its event logs while it runs, and its sums and `run.json` at the end.

use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use super::event::{Event, Observer, Start};
use super::merge::{Checkpoint, Stored};
use super::plan::Control;
use super::summary::{Canary, Summary, SummaryEvent, Sums};
use crate::backends::Identity;
use crate::record::{EventLog, RecordError, RunDir};

/// Event logs. One that cannot be written any more stops the campaign, because a log with holes misleads.
#[derive(Debug)]
pub struct Logs<'a> {
    state: Mutex<State>,
    control: &'a Control,
    /// Directory that gets a checkpoint now and then, what is run there, and on what.
    checkpoints: Option<(&'a RunDir, &'a Start, &'a Identity)>,
}

#[derive(Debug)]
struct State {
    logs: Vec<EventLog>,
    trouble: Option<RecordError>,
}

impl<'a> Logs<'a> {
    /// Returns logs to write; their campaign is stopped through `control`.
    pub fn new(logs: Vec<EventLog>, control: &'a Control) -> Logs<'a> {
        Logs { state: Mutex::new(State { logs, trouble: None }), control, checkpoints: None }
    }

    /// Has the directory of these logs keep how far the campaign is, so that it can be gone on with.
    pub fn checking_in(self, dir: &'a RunDir, start: &'a Start, identity: &'a Identity) -> Logs<'a> {
        Logs { checkpoints: Some((dir, start, identity)), ..self }
    }

    /// Returns, once, why a log or a checkpoint could not be written.
    pub fn trouble(&self) -> Option<RecordError> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).trouble.take()
    }
}

impl Observer for Logs<'_> {
    fn event(&self, event: &Event) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let written = state.logs.iter_mut().try_for_each(|log| log.write(event));
        if let Err(error) = written {
            state.logs.clear();
            state.trouble = Some(error);
            self.control.stop();
        }
    }

    fn reached(&self, sums: &Sums) {
        let Some((dir, start, identity)) = self.checkpoints else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // A log that could not be written tells of fewer cases.
        if state.logs.is_empty() {
            return;
        }
        let (start, identity, sums) = (start.clone(), identity.clone(), sums.clone());
        let checkpoint = |events| Checkpoint { start, identity, sums, events };
        let written = dir.events_size().and_then(|events| dir.check_in(&checkpoint(events)));
        // The checkpoint before is still there and true, so the campaign goes on.
        state.trouble = state.trouble.take().or(written.err());
    }
}

/// Contents of `run.json`.
#[derive(Serialize)]
struct Run<'a> {
    start: &'a Start,
    canary: &'a Canary,
    summary: Option<&'a SummaryEvent<'a>>,
}

/// Writes how a campaign ended: its last event, `sums.json` and `run.json`. What fails does not keep the others from
/// being written; the first error is returned, that of an earlier event included.
pub fn conclude(
    dir: &RunDir,
    start: &Start,
    canary: &Canary,
    summary: Option<&Summary>,
    logs: &Logs,
) -> Result<(), RecordError> {
    let event = summary.map(Summary::event);
    if let Some(event) = &event {
        logs.event(&Event::Summary(event));
    }
    let stored = summary.map(|summary| Stored { start: start.clone(), sums: summary.sums() });
    let summed = stored.map_or(Ok(()), |stored| dir.sum(&stored));
    let described = dir.describe(&Run { start, canary, summary: event.as_ref() });
    logs.trouble().map_or(Ok(()), Err).and(summed).and(described)
}
