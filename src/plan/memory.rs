//! What a model's plans need in memory, from their buffers alone.

use std::collections::HashMap;

use serde::Serialize;

use super::options::PlanOptions;
use super::{Plan, Source, decode, prefill};
use crate::compute::PackedCache;
use crate::device::Role;
use crate::error::Result;
use crate::model::ModelConfig;

/// Units: bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Padded prompt length that the rest is for. Units: positions.
    pub seq_len: usize,
    /// Positions of the KV cache. Units: positions.
    pub positions: usize,
    /// Packed weights on the device, each once for all plans.
    pub weights: u64,
    /// RoPE tables of the prefill.
    pub tables: u64,
    /// Everything a prefill and a decode step write, the packed keys and values of one layer included.
    pub activations: u64,
    /// Keys and values of every layer, packed, on the host.
    pub kv_cache: u64,
}

impl Memory {
    /// Of one prefill of `seq_len` positions and a cache of `positions`.
    ///
    /// Errors: [`crate::error::Error::Plan`].
    pub fn of(config: &ModelConfig, seq_len: usize, positions: usize, options: &PlanOptions) -> Result<Memory> {
        let plans = [prefill(config, seq_len, options)?, decode(config, options)?];
        let statics = |role: Role| -> u64 {
            let mut seen: HashMap<(&Source, usize), u64> = HashMap::new();
            for buffer in plans.iter().flat_map(|p: &Plan| &p.buffers).filter(|b| b.spec.role == role) {
                seen.insert((&buffer.source, buffer.spec.len()), buffer.spec.bytes() as u64);
            }
            seen.values().sum()
        };
        let packed = |rows: usize| PackedCache::bytes(config.num_key_value_heads, config.head_dim, rows);
        let written = plans.iter().flat_map(|p| &p.buffers).filter(|b| !b.spec.role.is_static() && b.lies_in.is_none());
        Ok(Memory {
            seq_len,
            positions,
            weights: statics(Role::StaticWeight),
            tables: statics(Role::StaticLut),
            activations: written.map(|b| b.spec.bytes() as u64).sum::<u64>() + packed(seq_len) as u64,
            kv_cache: (config.num_hidden_layers * packed(positions)) as u64,
        })
    }

    pub fn total(&self) -> u64 {
        self.weights + self.tables + self.activations + self.kv_cache
    }
}
