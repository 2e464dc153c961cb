//! Faults of the host's share of a run: RoPE tables, the KV cache, decode attention.

use std::sync::{Arc, Mutex};

use half::bf16;

use super::At;
use super::kernels::dot;
use crate::error::Result;
use crate::kernel::attention_scale;
use crate::model::{ModelConfig, RopeTable};
use crate::plan::{BufferId, HostOp, Op, Stage};
use crate::runner::{Hook, SharedHook, StepContext};

/// What a closure hook knows beside the step.
pub(super) struct Known {
    config: ModelConfig,
    at: At,
    /// Values kept from one step to a later one, per layer.
    kept: Vec<(Vec<bf16>, Vec<bf16>)>,
}

/// A hook from one function, called after every step (and with `before` set, before the first one of a run).
pub(super) struct After {
    known: Known,
    before: bool,
    act: fn(&mut Known, &mut StepContext<'_>) -> Result<()>,
}

impl Hook for After {
    fn before_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        if self.before && cx.step.name == cx.plan.steps[0].name { (self.act)(&mut self.known, cx) } else { Ok(()) }
    }

    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        if self.before && matches!(cx.plan.stage, Stage::Prefill { .. }) {
            Ok(())
        } else {
            (self.act)(&mut self.known, cx)
        }
    }
}

fn hook(
    config: &ModelConfig,
    at: &At,
    before: bool,
    act: fn(&mut Known, &mut StepContext<'_>) -> Result<()>,
) -> SharedHook {
    let kept = vec![(vec![], vec![]); config.num_hidden_layers];
    let known = Known { config: config.clone(), at: at.clone(), kept };
    Arc::new(Mutex::new(After { known, before, act }))
}

// RoPE tables.

/// The buffers of the tables and the heads they repeat a row for: of a prefill before its first step, of a decode step once
/// the host has written its row.
fn tables(config: &ModelConfig, cx: &StepContext<'_>) -> Vec<(BufferId, usize)> {
    let due = match cx.plan.stage {
        Stage::Prefill { .. } => true,
        Stage::Decode => matches!(cx.step.op, Op::Host(HostOp::RopeRow { .. })),
    };
    if !due {
        return vec![];
    }
    let named = cx.plan.buffers.iter().enumerate().filter(|(_, b)| b.spec.name.ends_with("_rope_lut"));
    named.map(|(i, b)| (BufferId(i), b.spec.cols / config.head_dim)).collect()
}

/// Writes the tables anew, from the angle of `position` and of frequency `i` as `angle` has it.
fn rewrite(known: &Known, cx: &mut StepContext<'_>, angle: impl Fn(usize, f32) -> f32) -> Result<()> {
    let table = RopeTable::new(&known.config);
    let frequencies = table.inv_freq(known.config.max_position_embeddings);
    for (buffer, heads) in tables(&known.config, cx) {
        let rows = cx.plan.buffer(buffer).spec.rows;
        let mut content = vec![];
        for row in 0..rows {
            let angles: Vec<f32> = frequencies.iter().map(|&f| angle(cx.position + row, f)).collect();
            let one: Vec<bf16> = angles
                .iter()
                .map(|a| bf16::from_f32(a.cos()))
                .chain(angles.iter().map(|a| bf16::from_f32(a.sin())))
                .collect();
            (0..heads).for_each(|_| content.extend_from_slice(&one));
        }
        cx.write(buffer, &content)?;
    }
    Ok(())
}

fn is_prefill(cx: &StepContext<'_>) -> bool {
    matches!(cx.plan.stage, Stage::Prefill { .. })
}

/// Prefill's positions begin at `strength`.
pub(super) fn rope_late_prefill(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, true, |known, cx| {
        let by = known.at.strength as usize;
        if is_prefill(cx) { rewrite(known, cx, |p, f| (p + by) as f32 * f) } else { Ok(()) }
    })
}

/// Decode's positions are `strength` too large.
pub(super) fn rope_late_decode(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, true, |known, cx| {
        let by = known.at.strength as usize;
        if is_prefill(cx) { Ok(()) } else { rewrite(known, cx, |p, f| (p + by) as f32 * f) }
    })
}

/// Decode's row stays that of its first step.
pub(super) fn rope_stuck(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, true, |known, cx| {
        if is_prefill(cx) {
            known.kept[0].0 = vec![bf16::from_f32(cx.valid_rows as f32)];
            return Ok(());
        }
        let first = known.kept[0].0.first().map_or(0, |p| p.to_f32() as usize);
        rewrite(known, cx, |_, f| first as f32 * f)
    })
}

