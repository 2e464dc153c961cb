//! The KV cache on the host, as upstream keeps it: per layer, one row per position.

use half::bf16;

use crate::error::{Error, Result};

/// Keys (after QK-norm and RoPE) and values of every layer.
///
/// Shapes: per layer `[capacity, kv_dim]`, row-major; rows from `len` on hold NaN.
pub struct KvCache {
    kv_dim: usize,
    capacity: usize,
    keys: Vec<Vec<bf16>>,
    values: Vec<Vec<bf16>>,
    written: Vec<usize>,
}

impl KvCache {
    pub fn new(layers: usize, kv_dim: usize, capacity: usize) -> Self {
        let empty = || vec![vec![bf16::NAN; capacity * kv_dim]; layers];
        KvCache { kv_dim, capacity, keys: empty(), values: empty(), written: vec![0; layers] }
    }

    /// Forgets everything; what was written is NaN again, so that no row of an earlier prompt can be attended to.
    pub fn clear(&mut self) {
        for (layer, written) in self.written.iter_mut().enumerate() {
            let used = *written * self.kv_dim;
            self.keys[layer][..used].fill(bf16::NAN);
            self.values[layer][..used].fill(bf16::NAN);
            *written = 0;
        }
    }

    /// Width of a row: KV heads times head_dim.
    pub fn kv_dim(&self) -> usize {
        self.kv_dim
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub fn layers(&self) -> usize {
        self.written.len()
    }

    /// Positions written in `layer`.
    pub fn len(&self, layer: usize) -> usize {
        self.written[layer]
    }

    pub fn is_empty(&self) -> bool {
        self.written.iter().all(|&n| n == 0)
    }

    /// Writes rows from `position` on.
    ///
    /// Shapes: `keys`, `values` `[n, kv_dim]`.
    /// Errors: [`Error::Plan`] when the rows do not fit or leave a gap.
    pub fn append(&mut self, layer: usize, position: usize, keys: &[bf16], values: &[bf16]) -> Result<()> {
        let rows = keys.len() / self.kv_dim;
        if position > self.written[layer] || position + rows > self.capacity || keys.len() != values.len() {
            return Err(Error::Plan {
                why: format!(
                    "kv cache: layer {layer}: rows {position}..{} do not follow {} written ones within {}",
                    position + rows,
                    self.written[layer],
                    self.capacity
                ),
            });
        }
        let range = position * self.kv_dim..position * self.kv_dim + keys.len();
        self.keys[layer][range.clone()].copy_from_slice(keys);
        self.values[layer][range].copy_from_slice(values);
        self.written[layer] = position + rows;
        Ok(())
    }

    /// The written keys of a layer.
    ///
    /// Shapes: `[len, kv_dim]`.
    pub fn keys(&self, layer: usize) -> &[bf16] {
        &self.keys[layer][..self.written[layer] * self.kv_dim]
    }

    /// The written values of a layer.
    ///
    /// Shapes: `[len, kv_dim]`.
    pub fn values(&self, layer: usize) -> &[bf16] {
        &self.values[layer][..self.written[layer] * self.kv_dim]
    }

    /// For fault injection: the rows as they lie in memory.
    pub fn raw_mut(&mut self, layer: usize) -> (&mut [bf16], &mut [bf16]) {
        (&mut self.keys[layer], &mut self.values[layer])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cleared_cache_holds_nothing_of_the_earlier_prompt() {
        let mut kv = KvCache::new(1, 2, 4);
        let row = [bf16::ONE, bf16::ONE];
        kv.append(0, 0, &row, &row).unwrap();
        kv.append(0, 1, &row, &row).unwrap();
        kv.clear();
        assert!(kv.is_empty() && kv.raw_mut(0).0.iter().all(|v| v.is_nan()));
    }

    #[test]
    fn a_gap_or_an_overflow_is_an_error() {
        let mut kv = KvCache::new(1, 1, 2);
        assert!(kv.append(0, 1, &[bf16::ONE], &[bf16::ONE]).is_err());
        assert!(kv.append(0, 0, &[bf16::ONE; 3], &[bf16::ONE; 3]).is_err());
        assert!(kv.append(0, 0, &[bf16::ONE; 2], &[bf16::ONE; 1]).is_err());
    }
}
