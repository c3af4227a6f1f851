//! The turns in which the destinations of a load are filled, where some of them share memory.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use super::{Gather, Source, parts};
use crate::Result;
use crate::geometry::memory::{self, Footprint, Write, contested};
use crate::geometry::{Dims, Region, is_run, row_major};
use crate::read::ReadReq;

/// A destination that the caller fills: on a device, say.
pub(super) struct Elsewhere {
    /// As [`Gather::set_place`] had it.
    at: u64,
    file: u32,
    write: Write,
    how: How,
}

enum How {
    /// From a slab.
    Slab(Want),
    /// All of it at once, by its own class.
    Opaque { target: usize },
}

/// A rectangle of a chunk, and the part of a target that it fills.
#[derive(Clone, Debug)]
pub struct Want {
    /// Number of the target.
    pub target: usize,
    /// The chunk.
    pub chunk: u64,
    /// Where in it the rectangle begins.
    pub chunk_offsets: Dims,
    /// Where in the target it goes.
    pub offsets: Dims,
    /// How far it extends.
    pub sizes: Dims,
    /// Where it goes is one run of memory, from this byte of the target on, counted as the elements are stored. It may be cut at any element.
    pub begin: Option<u64>,
    /// Number of the target's device: what goes to different ones never shares a slab.
    pub device: u32,
}

/// A tensor that the caller fills, as far as it is known where its elements lie.
pub struct Rest {
    /// Number of its device.
    pub device: u32,
    /// Address of the first element; `None`: the memory comes into being later.
    pub address: Option<u64>,
    /// Bytes of an element.
    pub itemsize: u64,
    /// Elements from one to the next, in each dimension.
    pub strides: Dims,
}

/// In which turn what is filled. Those of one turn share no memory. By default all of it in one.
#[derive(Default)]
pub struct Turns(Option<Vec<Turn>>);

/// Numbers of requests, and of what the caller fills.
#[derive(Default)]
struct Turn {
    requests: Vec<usize>,
    elsewhere: Vec<usize>,
}

impl Turns {
    /// How many there are, at least one.
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(1, Vec::len)
    }

    pub(super) fn requests<'a>(&self, turn: usize, all: &'a [ReadReq]) -> Cow<'a, [ReadReq]> {
        match &self.0 {
            None => Cow::Borrowed(all),
            Some(turns) => turns[turn].requests.iter().map(|&i| all[i].clone()).collect(),
        }
    }
}

impl Gather {
    /// Adds a region that the caller fills, so that it gets a turn. `target`: the caller's number for it.
    pub fn add_elsewhere(&mut self, target: usize, source: Source, region: &Region, to: &Rest) -> Result<()> {
        let index = std::sync::Arc::clone(&self.index);
        let (tensor, dtype) = self.check(source, region)?;
        let name = index.name(tensor);
        let bytes: Option<Dims> = to.strides.iter().map(|s| s.checked_mul(to.itemsize)).collect();
        let lies = |start, sizes: &[u64]| Footprint::new(to.device, start, to.itemsize, sizes, bytes.as_deref()?);
        if let Some(address) = to.address {
            self.check_footprint(name, lies(address, &region.sizes))?;
        }
        let row_major = row_major(&region.sizes);
        let is_flat = is_run(&region.sizes, &to.strides);
        for part in parts(&index, source, region)? {
            let along = |strides: &[u64]| -> u64 { part.region_offsets.iter().zip(strides).map(|(o, s)| o * s).sum() };
            let start = to.address.map(|address| address + along(&to.strides) * to.itemsize);
            let footprint = start.and_then(|start| lies(start, &part.sizes));
            let flat = is_flat && is_run(&part.sizes, &row_major);
            let file = self.place(index.chunk_file(part.chunk))?;
            self.elsewhere.push(Elsewhere {
                at: self.next_at,
                file,
                write: Write {
                    footprints: footprint
                        .into_iter()
                        .filter(|footprint| !footprint.is_empty())
                        .collect(),
                    covers: true,
                },
                how: How::Slab(Want {
                    target,
                    chunk: part.chunk,
                    begin: flat.then(|| along(&row_major) * dtype.size()),
                    chunk_offsets: part.chunk_offsets,
                    offsets: part.region_offsets,
                    sizes: part.sizes,
                    device: to.device,
                }),
            });
        }
        Ok(())
    }

