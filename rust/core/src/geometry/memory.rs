//! Writes that may touch the same memory, and the passes in which they have the same result as one
//! after another.

use std::collections::HashSet;
use std::ops::Range;

use smallvec::SmallVec;

/// Limit on the runs of a layout that are listed, to find out whether two share a byte. Layouts
/// with more runs are assumed to share bytes.
const LISTED: u64 = 1 << 16;

/// The bytes that a write touches: a run, and loops around it. Equal footprints have the same
/// bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Footprint {
    space: u32,
    start: u64,
    /// Loops, largest stride first. Contiguous loops are part of the run, and loops that are one
    /// even walk are joined.
    steps: SmallVec<[Step; 4]>,
    run: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Step {
    n: u64,
    stride: u64,
}

impl Footprint {
    /// Makes a footprint of `shape` elements of `itemsize` bytes from address `start` on, with
    /// strides in bytes. Footprints in different spaces never meet.
    ///
    /// Returns `None` if the slices differ in length, or it ends beyond 63 bits.
    pub fn new(
        space: u32,
        start: u64,
        itemsize: u64,
        shape: &[u64],
        strides: &[u64],
    ) -> Option<Self> {
        if shape.len() != strides.len() {
            return None;
        }
        let mut made = Self { space, start, steps: SmallVec::new(), run: itemsize };
        if shape.contains(&0) {
            made.run = 0;
        }
        if made.run == 0 {
            return Some(made);
        }
        // Row-major memory becomes a run without sorting.
        for (&n, &stride) in shape.iter().zip(strides).rev() {
            if n > 1 && made.steps.is_empty() && stride == made.run {
                made.run = made.run.checked_mul(n)?;
            } else if n > 1 {
                made.steps.push(Step { n, stride });
            }
        }
        made.normalise()?;
        let reach = made.steps.iter().try_fold(made.run, |sum, step| {
            sum.checked_add((step.n - 1).checked_mul(step.stride)?)
        })?;
        start.checked_add(reach).filter(|&end| i64::try_from(end).is_ok())?;
        Some(made)
    }

    fn normalise(&mut self) -> Option<()> {
        self.steps.sort_by_key(|step| std::cmp::Reverse((step.stride, step.n)));
        while let Some(step) = self.steps.last().filter(|step| step.stride == self.run) {
            self.run = self.run.checked_mul(step.n)?;
            self.steps.pop();
        }
        let mut i = 1;
        while i < self.steps.len() {
            let (outer, inner) = (self.steps[i - 1], self.steps[i]);
            if inner.n.checked_mul(inner.stride)? == outer.stride {
                self.steps[i].n = inner.n.checked_mul(outer.n)?;
                self.steps.remove(i - 1);
            } else {
                i += 1;
            }
        }
        Some(())
    }

    /// Returns whether it touches no byte.
    pub fn is_empty(&self) -> bool {
        self.run == 0
    }

    fn layout(&self) -> Loops<'_> {
        Loops { steps: &self.steps, run: self.run }
    }

    /// Returns the range from its first byte to just past its last, gaps included.
    pub fn reach(&self, write: u32) -> Reach {
        Reach {
            space: self.space,
            start: self.start,
            end: self.start + self.layout().reach(),
            write,
        }
    }

    /// Returns whether two of its elements share a byte.
    pub fn overlaps_itself(&self) -> bool {
        let mut reach = self.run;
        let is_nested = self.steps.iter().rev().all(|step| {
            let is_apart = step.stride >= reach;
            reach += (step.n - 1) * step.stride;
            is_apart
        });
        if is_nested {
            return false;
        }
        let runs = self.steps.iter().fold(1_u64, |runs, step| runs.saturating_mul(step.n));
        if runs > LISTED {
            return true;
        }
        let mut starts = vec![0];
        for step in &self.steps {
            starts = (starts.iter())
                .flat_map(|&at| (0..step.n).map(move |i| at + i * step.stride))
                .collect();
        }
        starts.sort_unstable();
        starts.windows(2).any(|pair| pair[1] - pair[0] < self.run)
    }
}

/// A footprint without its address.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Loops<'a> {
    steps: &'a [Step],
    run: u64,
}

impl Loops<'_> {
    fn reach(self) -> u64 {
        self.steps.iter().fold(self.run, |sum, step| sum + (step.n - 1) * step.stride)
    }

    /// Returns the outermost loop, and the rest.
    fn split(self) -> Option<(Step, Self)> {
        let (&outer, steps) = self.steps.split_first()?;
        Some((outer, Self { steps, run: self.run }))
    }
}

