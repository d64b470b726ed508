//! The kernel that README shows: a campaign finds its bug.

include!("kernel.rs");

/// Test that README shows this kernel, without the line that lets the test pass here.
#[test]
fn readme_shows_this_kernel() {
    let lines = include_str!("kernel.rs").lines().filter(|line| !line.contains("should_panic"));
    let shown: String = lines.map(|line| format!("{line}\n")).collect();
    assert!(include_str!("../../../../README.md").contains(&shown), "README shows another kernel");
}
