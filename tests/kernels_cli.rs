//! The `kernels` command as its users meet it.

#[test]
fn nothing() {}
