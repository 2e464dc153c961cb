//! Attention with a bf16 softmax state.

use super::*;

/// (heads, kv heads, head_dim)
type Dims = (usize, usize, usize);

/// The flash attention of the silicon, step by step, row by row.
fn naive_attention(q: &[bf16], k: &[bf16], v: &[bf16], (heads, kv_heads, head_dim): Dims, causal: bool) -> Vec<f64> {
    const LOWEST: f64 = -3.389_531_389_251_535_5e38;
    let (wide, narrow) = (heads * head_dim, kv_heads * head_dim);
    let rows = q.len() / wide;
    let c = nearest(f64::from((1.0 / (head_dim as f32).sqrt()) * std::f32::consts::LOG2_E));
    let factor = |difference: f64| naive_exp2(nearest(difference).max(LOWEST) * c);
    let head_of = |x: &[bf16], width: usize, row: usize, head: usize| -> Vec<f64> {
        x[row * width + head * head_dim..][..head_dim].iter().map(|x| x.to_f64()).collect()
    };
    let quantised = |x: Vec<f64>| x.chunks(BLOCK).flat_map(naive_block).collect::<Vec<_>>();
    let stage_len = rows.div_ceil(256) * 64;
    let mut out = vec![];
    for row in 0..rows {
        for head in 0..heads {
            let kv = head / (heads / kv_heads);
            let seen = if causal { row + 1 } else { rows };
            let q = quantised(head_of(q, wide, row, head));
            let mut merged: Option<(f64, f64, Vec<f64>)> = None;
            for stage in (0..4).rev() {
                let (mut m, mut l, mut o) = (LOWEST, 0.0, vec![0.0; head_dim]);
                for start in (stage * stage_len..((stage + 1) * stage_len).min(rows)).step_by(64) {
                    if start >= seen {
                        break;
                    }
                    let filled = 64.min(rows - start);
                    let mut s = vec![f64::NEG_INFINITY; 64];
                    for (p, s) in s.iter_mut().enumerate().take(filled.min(seen - start)) {
                        let k = quantised(head_of(k, narrow, start + p, kv));
                        *s = 0.0;
                        for (q, k) in q.chunks(64).zip(k.chunks(64)) {
                            *s = nearest(*s + q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>());
                        }
                    }
                    let new = s.iter().copied().fold(m.max(LOWEST), f64::max);
                    let p: Vec<f64> = s.iter().map(|s| factor(s - new)).collect();
                    let rescale = factor(m - new);
                    l = nearest(l * rescale + nearest(p.iter().sum()));
                    let p = quantised(p);
                    for (d, o) in o.iter_mut().enumerate() {
                        let column: Vec<f64> = (0..64)
                            .map(|p| if p < filled { head_of(v, narrow, start + p, kv)[d] } else { 0.0 })
                            .collect();
                        let sum: f64 = p.iter().zip(quantised(column)).map(|(p, v)| p * v).sum();
                        *o = nearest(nearest(*o * rescale) + sum);
                    }
                    m = new;
                }
                merged = Some(match merged {
                    None => (m, l, o),
                    Some((later_m, later_l, later_o)) => {
                        let new = m.max(later_m);
                        let (own, later) = (factor(m - new), factor(later_m - new));
                        let total = nearest(l * own + nearest(later_l * later));
                        let added = |(o, later_o): (&f64, &f64)| nearest(nearest(o * own) + nearest(later_o * later));
                        (new, total, o.iter().zip(&later_o).map(added).collect())
                    }
                });
            }
            let (_, l, o) = merged.expect("four stages");
            out.extend(o.iter().map(|o| nearest(o * nearest(1.0 / l))));
        }
    }
    out
}

struct Inputs {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    dims: Dims,
}

impl Inputs {
    fn new(rows: usize, dims: Dims, seed: u64) -> Inputs {
        let kv = rows * dims.1 * dims.2;
        Inputs { q: noise(rows * dims.0 * dims.2, seed), k: noise(kv, seed ^ 1000), v: noise(kv, seed ^ 2000), dims }
    }

