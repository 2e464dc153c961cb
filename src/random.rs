//! Seeded numbers: the same seed, the same numbers, on every machine. Not for secrets.

/// A seeded generator.
///
/// Source: SplitMix64 (Steele, Lea, Flood, 2014); Box and Muller for the normal distribution.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Seeded by a text (FNV-1a).
    pub fn of(text: &str) -> Random {
        Random(text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)))
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In (0, 1).
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    /// In `0..end`; 0 where there is nothing.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end.max(1) as u64) as usize
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs for seed 1234567 of the algorithm's reference implementation.
    #[test]
    fn bits_are_splitmix64s() {
        let mut random = Random::new(1_234_567);
        let found: Vec<u64> = (0..3).map(|_| random.bits()).collect();
        assert_eq!(found, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn the_distributions_have_their_moments() {
        let mut random = Random::of("moments");
        let n = 100_000;
        let uniform: Vec<f64> = (0..n).map(|_| random.uniform()).collect();
        assert!(uniform.iter().all(|&u| 0.0 < u && u < 1.0));
        let mean = uniform.iter().sum::<f64>() / n as f64;
        // Five standard errors each.
        assert!((mean - 0.5).abs() < 5.0 / (12.0 * n as f64).sqrt(), "{mean}");
        let normal: Vec<f64> = (0..n).map(|_| random.normal()).collect();
        let (mean, square) =
            (normal.iter().sum::<f64>() / n as f64, normal.iter().map(|x| x * x).sum::<f64>() / n as f64);
        assert!(mean.abs() < 5.0 / (n as f64).sqrt(), "{mean}");
        assert!((square - 1.0).abs() < 5.0 * (2.0 / n as f64).sqrt(), "{square}");
        assert!((0..1000).all(|_| random.below(7) < 7) && random.below(0) == 0);
    }
}
