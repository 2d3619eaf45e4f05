//! Random numbers that depend only on the seed, everywhere.

use crate::machine::mix;

/// A generator of random numbers: a well-mixed counter.
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    drawn: u64,
    /// The unused part of a number that is consumed by 16 bits.
    rest: u64,
    rest_shorts: u32,
}

impl Random {
    /// Makes the generator of `seed`.
    pub fn new(seed: u64) -> Random {
        Random { seed, drawn: 0, rest: 0, rest_shorts: 0 }
    }

    /// Makes an independent generator.
    pub fn split(&mut self) -> Random {
        Random::new(self.draw())
    }

    /// Returns the next number of 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.drawn += 1;
        mix(mix(self.seed, self.drawn), self.drawn)
    }

    /// Returns true with a probability of `percent` in `hundreds` hundred, to 1 in 65,536. One
    /// number serves four calls.
    pub fn has_chance(&mut self, percent: u32, hundreds: u32) -> bool {
        if self.rest_shorts == 0 {
            (self.rest, self.rest_shorts) = (self.draw(), 4);
        }
        let short = self.rest & 0xffff;
        (self.rest, self.rest_shorts) = (self.rest >> 16, self.rest_shorts - 1);
        short * 100 * u64::from(hundreds) < u64::from(percent) << 16
    }

    /// Returns the next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(limit)) >> 64) as u64
    }

    /// Returns the next number between half of `mean` and one and a half of it.
    pub fn around(&mut self, mean: u64) -> u64 {
        mean / 2 + self.below(mean)
    }

    /// Returns the next number of an exponential distribution with this mean, as waits that do not
    /// depend on the time since the last event. (Von Neumann's method: logarithms differ between
    /// machines.)
    pub fn exponential(&mut self, mean: u64) -> u64 {
        let mut whole = 0;
        loop {
            let first = self.draw();
            let (mut last, mut falling) = (first, 1);
            loop {
                let next = self.draw();
                if next > last {
                    break;
                }
                (last, falling) = (next, falling + 1);
            }
            if falling % 2 == 1 {
                return whole + ((u128::from(first) * u128::from(mean)) >> 64) as u64;
            }
            whole += mean;
        }
    }

    /// Returns the next number in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// `rand()` of the GNU C library in a program that never calls `srand`: r(i) = r(i-3) + r(i-31),
/// without the lowest bit, after 310 discarded numbers. The kernel's swap allocator test uses it,
/// so its touches are known.
#[derive(Clone, Debug)]
pub struct GlibcRand {
    last: [u32; 31],
    at: usize,
}

impl Default for GlibcRand {
    fn default() -> GlibcRand {
        let mut last = [1; 31];
        for index in 1..31 {
            last[index] = (16_807 * u64::from(last[index - 1]) % 2_147_483_647) as u32;
        }
        // The first three following numbers are repeated, not added, so the last of them is at 31 +
        // 3.
        let mut rand = GlibcRand { last, at: 3 };
        (0..310).for_each(|_| {
            rand.draw();
        });
        rand
    }
}

impl GlibcRand {
    /// Returns the next number of 31 bits.
    pub fn draw(&mut self) -> u32 {
        let new = self.last[self.at].wrapping_add(self.last[(self.at + 28) % 31]);
        self.last[self.at] = new;
        self.at = (self.at + 1) % 31;
        new >> 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unseeded_rand_starts_with_the_known_numbers() {
        let mut rand = GlibcRand::default();
        let numbers: Vec<u32> = (0..5).map(|_| rand.draw()).collect();
        assert_eq!(numbers, [1_804_289_383, 846_930_886, 1_681_692_777, 1_714_636_915, 1_957_747_793]);
    }

    #[test]
    fn exponential_waits_have_no_memory() {
        let mut random = Random::new(3);
        let waits: Vec<u64> = (0..100_000).map(|_| random.exponential(1000)).collect();
        assert!((980..1020).contains(&(waits.iter().sum::<u64>() / 100_000)));
        // The fractions e^-1 and e^-3 of them exceed the mean and three times the mean.
        let longer = |than| waits.iter().filter(|&&wait| wait > than).count();
        assert!((36_000..37_600).contains(&longer(1000)) && (4700..5250).contains(&longer(3000)));
    }

    #[test]
    fn numbers_are_uniform() {
        let mut random = Random::new(7);
        let mut counts = [0u32; 10];
        (0..100_000).for_each(|_| counts[random.below(10) as usize] += 1);
        assert!(counts.iter().all(|&count| (9_600..10_400).contains(&count)), "{counts:?}");
        let happen = |percent, hundreds, random: &mut Random| {
            (0..100_000).filter(|_| random.has_chance(percent, hundreds)).count()
        };
        assert!(
            (69_000..71_000).contains(&happen(70, 1, &mut random))
                && (1_900..2_100).contains(&happen(80, 40, &mut random))
        );
        let mean = (0..100_000).map(|_| random.unit()).sum::<f64>() / 1e5;
        assert!((0.49..0.51).contains(&mean), "{mean}");
    }
}
