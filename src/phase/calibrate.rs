//! Is `emu_npu2` as wrong as the silicon? Every kernel on seeded standard-normal inputs at a registry shape against an
//! f32 reference rounded to the output's type, as the registry measures, beside the figure measured on hardware.
//!
//! A figure is a fingerprint of the arithmetic: another rounding or one step more shows as another error. Says nothing of
//! single elements, which only the silicon can. Returns data; whoever asks prints it.

mod reference;
#[cfg(test)]
mod tests;

use half::bf16;
use ndarray::ArrayView2;

use self::reference::Sample;
use super::devices::open_device;
use crate::check::metrics::Metrics;
use crate::device::{BoundLaunch, BufferHandle, BufferSpec, Device, Layout, Role};
use crate::error::{Error, Result};
use crate::kernel::{ArgRole, Dtype, Epsilon, Kernel};
use crate::random::Random;
use crate::tensor;

/// The label that is calibrated.
pub const DEVICE: &str = "emu_npu2";

/// What a figure has to be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// measured / hardware lies within.
    Ratio(f64, f64),
    /// measured lies below; hardware's own figures go down to 0.
    Below(f64),
}

/// In what direction a kernel errs, where hardware says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaning {
    /// Toward minus infinity: a negative bias.
    Down,
    /// Away from zero: results too large.
    Larger,
    /// Neither more than a tenth of the error.
    None,
    /// Not known.
    Unknown,
}

/// One kernel at one shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub kernel: &'static str,
    pub shape: &'static str,
    /// mean|d - r| / mean|r| on `emu_npu2`.
    pub measured: f64,
    /// The same on hardware.
    pub hardware: f64,
    /// mean(d - r) / mean|r|.
    pub bias: f64,
    /// mean(|d| - |r|) / mean|r|.
    pub gain: f64,
    pub max_abs: f64,
    /// Outputs compared.
    pub compared: usize,
    pub goal: Goal,
    pub leaning: Leaning,
}

impl Row {
    pub fn ratio(&self) -> f64 {
        self.measured / self.hardware
    }

    /// Whether the figure is what it has to be.
    pub fn in_goal(&self) -> bool {
        match self.goal {
            Goal::Ratio(low, high) => (low..=high).contains(&self.ratio()),
            Goal::Below(limit) => self.measured < limit,
        }
    }

    /// Whether the error leans as hardware's does.
    pub fn leans_right(&self) -> bool {
        match self.leaning {
            Leaning::Down => self.bias < -0.2 * self.measured,
            Leaning::Larger => self.gain > 0.8 * self.measured,
            Leaning::None => self.bias.abs() < 0.1 * self.measured && self.gain.abs() < 0.1 * self.measured,
            Leaning::Unknown => true,
        }
    }
}

const WITHIN_A_QUARTER: Goal = Goal::Ratio(0.8, 1.25);
const ATTENTION: Goal = Goal::Ratio(0.6, 1.6);
const GEMV: Goal = Goal::Below(2.2e-6);

/// `eps` of the registry's norms.
const EPS: f64 = 1e-5;

/// Rows of a large product or attention that the reference computes: more say nothing more.
const SAMPLED: usize = 64;

