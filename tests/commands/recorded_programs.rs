//! Recordings of other people's context-parallel programs, which lie in `corpus/recordings`: each holds as it is, and
//! fails once what one rank gave is changed as a fault of its kind of program would.

use std::fs;
use std::path::Path;

use super::place;
use super::recordings::{Tensors, edit_rank, judged};

/// A change of one rank's tensors.
type Change = fn(&mut Tensors);

/// A program's recording, the rank whose tensors are changed, the change, and the tensor that the judge must name.
const PROGRAMS: [(&str, usize, Change, &str); 9] = [
    ("ring-flash-attn-varlen", 1, |of| swap_rows(of, "out", 4, 5), "out"),
    ("ring-flash-attn-llama3", 2, |of| clear_row(of, "dk", 0), "dk"),
    ("torch-all-gather", 3, |of| swap_rows(of, "dv", 0, 31), "dv"),
    ("torch-all-to-all", 0, |of| clear_row(of, "dq", 17), "dq"),
    ("yunchang-hybrid", 2, |of| swap_heads(of, "out", 1, 2), "out"),
    ("te-p2p", 2, |of| clear_row(of, "dk", 5), "dk"),
    ("te-all-gather", 1, |of| swap_rows(of, "dq", 2, 3), "dq"),
    ("te-all-to-all", 0, |of| swap_heads(of, "out", 0, 3), "out"),
    ("te-hierarchical", 3, |of| swap_rows(of, "dv", 0, 1), "dv"),
];

#[test]
fn the_programs_of_others_hold_and_one_change_in_each_is_found() {
    for (name, rank, change, tensor) in PROGRAMS {
        let place = place();
        copy(name, &place.path().join("run"));
        let (exit, said) = judged(place.path());
        assert!(exit == 0 && said.contains("held     run · margin "), "{name}: {said}");
        edit_rank(&place.path().join("run"), rank, |tensors, _| change(tensors));
        let (exit, said) = judged(place.path());
        assert!(
            exit == 2 && said.contains(&format!("FAIL     run · envelope · {tensor} · ")),
            "{name}: {said}"
        );
    }
}

fn copy(name: &str, to: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/recordings").join(name);
    fs::create_dir(to).expect("a folder");
    for entry in fs::read_dir(from).expect("the recording is there") {
        let path = entry.expect("a file").path();
        fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("a copy");
    }
}

/// Two rows that one rank put into each other's place.
fn swap_rows(tensors: &mut Tensors, name: &str, one: usize, other: usize) {
    let (shape, data) = of(tensors, name);
    let row = data.len() / shape[0];
    (0..row).for_each(|byte| data.swap(one * row + byte, other * row + byte));
}

/// A row to which nothing was added.
fn clear_row(tensors: &mut Tensors, name: &str, at: usize) {
    let (shape, data) = of(tensors, name);
    let row = data.len() / shape[0];
    data[at * row..(at + 1) * row].fill(0);
}

/// Two heads that came back in each other's place.
fn swap_heads(tensors: &mut Tensors, name: &str, one: usize, other: usize) {
    let (shape, data) = of(tensors, name);
    let (row, head) = (data.len() / shape[0], data.len() / shape[0] / shape[1]);
    for first in (0..data.len()).step_by(row) {
        (0..head).for_each(|byte| data.swap(first + one * head + byte, first + other * head + byte));
    }
}

fn of<'a>(tensors: &'a mut Tensors, name: &str) -> (Vec<usize>, &'a mut Vec<u8>) {
    let (_, shape, data) = tensors.get_mut(name).expect("the rank has the tensor");
    (shape.clone(), data)
}
