//! Which writes touch the same memory, and the turns in which they happen so that the result is that of one after another.

use std::collections::HashMap;
use std::ops::Range;

use smallvec::SmallVec;

/// Steps of a search for common bytes. Layouts that tensors have take a few; beyond this many, memory counts as shared.
const SEARCH: u32 = 1 << 16;

/// The bytes that a write touches: a run, and loops around it. Equal ones are the same bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Footprint {
    space: u32,
    start: u64,
    /// The largest stride first; contiguous ones are in the run, and those that walk evenly together are one.
    steps: SmallVec<[Step; 4]>,
    run: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Step {
    n: u64,
    stride: u64,
}

impl Footprint {
    /// `shape` elements of `itemsize` bytes from address `start` on, with strides in bytes. What is in different spaces never meets.
    ///
    /// `None` if the slices differ in length, or it ends beyond 63 bits.
    pub fn new(space: u32, start: u64, itemsize: u64, shape: &[u64], strides: &[u64]) -> Option<Self> {
        if shape.len() != strides.len() {
            return None;
        }
        let mut made = Self {
            space,
            start,
            steps: SmallVec::new(),
            run: itemsize,
        };
        if shape.contains(&0) {
            made.run = 0;
        }
        if made.run == 0 {
            return Some(made);
        }
        // Row-major memory is a run without sorting.
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

    /// Whether it touches nothing.
    pub fn is_empty(&self) -> bool {
        self.run == 0
    }

    fn layout(&self) -> Layout<'_> {
        Layout {
            steps: &self.steps,
            run: self.run,
        }
    }

    /// From its first byte to just past its last, gaps included.
    pub fn reach(&self, write: u32) -> Reach {
        Reach {
            space: self.space,
            start: self.start,
            end: self.start + self.layout().reach(),
            write,
        }
    }

    /// Whether two of its elements share a byte.
    pub fn overlaps_itself(&self) -> bool {
        let mut layout = self.layout();
        while let Some((outer, inner)) = layout.split() {
            if outer.stride == 0 {
                return true;
            }
            // The inner loops against themselves, some steps further on: as many as they reach over.
            let last = (outer.n - 1).min((inner.reach() - 1) / outer.stride);
            let mut left = SEARCH;
            if (1..=last).any(|k| inner.meets(inner, i128::from(k * outer.stride), &mut left)) {
                return true;
            }
            layout = inner;
        }
        false
    }
}

/// A footprint without its place.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Layout<'a> {
    steps: &'a [Step],
    run: u64,
}

impl Layout<'_> {
    fn reach(self) -> u64 {
        self.steps
            .iter()
            .fold(self.run, |sum, step| sum + (step.n - 1) * step.stride)
    }

    /// The outermost loop, and what is in it.
    fn split(self) -> Option<(Step, Self)> {
        let (&outer, steps) = self.steps.split_first()?;
        Some((outer, Self { steps, run: self.run }))
    }

    /// The same, where that loop gets anywhere. (Those that do not are the innermost.)
    fn moves(self) -> Option<(Step, Self)> {
        self.split().filter(|(outer, _)| outer.stride > 0)
    }

    /// Whether it shares a byte with `other`, which begins `ahead` bytes after it. `left`: steps that the search may still take.
    fn meets(self, other: Layout<'_>, ahead: i128, left: &mut u32) -> bool {
        let (reach, other_reach) = (i128::from(self.reach()), i128::from(other.reach()));
        if ahead >= reach || -ahead >= other_reach {
            return false;
        }
        if *left == 0 {
            return true;
        }
        let (a, b) = (self.moves(), other.moves());
        if a.is_none() && b.is_none() {
            return true;
        }
        *left -= 1;
        let stride = |outer: Option<(Step, Layout<'_>)>| outer.map_or(0, |(step, _)| step.stride);
        match (a, b) {
            // The same stride: it only counts how many steps one is ahead of the other.
            (Some((outer, inner)), Some((other_outer, other_inner))) if outer.stride == other_outer.stride => {
                let step = i128::from(outer.stride);
                let (inner_reach, other_reach) = (i128::from(inner.reach()), i128::from(other_inner.reach()));
                let first = ((-ahead - other_reach).div_euclid(step) + 1).max(1 - i128::from(outer.n));
                let last = (inner_reach - ahead - 1)
                    .div_euclid(step)
                    .min(i128::from(other_outer.n) - 1);
                (first..=last).any(|k| inner.meets(other_inner, ahead + k * step, left))
            }
            // Step by step where the steps are longer, as far as the other reaches.
            (Some((outer, inner)), _) if stride(a) > stride(b) => {
                let step = i128::from(outer.stride);
                let first = ((ahead - i128::from(inner.reach())).div_euclid(step) + 1).max(0);
                let last = (ahead + other_reach - 1).div_euclid(step).min(i128::from(outer.n) - 1);
                (first..=last).any(|i| inner.meets(other, ahead - i * step, left))
            }
            _ => other.meets(self, -ahead, left),
        }
    }
}

