//! The KV cache on the host: per layer keys and values of each position, packed for decode's attention.

use std::sync::Arc;

use half::bf16;

use crate::compute::{PackedCache, Pool};
use crate::error::{Error, Result};
use crate::model::ModelConfig;

/// Keys (after QK-norm and RoPE) and values of every layer.
///
/// Shapes: a row is `[kv_dim]`, KV heads times head_dim; rows behind what the prompt has written or is about to hold NaN.
pub struct KvCache {
    layers: Vec<PackedCache>,
    pool: Arc<Pool>,
}

impl KvCache {
    /// An empty cache with room for `capacity` positions.
    pub fn new(config: &ModelConfig, capacity: usize, pool: Arc<Pool>) -> Self {
        let (layers, kv_heads) = (config.num_hidden_layers, config.num_key_value_heads);
        KvCache { layers: PackedCache::of_layers(layers, kv_heads, config.head_dim, capacity), pool }
    }

    /// Forgets everything, for a prompt of `rows` positions: nobody can read a row until it is written, and those behind the prompt
    /// hold NaN again, so that no row of an earlier one can be attended to.
    pub fn restart(&mut self, rows: usize) {
        self.layers.iter_mut().for_each(|layer| layer.restart(rows));
    }

    /// Width of a row.
    pub fn kv_dim(&self) -> usize {
        self.layers.first().map_or(0, PackedCache::width)
    }

    pub fn capacity(&self) -> usize {
        self.layers.first().map_or(0, PackedCache::capacity)
    }

    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Positions written in `layer`.
    pub fn len(&self, layer: usize) -> usize {
        self.layers[layer].len()
    }

    pub fn is_empty(&self) -> bool {
        self.layers.iter().all(PackedCache::is_empty)
    }

    /// A layer as attention reads it.
    pub fn layer(&self, layer: usize) -> &PackedCache {
        &self.layers[layer]
    }

    /// The place of `rows` rows from `position` on: first keys are written, then values, and then they are there. What stood from
    /// `position` on is gone with the first of them.
    ///
    /// Errors: [`Error::Plan`] when the rows do not fit or leave a gap.
    pub fn append(&mut self, layer: usize, position: usize, rows: usize) -> Result<Place<'_>> {
        let (end, cache) = (position + rows, &mut self.layers[layer]);
        if position > cache.len() || end > cache.capacity() {
            return Err(Error::Plan {
                why: format!(
                    "kv cache: layer {layer}: rows {position}..{end} do not follow {} written ones within {}",
                    cache.len(),
                    cache.capacity()
                ),
            });
        }
        Ok(Place { cache, pool: &self.pool, position, rows })
    }

    /// The written keys and values of a layer.
    ///
    /// Shapes: `[len, kv_dim]` each.
    pub fn rows(&self, layer: usize) -> (Vec<bf16>, Vec<bf16>) {
        self.rows_at(layer, 0..self.len(layer))
    }

    /// The keys and values at these positions.
    ///
    /// Shapes: `[positions, kv_dim]` each; panics where one is not written.
    pub fn rows_at(&self, layer: usize, positions: impl IntoIterator<Item = usize>) -> (Vec<bf16>, Vec<bf16>) {
        let (mut keys, mut values) = (vec![], vec![]);
        for position in positions {
            self.layers[layer].read(position, &mut keys, &mut values);
        }
        (keys, values)
    }

    /// For fault injection and for the search of a fault: changes the written rows of a layer.
    ///
    /// Shapes: `change` gets `[len, kv_dim]` twice.
    pub fn edit(&mut self, layer: usize, change: impl FnOnce(&mut [bf16], &mut [bf16])) {
        let (mut keys, mut values) = self.rows(layer);
        change(&mut keys, &mut values);
        let (cache, pool) = (&mut self.layers[layer], &*self.pool);
        let mut place = Place { rows: cache.len(), cache, pool, position: 0 };
        place.keys(&keys);
        place.values(&values);
    }
}

/// Where new rows of a layer go.
pub struct Place<'a> {
    cache: &'a mut PackedCache,
    pool: &'a Pool,
    position: usize,
    rows: usize,
}

impl Place<'_> {
    /// Shapes: `[rows, kv_dim]` of the place's rows; panics for others.
    pub fn keys(&mut self, rows: &[bf16]) {
        assert_eq!(rows.len(), self.rows * self.cache.width(), "kv cache: keys for {} rows", self.rows);
        self.cache.write_keys(self.pool, self.position, rows);
    }

    /// Shapes: `[rows, kv_dim]` of the place's rows; panics for others, and before their keys.
    pub fn values(&mut self, rows: &[bf16]) {
        self.cache.write_values(self.pool, self.position, rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(capacity: usize) -> KvCache {
        KvCache { layers: PackedCache::of_layers(2, 1, 2, capacity), pool: Arc::new(Pool::new(1)) }
    }

    fn write(kv: &mut KvCache, position: usize, value: f32) {
        let row = [bf16::from_f32(value), bf16::from_f32(-value)];
        for layer in 0..2 {
            let mut place = kv.append(layer, position, 1).unwrap();
            place.keys(&row);
            place.values(&row);
        }
    }

    #[test]
    fn a_gap_an_overflow_or_half_a_row_adds_nothing() {
        let mut kv = cache(2);
        assert!(kv.append(0, 1, 1).is_err());
        assert!(kv.append(0, 0, 3).is_err());
        kv.append(0, 0, 1).unwrap().keys(&[bf16::ONE; 2]);
        assert!(kv.is_empty());
        write(&mut kv, 0, 1.0);
        kv.append(0, 1, 1).unwrap().keys(&[bf16::ONE; 2]);
        assert_eq!((kv.len(0), kv.len(1)), (1, 1));
    }

    #[test]
    fn an_edit_changes_written_rows_of_one_layer() {
        let mut kv = cache(8);
        (0..3).for_each(|position| write(&mut kv, position, 1.0));
        kv.edit(1, |keys, values| {
            assert_eq!((keys.len(), values.len()), (6, 6));
            keys[2..4].fill(bf16::ZERO);
            values[4] = bf16::NAN;
        });
        let row = [bf16::ONE, bf16::NEG_ONE];
        assert_eq!(kv.rows(0), (row.repeat(3), row.repeat(3)));
        let (keys, values) = kv.rows(1);
        assert_eq!(keys, [row, [bf16::ZERO; 2], row].concat());
        assert!(values[4].is_nan() && values[..4] == row.repeat(2) && values[5] == bf16::NEG_ONE);
        // It goes on behind them.
        write(&mut kv, 3, 2.0);
        assert_eq!(kv.rows_at(1, [3, 0]).0, [bf16::from_f32(2.0), bf16::from_f32(-2.0), row[0], row[1]]);
    }
}
