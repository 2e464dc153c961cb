//! Kernels that compute something else: what a fault does in place of a launch. Plain loops, or the device's own kernel
//! over permuted inputs where that is enough, which keeps its arithmetic.

use half::bf16;

use super::launch::{Launch, Site};
use crate::device::Completed;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, attention_scale};

fn other_kernel(launch: &Launch<'_>) -> Error {
    Error::Plan { why: format!("fault on {}: not its kernel", launch.kernel()) }
}

/// A seed of its own for one layer's site, the same in every run.
fn layer_name(launch: &Launch<'_>, part: &str) -> String {
    let layer = launch.site().and_then(|site: Site<'_>| site.layer).unwrap_or(0);
    format!("model.layers.{layer}.{part}")
}

// RoPE.

/// Pairs (2i, 2i + 1) turned in place of (i, i + h).
pub(super) fn rope_interleaved(launch: &mut Launch<'_>) -> Result<Completed> {
    let Kernel::Rope { head_dim, .. } = *launch.kernel() else { return Err(other_kernel(launch)) };
    let half = head_dim / 2;
    let x = launch.input(0)?;
    let at = |i: usize| if i < half { 2 * i } else { 2 * (i - half) + 1 };
    let halves: Vec<bf16> = (0..x.len()).map(|i| x[i / head_dim * head_dim + at(i % head_dim)]).collect();
    let completed = launch.run_with(0, &halves)?;
    let turned = launch.output()?;
    let mut out = turned.clone();
    for (i, &y) in turned.iter().enumerate() {
        out[i / head_dim * head_dim + at(i % head_dim)] = y;
    }
    launch.write_output(&out)?;
    Ok(completed)
}

/// Turned the other way.
pub(super) fn rope_backwards(launch: &mut Launch<'_>) -> Result<Completed> {
    let Kernel::Rope { head_dim, .. } = *launch.kernel() else { return Err(other_kernel(launch)) };
    let mut lut = launch.input(1)?;
    lut.chunks_mut(head_dim).for_each(|row| row[head_dim / 2..].iter_mut().for_each(|sin| *sin = -*sin));
    launch.run_with(1, &lut)
}

/// The input, unturned.
pub(super) fn copies_input(launch: &mut Launch<'_>) -> Result<Completed> {
    let x = launch.input(0)?;
    launch.answer_bf16(&x)
}

// Attention.

/// Which keys a query row sees: (row, key, seq).
type Sees = dyn Fn(usize, usize, usize) -> bool;

fn attention(launch: &mut Launch<'_>, sees: &Sees) -> Result<Completed> {
    let Kernel::Attention { seq, heads, kv_heads, head_dim, causal: true } = *launch.kernel() else {
        return Err(other_kernel(launch));
    };
    let mut widen = |index| Ok(launch.input(index)?.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
    let (q, k, v): (Vec<f32>, Vec<f32>, Vec<f32>) = (widen(0)?, widen(1)?, widen(2)?);
    let scale = attention_scale(head_dim);
    let mut out = vec![0f32; q.len()];
    let (wide, narrow) = (heads * head_dim, kv_heads * head_dim);
    for (i, out) in out.chunks_exact_mut(head_dim).enumerate() {
        let (row, head) = (i / heads, i % heads);
        let q = &q[row * wide + head * head_dim..][..head_dim];
        let start = head / (heads / kv_heads) * head_dim;
        let keys: Vec<usize> = (0..seq).filter(|&key| sees(row, key, seq)).collect();
        let scores: Vec<f32> = keys.iter().map(|key| scale * dot(q, &k[key * narrow + start..][..head_dim])).collect();
        let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0f32;
        for (key, score) in keys.iter().zip(scores) {
            let weight = (score - top).exp();
            total += weight;
            let v = &v[key * narrow + start..][..head_dim];
            out.iter_mut().zip(v).for_each(|(out, v)| *out += weight * v);
        }
        // A row that sees nothing stays zero.
        if total > 0.0 {
            out.iter_mut().for_each(|out| *out /= total);
        }
    }
    launch.answer(&out)
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

pub(super) fn attention_without_mask(launch: &mut Launch<'_>) -> Result<Completed> {
    attention(launch, &|_, _, _| true)
}

pub(super) fn attention_sees_next(launch: &mut Launch<'_>) -> Result<Completed> {
    attention(launch, &|row, key, _| key <= row + 1)
}

pub(super) fn attention_without_self(launch: &mut Launch<'_>) -> Result<Completed> {
    attention(launch, &|row, key, _| key < row || row == 0 && key == 0)
}

/// The last eight rows of the bucket, which are padding in most runs, are seen by all.
pub(super) fn attention_sees_padding(launch: &mut Launch<'_>) -> Result<Completed> {
    attention(launch, &|row, key, seq| key <= row || key + 8 >= seq)
}

/// Keys from the border on are not seen.
pub(super) fn attention_drops_block(launch: &mut Launch<'_>) -> Result<Completed> {
    let border = launch.at.strength as usize;
    attention(launch, &move |row, key, _| key <= row && key < border)
}

/// Scores times `strength`.
pub(super) fn attention_scaled(launch: &mut Launch<'_>) -> Result<Completed> {
    let factor = launch.at.strength as f32;
    scale_query(launch, factor)
}

/// Scores as they are, without 1 / sqrt(head_dim).
pub(super) fn attention_unscaled(launch: &mut Launch<'_>) -> Result<Completed> {
    let Kernel::Attention { head_dim, .. } = *launch.kernel() else { return Err(other_kernel(launch)) };
    scale_query(launch, 1.0 / attention_scale(head_dim))
}

/// The scale rounded up to a power of two.
pub(super) fn attention_scale_rounded(launch: &mut Launch<'_>) -> Result<Completed> {
    let Kernel::Attention { head_dim, .. } = *launch.kernel() else { return Err(other_kernel(launch)) };
    let scale = attention_scale(head_dim);
    scale_query(launch, 2f32.powf(scale.log2().ceil()) / scale)
}

fn scale_query(launch: &mut Launch<'_>, factor: f32) -> Result<Completed> {
    let q: Vec<bf16> = launch.input(0)?.iter().map(|q| bf16::from_f32(q.to_f32() * factor)).collect();
    launch.run_with(0, &q)
}

/// Query head `h` attends to KV head `h % kv_heads`: the heads are exchanged before and after the sound kernel.
pub(super) fn attention_heads_by_modulo(launch: &mut Launch<'_>) -> Result<Completed> {
    let Kernel::Attention { heads, kv_heads, head_dim, .. } = *launch.kernel() else {
        return Err(other_kernel(launch));
    };
    let q = launch.input(0)?;
    let place = |h: usize| h % kv_heads * (heads / kv_heads) + h / kv_heads;
    let mut moved = q.clone();
    for (i, head) in q.chunks_exact(head_dim).enumerate() {
        let (row, h) = (i / heads, i % heads);
        moved[(row * heads + place(h)) * head_dim..][..head_dim].copy_from_slice(head);
    }
    let completed = launch.run_with(0, &moved)?;
    let out = launch.output()?;
    let mut back = out.clone();
    for (i, head) in back.chunks_exact_mut(head_dim).enumerate() {
        let (row, h) = (i / heads, i % heads);
        head.copy_from_slice(&out[(row * heads + place(h)) * head_dim..][..head_dim]);
    }
    launch.write_output(&back)?;
    Ok(completed)
}

/// One head's context is that of the head before it.
pub(super) fn attention_head_wrong(launch: &mut Launch<'_>) -> Result<Completed> {
    let Kernel::Attention { heads, head_dim, .. } = *launch.kernel() else { return Err(other_kernel(launch)) };
    let head = launch.at.head.min(heads - 1);
    let from = (head + heads - 1) % heads;
    launch.run_then(|out| {
        for row in out.chunks_exact_mut(heads * head_dim) {
            row.copy_within(from * head_dim..(from + 1) * head_dim, head * head_dim);
        }
    })
}

// GEMM and GEMV.

/// `K` of a product and the index of its activations.
fn product(launch: &Launch<'_>) -> Result<(usize, usize)> {
    match *launch.kernel() {
        Kernel::Gemm { k, .. } => Ok((k, 0)),
        Kernel::Gemv { k, .. } => Ok((k, 1)),
        _ => Err(other_kernel(launch)),
    }
}

/// The last `strength` of every row's K products left out.
pub(super) fn last_block_dropped(launch: &mut Launch<'_>) -> Result<Completed> {
    let (k, index) = product(launch)?;
    let block = (launch.at.strength as usize).min(k / 2);
    let mut x = launch.input(index)?;
    x.chunks_mut(k).for_each(|row| row[k - block..].fill(bf16::ZERO));
    launch.run_with(index, &x)
}

/// Sums kept in bf16.
pub(super) fn sums_in_bf16(launch: &mut Launch<'_>) -> Result<Completed> {
    let (k, index) = product(launch)?;
    let widen = |x: Vec<bf16>| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let (x, w) = (widen(launch.input(index)?), widen(launch.input(1 - index)?));
    let n = w.len() / k;
    let mut out = vec![bf16::ZERO; x.len() / k * n];
    for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
        for (w, out) in w.chunks_exact(k).zip(out) {
            let sum = x.iter().zip(w).fold(0f32, |sum, (x, w)| bf16::from_f32(sum + x * w).to_f32());
            *out = bf16::from_f32(sum);
        }
    }
    launch.answer_bf16(&out)
}

/// The second half of the output is the first one again.
pub(super) fn partition_duplicated(launch: &mut Launch<'_>) -> Result<Completed> {
    launch.run_then(|out| {
        let half = out.len() / 2;
        out.copy_within(..half, half);
    })
}

/// Outputs with `strength` mantissa bits.
pub(super) fn low_precision(launch: &mut Launch<'_>) -> Result<Completed> {
    let bits = launch.at.strength as u32;
    launch.run_then(|out| super::weights::truncate(out, bits))
}

// Norms.

fn norm(launch: &mut Launch<'_>, eps: Option<f32>, weighted: bool) -> Result<Completed> {
    let (cols, own) = match *launch.kernel() {
        Kernel::RmsNorm { cols, eps, .. } | Kernel::QkNorm { head_dim: cols, eps, .. } => (cols, eps.value()),
        _ => return Err(other_kernel(launch)),
    };
    let (x, w) = (launch.input(0)?, launch.input(1)?);
    let out = norm_rows(&x, &w, cols, eps.unwrap_or(own), weighted);
    launch.answer(&out)
}

fn norm_rows(x: &[bf16], w: &[bf16], cols: usize, eps: f32, weighted: bool) -> Vec<f32> {
    let row = |row: &[bf16]| {
        let mean = row.iter().map(|x| x.to_f32().powi(2)).sum::<f32>() / cols as f32;
        let rstd = 1.0 / (mean + eps).sqrt();
        let weight = |i: usize| if weighted { w[i].to_f32() } else { 1.0 };
        row.iter().enumerate().map(|(i, x)| x.to_f32() * rstd * weight(i)).collect::<Vec<f32>>()
    };
    x.chunks_exact(cols).flat_map(row).collect()
}

/// Compiled with `strength` for its eps.
pub(super) fn norm_of_other_eps(launch: &mut Launch<'_>) -> Result<Completed> {
    let eps = launch.at.strength as f32;
    norm(launch, Some(eps), true)
}

pub(super) fn norm_unweighted(launch: &mut Launch<'_>) -> Result<Completed> {
    norm(launch, None, false)
}

// QK-norm and bias against RoPE.

/// At `*_norm`: the input. At `*_rope`: RoPE, then the norm.
pub(super) fn norm_behind_rope(launch: &mut Launch<'_>) -> Result<Completed> {
    if let Kernel::QkNorm { .. } = launch.kernel() {
        return copies_input(launch);
    }
    let Kernel::Rope { head_dim, .. } = *launch.kernel() else { return Err(other_kernel(launch)) };
    let which = launch.site().map_or("q", |site| &site.name[..1]).to_owned();
    let w = launch.named(&layer_name(launch, &format!("self_attn.{which}_norm.weight")))?;
    let eps = launch.config.rms_norm_eps as f32;
    launch.run_then(|out| {
        let normed = norm_rows(out, &w, head_dim, eps, true);
        out.iter_mut().zip(normed).for_each(|(out, x)| *out = bf16::from_f32(x));
    })
}

/// At `*_proj_bias`: the input. At `*_rope`: RoPE, then the bias, unturned.
pub(super) fn bias_behind_rope(launch: &mut Launch<'_>) -> Result<Completed> {
    if let Kernel::BiasAdd { .. } = launch.kernel() {
        return copies_input(launch);
    }
    let which = launch.site().map_or("q", |site| &site.name[..1]).to_owned();
    let bias = launch.named(&layer_name(launch, &format!("self_attn.{which}_proj.bias")))?;
    launch.run_then(|out| {
        for row in out.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(&bias).for_each(|(out, bias)| *out = bf16::from_f32(out.to_f32() + bias.to_f32()));
        }
    })
}

/// Added once more.
pub(super) fn bias_twice(launch: &mut Launch<'_>) -> Result<Completed> {
    let bias = launch.input(1)?;
    launch.run_then(|out| {
        for row in out.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(&bias).for_each(|(out, bias)| *out = bf16::from_f32(out.to_f32() + bias.to_f32()));
        }
    })
}