/// From the first byte of a footprint to just past its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    space: u32,
    start: u64,
    end: u64,
    /// The write that it belongs to.
    pub write: u32,
}

/// Sorts `reaches`, and finds the runs of them that are connected: each of a run reaches into another.
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

/// One write, for [`turns`].
#[derive(Clone, Debug)]
pub struct Write {
    /// The memory that it touches.
    pub footprints: SmallVec<[Footprint; 1]>,
    /// Whether it is known to write all of that memory.
    pub covers: bool,
}

/// The turn of each write, so that the result is that of the writes one after another, in their order: those of one turn share no
/// memory. `None`: it need not happen, as a later one writes all its bytes; never where `every` one is to be seen.
pub fn turns(writes: &[Write], every: bool) -> Vec<Option<u32>> {
    let groups = groups(writes, every);
    let mut items = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        items.extend(writes[group[0]].footprints.iter().map(|footprint| Item {
            group: number,
            space: footprint.space,
            start: footprint.start,
            layout: footprint.layout(),
        }));
    }
    let mut pairs = Vec::new();
    find_meetings(&mut items, &mut pairs);
    let mut before: Vec<SmallVec<[usize; 2]>> = vec![SmallVec::new(); writes.len()];
    for group in &groups {
        group.windows(2).for_each(|pair| before[pair[1]].push(pair[0]));
    }
    for (a, b) in pairs {
        let (a, b) = (&groups[a], &groups[b]);
        for (one, other) in [(a, b), (b, a)] {
            for &write in one {
                // Those before it follow each other already.
                let earlier = other.partition_point(|&at| at < write);
                before[write].extend(earlier.checked_sub(1).map(|at| other[at]));
            }
        }
    }
    let mut turns = vec![None; writes.len()];
    let mut happening: Vec<usize> = groups.into_iter().flatten().collect();
    happening.sort_unstable();
    for write in happening {
        let after = before[write].iter().filter_map(|&earlier| turns[earlier]).max();
        turns[write] = Some(after.map_or(0, |turn: u32| turn + 1));
    }
    turns
}

/// Writes of the same bytes, in their order; of those that need not be seen, the last alone.
fn groups(writes: &[Write], every: bool) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut known: HashMap<&Footprint, usize> = HashMap::new();
    for (i, write) in writes.iter().enumerate() {
        let same = match write.footprints.as_slice() {
            [one] if write.covers => known.get(one).copied(),
            _ => None,
        };
        match same {
            Some(group) if every => groups[group].push(i),
            Some(group) => groups[group][0] = i,
            None => {
                if let ([one], true) = (write.footprints.as_slice(), write.covers) {
                    known.insert(one, groups.len());
                }
                groups.push(vec![i]);
            }
        }
    }
    groups
}

struct Item<'a> {
    group: usize,
    space: u32,
    start: u64,
    layout: Layout<'a>,
}

impl Item<'_> {
    fn end(&self) -> u64 {
        self.start + self.layout.reach()
    }
}

/// The pairs of groups that share a byte.
fn find_meetings(items: &mut [Item<'_>], pairs: &mut Vec<(usize, usize)>) {
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
            find_meetings(run, pairs);
        } else if count > 1 {
            compare(run, pairs);
        }
        rest = more;
    }
}

/// Where all have the same outermost loop, and together fit between its steps, as columns of a matrix do, only those in the same step can
/// meet: takes the loop away.
fn enter_common_loop(items: &mut [Item<'_>]) -> bool {
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

fn compare(items: &[Item<'_>], pairs: &mut Vec<(usize, usize)>) {
    let mut open: Vec<&Item<'_>> = Vec::new();
    for item in items {
        open.retain(|other| other.end() > item.start);
        for other in &open {
            let ahead = i128::from(item.start) - i128::from(other.start);
            let mut left = SEARCH;
            if item.group != other.group && other.layout.meets(item.layout, ahead, &mut left) {
                pairs.push((other.group, item.group));
            }
        }
        open.push(item);
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
