//! Attention against a naive f64 loop, at odd shapes, on every instruction set.

use proptest::prelude::*;
use rstest::rstest;

use super::*;
use crate::compute::{
    Call, Pool,
    testing::{THREADS, assert_close, bits, isas, noise},
};

/// (heads, kv heads, head_dim)
type Dims = (usize, usize, usize);

fn naive(q: &[bf16], k: &[bf16], v: &[bf16], (heads, kv_heads, head_dim): Dims, scale: f64, causal: bool) -> Vec<f64> {
    let (rows, wide, narrow) = (q.len() / (heads * head_dim), heads * head_dim, kv_heads * head_dim);
    let mut out = vec![0.0; q.len()];
    for (row, out) in out.chunks_mut(wide).enumerate() {
        for (head, out) in out.chunks_mut(head_dim).enumerate() {
            let at = |position: usize, d: usize| position * narrow + head / (heads / kv_heads) * head_dim + d;
            let seen = if causal { row + 1 } else { rows };
            let score = |p: usize| {
                let q = &q[row * wide + head * head_dim..];
                scale * (0..head_dim).map(|d| q[d].to_f64() * k[at(p, d)].to_f64()).sum::<f64>()
            };
            let scores: Vec<f64> = (0..seen).map(score).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            for (d, out) in out.iter_mut().enumerate() {
                *out = (0..seen).map(|p| (scores[p] - top).exp() * v[at(p, d)].to_f64()).sum::<f64>() / total;
            }
        }
    }
    out
}

struct Inputs {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    dims: Dims,
    scale: f32,
}

impl Inputs {
    fn new(rows: usize, dims: Dims, seed: u64) -> Inputs {
        let (heads, kv_heads, head_dim) = dims;
        let kv = rows * kv_heads * head_dim;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let q = noise(rows * heads * head_dim, seed);
        Inputs { q, k: noise(kv, seed ^ 1000), v: noise(kv, seed ^ 2000), dims, scale }
    }

    fn attend(&self, call: Call<'_>, causal: bool) -> Vec<bf16> {
        let mut out = vec![bf16::NAN; self.q.len()];
        call.attention(&self.q, &self.k, &self.v, self.dims, self.scale, causal, &mut out);
        out
    }

    /// The first `len` positions.
    fn cache(&self, len: usize) -> PackedCache {
        let (_, kv_heads, head_dim) = self.dims;
        // Room for more, which is NaN.
        let mut cache = PackedCache::new(kv_heads, head_dim, len + 3);
        let (pool, end) = (Pool::new(1), len * kv_heads * head_dim);
        cache.write_keys(&pool, 0, &self.k[..end]);
        cache.write_values(&pool, 0, &self.v[..end]);
        cache
    }

    fn decode(&self, call: Call<'_>, row: usize) -> Vec<bf16> {
        let (heads, _, head_dim) = self.dims;
        let wide = heads * head_dim;
        let mut out = vec![bf16::NAN; wide];
        let q = &self.q[row * wide..][..wide];
        call.decode_attention(q, &self.cache(row + 1), heads, self.scale, &mut out);
        out
    }

    fn expected(&self, causal: bool) -> Vec<f64> {
        naive(&self.q, &self.k, &self.v, self.dims, f64::from(self.scale), causal)
    }
}

/// Room for probabilities rounded to bf16 and one rounding of the result, on values of order one.
fn assert_context(name: &str, out: &[bf16], expected: &[f64]) {
    assert_close(name, out, expected, 1.0 / 256.0, 6e-3);
}