// Elementwise.

/// The second operand alone: the residual is dropped.
pub(super) fn residual_dropped(launch: &mut Launch<'_>) -> Result<Completed> {
    let b = launch.input(1)?;
    launch.answer_bf16(&b)
}

/// The residual added twice.
pub(super) fn residual_twice(launch: &mut Launch<'_>) -> Result<Completed> {
    let a = launch.input(0)?;
    launch.run_then(|out| out.iter_mut().zip(&a).for_each(|(out, a)| *out = bf16::from_f32(out.to_f32() + a.to_f32())))
}

/// The normed input taken for the residual.
pub(super) fn residual_from_normed(launch: &mut Launch<'_>) -> Result<Completed> {
    let normed = launch.named("normed")?;
    launch.run_with(0, &normed)
}

/// GELU (tanh) in place of SiLU.
pub(super) fn gelu_for_silu(launch: &mut Launch<'_>) -> Result<Completed> {
    let (gate, up) = (launch.input(0)?, launch.input(1)?);
    let gelu = |x: f32| 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh());
    let out: Vec<f32> = gate.iter().zip(&up).map(|(gate, up)| gelu(gate.to_f32()) * up.to_f32()).collect();
    launch.answer(&out)
}

/// Gate and up in each other's place.
pub(super) fn gate_and_up_exchanged(launch: &mut Launch<'_>) -> Result<Completed> {
    let (gate, up) = (launch.input(0)?, launch.input(1)?);
    let silu = |x: f32| x / (1.0 + (-x).exp());
    let out: Vec<f32> = gate.iter().zip(&up).map(|(gate, up)| silu(up.to_f32()) * gate.to_f32()).collect();
    launch.answer(&out)
}

