//! The kernel that README shows, with its bug: a campaign finds it.

include!("kernel.rs");

#[test]
fn readme_shows_this_kernel() {
    let readme = include_str!("../../../README.md");
    assert!(
        readme.contains(include_str!("kernel.rs")),
        "README's kernel is not judge/tests/first_kernel/kernel.rs"
    );
}
