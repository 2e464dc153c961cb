//! One kernel at a time, on slices: [`compute::Call`](crate::compute::Call) in the NPU2's arithmetic.
//!
//! May not compute anything itself. GEMV is missing: it is `compute::Call`'s.

use half::bf16;

use super::super::{Add, Attention, BiasAdd, Blocks, GeluTanh, Gemm, RmsNorm, RmsNormDecode, Rope, SiluMul, Tier};
use crate::compute::{
    self, Kernel, Out, PackedWeight,
    view::{Dst, Src},
};

/// A pool and an instruction set to call kernels with.
///
/// Every method is the kernel of the same name; it panics where the shapes do not fit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a>(pub(super) compute::Call<'a>);

fn src<T: Copy>(slice: &[T]) -> Src<T> {
    // SAFETY: this module's methods hold the borrow until the only run of the kernel is over.
    unsafe { Src::of(slice) }
}

fn dst<T: Copy>(slice: &mut [T]) -> Dst<T> {
    // SAFETY: this module's methods hold the borrow until the only run of the kernel is over, and it is unique.
    unsafe { Dst::of(slice) }
}

impl Call<'_> {
    fn run(&self, kernels: &[&dyn Kernel]) {
        self.0.pool.run(kernels);
    }

    /// [`Blocks`]. Shapes: `x`, `y` [rows, cols].
    pub(super) fn blocks(&self, x: &[bf16], cols: usize, y: &mut [bf16]) {
        self.run(&[&Blocks { x: src(x), y: dst(y), cols, isa: self.0.isa }]);
    }

    /// [`Blocks`] and [`Gemm`] to bf16. Shapes: `a` [M, K], `c` [M, N].
    pub(super) fn gemm(&self, a: &[bf16], w: &PackedWeight, tier: Tier, c: &mut [bf16]) {
        self.product(a, w, tier, Out::Bf16(dst(c)));
    }

    /// [`Blocks`] and [`Gemm`] to f32. Shapes: `a` [M, K], `c` [M, N].
    pub(super) fn gemm_f32(&self, a: &[bf16], w: &PackedWeight, tier: Tier, c: &mut [f32]) {
        self.product(a, w, tier, Out::F32(dst(c)));
    }

    fn product(&self, a: &[bf16], w: &PackedWeight, tier: Tier, c: Out) {
        let isa = self.0.isa;
        let mut quantised = vec![bf16::NAN; a.len()];
        let blocks = Blocks { x: src(a), y: dst(&mut quantised), cols: w.k(), isa };
        self.run(&[&blocks, &Gemm { a: src(&quantised), w, c, tier, isa }]);
    }

    /// [`RmsNorm`]. Shapes: `x`, `y` [rows, cols], `weight` [cols].
    pub(super) fn rms_norm(&self, x: &[bf16], weight: &[bf16], eps: f32, y: &mut [bf16]) {
        self.run(&[&RmsNorm { x: src(x), weight: src(weight), eps, y: dst(y), isa: self.0.isa }]);
    }

    /// [`RmsNormDecode`]. Shapes: `x`, `weight`, `y` [cols].
    pub(super) fn rms_norm_decode(&self, x: &[bf16], weight: &[bf16], eps: f32, y: &mut [bf16]) {
        self.run(&[&RmsNormDecode { x: src(x), weight: src(weight), eps, y: dst(y), isa: self.0.isa }]);
    }

    /// [`Rope`]. Shapes: `x`, `lut`, `y` [rows, head_dim].
    pub(super) fn rope(&self, x: &[bf16], lut: &[bf16], head_dim: usize, y: &mut [bf16]) {
        self.run(&[&Rope { x: src(x), lut: src(lut), y: dst(y), head_dim, isa: self.0.isa }]);
    }

    /// [`Attention`]. Shapes: `q`, `out` [S, heads * head_dim], `k`, `v` [S, kv_heads * head_dim]; `dims` is
    /// (heads, kv_heads, head_dim).
    #[expect(clippy::too_many_arguments, reason = "the kernel's own fields")]
    pub(super) fn attention(
        &self,
        q: &[bf16],
        k: &[bf16],
        v: &[bf16],
        dims: (usize, usize, usize),
        scale: f32,
        causal: bool,
        out: &mut [bf16],
    ) {
        let (heads, kv_heads, head_dim) = dims;
        let (q, k, v, out) = (src(q), src(k), src(v), dst(out));
        self.run(&[&Attention { q, k, v, out, heads, kv_heads, head_dim, scale, causal, isa: self.0.isa }]);
    }

    /// [`SiluMul`]. Shapes: all alike.
    pub(super) fn silu_mul(&self, gate: &[bf16], up: &[bf16], out: &mut [bf16]) {
        self.run(&[&SiluMul { gate: src(gate), up: src(up), out: dst(out), isa: self.0.isa }]);
    }

    /// [`Add`]. Shapes: all alike.
    pub(super) fn add(&self, a: &[bf16], b: &[bf16], out: &mut [bf16]) {
        self.run(&[&Add { a: src(a), b: src(b), out: dst(out), isa: self.0.isa }]);
    }

    /// [`BiasAdd`]. Shapes: `x`, `y` [rows, cols], `bias` [cols].
    pub(super) fn bias_add(&self, x: &[bf16], bias: &[bf16], y: &mut [bf16]) {
        self.run(&[&BiasAdd { x: src(x), bias: src(bias), y: dst(y), isa: self.0.isa }]);
    }

    /// [`GeluTanh`]. Shapes: all alike.
    pub(super) fn gelu_tanh(&self, x: &[bf16], y: &mut [bf16]) {
        self.run(&[&GeluTanh { x: src(x), y: dst(y), isa: self.0.isa }]);
    }
}
