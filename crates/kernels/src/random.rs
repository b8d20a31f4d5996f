//! Counter-based random numbers: every draw is a function of a seed, a purpose and coordinates
//! (epoch, document, row ...), so that results do not depend on order, threads or ranks, and a
//! resumed run draws what the uninterrupted one would have drawn.
//!
//! The generator hashes its key once per coordinate with the 64-bit finaliser of SplitMix64
//! (Steele et al. 2014) and then walks a Weyl sequence through the same finaliser.

/// Step of the Weyl sequence, 2⁶⁴ / φ.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A stream of draws for one purpose and place.
#[derive(Debug, Clone)]
pub struct CounterRng {
    state: u64,
}

impl CounterRng {
    /// The stream of `seed` for a purpose (its name) at `coordinates`.
    pub fn new(seed: u64, purpose: &str, coordinates: &[u64]) -> Self {
        let purpose = purpose.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        let key = mix(mix(seed.wrapping_add(GOLDEN)) ^ purpose);
        let state = coordinates.iter().fold(key, |key, c| mix(key.wrapping_add(GOLDEN) ^ mix(*c)));
        Self { state }
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// Uniform in `[0, 1)`, 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform in `0..n`; 0 for `n = 0`.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// Standard normal (Box and Muller 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.uniform()).cos()
    }

    /// Index drawn with the given non-negative weights.
    pub fn categorical(&mut self, weights: &[f64]) -> usize {
        let mut left = self.uniform() * weights.iter().sum::<f64>();
        let mut last = 0;
        for (index, &weight) in weights.iter().enumerate().filter(|(_, w)| **w > 0.0) {
            last = index;
            if left < weight {
                return index;
            }
            left -= weight;
        }
        last
    }

    /// Shuffles in place (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_by_seed_purpose_and_coordinates() {
        let first = |seed, purpose, at: &[u64]| CounterRng::new(seed, purpose, at).next_u64();
        let all = [
            first(1, "delay", &[0, 0]),
            first(2, "delay", &[0, 0]),
            first(1, "anchor", &[0, 0]),
            first(1, "delay", &[0, 1]),
            first(1, "delay", &[1, 0]),
            first(1, "delay", &[0]),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b));
        }
        assert_eq!(all[0], first(1, "delay", &[0, 0]));
    }

    #[test]
    fn moments_are_right() {
        let mut rng = CounterRng::new(3, "test", &[]);
        let n = 40_000;
        let normal: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
        let mean = normal.iter().sum::<f64>() / f64::from(n);
        let variance = normal.iter().map(|x| x * x).sum::<f64>() / f64::from(n);
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03);
        let mut counts = [0; 3];
        (0..n).for_each(|_| counts[rng.categorical(&[1.0, 0.0, 3.0])] += 1);
        assert!(counts[1] == 0 && (f64::from(counts[2]) / f64::from(n) - 0.75).abs() < 0.01);
        let mut seen = [false; 7];
        (0..200).for_each(|_| seen[rng.below(7) as usize] = true);
        assert!(seen.iter().all(|s| *s));
    }
}
