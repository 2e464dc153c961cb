//! Working memory of kernels, one per thread, kept from call to call.
//!
//! Hands out addresses only; what lies where and when is up to the kernel.

use std::cell::RefCell;

/// A cache line, so that whole vectors never straddle two.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "reached through pointers")] [u32; LINE]);

/// u32 in a cache line.
pub(super) const LINE: usize = 16;

thread_local! {
    static MEMORY: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Parts of this thread's memory of these lengths (in u32), each on lines of its own, valid until the thread takes it
/// again. A kernel takes it once per run, and none runs inside another.
pub(super) fn take<const N: usize>(lens: [usize; N]) -> [*mut u32; N] {
    let base = MEMORY.with_borrow_mut(|memory| {
        let lines = lens.iter().map(|len| len.div_ceil(LINE)).sum::<usize>();
        if memory.len() < lines {
            memory.resize(lines, Line([0; LINE]));
        }
        memory.as_mut_ptr().cast::<u32>()
    });
    let mut offset = 0;
    lens.map(|len| {
        // SAFETY: the parts, each rounded up to whole lines, lie within `lines` lines one after the other.
        let at = unsafe { base.add(offset) };
        offset += len.next_multiple_of(LINE);
        at
    })
}