/// Measures every row.
///
/// Errors: those of the device.
pub fn calibrate() -> Result<Vec<Row>> {
    let mut bench = Calibration::open()?;
    Ok(vec![
        bench.gemm("512x512x512", (512, 512, 512), Dtype::F32, 0.0093)?,
        bench.gemm("2048x2048x512", (2048, 2048, 512), Dtype::F32, 0.0093)?,
        bench.gemm("2048x2048x512", (2048, 2048, 512), Dtype::Bf16, 0.0093)?,
        bench.low_tier("512x512x512", (512, 512, 512), 0.01)?,
        bench.low_tier("2048x2048x512", (2048, 2048, 512), 0.013)?,
        bench.low_tier("2048x8192x2048 (256x8192x128)", (256, 8192, 128), 0.019)?,
        bench.gemv("2048x2048", (2048, 2048), 1.6e-9)?,
        bench.gemv("1536x8960", (1536, 8960), 2.2e-6)?,
        bench.rms_norm("2048x2048", (2048, 2048), 0.0042)?,
        bench.rms_norm("2048x896", (2048, 896), 0.0042)?,
        bench.qk_norm("2048x128", (2048, 128), 0.0046)?,
        bench.layer_norm("1024x768", (1024, 768), 0.0044)?,
        bench.rms_norm_decode("1x2048, 64 rows", (64, 2048), 0.069)?,
        bench.rope("32x64", (32, 64), 0.0027)?,
        bench.rope("16384x64", (16384, 64), 0.0028)?,
        bench.add("1024x1024", (1024, 1024), 0.0019)?,
        bench.silu_mul("2048x1024", (2048, 1024), 0.01)?,
        bench.gelu("1048576", 1 << 20, 0.0084)?,
        bench.attention("2048x64, 14/2 heads causal (2/1)", (2048, 2, 1, 64), true, 0.038)?,
        bench.attention("2048x128, 16/8 heads causal (2/1)", (2048, 2, 1, 128), true, 0.038)?,
        bench.attention("512x64, 2 heads", (512, 2, 2, 64), false, 0.044)?,
        bench.attention("1024x64, 12 heads (2)", (1024, 2, 2, 64), false, 0.048)?,
    ])
}

/// The device under measurement.
struct Calibration {
    device: Box<dyn Device>,
}

/// Seeded standard-normal numbers, rounded to bf16.
fn normal(len: usize, seed: u64) -> Vec<bf16> {
    let mut numbers = Random::new(seed);
    (0..len).map(|_| bf16::from_f64(numbers.normal())).collect()
}

/// The same, divided by the root of `k`, as the registry scales a product's operands.
fn scaled(len: usize, k: usize, seed: u64) -> Vec<bf16> {
    let mut numbers = Random::new(seed);
    let scale = 1.0 / (k as f64).sqrt();
    (0..len).map(|_| bf16::from_f64(numbers.normal() * scale)).collect()
}

