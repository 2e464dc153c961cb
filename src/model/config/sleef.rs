//! `powf` as torch computes it on a CPU: SLEEF's `pow` of 1.0 ULP in double-float arithmetic.
//!
//! One ULP of an inverse frequency turns into 1e-4 of a cosine at position 2047, so RoPE rows that are to agree with
//! HF's to 1e-6 need torch's own rounding, not a better one (about 1 in 100 results differs from the correctly rounded).
//! Source: N. Shibata, F. Petrogalli, "SLEEF: a portable vectorized library of C standard mathematical functions",
//! 2020; the algorithm of `xpowf` (FMA variant), written anew.

#![allow(clippy::excessive_precision)]

/// An unevaluated sum of two f32.
#[derive(Clone, Copy)]
struct Df {
    hi: f32,
    lo: f32,
}

fn df(hi: f32, lo: f32) -> Df {
    Df { hi, lo }
}

/// |x| >= |y|.
fn add(x: Df, y: Df) -> Df {
    let hi = x.hi + y.hi;
    df(hi, (x.hi - hi) + y.hi + x.lo + y.lo)
}

/// Any magnitudes.
fn add2_f(x: Df, y: f32) -> Df {
    let hi = x.hi + y;
    let v = hi - x.hi;
    df(hi, (x.hi - (hi - v)) + (y - v) + x.lo)
}

fn add2_ff(x: f32, y: f32) -> Df {
    let hi = x + y;
    let v = hi - x;
    df(hi, (x - (hi - v)) + (y - v))
}

fn mul(x: Df, y: Df) -> Df {
    let hi = x.hi * y.hi;
    df(hi, x.hi.mul_add(y.lo, x.lo.mul_add(y.hi, x.hi.mul_add(y.hi, -hi))))
}

fn mul_f(x: Df, y: f32) -> Df {
    let hi = x.hi * y;
    df(hi, x.lo.mul_add(y, x.hi.mul_add(y, -hi)))
}

fn square(x: Df) -> Df {
    let hi = x.hi * x.hi;
    df(hi, (x.hi + x.hi).mul_add(x.lo, x.hi.mul_add(x.hi, -hi)))
}

fn div(n: Df, d: Df) -> Df {
    let t = 1.0 / d.hi;
    let hi = n.hi * t;
    let u = t.mul_add(n.hi, -hi);
    let v = (-d.lo).mul_add(t, (-d.hi).mul_add(t, 1.0));
    df(hi, hi.mul_add(v, n.lo.mul_add(t, u)))
}

fn normalise(x: Df) -> Df {
    let hi = x.hi + x.lo;
    df(hi, (x.hi - hi) + x.lo)
}

/// Natural logarithm of a normal positive `d`.
fn log(d: f32) -> Df {
    let e = (f64::from(d * (1.0 / 0.75)).log2().floor()) as i32;
    let m = (f64::from(d) * 2f64.powi(-e)) as f32;
    let x = div(add2_ff(-1.0, m), add2_ff(1.0, m));
    let x2 = square(x);
    let t = 0.240_320_354_700_088_500_976_562f32;
    let t = t.mul_add(x2.hi, 0.285_112_679_004_669_189_453_125);
    let t = t.mul_add(x2.hi, 0.400_007_992_982_864_379_882_812);
    let c = df(0.666_666_626_930_236_816_406_25, 3.691_838_612_596_143_320_843_11e-9);
    let s = mul_f(df(0.693_147_182_464_599_609_38, -1.904_654_323_148_236_017e-9), e as f32);
    let s = add(s, df(x.hi * 2.0, x.lo * 2.0));
    add(s, mul(mul(x2, x), add(mul_f(x2, t), c)))
}

fn exp(d: Df) -> f32 {
    let q = ((d.hi + d.lo) * std::f32::consts::LOG2_E).round_ties_even();
    let s = add2_f(d, q * -0.693_145_751_953_125);
    let s = add2_f(s, q * -1.428_606_765_330_187_045e-6);
    let s = normalise(s);
    let u = 0.001_363_246_468_827_128_410_339_36f32;
    let u = u.mul_add(s.hi, 0.008_365_969_173_610_210_418_701_17);
    let u = u.mul_add(s.hi, 0.041_671_082_377_433_776_855_468_8);
    let u = u.mul_add(s.hi, 0.166_665_524_244_308_471_679_688);
    let u = u.mul_add(s.hi, 0.499_999_850_988_388_061_523_438);
    let t = add(s, mul_f(square(s), u));
    let t = add(df(1.0, 0.0), t);
    if d.hi < -104.0 { 0.0 } else { ((f64::from(t.hi + t.lo)) * 2f64.powi(q as i32)) as f32 }
}

/// `base ^ exponent` for a normal positive `base`; infinite where it overflows.
pub fn powf(base: f32, exponent: f32) -> f32 {
    if base == 1.0 || exponent == 0.0 {
        return 1.0;
    }
    let y = exp(mul_f(log(base), exponent));
    if y.is_nan() { f32::INFINITY } else { y }
}
