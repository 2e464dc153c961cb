//! Memory of one emulated buffer: the content between two guards, born as NaN.
//!
//! Kernels see raw pointers, so the memory is owned through one too: nothing here ever forms a reference that could
//! conflict with a running kernel.

use std::alloc::{Layout as Allocation, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::compute::{HUGE_PAGE, Pool, ask_for_huge_pages};
use crate::device::POISON;

/// Units: bytes; also the least alignment, so that the content starts on a cache line.
const GUARD: usize = 64;

/// A pattern that is neither NaN nor a plausible number.
const GUARD_BYTE: u8 = 0xa5;

/// Bytes that one worker fills at a time; even.
const PIECE: usize = 256 << 10;

/// Fills `bytes`, which start with a whole element, with NaN.
fn poison(bytes: &mut [u8]) {
    let (pairs, last) = bytes.split_at_mut(bytes.len() / 2 * 2);
    bytemuck::cast_slice_mut::<u8, u16>(pairs).fill(u16::from_ne_bytes(POISON));
    last.fill(POISON[1]);
}

/// `len` bytes between guards.
pub(super) struct GuardedMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is owned by this value alone; `&self` methods only read, and the device that owns it runs kernels
// on it only under `&mut`.
unsafe impl Send for GuardedMemory {}
// SAFETY: as above.
unsafe impl Sync for GuardedMemory {}

impl GuardedMemory {
    /// Content filled with NaN, guards in place.
    pub(super) fn new(len: usize) -> GuardedMemory {
        let allocation = Self::allocation(len);
        // SAFETY: the size is at least two guards, hence not zero.
        let base = unsafe { alloc(allocation) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(allocation) };
        if allocation.align() == HUGE_PAGE {
            // SAFETY: allocated just now, with this alignment and size.
            unsafe { ask_for_huge_pages(base, allocation.size()) };
        }
        let mut memory = GuardedMemory { base, len };
        for range in memory.guards() {
            // SAFETY: both guards lie within the allocation, and nobody else knows it yet.
            unsafe { base.add(range.start).as_ptr().write_bytes(GUARD_BYTE, range.len()) };
        }
        memory.fill_nan();
        memory
    }

    fn allocation(len: usize) -> Allocation {
        let size = len.div_ceil(GUARD).saturating_add(2).saturating_mul(GUARD);
        let align = if size < HUGE_PAGE { GUARD } else { HUGE_PAGE };
        Allocation::from_size_align(size, align).expect("a buffer larger than the address space")
    }

    /// The guard in front, and everything behind the last byte: an overrun by one element shows.
    fn guards(&self) -> [std::ops::Range<usize>; 2] {
        [0..GUARD, GUARD + self.len..Self::allocation(self.len).size()]
    }

    /// First byte of the content; aligned to 64 bytes.
    pub(super) fn content(&self) -> *mut u8 {
        // SAFETY: within the allocation, which is at least two guards long.
        unsafe { self.base.add(GUARD).as_ptr() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: initialised at birth, valid for `len`; kernels that could write run only under the device's `&mut`.
        unsafe { std::slice::from_raw_parts(self.content(), self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.content(), self.len) }
    }

    /// Fills the content with NaN.
    pub(super) fn fill_nan(&mut self) {
        poison(self.bytes_mut());
    }

    /// [`GuardedMemory::fill_nan`] by all workers of a pool.
    pub(super) fn fill_nan_with(&mut self, pool: &Pool) {
        let pieces: Vec<Mutex<&mut [u8]>> = self.bytes_mut().chunks_mut(PIECE).map(Mutex::new).collect();
        if let [_, _, ..] = &pieces[..] {
            pool.for_each(pieces.len(), |i| poison(&mut pieces[i].lock().unwrap_or_else(PoisonError::into_inner)));
        } else {
            self.fill_nan();
        }
    }

    /// Offset of the first damaged guard byte relative to the content's start, if any.
    pub(super) fn damage(&self) -> Option<isize> {
        self.guards().into_iter().flatten().find_map(|i| {
            // SAFETY: guards lie within the allocation and were initialised at birth.
            let byte = unsafe { *self.base.add(i).as_ptr() };
            (byte != GUARD_BYTE).then_some(i as isize - GUARD as isize)
        })
    }
}

impl Drop for GuardedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with exactly this layout, freed once.
        unsafe { dealloc(self.base.as_ptr(), Self::allocation(self.len)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use rstest::rstest;

    #[rstest]
    fn born_as_nan_between_intact_guards(
        #[values(0, 2, 62, 64, 66, 1000, HUGE_PAGE - 2, HUGE_PAGE, 3 * HUGE_PAGE + 6)] len: usize,
    ) {
        let memory = GuardedMemory::new(len);
        assert!(memory.bytes().chunks(2).all(|b| bf16::from_le_bytes([b[0], b[1]]).is_nan()));
        assert!(memory.bytes().chunks_exact(4).all(|b| f32::from_le_bytes(b.try_into().unwrap()).is_nan()));
        assert_eq!(memory.damage(), None);
        assert_eq!(memory.content() as usize % 64, 0);
    }

    #[rstest]
    fn all_workers_fill_what_one_does(#[values(0, 2, PIECE, 3 * PIECE + 62)] len: usize) {
        let mut memory = GuardedMemory::new(len);
        memory.bytes_mut().fill(0);
        memory.fill_nan_with(&Pool::new(3));
        assert_eq!((memory.bytes(), memory.damage()), (GuardedMemory::new(len).bytes(), None));
    }

    #[rstest]
    #[case(-1)]
    #[case(10)]
    #[case(40)]
    fn one_byte_outside_is_seen(#[case] offset: isize) {
        let memory = GuardedMemory::new(10);
        // SAFETY: within the guards of a 10-byte buffer.
        unsafe { *memory.content().offset(offset) = 0 };
        assert_eq!(memory.damage(), Some(offset));
    }
}
