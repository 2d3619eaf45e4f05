//! Numbers by chance: the same for the same seed, everywhere.

use crate::machine::mix;

/// As many as are wanted (a counter, well mixed).
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    drawn: u64,
    /// What is left of a number that is given out by 16 bits.
    rest: u64,
    rest_shorts: u32,
}

impl Random {
    /// The numbers of `seed`.
    pub fn new(seed: u64) -> Random {
        Random { seed, drawn: 0, rest: 0, rest_shorts: 0 }
    }

    /// Numbers for somebody else.
    pub fn split(&mut self) -> Random {
        Random::new(self.draw())
    }

    /// The next one, of 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.drawn += 1;
        mix(mix(self.seed, self.drawn), self.drawn)
    }

    /// Whether a chance of `percent` in `hundreds` hundred comes about, to 1 in 65,536. Four are of one number.
    pub fn has_chance(&mut self, percent: u32, hundreds: u32) -> bool {
        if self.rest_shorts == 0 {
            (self.rest, self.rest_shorts) = (self.draw(), 4);
        }
        let short = self.rest & 0xffff;
        (self.rest, self.rest_shorts) = (self.rest >> 16, self.rest_shorts - 1);
        short * 100 * u64::from(hundreds) < u64::from(percent) << 16
    }

    /// The next one below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(limit)) >> 64) as u64
    }

    /// The next one between half of `mean` and one and a half times it.
    pub fn around(&mut self, mean: u64) -> u64 {
        mean / 2 + self.below(mean)
    }

    /// The next one of those that are `mean` on average and come by chance, as what does not depend on the time since the last one.
    /// (By von Neumann's method: logarithms are not the same everywhere.)
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

    /// The next one in 0..1.
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// `rand()` of the GNU C library as a program gets it that never calls `srand`: r(i) = r(i-3) + r(i-31), all but the lowest
/// bit of it, after 310 numbers that nobody sees. The kernel's swap allocator test uses it, so that what it
/// touches is known.
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
        // The first three that follow are repeated, not added; with that the last of them is at 31 + 3.
        let mut rand = GlibcRand { last, at: 3 };
        (0..310).for_each(|_| {
            rand.draw();
        });
        rand
    }
}

impl GlibcRand {
    /// The next one, of 31 bits.
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
    fn an_unseeded_rand_begins_as_everybody_has_seen_it() {
        let mut rand = GlibcRand::default();
        let numbers: Vec<u32> = (0..5).map(|_| rand.draw()).collect();
        assert_eq!(numbers, [1_804_289_383, 846_930_886, 1_681_692_777, 1_714_636_915, 1_957_747_793]);
    }

    #[test]
    fn waits_by_chance_do_not_depend_on_those_before() {
        let mut random = Random::new(3);
        let waits: Vec<u64> = (0..100_000).map(|_| random.exponential(1000)).collect();
        assert!((980..1020).contains(&(waits.iter().sum::<u64>() / 100_000)));
        // e^-1 and e^-3 of them are longer than once and three times the mean.
        let longer = |than| waits.iter().filter(|&&wait| wait > than).count();
        assert!((36_000..37_600).contains(&longer(1000)) && (4700..5250).contains(&longer(3000)));
    }

    #[test]
    fn numbers_are_spread_evenly() {
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
