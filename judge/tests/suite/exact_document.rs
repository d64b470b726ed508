//! The document on exact modes, which is the table in words.

use seamproof_judge::exact::table;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/exact-modes.md");

#[test]
fn the_document_is_up_to_date() {
    let stored = std::fs::read_to_string(PATH).expect("the document is there");
    assert!(stored == table(), "docs/exact-modes.md is out of date: run the ignored test next to this one");
}

#[test]
#[ignore = "writes docs/exact-modes.md"]
fn write_the_document() {
    std::fs::write(PATH, table()).expect("the document can be written");
}
