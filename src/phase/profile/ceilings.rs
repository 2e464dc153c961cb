//! What this machine can do, measured when it is asked: the fastest GEMM and the fastest stream of weights.

use std::time::Instant;

use half::bf16;

use crate::compute::{Call, PackedWeight};
use crate::error::Result;
use crate::phase::devices;

/// Measured with the emulated device's own kernels and threads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// A GEMM of [`GEMM`], whose operands stay in the caches.
    pub gflops: f64,
    /// A GEMV over [`GEMV`], which no cache holds. Units: 10^9 bytes per second.
    pub gbytes: f64,
}

/// m, k, n.
pub const GEMM: (usize, usize, usize) = (256, 768, 768);
/// Rows and columns: 128 MiB of bf16.
pub const GEMV: (usize, usize) = (16384, 4096);

impl Ceilings {
    /// The best of some runs each.
    ///
    /// Errors: for a wrong `PHASEGATE_THREADS` or `PHASEGATE_ISA`.
    pub fn measure() -> Result<Ceilings> {
        let (pool, isa) = (devices::pool()?, devices::isa()?);
        let call = Call { pool: &pool, isa };
        let values = |len: usize| (0..len).map(|i| bf16::from_f32((i % 13) as f32 - 6.0)).collect::<Vec<_>>();
        let (m, k, n) = GEMM;
        let (a, w, mut c) = (values(m * k), PackedWeight::pack(&pool, &values(n * k), n, k), vec![bf16::ZERO; m * n]);
        let gemm = best(20, || call.gemm(&a, &w, &mut c));
        let (rows, cols) = GEMV;
        let w = PackedWeight::pack(&pool, &values(rows * cols), rows, cols);
        let (x, mut y) = (values(cols), vec![bf16::ZERO; rows]);
        let gemv = best(6, || call.gemv(&x, &w, &mut y));
        Ok(Ceilings { gflops: (2 * m * k * n) as f64 / gemm / 1e9, gbytes: (2 * rows * cols) as f64 / gemv / 1e9 })
    }
}

/// The shortest of `runs` calls. Units: seconds.
fn best(runs: usize, mut call: impl FnMut()) -> f64 {
    let times = (0..runs).map(|_| {
        let started = Instant::now();
        call();
        started.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}
