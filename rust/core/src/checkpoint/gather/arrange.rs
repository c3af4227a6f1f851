//! The passes in which the destinations of a load are filled, if some of them share memory.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use super::{Gather, Source, parts};
use crate::Result;
use crate::geometry::memory::{self, Footprint, Write, contested};
use crate::geometry::{Dims, Region, is_run, row_major};
use crate::read::ReadReq;

/// A destination that the caller fills, on a device for instance.
pub(super) struct DeviceDestination {
    /// Place in the plan, from [`Gather::set_place`].
    at: u64,
    file: u32,
    write: Write,
    how: How,
}

enum How {
    /// From a slab.
    Slab(SlabRegion),
    /// In one go, by the tensor's own class.
    Opaque { target: usize },
}

/// A rectangle of a chunk, and the part of a target that it fills.
#[derive(Clone, Debug)]
pub struct SlabRegion {
    /// Number of the target.
    pub target: usize,
    /// Number of the chunk.
    pub chunk: u64,
    /// Offsets of the rectangle in the chunk.
    pub chunk_offsets: Dims,
    /// Offsets in the target.
    pub offsets: Dims,
    /// Sizes of the rectangle.
    pub sizes: Dims,
    /// First byte in the target, in units of stored elements, if the destination is one run of
    /// memory. Such a rectangle may be split at any element.
    pub begin: Option<u64>,
    /// Number of the target's device. Rectangles for different devices never share a slab.
    pub device: u32,
}

/// A tensor that the caller fills, and its layout in memory as far as that is known.
pub struct DeviceTensor {
    /// Number of its device.
    pub device: u32,
    /// Address of the first element; `None` if the memory is allocated later.
    pub address: Option<u64>,
    /// Size of an element in bytes.
    pub itemsize: u64,
    /// Strides in elements.
    pub strides: Dims,
}

/// Assignment of destinations to passes. Those of one pass share no memory. By default there is one
/// pass.
pub struct Passes {
    count: usize,
    /// The pass of each request, then of each device destination. `None` is never filled.
    of: Option<Vec<Option<u32>>>,
}

impl Default for Passes {
    fn default() -> Self {
        Self { count: 1, of: None }
    }
}

impl Passes {
    /// Returns the number of passes, at least one.
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether destination `i` belongs to this pass.
    fn has(&self, pass: usize, i: usize) -> bool {
        self.of.as_ref().map_or(pass == 0, |of| of[i].is_some_and(|of| of as usize == pass))
    }

    pub(super) fn requests<'a>(&self, pass: usize, all: &'a [ReadReq]) -> Cow<'a, [ReadReq]> {
        if self.of.is_none() {
            return Cow::Borrowed(all);
        }
        (0..all.len()).filter(|&i| self.has(pass, i)).map(|i| all[i].clone()).collect()
    }
}