#[rstest]
#[case(1, (1, 1, 2))]
#[case(5, (2, 1, 6))]
#[case(63, (3, 3, 34))]
#[case(64, (9, 3, 64))]
#[case(65, (4, 2, 32))]
#[case(130, (9, 3, 64))]
#[case(127, (2, 2, 8))]
#[case(128, (26, 1, 16))]
#[case(129, (2, 1, 8))]
#[case(200, (2, 1, 128))]
#[case(257, (3, 1, 64))]
#[case(700, (2, 2, 10))]
#[case(97, (2, 2, 66))]
fn matches_f64_is_the_same_for_any_threads_and_equals_decode(#[case] rows: usize, #[case] dims: Dims) {
    let inputs = Inputs::new(rows, dims, 1);
    for causal in [true, false] {
        let expected = inputs.expected(causal);
        for isa in isas() {
            let mut first: Option<Vec<u16>> = None;
            for threads in THREADS {
                let pool = Pool::new(threads);
                let call = Call { pool: &pool, isa };
                let out = inputs.attend(call, causal);
                let name = format!("{isa} {rows} rows {dims:?} causal {causal}, {threads} threads");
                assert_context(&name, &out, &expected);
                assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{name}");
                let wide = dims.0 * dims.2;
                for row in if causal { (0..rows).step_by(7).collect() } else { vec![rows - 1] } {
                    let decoded = inputs.decode(call, row);
                    assert_eq!(bits(&decoded), bits(&out[row * wide..][..wide]), "{name}: decode of row {row}");
                }
            }
        }
    }
}

#[rstest]
fn masked_nan_and_infinity_leave_no_trace(
    #[values(bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY)] poison: bf16,
    #[values(1, 20, 63, 64, 100, 127, 128, 129, 255, 256, 257, 280)] clean: usize,
) {
    let (rows, dims) = (300, (4, 2, 34));
    let inputs = Inputs::new(rows, dims, 3);
    let mut poisoned = Inputs::new(rows, dims, 3);
    let (wide, narrow) = (dims.0 * dims.2, dims.1 * dims.2);
    poisoned.k[clean * narrow..].fill(poison);
    poisoned.v[clean * narrow..].fill(poison);
    poisoned.q[clean * wide..].fill(poison);
    for isa in isas() {
        let pool = Pool::new(2);
        let call = Call { pool: &pool, isa };
        let (good, bad) = (inputs.attend(call, true), poisoned.attend(call, true));
        assert_eq!(bits(&good[..clean * wide]), bits(&bad[..clean * wide]), "{isa}");
        assert!(bad[clean * wide..].iter().all(|v| v.is_nan()), "{isa}: a poisoned row looks sound");
    }
}