    /// Adds a region that the caller fills at once, be it in several chunks: a tensor of which only its class knows where the elements lie.
    /// `footprints`: of the memory that it may write to.
    pub fn add_opaque(
        &mut self,
        target: usize,
        source: Source,
        region: &Region,
        footprints: impl IntoIterator<Item = Footprint>,
    ) -> Result<()> {
        let index = std::sync::Arc::clone(&self.index);
        self.check(source, region)?;
        let Some(first) = parts(&index, source, region)?.into_iter().next() else {
            return Ok(());
        };
        let file = self.place(index.chunk_file(first.chunk))?;
        self.elsewhere.push(Elsewhere {
            at: self.next_at,
            file,
            write: Write {
                footprints: footprints
                    .into_iter()
                    .filter(|footprint| !footprint.is_empty())
                    .collect(),
                covers: false,
            },
            how: How::Opaque { target },
        });
        Ok(())
    }

    /// Finds the turns. What a later destination hides has none, unless `every` one is to be filled.
    pub fn arrange(&self, every: bool) -> Turns {
        let count = self.requests.len();
        let mut reaches: Vec<_> = (0..count).map(|i| self.footprint(i).reach(number(i))).collect();
        for (i, elsewhere) in self.elsewhere.iter().enumerate() {
            let footprints = &elsewhere.write.footprints;
            reaches.extend(footprints.iter().map(|footprint| footprint.reach(number(count + i))));
        }
        let runs = contested(&mut reaches);
        if runs.is_empty() {
            return Turns(None);
        }
        let mut sharing: Vec<usize> = runs
            .into_iter()
            .flat_map(|run| reaches[run].iter().map(|reach| reach.write as usize))
            .collect();
        let files = self.files_in_order();
        sharing.sort_unstable_by_key(|&i| (files[&self.file(i)], self.at(i), i));
        sharing.dedup();
        let writes: Vec<Write> = sharing.iter().map(|&i| self.write(i)).collect();
        let mut turns = vec![Some(0); self.count()];
        for (i, turn) in sharing.into_iter().zip(memory::turns(&writes, every)) {
            turns[i] = turn;
        }
        self.split(&turns)
    }

    fn split(&self, turns: &[Option<u32>]) -> Turns {
        let mut split: Vec<Turn> = Vec::new();
        for (i, turn) in turns.iter().enumerate() {
            let Some(turn) = turn.map(|turn| turn as usize) else {
                continue;
            };
            if split.len() <= turn {
                split.resize_with(turn + 1, Turn::default);
            }
            match i.checked_sub(self.requests.len()) {
                None => split[turn].requests.push(i),
                Some(i) => split[turn].elsewhere.push(i),
            }
        }
        Turns(Some(split))
    }

    /// Numbers of what the caller fills from slabs in a turn, for [`want`](Self::want).
    pub fn wants(&self, turns: &Turns, turn: usize) -> Vec<usize> {
        let mut all = self.elsewhere(turns, turn);
        all.retain(|&i| self.want(i).is_some());
        all
    }

    /// What has this number, if it is filled from slabs.
    pub fn want(&self, number: usize) -> Option<&Want> {
        match &self.elsewhere.get(number)?.how {
            How::Slab(want) => Some(want),
            How::Opaque { .. } => None,
        }
    }

    /// The targets that their own class fills in a turn.
    pub fn opaque(&self, turns: &Turns, turn: usize) -> Vec<usize> {
        let target = |i: usize| match &self.elsewhere[i].how {
            How::Slab(_) => None,
            How::Opaque { target } => Some(*target),
        };
        self.elsewhere(turns, turn).into_iter().filter_map(target).collect()
    }

