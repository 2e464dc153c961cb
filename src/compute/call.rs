//! One kernel at a time, on slices: the safe way in for host code and tests.
//!
//! May not compute anything itself; a dispatch of several kernels goes through [`Pool::run`].

use half::bf16;

use super::{
    Add, Attention, BiasAdd, DecodeAttention, GeluTanh, Gemm, Gemv, GemvAdd, Gemvs, Isa, Kernel, LayerNorm, Out,
    PackPositions, PackedCache, PackedWeight, Pool, RmsNorm, Rope, SiluMul, Swiglu,
    view::{Dst, Src},
};

/// A pool and an instruction set to call kernels with.
///
/// Every method is the kernel of the same name; it panics where the shapes do not fit.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// Who works.
    pub pool: &'a Pool,
    /// With what.
    pub isa: Isa,
}

fn src<T: Copy>(slice: &[T]) -> Src<T> {
    // SAFETY: this module's methods hold the borrow until the only run of the kernel is over.
    unsafe { Src::of(slice) }
}

fn dst<T: Copy>(slice: &mut [T]) -> Dst<T> {
    // SAFETY: this module's methods hold the borrow until the only run of the kernel is over, and it is unique.
    unsafe { Dst::of(slice) }
}

impl Call<'_> {
    fn run(&self, kernel: impl Kernel) {
        self.pool.run(&[&kernel]);
    }

    /// [`Gemm`] to bf16. Shapes: `a` [M, K], `c` [M, N].
    pub fn gemm(&self, a: &[bf16], w: &PackedWeight, c: &mut [bf16]) {
        self.run(Gemm { a: src(a), w, c: Out::Bf16(dst(c)), isa: self.isa });
    }

    /// [`Gemm`] to f32. Shapes: `a` [M, K], `c` [M, N].
    pub fn gemm_f32(&self, a: &[bf16], w: &PackedWeight, c: &mut [f32]) {
        self.run(Gemm { a: src(a), w, c: Out::F32(dst(c)), isa: self.isa });
    }

    /// [`Gemv`] to bf16. Shapes: `x` [K], `y` [N].
    pub fn gemv(&self, x: &[bf16], w: &PackedWeight, y: &mut [bf16]) {
        self.run(Gemv { x: src(x), w, y: Out::Bf16(dst(y)), isa: self.isa });
    }

    /// [`Gemv`] to f32. Shapes: `x` [K], `y` [N].
    pub fn gemv_f32(&self, x: &[bf16], w: &PackedWeight, y: &mut [f32]) {
        self.run(Gemv { x: src(x), w, y: Out::F32(dst(y)), isa: self.isa });
    }

    /// [`Gemvs`]. Shapes: each pair `x` [K], `y` [N].
    pub fn gemvs<'v>(&self, vectors: impl IntoIterator<Item = (&'v [bf16], &'v mut [bf16])>, w: &PackedWeight) {
        let vectors = vectors.into_iter().map(|(x, y)| (src(x), Out::Bf16(dst(y)))).collect();
        self.run(Gemvs { vectors, w, isa: self.isa });
    }

    /// [`GemvAdd`] without rounding between. Shapes: `x` [K], `r`, `y` [N].
    pub fn gemv_add(&self, x: &[bf16], w: &PackedWeight, r: &[bf16], y: &mut [bf16]) {
        self.run(GemvAdd { x: src(x), w, r: src(r), y: dst(y), narrow: None, isa: self.isa });
    }

    /// [`RmsNorm`], [`Gemv`] to f32 and [`Swiglu`]. Shapes: `packed` [2, K], the row over its norm's weight, `w` [2 * N, K],
    /// `out` [N].
    pub fn swiglu_rms(&self, packed: &[bf16], w: &PackedWeight, eps: f32, out: &mut [bf16]) {
        let (row, weight) = packed.split_at(packed.len() / 2);
        let (mut normed, mut sums) = (vec![bf16::NAN; row.len()], vec![f32::NAN; w.n()]);
        self.rms_norm(row, weight, eps, &mut normed);
        self.gemv_f32(&normed, w, &mut sums);
        self.run(Swiglu::<false> { sums: src(&sums), out: dst(out), isa: self.isa });
    }

    /// [`LayerNorm`]. Shapes: `x`, `y` [rows, cols], `params` [2, cols].
    pub fn layer_norm(&self, x: &[bf16], params: &[bf16], eps: f32, y: &mut [bf16]) {
        self.run(LayerNorm::<false> { x: src(x), params: src(params), eps, y: dst(y), isa: self.isa });
    }

    /// [`RmsNorm`]. Shapes: `x`, `y` [rows, cols], `weight` [cols].
    pub fn rms_norm(&self, x: &[bf16], weight: &[bf16], eps: f32, y: &mut [bf16]) {
        self.run(RmsNorm::<false> { x: src(x), weight: src(weight), eps, y: dst(y), isa: self.isa });
    }

    /// [`Rope`]. Shapes: `x`, `lut`, `y` [rows, head_dim].
    pub fn rope(&self, x: &[bf16], lut: &[bf16], head_dim: usize, y: &mut [bf16]) {
        self.run(Rope::<false> { x: src(x), lut: src(lut), y: dst(y), head_dim, isa: self.isa });
    }

    /// [`PackPositions`] and [`Attention`]. Shapes: `q`, `out` [S, heads * head_dim], `k`, `v` [S, kv_heads * head_dim]; `dims` is
    /// (heads, kv_heads, head_dim).
    #[expect(clippy::too_many_arguments, reason = "the kernel's own fields")]
    pub fn attention(
        &self,
        q: &[bf16],
        k: &[bf16],
        v: &[bf16],
        dims: (usize, usize, usize),
        scale: f32,
        causal: bool,
        out: &mut [bf16],
    ) {
        let ((heads, kv_heads, head_dim), isa) = (dims, self.isa);
        let seq = k.len() / (kv_heads * head_dim).max(1);
        let mut packed = vec![0; PackPositions::len(kv_heads, head_dim, seq)];
        let (q, k, v, out) = (src(q), src(k), src(v), dst(out));
        let to = dst(&mut packed);
        // SAFETY: the vector outlives the one run, in which a barrier stands between writing and reading.
        let positions = unsafe { Src::new(to.ptr().cast_const(), to.len()) };
        let pack = PackPositions { k, v, to, kv_heads, head_dim, isa };
        let attention = Attention { q, positions, out, first: 0, seq, heads, kv_heads, head_dim, scale, causal, isa };
        self.pool.run(&[&pack, &attention]);
    }

    /// [`DecodeAttention`]. Shapes: `q`, `out` [heads * head_dim].
    pub fn decode_attention(&self, q: &[bf16], cache: &PackedCache, heads: usize, scale: f32, out: &mut [bf16]) {
        self.run(DecodeAttention { q: src(q), cache, out: dst(out), heads, scale, isa: self.isa });
    }

    /// [`SiluMul`]. Shapes: all alike.
    pub fn silu_mul(&self, gate: &[bf16], up: &[bf16], out: &mut [bf16]) {
        self.run(SiluMul::<false> { gate: src(gate), up: src(up), out: dst(out), isa: self.isa });
    }

    /// [`Add`]. Shapes: all alike.
    pub fn add(&self, a: &[bf16], b: &[bf16], out: &mut [bf16]) {
        self.run(Add::<false> { a: src(a), b: src(b), out: dst(out), isa: self.isa });
    }

    /// [`BiasAdd`]. Shapes: `x`, `y` [rows, cols], `bias` [cols].
    pub fn bias_add(&self, x: &[bf16], bias: &[bf16], y: &mut [bf16]) {
        self.run(BiasAdd::<false> { x: src(x), bias: src(bias), y: dst(y), isa: self.isa });
    }

    /// [`GeluTanh`]. Shapes: all alike.
    pub fn gelu_tanh(&self, x: &[bf16], y: &mut [bf16]) {
        self.run(GeluTanh::<false> { x: src(x), y: dst(y), isa: self.isa });
    }
}
