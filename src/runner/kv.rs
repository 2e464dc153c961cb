//! The KV cache on the host, as upstream keeps it: per layer, one row per position.

use half::bf16;

use crate::error::{Error, Result};

/// Keys (after QK-norm and RoPE) and values of every layer.
///
/// Shapes: per layer `[capacity, kv_dim]`, row-major; rows that no prompt has written hold NaN.
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

    /// Forgets everything, for a prompt of `rows` positions: nobody can read a row until it is written, and those behind the prompt
    /// hold NaN again, so that no row of an earlier one can be attended to.
    pub fn restart(&mut self, rows: usize) {
        for (layer, written) in self.written.iter_mut().enumerate() {
            let stale = (rows * self.kv_dim).min(*written * self.kv_dim)..*written * self.kv_dim;
            self.keys[layer][stale.clone()].fill(bf16::NAN);
            self.values[layer][stale].fill(bf16::NAN);
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

    /// The keys and the values of `rows` rows from `position` on, for the caller to write now.
    ///
    /// Shapes: `[rows, kv_dim]` each.
    /// Errors: [`Error::Plan`] when the rows do not fit or leave a gap.
    pub fn extend(&mut self, layer: usize, position: usize, rows: usize) -> Result<[&mut [bf16]; 2]> {
        if position > self.written[layer] || position + rows > self.capacity {
            return Err(Error::Plan {
                why: format!(
                    "kv cache: layer {layer}: rows {position}..{} do not follow {} written ones within {}",
                    position + rows,
                    self.written[layer],
                    self.capacity
                ),
            });
        }
        self.written[layer] = position + rows;
        let range = position * self.kv_dim..(position + rows) * self.kv_dim;
        Ok([&mut self.keys[layer][range.clone()], &mut self.values[layer][range]])
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

    fn write(kv: &mut KvCache, position: usize, row: [bf16; 2]) {
        let [keys, values] = kv.extend(0, position, 1).unwrap();
        keys.copy_from_slice(&row);
        values.copy_from_slice(&row);
    }

    #[test]
    fn a_cache_that_starts_again_shows_nothing_of_the_earlier_prompt() {
        for rows in 0..4 {
            let mut kv = KvCache::new(1, 2, 4);
            (0..3).for_each(|position| write(&mut kv, position, [bf16::ONE; 2]));
            kv.restart(rows);
            assert!(kv.is_empty() && kv.keys(0).is_empty() && kv.values(0).is_empty());
            (0..rows).for_each(|position| write(&mut kv, position, [bf16::ZERO; 2]));
            let (keys, values) = kv.raw_mut(0);
            for side in [keys, values] {
                assert!(side[..2 * rows].iter().all(|v| *v == bf16::ZERO), "{rows}: {side:?}");
                assert!(side[2 * rows..].iter().all(|v| v.is_nan()), "{rows}: {side:?}");
            }
        }
    }

    #[test]
    fn a_gap_or_an_overflow_is_an_error() {
        let mut kv = KvCache::new(1, 1, 2);
        assert!(kv.extend(0, 1, 1).is_err());
        assert!(kv.extend(0, 0, 3).is_err());
        assert!(kv.is_empty());
    }
}