/// Positions and angles in bf16: exact to 256, coarser and coarser beyond.
pub(super) fn rope_bf16_angles(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, true, |known, cx| {
        let round = |x: f32| bf16::from_f32(x).to_f32();
        rewrite(known, cx, |p, f| if p <= 256 { p as f32 * f } else { round(round(p as f32) * f) })
    })
}

// The KV cache.

/// The layer of a step that has just appended to the cache, if it is the fault's.
fn appended(known: &Known, cx: &StepContext<'_>) -> Option<usize> {
    match cx.step.op {
        Op::Host(HostOp::KvAppend { layer, .. }) if known.at.layer.is_none_or(|l| l == layer) => Some(layer),
        _ => None,
    }
}

fn row(known: &Known, position: usize) -> std::ops::Range<usize> {
    let dim = known.config.kv_dim();
    position * dim..(position + 1) * dim
}

/// The row that the `position`-th decode step should have written holds zeros.
pub(super) fn kv_row_missing(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let Some(layer) = appended(known, cx) else { return Ok(()) };
        if is_prefill(cx) {
            known.kept[layer] = (vec![bf16::ZERO; known.at.position], vec![]);
            return Ok(());
        }
        if known.kept[layer].0.pop().is_none() && known.kept[layer].1.is_empty() {
            let range = row(known, cx.position);
            cx.kv.edit(layer, |keys, values| {
                keys[range.clone()].fill(bf16::ZERO);
                values[range].fill(bf16::ZERO);
            });
            known.kept[layer].1 = vec![bf16::ZERO];
        }
        Ok(())
    })
}

/// Every decode row is written one step late.
pub(super) fn kv_one_late(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let Some(layer) = appended(known, cx) else { return Ok(()) };
        if is_prefill(cx) {
            known.kept[layer] = (vec![], vec![]);
            return Ok(());
        }
        let (now, before) = (row(known, cx.position), row(known, cx.position - 1));
        cx.kv.edit(layer, |keys, values| {
            let late = (keys[now.clone()].to_vec(), values[now.clone()].to_vec());
            keys[now.clone()].fill(bf16::ZERO);
            values[now].fill(bf16::ZERO);
            if !known.kept[layer].0.is_empty() {
                keys[before.clone()].copy_from_slice(&known.kept[layer].0);
                values[before].copy_from_slice(&known.kept[layer].1);
            }
            known.kept[layer] = late;
        });
        Ok(())
    })
}

/// Row `position` of a prompt is the one that the prompt before left.
pub(super) fn kv_stale(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let Some(layer) = appended(known, cx).filter(|_| is_prefill(cx)) else { return Ok(()) };
        let range = row(known, known.at.position.min(cx.valid_rows - 1));
        cx.kv.edit(layer, |keys, values| {
            let fresh = (keys[range.clone()].to_vec(), values[range.clone()].to_vec());
            if !known.kept[layer].0.is_empty() {
                keys[range.clone()].copy_from_slice(&known.kept[layer].0);
                values[range].copy_from_slice(&known.kept[layer].1);
            }
            known.kept[layer] = fresh;
        });
        Ok(())
    })
}

/// A layer keeps its rows where the layer before does, and so finds that layer's.
pub(super) fn kv_shared(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let Some(layer) = appended(known, cx).filter(|&l| l > 0) else { return Ok(()) };
        let other = cx.kv.rows(layer - 1);
        cx.kv.edit(layer, |keys, values| {
            keys[..other.0.len()].copy_from_slice(&other.0);
            values[..other.1.len()].copy_from_slice(&other.1);
        });
        Ok(())
    })
}

/// A ring of `strength` rows, or half of the prompt's where it is shorter: rows beyond overwrite the first ones.
pub(super) fn kv_wraps(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let Some(layer) = appended(known, cx) else { return Ok(()) };
        let ring = known.at.strength as usize;
        let rows = cx.position..cx.position + cx.valid_rows;
        if rows.end <= ring {
            return Ok(());
        }
        cx.kv.edit(layer, |keys, values| {
            for p in rows.filter(|&p| p >= ring) {
                let (from, to) = (row(known, p), row(known, p % ring));
                keys.copy_within(from.clone(), to.start);
                values.copy_within(from, to.start);
            }
        });
        Ok(())
    })
}

/// Two KV heads in each other's place in the rows that decode writes.
pub(super) fn kv_heads_exchanged(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let Some(layer) = appended(known, cx).filter(|_| !is_prefill(cx)) else { return Ok(()) };
        let dim = known.config.head_dim;
        let range = row(known, cx.position);
        cx.kv.edit(layer, |keys, values| {
            for rows in [keys, values] {
                let (one, other) = rows[range.clone()].split_at_mut(dim);
                one.swap_with_slice(&mut other[..dim]);
            }
        });
        Ok(())
    })
}

