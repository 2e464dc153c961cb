//! Raw views that kernels read and write.
//!
//! In one dispatch the output of a launch is the input of the next, so kernels of one list cannot all hold slices:
//! the borrow checker would see a mutable and a shared borrow of one buffer. A view is a pointer and a length; the
//! barrier between kernels, not the type, keeps writes and reads apart. A view never owns and never frees.

/// Elements a kernel reads.
#[derive(Debug)]
pub struct Src<T> {
    ptr: *const T,
    len: usize,
}

/// Elements a kernel writes.
#[derive(Debug)]
pub struct Dst<T> {
    ptr: *mut T,
    len: usize,
}

impl<T: Copy> Src<T> {
    /// A view of `len` elements at `ptr`.
    ///
    /// # Safety
    /// From now until the last run of every kernel that holds this view, `ptr` must be aligned and valid for reads of
    /// `len` initialised elements. While such a kernel runs, nobody outside that run may write to them, and the kernel
    /// itself may only where its documentation allows `y == x`, with exactly the same pointer.
    pub unsafe fn new(ptr: *const T, len: usize) -> Src<T> {
        debug_assert!(ptr.is_aligned());
        Src { ptr, len }
    }

    /// A view of a slice.
    ///
    /// # Safety
    /// As [`Src::new`]: the view outlives the borrow, the memory must outlive the view.
    pub unsafe fn of(slice: &[T]) -> Src<T> {
        Src { ptr: slice.as_ptr(), len: slice.len() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn ptr(&self) -> *const T {
        self.ptr
    }
}

impl<T: Copy> Dst<T> {
    /// A view of `len` elements at `ptr`.
    ///
    /// # Safety
    /// From now until the last run of every kernel that holds this view, `ptr` must be aligned and valid for writes of
    /// `len` elements. While such a kernel runs, nobody outside that run may read or write them; the same kernel may
    /// not be run by two pools at a time.
    pub unsafe fn new(ptr: *mut T, len: usize) -> Dst<T> {
        debug_assert!(ptr.is_aligned());
        Dst { ptr, len }
    }

    /// A view of a slice.
    ///
    /// # Safety
    /// As [`Dst::new`]: the view outlives the borrow, the memory must outlive the view.
    pub unsafe fn of(slice: &mut [T]) -> Dst<T> {
        Dst { ptr: slice.as_mut_ptr(), len: slice.len() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn ptr(&self) -> *mut T {
        self.ptr
    }
}

impl<T> Clone for Src<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Src<T> {}

impl<T> Clone for Dst<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Dst<T> {}

// SAFETY: a view is an address; who may read or write there, and when, is the contract of the unsafe constructors,
// and kernels write disjoint elements from different workers (`Kernel`).
unsafe impl<T: Sync> Send for Src<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Src<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Dst<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Dst<T> {}