/// The range from the first byte of a footprint to just past its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    space: u32,
    start: u64,
    end: u64,
    /// The write of the footprint.
    pub write: u32,
}

/// Sorts `reaches`, and returns the runs of connected ones: each range in a run overlaps another.
pub fn contested(reaches: &mut [Reach]) -> Vec<Range<usize>> {
    let key = |reach: &Reach| (reach.space, reach.start);
    if !reaches.is_sorted_by_key(key) {
        reaches.sort_unstable_by_key(key);
    }
    let mut runs = Vec::new();
    let mut begin = 0;
    let mut end = 0;
    for (i, reach) in reaches.iter().enumerate() {
        if i > begin && (reach.space != reaches[begin].space || reach.start >= end) {
            runs.push(begin..i);
            begin = i;
            end = 0;
        }
        end = end.max(reach.end);
    }
    runs.push(begin..reaches.len());
    runs.retain(|run| run.len() > 1);
    runs
}

/// One write, for [`passes`].
#[derive(Clone, Debug)]
pub struct Write {
    /// The memory that it touches.
    pub footprints: SmallVec<[Footprint; 1]>,
    /// True if the write covers all of that memory.
    pub covers: bool,
}

/// Returns the pass of each write. Writes of one pass share no memory, and the passes have the same
/// result as the writes one after another. `None` means that the write is not needed, because a
/// later one writes the same bytes.
///
/// Writes that may share memory get different passes. Two are known to be disjoint if their ranges
/// are apart, or if they are side by side in the rows of a matrix.
pub fn passes(writes: &[Write]) -> Vec<Option<u32>> {
    let mut seen = HashSet::new();
    let mut items = Vec::new();
    let mut happens = vec![true; writes.len()];
    for (number, write) in writes.iter().enumerate().rev() {
        if let ([one], true) = (write.footprints.as_slice(), write.covers) {
            happens[number] = seen.insert(one);
        }
        items.extend((write.footprints.iter()).filter(|_| happens[number]).map(|footprint| {
            Stretch {
                write: number,
                space: footprint.space,
                start: footprint.start,
                layout: footprint.layout(),
            }
        }));
    }
    let mut crowds = Vec::new();
    find_crowds(&mut items, &mut crowds);
    let mut crowds_of: Vec<SmallVec<[usize; 1]>> = vec![SmallVec::new(); writes.len()];
    for (number, crowd) in crowds.iter().enumerate() {
        for &write in crowd {
            crowds_of[write].push(number);
        }
    }
    let mut next = vec![0; crowds.len()];
    (happens.into_iter().zip(crowds_of))
        .map(|(happens, crowds)| {
            let pass = crowds.iter().map(|&crowd| next[crowd]).max().unwrap_or(0);
            for &crowd in &crowds {
                next[crowd] = pass + 1;
            }
            happens.then_some(pass)
        })
        .collect()
}

struct Stretch<'a> {
    write: usize,
    space: u32,
    start: u64,
    layout: Loops<'a>,
}

impl Stretch<'_> {
    fn end(&self) -> u64 {
        self.start + self.layout.reach()
    }
}

/// Groups the writes that may share memory.
fn find_crowds(items: &mut [Stretch<'_>], crowds: &mut Vec<Vec<usize>>) {
    items.sort_unstable_by_key(|item| (item.space, item.start));
    let mut rest = items;
    while let Some(first) = rest.first() {
        let (space, mut end, mut count) = (first.space, first.end(), 1);
        while let Some(item) = rest.get(count)
            && item.space == space
            && item.start < end
        {
            end = end.max(item.end());
            count += 1;
        }
        let (run, more) = rest.split_at_mut(count);
        if count > 1 && enter_common_loop(run) {
            find_crowds(run, crowds);
        } else if count > 1 {
            crowds.push(run.iter().map(|item| item.write).collect());
        }
        rest = more;
    }
}

/// Removes the outermost loop if all writes have the same one and together fit between its steps,
/// like columns of a matrix. Then only writes of the same step can meet.
fn enter_common_loop(items: &mut [Stretch<'_>]) -> bool {
    let Some((outer, _)) = items[0].layout.split() else {
        return false;
    };
    let mut end = 0;
    for item in &*items {
        match item.layout.split() {
            Some((step, inner)) if step == outer => end = end.max(item.start + inner.reach()),
            _ => return false,
        }
    }
    if end - items[0].start > outer.stride {
        return false;
    }
    for item in items {
        item.layout.steps = &item.layout.steps[1..];
    }
    true
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