/// One head's values of every row are zero.
pub(super) fn kv_head_missing(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let Some(layer) = appended(known, cx) else { return Ok(()) };
        let dim = known.config.head_dim;
        let head = known.at.head.min(known.config.num_key_value_heads - 1);
        let rows = cx.position..cx.position + cx.valid_rows;
        cx.kv.edit(layer, |_, values| {
            for p in rows {
                let start = row(known, p).start + head * dim;
                values[start..start + dim].fill(bf16::ZERO);
            }
        });
        Ok(())
    })
}

/// Keys are kept as they were before RoPE.
pub(super) fn kv_before_rope(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let Some(layer) = appended(known, cx) else { return Ok(()) };
        let name = if known.config.qk_norm { "k_normed" } else { "k" };
        let Some(buffer) = cx.plan.buffers.iter().position(|b| b.spec.name == name) else { return Ok(()) };
        let unturned = cx.read(BufferId(buffer))?;
        let dim = known.config.kv_dim();
        let range = cx.position * dim..(cx.position + cx.valid_rows) * dim;
        let unturned = &unturned[..cx.valid_rows * dim];
        cx.kv.edit(layer, |keys, _| keys[range].copy_from_slice(unturned));
        Ok(())
    })
}

// Decode attention.

/// Computes one row's context anew. `place(head)` is the KV head, `sees(position, len)` whether a row is seen.
fn decode_attention(
    known: &Known,
    cx: &mut StepContext<'_>,
    factor: f32,
    place: impl Fn(usize) -> usize,
    sees: impl Fn(usize, usize) -> bool,
) -> Result<()> {
    let Op::Host(HostOp::DecodeAttention { layer, q, out }) = cx.step.op else { return Ok(()) };
    if known.at.layer.is_some_and(|l| l != layer) {
        return Ok(());
    }
    let (dim, kv_dim) = (known.config.head_dim, known.config.kv_dim());
    let widen = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let query = widen(&cx.read(q)?);
    let (keys, values) = cx.kv.rows(layer);
    let (keys, values) = (widen(&keys), widen(&values));
    let len = keys.len() / kv_dim;
    let mut context = vec![bf16::ZERO; query.len()];
    for (head, (query, context)) in query.chunks_exact(dim).zip(context.chunks_exact_mut(dim)).enumerate() {
        let start = place(head) * dim;
        let seen: Vec<usize> = (0..len).filter(|&p| sees(p, len)).collect();
        let scale = factor * attention_scale(dim);
        let scores: Vec<f32> = seen.iter().map(|p| scale * dot(query, &keys[p * kv_dim + start..][..dim])).collect();
        let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| (score - top).exp()).collect();
        let total: f32 = weights.iter().sum();
        for (i, context) in context.iter_mut().enumerate() {
            let sum: f32 = seen.iter().zip(&weights).map(|(p, w)| w * values[p * kv_dim + start + i]).sum();
            *context = bf16::from_f32(sum / total);
        }
    }
    cx.write(out, &context)
}

pub(super) fn decode_unscaled(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let (group, factor) = (known.config.group(), 1.0 / attention_scale(known.config.head_dim));
        decode_attention(known, cx, factor, |head| head / group, |_, _| true)
    })
}

pub(super) fn decode_heads_by_modulo(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let kv_heads = known.config.num_key_value_heads;
        decode_attention(known, cx, 1.0, |head| head % kv_heads, |_, _| true)
    })
}

/// The row that this step has just written is not seen.
pub(super) fn decode_without_self(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let group = known.config.group();
        decode_attention(known, cx, 1.0, |head| head / group, |p, len| p + 1 < len)
    })
}

/// The last `strength` rows only are seen.
pub(super) fn decode_window(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let (group, window) = (known.config.group(), known.at.strength as usize);
        // What sees every row stays the sound kernel's, to the last bit.
        if cx.position < window {
            return Ok(());
        }
        decode_attention(known, cx, 1.0, |head| head / group, |p, len| p + window >= len)
    })
}

/// The context that the host writes does not reach the device: it works on that of the step before.
pub(super) fn context_not_synced(config: &ModelConfig, at: &At) -> SharedHook {
    hook(config, at, false, |known, cx| {
        let Op::Host(HostOp::DecodeAttention { layer, out, .. }) = cx.step.op else { return Ok(()) };
        if known.at.layer.is_some_and(|l| l != layer) {
            return Ok(());
        }
        let fresh = cx.read(out)?;
        let stale = std::mem::replace(&mut known.kept[layer].0, fresh);
        if stale.is_empty() { Ok(()) } else { cx.write(out, &stale) }
    })
}
