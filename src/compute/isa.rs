//! Instruction sets the kernels are written for, and which of them this CPU has.
//!
//! May not choose kernels: it only names an instruction set and vouches that the CPU supports it.

use std::{fmt, str::FromStr};

/// An instruction set, ordered from the slowest to the fastest.
///
/// `Portable` exists on every architecture; the others are x86-64. `Portable`, `Avx2` and `Avx512f` agree bit for
/// bit in [`Gemm`](super::Gemm) (a bf16 product is exact in f32); `Avx512bf16` sums pairs as `vdpbf16ps` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, vectorised by the compiler for the target's baseline.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F and DQ.
    Avx512f,
    /// AVX-512 F, DQ, BW and BF16 (`vdpbf16ps`).
    Avx512bf16,
}

impl Isa {
    /// All of them, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Portable, Isa::Avx2, Isa::Avx512f, Isa::Avx512bf16];

    /// The fastest instruction set this CPU supports.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rfind(|isa| isa.supported()).unwrap_or(Isa::Portable)
    }

    /// Whether this CPU (and its operating system) can execute the instruction set.
    #[cfg(target_arch = "x86_64")]
    pub fn supported(self) -> bool {
        // The macro caches CPUID, so this is a load and a bit test.
        match self {
            Isa::Portable => true,
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Isa::Avx512f => {
                Isa::Avx2.supported() && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq")
            }
            Isa::Avx512bf16 => {
                Isa::Avx512f.supported()
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512bf16")
            }
        }
    }

    /// Whether this CPU can execute the instruction set.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn supported(self) -> bool {
        self == Isa::Portable
    }

    fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512f => "avx512f",
            Isa::Avx512bf16 => "avx512bf16",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The text names no instruction set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown instruction set '{0}', expected portable, avx2, avx512f or avx512bf16")]
pub struct ParseIsaError(String);

impl FromStr for Isa {
    type Err = ParseIsaError;

    fn from_str(text: &str) -> Result<Isa, ParseIsaError> {
        Isa::ALL.into_iter().find(|isa| isa.name() == text).ok_or_else(|| ParseIsaError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_order_is_by_speed() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert!(Isa::ALL.is_sorted());
        assert!("sse9".parse::<Isa>().unwrap_err().to_string().contains("sse9"));
    }

    #[test]
    fn detected_isa_is_supported_and_so_is_everything_below() {
        let best = Isa::detect();
        assert!(Isa::ALL.into_iter().all(|isa| isa.supported() == (isa <= best)));
    }
}
