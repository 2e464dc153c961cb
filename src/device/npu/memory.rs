//! Buffers as the NPU's kernels want them: what lies in which buffer object, what the host has sent and what the device
//! has written since.

use xrt_sys::{Failure, Kind};

use super::handles::{Bo, Device};
use crate::device::{BufferHandle, BufferSpec, Layout};
use crate::kernel::contract::{ArgumentLayout, Contract};
use crate::tensor::transpose_bf16;

type Result<T> = std::result::Result<T, Failure>;

/// Both bf16 0x7fff and f32 0x7fff7fff are NaN.
const NAN_BYTES: [u8; 2] = [0xff, 0x7f];

/// Names a buffer object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    buffer: BufferHandle,
    layout: ArgumentLayout,
}

struct Buffer {
    spec: BufferSpec,
    /// As the host writes it: row-major; an HF linear weight as a GEMV wants it.
    rows: Bo,
    /// A linear weight as a GEMM wants it, once one is bound to it.
    transposed: Option<Bo>,
    /// Whether the whole of it has been sent since it was made or poisoned.
    sent: bool,
    /// Whether the host's view is older than the device's.
    device_wrote: bool,
}

impl Buffer {
    fn fill_transposed(&mut self) -> Result<usize> {
        let (rows, cols, bytes) = (self.spec.rows, self.spec.cols, self.spec.bytes());
        let Some(bo) = self.transposed.as_mut().filter(|_| self.sent) else { return Ok(0) };
        transpose_bf16(&self.rows.bytes()[..bytes], &mut bo.bytes_mut()[..bytes], rows, cols);
        bo.to_device(0, bytes)?;
        Ok(bytes)
    }
}

/// All buffers of a device.
#[derive(Default)]
pub(super) struct Memory {
    buffers: Vec<Buffer>,
    /// Address and size of every buffer object.
    addresses: Vec<(u64, u64)>,
}

impl Memory {
    /// A buffer, filled with NaN.
    pub(super) fn create(&mut self, device: &Device, spec: BufferSpec) -> Result<BufferHandle> {
        let mut rows = self.object(device, spec.bytes())?;
        fill_with_nan(&mut rows)?;
        self.buffers.push(Buffer { spec, rows, transposed: None, sent: false, device_wrote: false });
        Ok(BufferHandle(self.buffers.len() - 1))
    }

    /// A buffer object of its own: one that lies within another would be written by whoever writes that.
    fn object(&mut self, device: &Device, bytes: usize) -> Result<Bo> {
        // Descriptors count words.
        let bytes = bytes.next_multiple_of(4).max(4);
        let bo = Bo::new(device, bytes)?;
        let (start, end) = (bo.address()?, bo.address()? + bytes as u64);
        if let Some((other, size)) = self.addresses.iter().find(|(other, size)| start < other + size && *other < end) {
            let text = format!("two buffers overlap: {bytes} bytes at {start:#x}, {size} at {other:#x}");
            return Err(Failure { kind: Kind::Memory, code: 0, text });
        }
        self.addresses.push((start, bytes as u64));
        Ok(bo)
    }

    pub(super) fn find(&self, handle: BufferHandle) -> Option<&BufferSpec> {
        self.buffers.get(handle.0).map(|buffer| &buffer.spec)
    }

    pub(super) fn spec(&self, handle: BufferHandle) -> &BufferSpec {
        &self.buffers[handle.0].spec
    }

    /// Why this part of a buffer cannot be written or read, if it cannot.
    pub(super) fn misuse(&self, handle: BufferHandle, offset: usize, len: usize, write: bool) -> Option<String> {
        let Some(spec) = self.find(handle) else { return Some(format!("buffer {} does not exist", handle.0)) };
        let whole = spec.bytes();
        let end = offset.checked_add(len);
        if end.is_none_or(|end| end > whole) {
            let what = if write { "write of bytes" } else { "read of bytes" };
            return Some(format!("{}: {what} {offset}..{} of {whole}", spec.name, offset.saturating_add(len)));
        }
        match (spec.layout, write) {
            (Layout::LinearWeight, true) if len != whole => {
                Some(format!("{}: found {len} bytes, expected the whole weight of {whole}", spec.name))
            }
            (Layout::LinearWeight, false) => Some(format!("{}: a weight cannot be read back", spec.name)),
            _ => None,
        }
    }

    /// Sends content to the device. Gives the bytes that were sent.
    pub(super) fn write(&mut self, handle: BufferHandle, offset: usize, content: &[u8]) -> Result<usize> {
        let buffer = &mut self.buffers[handle.0];
        let whole = content.len() == buffer.spec.bytes();
        buffer.sent |= whole;
        buffer.rows.bytes_mut()[offset..offset + content.len()].copy_from_slice(content);
        buffer.rows.to_device(offset, content.len())?;
        if whole {
            buffer.device_wrote = false;
        }
        Ok(content.len() + buffer.fill_transposed()?)
    }

    /// Gives a linear weight a transposed copy, filled now or when the weight is written. Gives the bytes that were sent.
    pub(super) fn transpose(&mut self, device: &Device, handle: BufferHandle) -> Result<usize> {
        if self.buffers[handle.0].transposed.is_some() {
            return Ok(0);
        }
        let bo = self.object(device, self.buffers[handle.0].spec.bytes())?;
        let buffer = &mut self.buffers[handle.0];
        buffer.transposed = Some(bo);
        buffer.fill_transposed()
    }

    /// Brings the host's view up to date.
    pub(super) fn fetch(&mut self, handle: BufferHandle, offset: usize, len: usize) -> Result<()> {
        let buffer = &mut self.buffers[handle.0];
        if buffer.device_wrote && len > 0 { buffer.rows.from_device(offset, len) } else { Ok(()) }
    }

    pub(super) fn content(&self, handle: BufferHandle, offset: usize, len: usize) -> &[u8] {
        &self.buffers[handle.0].rows.bytes()[offset..offset + len]
    }

    pub(super) fn written_by_device(&mut self, handle: BufferHandle) {
        self.buffers[handle.0].device_wrote = true;
    }

    /// Fills a buffer with NaN; a weight counts as unwritten afterwards.
    pub(super) fn poison(&mut self, handle: BufferHandle) -> Result<()> {
        let buffer = &mut self.buffers[handle.0];
        buffer.sent = false;
        fill_with_nan(&mut buffer.rows)
    }

    /// The buffer objects of a dispatch's arguments; else the name of a weight that was never written.
    pub(super) fn places(
        &self,
        contract: &Contract,
        buffers: &[BufferHandle],
    ) -> std::result::Result<Vec<Place>, String> {
        let places = contract.args.iter().zip(buffers).map(|(argument, &handle)| {
            let buffer = &self.buffers[handle.0];
            if buffer.spec.layout == Layout::LinearWeight && !buffer.sent {
                return Err(format!("weight {} was never written", buffer.spec.name));
            }
            Ok(Place { buffer: handle, layout: argument.layout })
        });
        places.collect()
    }

    pub(super) fn bo(&self, place: Place) -> &Bo {
        let buffer = &self.buffers[place.buffer.0];
        match (place.layout, &buffer.transposed) {
            (ArgumentLayout::Transposed, Some(bo)) => bo,
            _ => &buffer.rows,
        }
    }
}

fn fill_with_nan(bo: &mut Bo) -> Result<()> {
    bo.bytes_mut().chunks_mut(2).for_each(|pair| pair.copy_from_slice(&NAN_BYTES[..pair.len()]));
    let bytes = bo.bytes().len();
    bo.to_device(0, bytes)
}