fn widened(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

impl Calibration {
    fn open() -> Result<Calibration> {
        Ok(Calibration { device: open_device(DEVICE)? })
    }

    /// Runs one launch on fresh buffers and reads its output, widened.
    fn launch(&mut self, kernel: Kernel, inputs: &[&[bf16]]) -> Result<Vec<f32>> {
        let device = &mut *self.device;
        let mut args: Vec<BufferHandle> = vec![];
        let described = kernel.args();
        for (arg, input) in described.iter().zip(inputs.iter().map(Some).chain([None])) {
            let layout = if arg.role == ArgRole::LinearWeight { Layout::LinearWeight } else { Layout::Rows };
            let role = if arg.role == ArgRole::Output { Role::Output } else { Role::Input };
            let (dtype, rows, cols) = (arg.dtype, arg.rows, arg.cols);
            let handle = device.create(BufferSpec { name: arg.name.into(), dtype, rows, cols, role, layout })?;
            if let Some(input) = input {
                device.write(handle, 0, tensor::bytes_of(input))?;
            }
            args.push(handle);
        }
        let (&out, dtype) = match (args.last(), described.last()) {
            (Some(out), Some(arg)) if args.len() == inputs.len() + 1 => (out, arg.dtype),
            _ => return Err(Error::Plan { why: format!("{kernel}: {} inputs", inputs.len()) }),
        };
        let run = device.prepare("calibrate", vec![BoundLaunch { site: "calibrate".into(), kernel, args }])?;
        device.run(run)?;
        let len = device.spec(out).bytes();
        let bytes = device.read(out, 0, len)?;
        Ok(match dtype {
            Dtype::Bf16 => widened(&tensor::bf16_from_le_bytes(bytes)),
            Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        })
    }

    /// Outputs `d` against references `r`.
    #[allow(clippy::too_many_arguments)]
    fn row(
        &self,
        kernel: &'static str,
        shape: &'static str,
        d: &[f32],
        r: &[f32],
        hardware: f64,
        goal: Goal,
        leaning: Leaning,
    ) -> Result<Row> {
        let view = |x| ArrayView2::from_shape((1, d.len()), x).map_err(|e| Error::Plan { why: e.to_string() });
        let metrics = Metrics::measure(view(d)?, view(r)?)?;
        let size = |x: &[f32]| x.iter().map(|x| f64::from(x.abs())).sum::<f64>();
        let gain = (size(d) - size(r)) / size(r);
        let Metrics { mean_rel_l1: measured, bias, max_abs, count: compared, .. } = metrics;
        Ok(Row { kernel, shape, measured, hardware, bias, gain, max_abs, compared, goal, leaning })
    }

    fn gemm(
        &mut self,
        shape: &'static str,
        (m, k, n): (usize, usize, usize),
        out: Dtype,
        hardware: f64,
    ) -> Result<Row> {
        let (a, w) = (scaled(m * k, k, 42), scaled(n * k, k, 43));
        let c = self.launch(Kernel::Gemm { m, k, n, out }, &[&a, &w])?;
        let sample = Sample::of(m, SAMPLED);
        let mut r = reference::product(&sample.rows(&a, k), &w, k);
        if out == Dtype::Bf16 {
            reference::round(&mut r);
        }
        let name = if out == Dtype::Bf16 { "gemm_bf16_bf16" } else { "gemm_bf16_f32" };
        self.row(name, shape, &sample.rows(&c, n), &r, hardware, WITHIN_A_QUARTER, Leaning::None)
    }

    fn low_tier(&mut self, shape: &'static str, (m, k, n): (usize, usize, usize), hardware: f64) -> Result<Row> {
        let (a, w) = (scaled(m * k, k, 42), scaled(n * k, k, 43));
        let c = self.launch(Kernel::GemmLow { m, k, n }, &[&a, &w])?;
        let sample = Sample::of(m, SAMPLED);
        let mut r = reference::product(&sample.rows(&a, k), &w, k);
        reference::round(&mut r);
        let d = sample.rows(&c, n);
        self.row("gemm_bf16_bf16 low", shape, &d, &r, hardware, WITHIN_A_QUARTER, Leaning::None)
    }

    fn gemv(&mut self, shape: &'static str, (m, k): (usize, usize), hardware: f64) -> Result<Row> {
        let (w, x) = (normal(m * k, 42), normal(k, 43));
        let four = bf16::from_f32(4.0);
        let [w, x] = [w, x].map(|v| v.into_iter().map(|v| v * four).collect::<Vec<_>>());
        let y = self.launch(Kernel::Gemv { m, k }, &[&w, &x])?;
        let mut r = reference::product(&x, &w, k);
        reference::round(&mut r);
        self.row("gemv", shape, &y, &r, hardware, GEMV, Leaning::Unknown)
    }

    fn norm(
        &mut self,
        name: &'static str,
        shape: &'static str,
        kernel: Kernel,
        (rows, cols): (usize, usize),
        hardware: f64,
    ) -> Result<Row> {
        let (x, w) = (normal(rows * cols, 0), normal(cols, 1));
        let y = self.launch(kernel, &[&x, &w])?;
        let r = reference::rms_norm(&x, &w, EPS);
        self.row(name, shape, &y, &r, hardware, WITHIN_A_QUARTER, Leaning::Down)
    }

    fn rms_norm(&mut self, shape: &'static str, (rows, cols): (usize, usize), hardware: f64) -> Result<Row> {
        let kernel = Kernel::RmsNorm { rows, cols, eps: Epsilon::new(EPS) };
        self.norm("rms_norm", shape, kernel, (rows, cols), hardware)
    }

    fn qk_norm(&mut self, shape: &'static str, (rows, head_dim): (usize, usize), hardware: f64) -> Result<Row> {
        let kernel = Kernel::QkNorm { rows, head_dim, eps: Epsilon::new(EPS) };
        self.norm("qk_norm", shape, kernel, (rows, head_dim), hardware)
    }

    /// Rows one by one: one row alone is decode's kernel.
    fn rms_norm_decode(&mut self, shape: &'static str, (rows, cols): (usize, usize), hardware: f64) -> Result<Row> {
        let (x, w) = (normal(rows * cols, 0), normal(cols, 1));
        let kernel = Kernel::RmsNorm { rows: 1, cols, eps: Epsilon::new(EPS) };
        let y = x.chunks(cols).map(|x| self.launch(kernel.clone(), &[x, &w])).collect::<Result<Vec<_>>>()?.concat();
        let r = reference::rms_norm(&x, &w, EPS);
        self.row("rms_norm_decode", shape, &y, &r, hardware, WITHIN_A_QUARTER, Leaning::Larger)
    }

    fn rope(&mut self, shape: &'static str, (rows, head_dim): (usize, usize), hardware: f64) -> Result<Row> {
        let (x, lut) = (normal(rows * head_dim, 0), reference::rope_rows(rows, head_dim));
        let y = self.launch(Kernel::Rope { rows, head_dim }, &[&x, &lut])?;
        let r = reference::rope(&x, &lut, head_dim);
        self.row("rope", shape, &y, &r, hardware, WITHIN_A_QUARTER, Leaning::Down)
    }

    fn add(&mut self, shape: &'static str, (rows, cols): (usize, usize), hardware: f64) -> Result<Row> {
        let (a, b) = (normal(rows * cols, 0), normal(rows * cols, 1));
        let y = self.launch(Kernel::Add { rows, cols }, &[&a, &b])?;
        let r = reference::each(&a, &b, |a, b| a + b);
        self.row("add", shape, &y, &r, hardware, WITHIN_A_QUARTER, Leaning::Down)
    }

    fn silu_mul(&mut self, shape: &'static str, (rows, cols): (usize, usize), hardware: f64) -> Result<Row> {
        let (gate, up) = (normal(rows * cols, 0), normal(rows * cols, 1));
        let y = self.launch(Kernel::SiluMul { rows, cols }, &[&gate, &up])?;
        let r = reference::each(&gate, &up, |g, u| g / (1.0 + (-g).exp()) * u);
        self.row("silu_mul", shape, &y, &r, hardware, WITHIN_A_QUARTER, Leaning::Down)
    }

    fn layer_norm(&mut self, shape: &'static str, (rows, cols): (usize, usize), hardware: f64) -> Result<Row> {
        let (x, params) = (normal(rows * cols, 0), normal(2 * cols, 1));
        let kernel = Kernel::LayerNorm { rows, cols, eps: Epsilon::new(EPS) };
        let y = self.launch(kernel, &[&x, &params])?;
        let r = reference::layer_norm(&x, &params, EPS);
        self.row("layer_norm", shape, &y, &r, hardware, WITHIN_A_QUARTER, Leaning::Unknown)
    }

    fn gelu(&mut self, shape: &'static str, len: usize, hardware: f64) -> Result<Row> {
        let x = normal(len, 0);
        let y = self.launch(Kernel::GeluTanh { rows: len / 1024, cols: 1024 }, &[&x])?;
        let r = reference::each(&x, &x, |x, _| {
            let u = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2 * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + u.tanh())
        });
        self.row("gelu_tanh", shape, &y, &r, hardware, WITHIN_A_QUARTER, Leaning::Unknown)
    }

    fn attention(
        &mut self,
        shape: &'static str,
        dims: (usize, usize, usize, usize),
        causal: bool,
        hardware: f64,
    ) -> Result<Row> {
        let ([q, k, v], (seq, heads, kv_heads, head_dim)) = (qkv(dims), dims);
        let out = self.launch(Kernel::Attention { seq, heads, kv_heads, head_dim, causal }, &[&q, &k, &v])?;
        let sample = Sample::of(seq, SAMPLED);
        let r = reference::attention(&q, &k, &v, (heads, kv_heads, head_dim), causal, &sample);
        let d = sample.rows(&out, heads * head_dim);
        let name = if causal { "attention" } else { "attention, no mask" };
        self.row(name, shape, &d, &r, hardware, ATTENTION, Leaning::Unknown)
    }
}

fn qkv((seq, heads, kv_heads, head_dim): (usize, usize, usize, usize)) -> [Vec<bf16>; 3] {
    let kv = seq * kv_heads * head_dim;
    [normal(seq * heads * head_dim, 42), normal(kv, 43), normal(kv, 44)]
}
