//! Event logs on disk, as an observer.

use std::sync::{Mutex, PoisonError};

use super::event::{Event, Observer};
use super::plan::Control;
use crate::record::{EventLog, RecordError};

/// The event logs. One that cannot be written any more stops the campaign: a log with holes misleads.
#[derive(Debug)]
pub struct Logs<'a> {
    state: Mutex<State>,
    control: &'a Control,
}

#[derive(Debug)]
struct State {
    logs: Vec<EventLog>,
    trouble: Option<RecordError>,
}

impl<'a> Logs<'a> {
    /// Logs to write; their campaign is stopped through `control`.
    pub fn new(logs: Vec<EventLog>, control: &'a Control) -> Logs<'a> {
        Logs { state: Mutex::new(State { logs, trouble: None }), control }
    }

    /// Why one could not be written, once.
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
}