#[rstest]
fn a_seen_nan_is_never_hidden(
    #[values(0, 5, 64, 127, 128, 130, 200, 256, 270)] position: usize,
    #[values(0, 1, 2)] part: usize,
) {
    let (rows, dims) = (275, (2, 1, 32));
    let mut inputs = Inputs::new(rows, dims, 4);
    let (wide, narrow) = (64, 32);
    match part {
        0 => inputs.q[position * wide + 3] = bf16::NAN,
        1 => inputs.k[position * narrow + 3] = bf16::NAN,
        _ => inputs.v[position * narrow + 3] = bf16::NAN,
    }
    for isa in isas() {
        let pool = Pool::new(2);
        let out = inputs.attend(Call { pool: &pool, isa }, true);
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

/// Some queries have the bits they have among all, whatever comes behind the last of them.
#[rstest]
fn queries_alone_are_those_of_all_and_see_nothing_behind_them(
    #[values(1, 2, 3, 9, 23, 24, 25, 193)] count: usize,
    #[values(0, 1, 8, 9, 127, 128, 129, 300)] first: usize,
    #[values(false, true)] poisoned: bool,
) {
    let (seq, dims) = (first + count + 5, (4, 2, 34));
    let (wide, narrow, end) = (dims.0 * dims.2, dims.1 * dims.2, first + count);
    let sound = Inputs::new(seq, dims, 11);
    let mut inputs = Inputs::new(seq, dims, 11);
    if poisoned {
        inputs.k[end * narrow..].fill(bf16::NAN);
        inputs.v[end * narrow..].fill(bf16::NAN);
    }
    let pool = Pool::new(2);
    for isa in isas() {
        let expected = sound.attend(Call { pool: &pool, isa }, true);
        let mut packed = vec![0; PackPositions::len(dims.1, dims.2, seq)];
        let mut out = vec![bf16::NAN; count * wide];
        // SAFETY: all slices outlive the run, and a barrier stands between writing and reading the packed positions.
        unsafe {
            let to = Dst::of(&mut packed);
            let positions = Src::new(to.ptr().cast_const(), to.len());
            let (k, v) = (Src::of(&inputs.k), Src::of(&inputs.v));
            let pack = PackPositions { k, v, to, kv_heads: dims.1, head_dim: dims.2, isa };
            let attention = Attention {
                q: Src::of(&inputs.q[first * wide..end * wide]),
                positions,
                out: Dst::of(&mut out),
                first,
                seq,
                heads: dims.0,
                kv_heads: dims.1,
                head_dim: dims.2,
                scale: inputs.scale,
                causal: true,
                isa,
            };
            pool.run(&[&pack, &attention]);
        }
        assert_eq!(bits(&out), bits(&expected[first * wide..end * wide]), "{isa}");
    }
}

/// Up to where a score is not finite any more: the top has probability 1, whatever rounding does to its neighbours.
#[rstest]
fn large_scores_do_not_overflow(#[values(0, 8, 14, 15, 16, 20, 30, 58)] power: i32) {
    let mut inputs = Inputs::new(140, (1, 1, 8), 6);
    inputs.scale = 500.0;
    for x in inputs.q.iter_mut().chain(&mut inputs.k) {
        *x *= bf16::from_f32(2f32.powi(power));
    }
    for isa in isas() {
        let call = Call { pool: &Pool::new(1), isa };
        let out = inputs.attend(call, true);
        assert_context(&format!("{isa}, 2^{power}"), &out, &inputs.expected(true));
        for row in [0, 1, 63, 64, 127, 128, 139] {
            assert_eq!(bits(&inputs.decode(call, row)), bits(&out[row * 8..][..8]), "{isa}, 2^{power}: row {row}");
        }
    }
}

/// Inputs whose scores grow from block to block by about these powers of two, for the queries that `grows` chooses.
fn growing(powers: [f32; 3], grows: impl Fn(usize) -> bool) -> Inputs {
    let mut inputs = Inputs::new(300, (4, 2, 8), 13);
    // One dimension makes the scores: of the queries 1 or 0, of the keys the power of their block.
    let of_power = std::f32::consts::LN_2 / inputs.scale;
    for (at, q) in inputs.q.chunks_mut(8).enumerate() {
        q[0] = bf16::from_f32(if grows(at / 4) { 1.0 } else { 0.0 });
    }
    for (at, k) in inputs.k.chunks_mut(8).enumerate() {
        k[0] = bf16::from_f32(powers[at / 2 / 128] * of_power);
    }
    inputs
}

/// Probabilities are relative to a maximum that a later block may pass, by little, by much, and by more than f32 holds.
#[rstest]
fn scores_may_grow_from_block_to_block(
    #[values([0.0, 3.0, 10.0], [0.0, 14.0, 29.0], [0.0, 40.0, 90.0], [-900.0, 0.0, 5.0], [0.0, 250.0, 900.0], [20.0, 0.0, 60.0])]
    powers: [f32; 3],
    #[values(true, false)] causal: bool,
    #[values(0, 100)] values: i32,
) {
    let mut inputs = growing(powers, |row| row % 5 < 2);
    let expected = inputs.expected(causal);
    // Values come back times a power of two, unless a context overflows on the way.
    let times = |x: &mut bf16, power| *x = bf16::from_f32(x.to_f32() * 2f32.powi(power));
    inputs.v.iter_mut().for_each(|v| times(v, values));
    for isa in isas() {
        let mut first: Option<Vec<u16>> = None;
        for threads in THREADS {
            let call = Call { pool: &Pool::new(threads), isa };
            let out = inputs.attend(call, causal);
            let name = format!("{isa}, {powers:?}, causal {causal}, values of 2^{values}, {threads} threads");
            let mut of_order_one = out.clone();
            of_order_one.iter_mut().for_each(|x| times(x, -values));
            assert_context(&name, &of_order_one, &expected);
            assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{name}");
            for row in if causal { vec![127, 128, 130, 255, 256, 257, 280, 299] } else { vec![299] } {
                let decoded = inputs.decode(call, row);
                assert_eq!(bits(&decoded), bits(&out[row * 32..][..32]), "{name}: decode of row {row}");
            }
        }
    }
}

/// Starting over at a new maximum neither lets in what is masked nor loses what is not finite.
#[rstest]
fn rows_that_grow_see_what_is_not_finite_from_its_position_on(
    #[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY)] poison: f32,
    #[values(0, 5, 129, 130, 200, 257, 290)] position: usize,
    #[values("the key", "the value", "all behind it")] part: &str,
) {
    let sound = growing([0.0, 90.0, 900.0], |_| true);
    let mut inputs = growing([0.0, 90.0, 900.0], |_| true);
    let (rows, poison) = (position * 16..(position + 1) * 16, bf16::from_f32(poison));
    match part {
        // Not the dimension that makes the scores: whatever the sign, the key's score is not finite.
        "the key" => inputs.k[rows].chunks_mut(8).for_each(|k| k[1] = poison),
        "the value" => inputs.v[rows].fill(poison),
        _ => {
            inputs.k[rows.start..].fill(poison);
            inputs.v[rows.start..].fill(poison);
        }
    }
    for isa in isas() {
        let call = Call { pool: &Pool::new(2), isa };
        let (good, bad) = (sound.attend(call, true), inputs.attend(call, true));
        for (row, (good, bad)) in good.chunks(32).zip(bad.chunks(32)).enumerate() {
            let name = format!("{isa}: row {row}, {poison} in {part} of {position}");
            if row < position {
                assert_eq!(bits(good), bits(bad), "{name}");
            } else if part != "the key" || poison.is_nan() {
                assert!(bad.iter().all(|x| !x.is_finite()), "{name}: {bad:?}");
            } else if row == position {
                // A score of -infinity is none; one of +infinity leaves nothing else.
                let heads = bad.chunks(8).filter(|head| head.iter().all(|x| x.is_nan())).count();
                assert!(heads > 0 || bits(bad) != bits(good), "{name}: no trace");
            }
        }
    }
}

/// A row that starts over at a new maximum does not reach the rows beside it.
#[test]
fn rows_that_grow_leave_the_others_alone() {
    let [still, some] = [false, true].map(|grow| growing([0.0, 90.0, 900.0], |row| grow && row % 3 == 0));
    for isa in isas() {
        let call = Call { pool: &Pool::new(2), isa };
        let (still, some) = (still.attend(call, true), some.attend(call, true));
        let mut differ = 0;
        for (row, (a, b)) in still.chunks(32).zip(some.chunks(32)).enumerate() {
            match row % 3 {
                0 => differ += usize::from(bits(a) != bits(b)),
                _ => assert_eq!(bits(a), bits(b), "{isa}: row {row}"),
            }
        }
        assert!(differ > 50, "{isa}: {differ} rows grew");
    }
}

/// What a row's state holds does not reach the rows beside it, which a vector's padding touches.
#[rstest]
fn a_row_that_is_not_finite_leaves_its_neighbours_alone(
    #[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY)] value: f32,
    #[values(0, 15, 16, 23, 24, 100, 129, 255, 290)] row: usize,
) {
    let dims = (4, 2, 32);
    let wide = dims.0 * dims.2;
    let sound = Inputs::new(300, dims, 9);
    let mut inputs = Inputs::new(300, dims, 9);
    inputs.q[row * wide..(row + 1) * wide].fill(bf16::from_f32(value));
    for isa in isas() {
        let call = Call { pool: &Pool::new(2), isa };
        let (out, right) = (inputs.attend(call, true), sound.attend(call, true));
        for (at, (x, right)) in out.chunks(wide).zip(right.chunks(wide)).enumerate() {
            assert!(at == row || bits(x) == bits(right), "{isa}: row {at} beside {row} of {value}");
        }
        assert!(out[row * wide..(row + 1) * wide].iter().all(|x| x.is_nan()), "{isa}: row {row} of {value}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn any_shape(
        rows in 1usize..300,
        group in 1usize..4,
        kv_heads in 1usize..4,
        half in 1usize..40,
        causal in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let inputs = Inputs::new(rows, (group * kv_heads, kv_heads, 2 * half), seed);
        let expected = inputs.expected(causal);
        let pool = Pool::new(2);
        for isa in isas() {
            assert_context(&isa.to_string(), &inputs.attend(Call { pool: &pool, isa }, causal), &expected);
        }
    }
}
