//! The runs of a worker since its start, kept so that they can be run again, and the search for the few of those runs
//! that a failure needs.

use std::collections::VecDeque;
use std::sync::Arc;

use seamproof_judge::case::Subject;

/// Largest number of runs of one worker that are kept.
pub const RUNS_MAX: usize = 1024;
/// Largest number of bytes of their requests that are kept.
pub const BYTES_MAX: usize = 64 << 20;

/// One run: the subject that was open, and the body of the request, with the inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PastRun {
    pub(super) subject: Arc<Subject>,
    pub(super) body: Arc<Vec<u8>>,
}

/// The latest runs of one worker, the oldest first.
#[derive(Debug, Default)]
pub(super) struct History {
    entries: VecDeque<PastRun>,
    bytes: usize,
    /// Number of runs that are no longer kept.
    forgotten: usize,
    /// Number of kept runs after the last good sentinel.
    doubtful: usize,
}

impl History {
    pub(super) fn push(&mut self, entry: PastRun) {
        self.bytes += entry.body.len();
        self.entries.push_back(entry);
        self.doubtful += 1;
        while self.entries.len() > RUNS_MAX || self.bytes > BYTES_MAX {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.bytes -= oldest.body.len();
            self.forgotten += 1;
        }
    }

    /// Notes that a sentinel came out right.
    pub(super) fn trust(&mut self) {
        self.doubtful = 0;
    }

    /// Returns the number of runs since the last good sentinel.
    pub(super) fn doubtful(&self) -> usize {
        self.doubtful
    }

    /// Returns every kept run.
    pub(super) fn entries(&self) -> Vec<PastRun> {
        self.entries.iter().cloned().collect()
    }

    /// Returns the number of runs that are no longer kept.
    pub(super) fn forgotten(&self) -> usize {
        self.forgotten
    }
}

/// Returns a smallest part of `all` that still `fails`, in its order. It is found by taking the shortest end of
/// `all`, then leaving out whatever is not needed. `all` itself must fail, and the empty list must not. At most
/// about `budget` questions are asked. If they run out, the result is the smallest part so far.
pub fn smallest<T: Clone>(all: &[T], budget: usize, mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    let mut asked = 0;
    let mut ask = |part: &[T]| {
        asked += 1;
        asked <= budget && fails(part)
    };
    let (mut longest, mut short) = (0, all.len());
    while longest + 1 < short {
        let middle = longest.midpoint(short);
        *(if ask(&all[middle..]) { &mut longest } else { &mut short }) = middle;
    }
    let mut kept = all[longest..].to_vec();
    // The first run of the shortest end is needed, and most often it is the only one.
    if kept.len() > 1 && ask(&kept[..1]) {
        kept.truncate(1);
    }
    let mut size = kept.len() / 2;
    while size > 0 && kept.len() > 1 {
        let mut at = 1;
        while at < kept.len() {
            let end = (at + size).min(kept.len());
            let rest = [&kept[..at], &kept[end..]].concat();
            if ask(&rest) { kept = rest } else { at = end }
        }
        size /= 2;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(bytes: usize) -> PastRun {
        let subject = Subject { name: "x".into(), options: std::collections::BTreeMap::new() };
        PastRun { subject: subject.into(), body: vec![0; bytes].into() }
    }

    #[test]
    fn a_history_is_bounded_in_runs_and_in_bytes() {
        let mut history = History::default();
        (0..RUNS_MAX + 10).for_each(|_| history.push(entry(1)));
        assert_eq!((history.entries().len(), history.forgotten()), (RUNS_MAX, 10));
        history.push(entry(BYTES_MAX));
        assert_eq!(history.entries().len(), 1);
        history.push(entry(BYTES_MAX + 1));
        assert!(history.entries().is_empty());
        assert_eq!(history.bytes, 0);
        history.trust();
        history.push(entry(1));
        assert_eq!(history.doubtful(), 1);
    }

    /// Test that every set of up to three needed runs is found, whatever is around it, in few questions.
    #[test]
    fn the_needed_runs_are_found() {
        let all: Vec<usize> = (0..40).collect();
        for needed in [vec![0], vec![39], vec![17], vec![3, 30], vec![0, 39], vec![5, 6, 7], vec![1, 20, 38]]
        {
            let mut asked = 0;
            let fails = |part: &[usize]| {
                asked += 1;
                needed.iter().all(|run| part.contains(run))
            };
            assert_eq!(smallest(&all, 1000, fails), needed);
            assert!(asked < 90, "{needed:?}: {asked}");
        }
    }

    #[test]
    fn a_budget_ends_the_search_with_a_part_that_fails() {
        let all: Vec<usize> = (0..100).collect();
        let fails = |part: &[usize]| [3, 50].iter().all(|run| part.contains(run));
        for budget in 0..40 {
            assert!(fails(&smallest(&all, budget, fails)));
        }
    }
}