    fn attend(&self, call: Call<'_>, causal: bool) -> Vec<bf16> {
        let mut out = vec![bf16::NAN; self.q.len()];
        let scale = 1.0 / (self.dims.2 as f32).sqrt();
        call.attention(&self.q, &self.k, &self.v, self.dims, scale, causal, &mut out);
        out
    }
}

#[rstest]
#[case(1, (1, 1, 2))]
#[case(5, (2, 1, 6))]
#[case(64, (2, 1, 64))]
#[case(65, (3, 3, 34))]
#[case(130, (4, 2, 32))]
#[case(97, (2, 1, 66))]
#[case(140, (2, 1, 128))]
#[case(300, (2, 1, 16))]
#[case(530, (1, 1, 8))]
fn attention_is_its_steps_and_the_same_for_any_threads(#[case] rows: usize, #[case] dims: Dims) {
    let inputs = Inputs::new(rows, dims, 1);
    for causal in [true, false] {
        let expected = naive_attention(&inputs.q, &inputs.k, &inputs.v, dims, causal);
        for isa in isas() {
            let mut first: Option<Vec<u16>> = None;
            for threads in THREADS {
                let pool = Pool::new(threads);
                let out = inputs.attend(call(&pool, isa), causal);
                let name = format!("{isa} {rows} rows {dims:?} causal {causal}, {threads} threads");
                // Sums in f32 that fall on the other side of a tie: few, and each a place of some bf16.
                let off = out.iter().zip(&expected).filter(|(y, expected)| y.to_f64() != **expected).count();
                assert!(off * 20 <= out.len(), "{name}: {off} of {} differ", out.len());
                assert_close(&name, &out, &expected, 0.03, 0.02);
                assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{name}");
            }
        }
    }
}

/// A masked value reaches a row through the exponent it shares, so zeros stand where the poison does.
#[rstest]
fn masked_nan_and_infinity_leave_no_trace(
    #[values(bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY)] poison: bf16,
    #[values(1, 20, 63, 64, 100)] clean: usize,
) {
    let dims = (4, 2, 34);
    let (wide, narrow) = (dims.0 * dims.2, dims.1 * dims.2);
    let with = |fill: bf16| {
        let mut inputs = Inputs::new(131, dims, 3);
        inputs.k[clean * narrow..].fill(fill);
        inputs.v[clean * narrow..].fill(fill);
        inputs.q[clean * wide..].fill(fill);
        inputs
    };
    let (zeros, poisoned) = (with(bf16::ZERO), with(poison));
    for isa in isas() {
        let pool = Pool::new(2);
        let (good, bad) = (zeros.attend(call(&pool, isa), true), poisoned.attend(call(&pool, isa), true));
        assert_eq!(bits(&good[..clean * wide]), bits(&bad[..clean * wide]), "{isa}");
        assert!(bad[clean * wide..].iter().all(|v| v.is_nan()), "{isa}: a poisoned row looks sound");
    }
}

#[rstest]
fn a_seen_nan_is_never_hidden(#[values(0, 5, 64, 69)] position: usize, #[values(0, 1, 2)] part: usize) {
    let (rows, dims) = (70, (2, 1, 32));
    let mut inputs = Inputs::new(rows, dims, 4);
    let (wide, narrow) = (64, 32);
    match part {
        0 => inputs.q[position * wide + 3] = bf16::NAN,
        1 => inputs.k[position * narrow + 3] = bf16::NAN,
        _ => inputs.v[position * narrow + 3] = bf16::NAN,
    }
    for isa in isas() {
        let out = inputs.attend(call(&Pool::new(2), isa), true);
        for (i, v) in out.iter().enumerate() {
            let (row, column) = (i / wide, i % wide);
            let expected = match part {
                0 => row == position && column < 32,
                1 => row >= position,
                _ => row >= position && column % 32 == 3,
            };
            assert_eq!(v.is_nan(), expected, "{isa}: row {row}, column {column}");
        }
    }
}