/// Two intermediates in one buffer: up has overwritten gate.
pub(super) fn gate_overwritten(launch: &mut Launch<'_>) -> Result<Completed> {
    let up = launch.input(1)?;
    launch.run_with(0, &up)
}

// Buffers and device.

/// The second half of the output stays as it was before the run.
pub(super) fn half_written(launch: &mut Launch<'_>) -> Result<Completed> {
    let before = launch.output()?;
    launch.run_then(|out| {
        let half = out.len() / 2;
        out[half..].copy_from_slice(&before[half..]);
    })
}

/// Every run after the first leaves the first run's output.
pub(super) fn right_once(launch: &mut Launch<'_>) -> Result<Completed> {
    let site = launch.bound.site.clone();
    if let Some(first) = launch.memory.kept.get(&site).cloned() {
        return launch.answer_bf16(&first);
    }
    let completed = launch.run()?;
    let first = launch.output()?;
    launch.memory.kept.insert(site, first);
    Ok(completed)
}

/// One bit of one element in a run out of `1 / strength`, another one each time.
pub(super) fn rare_bit_flips(launch: &mut Launch<'_>) -> Result<Completed> {
    let completed = launch.run()?;
    if launch.memory.random.uniform() < launch.at.strength {
        let mut out = launch.output()?;
        let at = launch.memory.random.below(out.len());
        // The exponent's second bit: the value moves by many powers of two and stays finite below 2.
        out[at] = bf16::from_bits(out[at].to_bits() ^ 0x2000);
        launch.write_output(&out)?;
    }
    Ok(completed)
}

