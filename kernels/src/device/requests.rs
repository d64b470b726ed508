//! The requests of a run that are not launched yet.
//!
//! Transfers *join* others: they are launched with the first transfers that come after everything that touches their
//! buffers. What a buffer holds then changes in the order in which it was asked for. A launch takes the host some
//! microseconds, and many operations of a schedule are fills and messages of ranks that wait for nothing of each other.

use seamproof_simulator::schedule::BufferId;

use super::lanes::{Command, RecordedTransfers};
use crate::error::KernelError;
use crate::pairs::TransferTable;

/// The requests, in the order in which they are launched.
#[derive(Default)]
pub(super) struct Requests {
    commands: Vec<Command>,
    /// The indices of transfers among the commands.
    transfers: Vec<usize>,
    /// For each buffer, the number of commands up to the last one that touches it. Buffers behind the end have none.
    touched: Vec<usize>,
}

impl Requests {
    /// Returns the requests.
    pub(super) fn commands(&self) -> &[Command] {
        &self.commands
    }

    /// Returns all transfers.
    pub(super) fn transfers(&mut self) -> impl Iterator<Item = &mut RecordedTransfers> {
        self.commands.iter_mut().filter_map(|command| match command {
            Command::Transfers(transfers) => Some(transfers),
            _ => None,
        })
    }

    /// Adds a request.
    pub(super) fn push(&mut self, command: Command) {
        self.commands.push(command);
    }

    /// Notes that what is recorded so far touches these buffers.
    pub(super) fn touch(&mut self, buffers: &[BufferId]) {
        self.touch_by(buffers, self.commands.len());
    }

    /// Forgets all requests.
    pub(super) fn clear(&mut self) {
        *self = Requests::default();
    }

    /// Adds transfers that touch these buffers. They may join others if `joins`. After an error the requests are of no
    /// use, since `fill` may have left a part of the transfers.
    pub(super) fn transfer(
        &mut self,
        buffers: &[BufferId],
        joins: bool,
        fill: impl FnOnce(&mut TransferTable) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let index = match self.joined(buffers).filter(|_| joins) {
            Some(index) => index,
            None => {
                self.transfers.push(self.commands.len());
                self.commands.push(Command::Transfers(RecordedTransfers::default()));
                self.commands.len() - 1
            }
        };
        self.touch_by(buffers, index + 1);
        match &mut self.commands[index] {
            Command::Transfers(RecordedTransfers { table, .. }) => fill(table),
            _ => Err(KernelError::shape("transfers were lost")),
        }
    }

    /// Returns the first transfers that come after everything that touches these buffers.
    fn joined(&self, buffers: &[BufferId]) -> Option<usize> {
        let touched = |buffer: &BufferId| self.touched.get(buffer.0).copied().unwrap_or(0);
        let start = buffers.iter().map(touched).max().unwrap_or(0);
        self.transfers.get(self.transfers.partition_point(|&index| index < start)).copied()
    }

    fn touch_by(&mut self, buffers: &[BufferId], commands: usize) {
        let end = buffers.iter().map(|buffer| buffer.0 + 1).max().unwrap_or(0);
        self.touched.resize(end.max(self.touched.len()), 0);
        for buffer in buffers {
            self.touched[buffer.0] = commands.max(self.touched[buffer.0]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn launch() -> Command {
        Command::Launch(Box::new(|_, _| Ok(())))
    }

    fn ids(buffers: &[usize]) -> Vec<BufferId> {
        buffers.iter().copied().map(BufferId).collect()
    }

    fn transfer(requests: &mut Requests, buffers: &[usize]) -> usize {
        let mut filled = None;
        let fill = |table: &mut TransferTable| {
            filled = Some(std::ptr::from_ref(table));
            Ok(())
        };
        requests.transfer(&ids(buffers), true, fill).expect("an empty table");
        let is_filled = |command: &Command| match command {
            Command::Transfers(transfers) => filled == Some(std::ptr::from_ref(&transfers.table)),
            _ => false,
        };
        requests.commands().iter().position(is_filled).expect("the table is among the requests")
    }

    #[test]
    fn transfers_join_the_first_ones_that_their_buffers_allow() {
        let mut requests = Requests::default();
        assert_eq!(transfer(&mut requests, &[0]), 0);
        assert_eq!(transfer(&mut requests, &[1, 2]), 0, "of other buffers");
        assert_eq!(transfer(&mut requests, &[2, 3]), 1, "after buffer 2 was touched");
        requests.push(launch());
        requests.touch(&ids(&[3, 4]));
        assert_eq!(transfer(&mut requests, &[5]), 0);
        assert_eq!(transfer(&mut requests, &[0]), 1);
        assert_eq!(transfer(&mut requests, &[4]), 3, "after a launch that touches the buffer");
        requests.clear();
        assert_eq!(transfer(&mut requests, &[4]), 0);
    }

    proptest! {
        #[test]
        fn a_buffer_is_touched_in_the_order_that_was_asked_for(
            works in prop::collection::vec((any::<bool>(), prop::collection::vec(0_usize..6, 1..3)), 0..40),
        ) {
            let mut requests = Requests::default();
            let mut last = [None; 6];
            for (is_transfer, buffers) in works {
                let index = if is_transfer {
                    transfer(&mut requests, &buffers)
                } else {
                    requests.push(launch());
                    requests.touch(&ids(&buffers));
                    requests.commands().len() - 1
                };
                let mut now = last;
                for buffer in buffers {
                    // Transfers that are launched as one have no order: each buffer is touched by one request of them.
                    prop_assert!(last[buffer].is_none_or(|before| before < index));
                    now[buffer] = Some(index);
                }
                last = now;
            }
        }
    }
}