    fn elsewhere(&self, turns: &Turns, turn: usize) -> Vec<usize> {
        match &turns.0 {
            None => (0..self.elsewhere.len()).collect(),
            Some(turns) => turns[turn].elsewhere.clone(),
        }
    }

    /// Places in the plan of all that is filled in a turn.
    pub fn places(&self, turns: &Turns, turn: usize) -> Vec<u64> {
        let mut places: Vec<u64> = self.in_turn(turns, turn).map(|i| self.at(i)).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// Places in the plan of which all is filled in the first turn.
    pub fn at_once(&self, turns: &Turns) -> Vec<u64> {
        let mut first = self.places(turns, 0);
        if turns.0.is_some() {
            let mut filled = vec![false; self.count()];
            self.in_turn(turns, 0).for_each(|i| filled[i] = true);
            let late: HashSet<u64> = (0..filled.len()).filter(|&i| !filled[i]).map(|i| self.at(i)).collect();
            first.retain(|place| !late.contains(place));
        }
        first
    }

    /// Takes all of these places out of the turns.
    pub fn leave_out(&self, turns: &mut Turns, places: &[u64]) {
        let places: HashSet<u64> = places.iter().copied().collect();
        let stays = |i: usize| !places.contains(&self.at(i));
        let split = (0..turns.len()).map(|turn| Turn {
            requests: self
                .requests_in(turns, turn)
                .into_iter()
                .filter(|&i| stays(i))
                .collect(),
            elsewhere: self
                .elsewhere(turns, turn)
                .into_iter()
                .filter(|&i| stays(self.requests.len() + i))
                .collect(),
        });
        *turns = Turns(Some(split.collect()));
    }

    fn requests_in(&self, turns: &Turns, turn: usize) -> Vec<usize> {
        match &turns.0 {
            None => (0..self.requests.len()).collect(),
            Some(turns) => turns[turn].requests.clone(),
        }
    }

    /// All that is filled in a turn, as numbers for [`at`](Self::at).
    fn in_turn(&self, turns: &Turns, turn: usize) -> impl Iterator<Item = usize> {
        let (here, count) = (self.requests_in(turns, turn), self.requests.len());
        here.into_iter()
            .chain(self.elsewhere(turns, turn).into_iter().map(move |i| count + i))
    }

    fn count(&self) -> usize {
        self.requests.len() + self.elsewhere.len()
    }

    /// The order in which the plan comes to the files.
    fn files_in_order(&self) -> HashMap<u32, usize> {
        let mut all: Vec<usize> = (0..self.count()).collect();
        all.sort_by_key(|&i| self.at(i));
        let mut order = HashMap::new();
        for i in all {
            let next = order.len();
            order.entry(self.file(i)).or_insert(next);
        }
        order
    }

    /// The requests come first, then what is elsewhere.
    fn at(&self, i: usize) -> u64 {
        self.at
            .get(i)
            .copied()
            .unwrap_or_else(|| self.elsewhere[i - self.at.len()].at)
    }

    fn file(&self, i: usize) -> u32 {
        match self.requests.get(i) {
            Some(request) => request.file,
            None => self.elsewhere[i - self.requests.len()].file,
        }
    }

    fn footprint(&self, i: usize) -> Footprint {
        let request = &self.requests[i];
        let start = request.dst.0.addr() as u64;
        let size = request.operation.element_size(request.itemsize);
        Footprint::new(0, start, size, &request.shape, &request.dst_strides)
            .expect("memory that is there ends within it")
    }

    fn write(&self, i: usize) -> Write {
        match i.checked_sub(self.requests.len()) {
            None => Write {
                footprints: [self.footprint(i)].into_iter().collect(),
                covers: true,
            },
            Some(i) => self.elsewhere[i].write.clone(),
        }
    }
}

fn number(i: usize) -> u32 {
    u32::try_from(i).expect("fewer than 2^32 destinations: each takes more than a byte")
}