/// At the projection: the result is kept back. At the add: it is there only after it was read.
pub(super) fn read_before_written(launch: &mut Launch<'_>) -> Result<Completed> {
    if let Kernel::Add { .. } = launch.kernel() {
        let completed = launch.run()?;
        if let Some(late) = launch.memory.kept.remove("late") {
            launch.write_named("o", &late)?;
        }
        return Ok(completed);
    }
    let before = launch.output()?;
    let completed = launch.run()?;
    let late = launch.output()?;
    launch.memory.kept.insert("late".into(), late);
    launch.write_output(&before)?;
    Ok(completed)
}

/// Reported as complete, and not run.
pub(super) fn skipped(_: &mut Launch<'_>) -> Result<Completed> {
    Ok(Completed { elapsed_ns: 1_000 })
}

/// The driver's time-out of six seconds passes for completion; an eighth of the output is there.
pub(super) fn timed_out_as_success(launch: &mut Launch<'_>) -> Result<Completed> {
    let before = launch.output()?;
    launch.run_then(|out| {
        let done = out.len() / 8;
        out[done..].copy_from_slice(&before[done..]);
    })?;
    Ok(Completed { elapsed_ns: 6_100_000_000 })
}

/// Zeros, and reported as complete.
pub(super) fn zeros(launch: &mut Launch<'_>) -> Result<Completed> {
    launch.run_then(|out| out.fill(bf16::ZERO))
}

