//! Case files. Any bytes give a case or an error of one line, and a case that is written reads back as it was.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seamproof_fuzz as _;
use seamproof_judge::case::Case;

fuzz_target!(|bytes: &[u8]| match Case::parse(bytes) {
    Ok(case) => {
        let text = case.to_json();
        let again = Case::parse(text.as_bytes()).expect("a case that was written can be read");
        assert_eq!(again, case);
        assert_eq!(again.to_json(), text);
        assert_eq!(again.id(), case.id());
    }
    Err(error) => assert!(!error.to_string().contains('\n')),
});
