//! The shape of an N-d strided copy, reduced to as few loops as possible.

use smallvec::SmallVec;

/// A loop around the copy of a run: `n` steps, with the bytes that each advances in source and
/// destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Steps, at least 2 in a normalised copy.
    pub n: u64,
    /// Source stride in bytes.
    pub src: u64,
    /// Destination stride in bytes.
    pub dst: u64,
}

/// Loops around a run of bytes that is contiguous in source and destination.
///
/// Loops are sorted by source stride, largest first, so that an earlier loop moves further in the
/// source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    /// The loops, outermost first.
    pub loops: SmallVec<[Loop; 4]>,
    /// Bytes of a run; 0 if there is nothing to copy.
    pub run: u64,
}

impl Strided {
    /// Normalises a copy of `shape` elements of `itemsize` bytes, with strides in bytes.
    ///
    /// Returns `None` if the slices differ in length, or an extent does not fit in 63 bits.
    #[must_use]
    pub fn new(itemsize: u64, shape: &[u64], src: &[u64], dst: &[u64]) -> Option<Self> {
        if shape.len() != src.len() || shape.len() != dst.len() {
            return None;
        }
        if itemsize == 0 || shape.contains(&0) {
            return Some(Self { loops: SmallVec::new(), run: 0 });
        }
        let mut loops: SmallVec<[Loop; 4]> = SmallVec::new();
        // The last dimensions of row-major input are contiguous: move them into the run without
        // sorting.
        let mut run = itemsize;
        for d in (0..shape.len()).rev() {
            match (shape[d], src[d], dst[d]) {
                (1, ..) => {}
                (n, s, t) if s == run && t == run && loops.is_empty() => {
                    run = run.checked_mul(n)?;
                }
                (n, s, t) => loops.push(Loop { n, src: s, dst: t }),
            }
        }
        let mut copy = Self { loops, run };
        if !copy.loops.is_empty() {
            copy.normalise()?;
        }
        copy.extent(|l| l.src)?;
        copy.extent(|l| l.dst)?;
        copy.loops.iter().try_fold(copy.run, |n, l| n.checked_mul(l.n))?;
        Some(copy)
    }

    /// Sorts the loops, moves contiguous ones into the run, and joins loops that are one even walk.
    fn normalise(&mut self) -> Option<()> {
        self.loops.sort_by_key(|l| std::cmp::Reverse((l.src, l.dst)));
        while let Some(i) = self.loops.iter().position(|l| l.src == self.run && l.dst == self.run) {
            self.run = self.run.checked_mul(self.loops.remove(i).n)?;
        }
        let mut i = 1;
        while i < self.loops.len() {
            let (outer, inner) = (self.loops[i - 1], self.loops[i]);
            let joins = inner.n.checked_mul(inner.src)? == outer.src
                && inner.n.checked_mul(inner.dst)? == outer.dst;
            if joins {
                self.loops[i].n = inner.n.checked_mul(outer.n)?;
                self.loops.remove(i - 1);
            } else {
                i += 1;
            }
        }
        Some(())
    }

    fn extent(&self, stride: impl Fn(&Loop) -> u64) -> Option<u64> {
        self.loops
            .iter()
            .try_fold(self.run, |sum, l| sum.checked_add((l.n - 1).checked_mul(stride(l))?))
            .filter(|&e| i64::try_from(e).is_ok())
    }