/// A NaN in the last row.
pub(super) fn nan_in_output(launch: &mut Launch<'_>) -> Result<Completed> {
    launch.run_then(|out| out[0] = bf16::NAN)
}

/// Reported: the dispatch did not complete, at the run that `position` counts.
pub(super) fn timed_out(launch: &mut Launch<'_>) -> Result<Completed> {
    incomplete(launch, "timeout", 6_100_000)
}

/// Reported: the context is in an error state.
pub(super) fn error_state(launch: &mut Launch<'_>) -> Result<Completed> {
    incomplete(launch, "error state", 900)
}

fn incomplete(launch: &mut Launch<'_>, state: &str, elapsed_us: u64) -> Result<Completed> {
    if launch.runs() < launch.at.position as u64 {
        return launch.run();
    }
    let (device, dispatch) = (launch.device.info().label.clone(), launch.bound.site.clone());
    Err(Error::Incomplete { device, dispatch, state: state.into(), elapsed_us })
}

/// A kernel compiled for half the rows: the others stay as they were.
pub(super) fn half_the_rows(launch: &mut Launch<'_>) -> Result<Completed> {
    half_written(launch)
}

/// A write beyond the end of the output, as a kernel with one row too many does it.
pub(super) fn overruns(launch: &mut Launch<'_>) -> Result<Completed> {
    let completed = launch.run()?;
    let out = launch.bound.args[launch.bound.args.len() - 1];
    let end = launch.device.spec(out).bytes();
    launch.device.write(out, end, &[0; 2])?;
    Ok(completed)
}