impl Gather {
    /// Adds a region that the caller fills, so that it gets a pass. `target` is the caller's number
    /// for it.
    pub fn add_device_target(
        &mut self,
        target: usize,
        source: Source,
        region: &Region,
        to: &DeviceTensor,
    ) -> Result<()> {
        let index = std::sync::Arc::clone(&self.index);
        let (tensor, dtype) = self.check(source, region)?;
        let name = index.name(tensor);
        let bytes: Option<Dims> = to.strides.iter().map(|s| s.checked_mul(to.itemsize)).collect();
        let lies = |start, sizes: &[u64]| {
            Footprint::new(to.device, start, to.itemsize, sizes, bytes.as_deref()?)
        };
        if let Some(address) = to.address {
            self.check_footprint(name, lies(address, &region.sizes))?;
        }
        let row_major = row_major(&region.sizes);
        let is_flat = is_run(&region.sizes, &to.strides);
        for part in parts(&index, source, region)? {
            let along = |strides: &[u64]| -> u64 {
                part.region_offsets.iter().zip(strides).map(|(o, s)| o * s).sum()
            };
            let start = to.address.map(|address| address + along(&to.strides) * to.itemsize);
            let footprint = start.and_then(|start| lies(start, &part.sizes));
            let flat = is_flat && is_run(&part.sizes, &row_major);
            let file = self.place(index.chunk_file(part.chunk))?;
            self.device_targets.push(DeviceDestination {
                at: self.next_at,
                file,
                write: Write {
                    footprints: footprint
                        .into_iter()
                        .filter(|footprint| !footprint.is_empty())
                        .collect(),
                    covers: true,
                },
                how: How::Slab(SlabRegion {
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

    /// Adds a region that the caller fills in one go, even if it spans several chunks: a tensor
    /// whose layout only its class knows. `footprints` are the memory that it may write to.
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
        self.device_targets.push(DeviceDestination {
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

    /// Finds the passes. A destination that a later one overwrites has none.
    pub fn arrange(&self) -> Passes {
        let count = self.requests.len();
        let mut reaches: Vec<_> = (0..count).map(|i| self.footprint(i).reach(number(i))).collect();
        for (i, target) in self.device_targets.iter().enumerate() {
            let footprints = &target.write.footprints;
            reaches.extend(footprints.iter().map(|footprint| footprint.reach(number(count + i))));
        }
        let runs = contested(&mut reaches);
        if runs.is_empty() {
            return Passes::default();
        }
        let mut sharing: Vec<usize> = runs
            .into_iter()
            .flat_map(|run| reaches[run].iter().map(|reach| reach.write as usize))
            .collect();
        let files = self.files_in_order();
        sharing.sort_unstable_by_key(|&i| (files[&self.file(i)], self.at(i), i));
        sharing.dedup();
        let writes: Vec<Write> = sharing.iter().map(|&i| self.write(i)).collect();
        let mut of = vec![Some(0); self.count()];
        for (i, pass) in sharing.into_iter().zip(memory::passes(&writes)) {
            of[i] = pass;
        }
        let count = of.iter().flatten().max().map_or(1, |&last| last as usize + 1);
        Passes { count, of: Some(of) }
    }

    /// Returns the numbers of the slab regions that the caller fills in a pass, for
    /// [`slab_region`](Self::slab_region).
    pub fn slab_regions(&self, passes: &Passes, pass: usize) -> Vec<usize> {
        let mut all = self.of_pass(passes, pass);
        all.retain(|&i| self.slab_region(i).is_some());
        all
    }

    /// Returns the slab region of this number, if it is filled from slabs.
    pub fn slab_region(&self, number: usize) -> Option<&SlabRegion> {
        match &self.device_targets.get(number)?.how {
            How::Slab(region) => Some(region),
            How::Opaque { .. } => None,
        }
    }

    /// Returns the targets that their own class fills in a pass.
    pub fn opaque(&self, passes: &Passes, pass: usize) -> Vec<usize> {
        let target = |i: usize| match &self.device_targets[i].how {
            How::Slab(_) => None,
            How::Opaque { target } => Some(*target),
        };
        self.of_pass(passes, pass).into_iter().filter_map(target).collect()
    }

    fn of_pass(&self, passes: &Passes, pass: usize) -> Vec<usize> {
        let first = self.requests.len();
        (0..self.device_targets.len()).filter(|i| passes.has(pass, first + i)).collect()
    }

    /// Returns the places in the plan that are filled in a pass.
    fn places(&self, passes: &Passes, pass: usize) -> Vec<u64> {
        let filled = (0..self.count()).filter(|&i| passes.has(pass, i));
        let mut places: Vec<u64> = filled.map(|i| self.at(i)).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// Returns the places in the plan that are filled entirely in the first pass.
    pub fn at_once(&self, passes: &Passes) -> Vec<u64> {
        let late = (0..self.count()).filter(|&i| !passes.has(0, i));
        let late: HashSet<u64> = late.map(|i| self.at(i)).collect();
        let mut first = self.places(passes, 0);
        first.retain(|place| !late.contains(place));
        first
    }

    /// Takes these places out of the passes.
    pub fn leave_out(&self, passes: &mut Passes, places: &[u64]) {
        let places: HashSet<u64> = places.iter().copied().collect();
        let of = passes.of.get_or_insert_with(|| vec![Some(0); self.count()]);
        for (i, pass) in of.iter_mut().enumerate() {
            *pass = pass.filter(|_| !places.contains(&self.at(i)));
        }
    }

    fn count(&self) -> usize {
        self.requests.len() + self.device_targets.len()
    }

    /// Returns for each file its position in the order in which the plan first reaches the files.
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

    /// Returns the place of a destination. Requests come first, then device destinations.
    fn at(&self, i: usize) -> u64 {
        self.at.get(i).copied().unwrap_or_else(|| self.device_targets[i - self.at.len()].at)
    }

    fn file(&self, i: usize) -> u32 {
        match self.requests.get(i) {
            Some(request) => request.file,
            None => self.device_targets[i - self.requests.len()].file,
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
            None => Write { footprints: [self.footprint(i)].into_iter().collect(), covers: true },
            Some(i) => self.device_targets[i].write.clone(),
        }
    }
}

fn number(i: usize) -> u32 {
    u32::try_from(i).expect("fewer than 2^32 destinations: each takes more than a byte")
}