    /// Returns the number of bytes copied.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.loops.iter().fold(self.run, |n, l| n * l.n)
    }

    /// Returns the bytes from the first source byte to just past the last, gaps included.
    #[must_use]
    pub fn src_extent(&self) -> u64 {
        self.loops.iter().fold(self.run, |sum, l| sum + (l.n - 1) * l.src)
    }

    /// Returns the bytes from the first destination byte to just past the last, gaps included.
    #[cfg(test)]
    pub fn dst_extent(&self) -> u64 {
        self.loops.iter().fold(self.run, |sum, l| sum + (l.n - 1) * l.dst)
    }

    /// Returns whether the copy is one run.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.loops.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loops(copy: &Strided) -> Vec<(u64, u64, u64)> {
        copy.loops.iter().map(|l| (l.n, l.src, l.dst)).collect()
    }

    #[test]
    fn normalises() {
        // (itemsize, shape, src strides, dst strides) -> (loops, run)
        type Case =
            (u64, &'static [u64], &'static [u64], &'static [u64], Vec<(u64, u64, u64)>, u64);
        let cases: Vec<Case> = vec![
            (4, &[], &[], &[], vec![], 4),
            (4, &[3, 5], &[20, 4], &[20, 4], vec![], 60),
            (4, &[3, 0], &[20, 4], &[20, 4], vec![], 0),
            (4, &[1, 5], &[999, 4], &[7, 4], vec![], 20),
            // columns of a row-major matrix, densely into the destination
            (2, &[8, 4], &[32, 2], &[8, 2], vec![(8, 32, 8)], 8),
            // two outer dimensions walk as one
            (2, &[3, 8, 4], &[256, 32, 2], &[64, 8, 2], vec![(24, 32, 8)], 8),
            // both column-major: dense all the same
            (2, &[3, 8], &[2, 6], &[2, 6], vec![], 48),
            // a transpose
            (2, &[3, 8], &[2, 6], &[16, 2], vec![(8, 6, 2), (3, 2, 16)], 2),
            // expanded source
            (2, &[3, 8], &[0, 2], &[16, 2], vec![(3, 0, 16)], 16),
        ];
        for (itemsize, shape, src, dst, want, run) in cases {
            let copy = Strided::new(itemsize, shape, src, dst).unwrap();
            assert_eq!((loops(&copy), copy.run), (want, run), "{shape:?} {src:?} {dst:?}");
        }
    }

    #[test]
    fn refuses_what_overflows() {
        assert!(Strided::new(8, &[u64::MAX, 2], &[16, 8], &[16, 8]).is_none());
        assert!(Strided::new(1, &[2], &[u64::MAX], &[1]).is_none());
        assert!(Strided::new(1, &[1 << 40, 1 << 40], &[0, 0], &[0, 0]).is_none());
        assert!(Strided::new(1, &[2], &[1, 1], &[1]).is_none());
    }

    fn pairs(loops: &[Loop], run: u64) -> Vec<(u64, u64)> {
        let mut at = vec![(0, 0)];
        for l in loops {
            at = at
                .iter()
                .flat_map(|&(s, d)| (0..l.n).map(move |i| (s + i * l.src, d + i * l.dst)))
                .collect();
        }
        let mut all: Vec<_> =
            at.iter().flat_map(|&(s, d)| (0..run).map(move |i| (s + i, d + i))).collect();
        all.sort_unstable();
        all
    }

    proptest! {
        /// Normalising keeps the (source byte, destination byte) pairs.
        #[test]
        fn keeps_every_byte(
            itemsize in 1u64..5,
            dims in prop::collection::vec((1u64..5, 0u64..40, 0u64..40), 0..4),
        ) {
            let shape: Vec<_> = dims.iter().map(|d| d.0).collect();
            let src: Vec<_> = dims.iter().map(|d| d.1).collect();
            let dst: Vec<_> = dims.iter().map(|d| d.2).collect();
            let plain: Vec<_> = dims.iter().map(|&(n, src, dst)| Loop { n, src, dst }).collect();
            let copy = Strided::new(itemsize, &shape, &src, &dst).unwrap();
            let got = pairs(&copy.loops, copy.run);
            prop_assert_eq!(&got, &pairs(&plain, itemsize));
            prop_assert_eq!(copy.bytes(), got.len() as u64);
            prop_assert_eq!(copy.src_extent(), got.iter().map(|p| p.0).max().unwrap() + 1);
            prop_assert_eq!(copy.dst_extent(), got.iter().map(|p| p.1).max().unwrap() + 1);
        }
    }
}
