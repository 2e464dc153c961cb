//! The KV cache on the host, as upstream keeps it: per layer, one row per position.

use half::bf16;

use crate::error::{Error, Result};

/// Keys (after QK-norm and RoPE) and values of every layer.
///
/// Shapes: per layer `[capacity, kv_dim]`, row-major; rows behind what the prompt has written or is about to hold NaN.
pub struct KvCache {
    kv_dim: usize,
    capacity: usize,
    keys: Vec<Vec<bf16>>,
    values: Vec<Vec<bf16>>,
    written: Vec<usize>,
    /// Rows from here on hold NaN.
    touched: Vec<usize>,
}

impl KvCache {
    pub fn new(layers: usize, kv_dim: usize, capacity: usize) -> Self {
        let empty = || vec![vec![bf16::NAN; capacity * kv_dim]; layers];
        KvCache { kv_dim, capacity, keys: empty(), values: empty(), written: vec![0; layers], touched: vec![0; layers] }
    }

    /// Forgets everything, for a prompt of `rows` positions: nobody can read a row until it is written, and those behind the prompt
    /// hold NaN again, so that no row of an earlier one can be attended to.
    pub fn restart(&mut self, rows: usize) {
        for (layer, touched) in self.touched.iter_mut().enumerate() {
            let kept = rows.min(*touched);
            let stale = kept * self.kv_dim..*touched * self.kv_dim;
            self.keys[layer][stale.clone()].fill(bf16::NAN);
            self.values[layer][stale].fill(bf16::NAN);
            *touched = kept;
        }
        self.written.fill(0);
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

    /// Has `rows` rows written from `position` on; they are there once `write` has written keys and values.
    ///
    /// Shapes: `write` gets `[rows, kv_dim]` twice.
    /// Errors: [`Error::Plan`] when the rows do not fit or leave a gap; those of `write`.
    pub fn append(
        &mut self,
        layer: usize,
        position: usize,
        rows: usize,
        write: impl FnOnce(&mut [bf16], &mut [bf16]) -> Result<()>,
    ) -> Result<()> {
        let end = position + rows;
        if position > self.written[layer] || end > self.capacity {
            return Err(Error::Plan {
                why: format!(
                    "kv cache: layer {layer}: rows {position}..{end} do not follow {} written ones within {}",
                    self.written[layer], self.capacity
                ),
            });
        }
        let range = position * self.kv_dim..end * self.kv_dim;
        self.touched[layer] = self.touched[layer].max(end);
        write(&mut self.keys[layer][range.clone()], &mut self.values[layer][range])?;
        self.written[layer] = end;
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

    fn write(kv: &mut KvCache, position: usize, value: bf16) {
        let both = |keys: &mut [bf16], values: &mut [bf16]| {
            keys.fill(value);
            values.fill(value);
            Ok(())
        };
        kv.append(0, position, 1, both).unwrap();
    }

    /// Rows below `zeros` hold 0, those behind NaN.
    fn assert_holds(kv: &mut KvCache, zeros: usize, what: &str) {
        let (keys, values) = kv.raw_mut(0);
        for side in [keys, values] {
            assert!(side[..2 * zeros].iter().all(|v| *v == bf16::ZERO), "{what}: {side:?}");
            assert!(side[2 * zeros..].iter().all(|v| v.is_nan()), "{what}: {side:?}");
        }
    }

    #[test]
    fn a_cache_that_starts_again_shows_nothing_of_the_earlier_prompt() {
        for rows in 0..4 {
            // A prompt that failed before it wrote anything between the two, or none.
            for failed in [None, Some(0), Some(1), Some(2), Some(4)] {
                let mut kv = KvCache::new(1, 2, 4);
                (0..3).for_each(|position| write(&mut kv, position, bf16::ONE));
                failed.into_iter().for_each(|rows| kv.restart(rows));
                kv.restart(rows);
                assert!(kv.is_empty() && kv.keys(0).is_empty() && kv.values(0).is_empty());
                (0..rows).for_each(|position| write(&mut kv, position, bf16::ZERO));
                assert_holds(&mut kv, rows, &format!("{rows} after {failed:?}"));
            }
        }
    }

    #[test]
    fn rows_behind_the_place_where_a_prompt_went_on_are_forgotten_too() {
        let mut kv = KvCache::new(1, 2, 4);
        (0..4).for_each(|position| write(&mut kv, position, bf16::ONE));
        write(&mut kv, 1, bf16::ONE);
        kv.restart(1);
        write(&mut kv, 0, bf16::ZERO);
        assert_holds(&mut kv, 1, "after a step back");
    }

    #[test]
    fn a_gap_an_overflow_or_a_failed_write_adds_nothing() {
        let mut kv = KvCache::new(1, 1, 2);
        assert!(kv.append(0, 1, 1, |_, _| Ok(())).is_err());
        assert!(kv.append(0, 0, 3, |_, _| Ok(())).is_err());
        let fail = |keys: &mut [bf16], _: &mut [bf16]| {
            keys.fill(bf16::ONE);
            Err(Error::Plan { why: "no values".into() })
        };
        assert!(kv.append(0, 0, 1, fail).is_err());
        assert!(kv.is_empty());
    }
}
