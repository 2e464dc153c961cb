//! Memory for packed weights and KV caches: regions cut from large blocks that ask for huge pages.
//!
//! Decoding streams every weight once per token, and most weights are smaller than a huge page: cut one after the other
//! from one block they share huge pages, and the walk over them misses the TLB two hundred times less. A block is freed
//! with its last region. The arena neither reads nor clears what it hands out.

use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

/// Units: bytes; also the alignment from which on a range is made of them.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
const BLOCK: usize = 16 * HUGE_PAGE;
const ALIGN: usize = 64;

/// Advice for memory that nobody has touched yet; where it is not allowed, small pages do as well.
///
/// # Safety
/// `start` is aligned to [`HUGE_PAGE`] and starts `bytes` bytes of one allocation.
pub(crate) unsafe fn ask_for_huge_pages(start: NonNull<u8>, bytes: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the caller's; the advice does not change the contents.
    unsafe {
        libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block is memory owned by its regions, which are disjoint; it has no state of its own.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// `bytes` of memory, above 0: huge pages as far as it fills them.
    fn new(bytes: usize) -> Block {
        let align = if bytes < HUGE_PAGE { ALIGN } else { HUGE_PAGE };
        let layout = Layout::from_size_align(bytes, align).expect("a region larger than memory");
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        if align == HUGE_PAGE {
            // SAFETY: the range was allocated just now.
            unsafe { ask_for_huge_pages(start, bytes / HUGE_PAGE * HUGE_PAGE) };
        }
        Block { start, layout }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no region is left.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// A part of a block, owned by whoever holds the region.
pub(super) struct Region {
    start: NonNull<u8>,
    _block: Arc<Block>,
}

// SAFETY: regions of a block are disjoint, so a region is owned memory.
unsafe impl Send for Region {}
// SAFETY: `start` gives the address only.
unsafe impl Sync for Region {}

impl Region {
    /// The first byte, aligned to 64.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

struct Open {
    block: Arc<Block>,
    used: usize,
}

static OPEN: Mutex<Option<Open>> = Mutex::new(None);

/// `bytes` of uninitialised memory, aligned to 64.
pub(super) fn region(bytes: usize) -> Region {
    let bytes = bytes.next_multiple_of(ALIGN);
    let mut slot = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    // A block nobody else holds is only kept alive by the slot: start it over.
    if let Some(open) = slot.as_mut()
        // Unlike the count alone this orders what was done with the last region before what comes.
        && Arc::get_mut(&mut open.block).is_some()
    {
        open.used = 0;
    }
    let fits = slot.as_ref().is_some_and(|open| open.block.layout.size() - open.used >= bytes);
    if !fits {
        *slot = Some(Open { block: Arc::new(Block::new(bytes.max(BLOCK))), used: 0 });
    }
    let open = slot.as_mut().expect("just filled");
    // SAFETY: `used + bytes` is within the block.
    let start = unsafe { open.block.start.add(open.used) };
    open.used += bytes;
    Region { start, _block: Arc::clone(&open.block) }
}

/// `count` regions of `bytes` each, in a block of their own: for what does not stay as long as weights do.
pub(super) fn regions(count: usize, bytes: usize) -> Vec<Region> {
    let bytes = bytes.next_multiple_of(ALIGN);
    let block = Arc::new(Block::new((count * bytes).max(ALIGN)));
    // SAFETY: `count * bytes` are within the block.
    let start = |i: usize| unsafe { block.start.add(i * bytes) };
    (0..count).map(|i| Region { start: start(i), _block: Arc::clone(&block) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_disjoint_and_writable() {
        let sizes = [1, 64, 65, 4096, 3 << 20, BLOCK + 1, 100];
        let regions: Vec<_> = sizes.iter().map(|&bytes| region(bytes)).collect();
        for (i, (region, &bytes)) in regions.iter().zip(&sizes).enumerate() {
            assert_eq!(region.start().addr().get() % ALIGN, 0);
            // SAFETY: the region has `bytes` bytes.
            unsafe { region.start().write_bytes(i as u8, bytes) };
        }
        for (i, (region, &bytes)) in regions.iter().zip(&sizes).enumerate() {
            // SAFETY: written above.
            let last = unsafe { region.start().add(bytes - 1).read() };
            assert_eq!(last, i as u8);
        }
    }

    #[test]
    fn regions_of_one_block_are_aligned_disjoint_and_writable() {
        for (count, bytes) in [(3, 0), (0, 100), (3, 65), (5, HUGE_PAGE / 2 + 1)] {
            let regions = regions(count, bytes);
            assert_eq!(regions.len(), count);
            for (i, region) in regions.iter().enumerate() {
                assert_eq!(region.start().addr().get() % ALIGN, 0);
                // SAFETY: the region has `bytes` bytes.
                unsafe { region.start().write_bytes(i as u8, bytes) };
            }
            for (i, region) in regions.iter().enumerate().filter(|_| bytes > 0) {
                // SAFETY: written above.
                let ends = unsafe { [region.start().read(), region.start().add(bytes - 1).read()] };
                assert_eq!(ends, [i as u8; 2]);
            }
        }
    }
}
