//! Choosing the next token: greedily, or drawn from the softmax at a temperature within a nucleus.
//!
//! The gates are greedy and never come here; the same seed gives the same tokens on every machine.

use half::bf16;

use super::argmax;
use crate::random::Random;

/// How tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0: greedy.
    pub temperature: f64,
    /// The smallest set of likeliest tokens whose probabilities reach this; 1: all.
    pub top_p: f64,
    pub seed: u64,
}

impl Sampling {
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
}

/// Draws tokens one after another.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    random: Random,
}

impl Sampler {
    pub fn new(sampling: Sampling) -> Sampler {
        Sampler { sampling, random: Random::new(sampling.seed) }
    }

    /// The next token outside of `masked` (ascending); none when a logit is a NaN or all are masked.
    ///
    /// Shapes: logits `[vocab_size]`.
    pub fn choose(&mut self, logits: &[bf16], masked: &[u32]) -> Option<u32> {
        let best = argmax(logits, masked)?;
        if self.sampling.temperature <= 0.0 {
            return Some(best);
        }
        let top = logits[best as usize].to_f64();
        let weight = |id: usize| ((logits[id].to_f64() - top) / self.sampling.temperature).exp();
        let named = (0..logits.len()).filter(|&id| masked.binary_search(&(id as u32)).is_err());
        let mut weights: Vec<(usize, f64)> = named.map(|id| (id, weight(id))).collect();
        // Likeliest first, ties to the smaller id: the nucleus does not depend on the order of equals.
        weights.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let all: f64 = weights.iter().map(|(_, w)| w).sum();
        let mut within = 0.0;
        let inside = weights.iter().position(|(_, w)| {
            within += w;
            within >= self.sampling.top_p * all
        });
        weights.truncate(inside.map_or(weights.len(), |last| last + 1));
        let nucleus: f64 = weights.iter().map(|(_, w)| w).sum();
        let mut left = self.random.uniform() * nucleus;
        let drawn = weights.iter().find(|(_, w)| {
            left -= w;
            left < 0.0
        });
        drawn.or(weights.last()).map(|(id, _)| *id as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|&v| bf16::from_f32(v)).collect()
    }

    fn shares(sampling: Sampling, logits: &[bf16], masked: &[u32]) -> Vec<f64> {
        let mut sampler = Sampler::new(sampling);
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..20_000 {
            counts[sampler.choose(logits, masked).unwrap() as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn shares_are_the_softmax() {
        // ln 8, ln 4, ln 2, ln 1: 8/15, 4/15, 2/15, 1/15, to the rounding of bf16.
        let logits = logits(&[8.0f32.ln(), 4.0f32.ln(), 2.0f32.ln(), 0.0]);
        let found = shares(Sampling { temperature: 1.0, top_p: 1.0, seed: 7 }, &logits, &[]);
        for (found, expected) in found.iter().zip([8.0, 4.0, 2.0, 1.0]) {
            assert!((found - expected / 15.0).abs() < 0.02, "{found} {expected}");
        }
        let cold = shares(Sampling { temperature: 0.1, top_p: 1.0, seed: 7 }, &logits, &[]);
        assert!(cold[0] > 0.99);
    }

    #[test]
    fn the_nucleus_ends_where_its_share_is_reached() {
        let logits = logits(&[8.0f32.ln(), 4.0f32.ln(), 2.0f32.ln(), 0.0]);
        let found = shares(Sampling { temperature: 1.0, top_p: 0.6, seed: 1 }, &logits, &[]);
        assert!(found[0] > 0.6 && found[1] > 0.3 && found[2..] == [0.0, 0.0], "{found:?}");
        let masked = shares(Sampling { temperature: 1.0, top_p: 0.6, seed: 1 }, &logits, &[0]);
        assert!(masked[0] == 0.0 && masked[1] > 0.6);
    }

    #[test]
    fn a_seed_gives_the_same_tokens_and_greedy_needs_none() {
        let logits = logits(&[1.0, 1.1, 0.9, 1.05]);
        let sampling = Sampling { temperature: 1.0, top_p: 0.9, seed: 42 };
        let draw = |sampling| {
            let mut sampler = Sampler::new(sampling);
            (0..50).map(|_| sampler.choose(&logits, &[]).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(sampling), draw(sampling));
        assert_ne!(draw(sampling), draw(Sampling { seed: 43, ..sampling }));
        assert_eq!(draw(Sampling::GREEDY), [1; 50]);
        assert_eq!(Sampler::new(sampling).choose(&[bf16::NAN], &[]), None);
    }
}
