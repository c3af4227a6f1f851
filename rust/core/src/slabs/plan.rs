//! Plan of a load through slabs: regions of an index become batches, and requests that fill them.

use std::sync::Arc;

use super::pack::{ALIGN, ItemPart, SlabBatch, SlabItem, pack};
use crate::checkpoint::gather::{Gather, Memory, ReadGroups, SharedSections, SlabRegion, Source};
use crate::copy::Signs;
use crate::format::{Index, Kind};
use crate::geometry::{Dims, Region, is_run, row_major};
use crate::read::{Destination, ReadOptions, Verify};
use crate::{Control, Error, Result};

/// All batches of a load, and the requests that fill them.
pub struct Plan {
    regions: Vec<SlabRegion>,
    pub(super) batches: Vec<SlabBatch>,
    /// The requests of each batch, one for every piece. Destinations are offsets in the slab.
    pub(super) reads: ReadGroups,
    slab_bytes: u64,
}

impl Plan {
    /// Packs the rectangles into slabs of `slab_bytes`, a multiple of [`ALIGN`], in order or with
    /// `sort` in the order of the files. Opens and checks every file that they need. `common` are
    /// the sections that other ranks read too, if they are known.
    ///
    /// # Errors
    /// [`Error::Plan`] for a rectangle outside of its chunk; those of [`read`](crate::read::read)
    /// for files.
    pub fn new(
        index: &Arc<Index>,
        allow_external: bool,
        regions: Vec<SlabRegion>,
        slab_bytes: u64,
        sort: bool,
        options: &ReadOptions,
        common: Option<&SharedSections>,
    ) -> Result<Self> {
        if slab_bytes == 0 || !slab_bytes.is_multiple_of(ALIGN) {
            return Err(Error::Plan(format!("slabs of {slab_bytes} bytes")));
        }
        let items = regions.iter().map(|region| item(index, region)).collect::<Result<Vec<_>>>()?;
        let batches = if sort {
            pack_sorted(&items, slab_bytes, options.verify != Verify::Nothing)
        } else {
            pack(&items, slab_bytes, options.verify != Verify::Nothing)
        };
        let mut gather = Gather::new(Arc::clone(index), allow_external);
        let mut ranges = Vec::with_capacity(batches.len());
        let mut count = 0;
        for batch in &batches {
            for piece in &batch.pieces {
                let of = &regions[piece.item];
                let place = place(piece.at)?;
                match &piece.part {
                    ItemPart::Bytes(from) => {
                        gather.add_bytes(
                            of.chunk,
                            items[piece.item].chunk_begin + from,
                            piece.length,
                            place,
                        )?;
                    }
                    ItemPart::Rectangle(offsets, sizes) => {
                        let region = Region {
                            offsets: sum(offsets, &of.chunk_offsets),
                            sizes: sizes.clone(),
                        };
                        let itemsize = items[piece.item].itemsize;
                        let to = Memory {
                            address: place,
                            strides: row_major(sizes)
                                .iter()
                                .map(|stride| stride * itemsize)
                                .collect(),
                        };
                        gather.add(Source::Chunk(of.chunk), &region, &to)?;
                    }
                }
            }
            ranges.push(count..count + batch.pieces.len());
            count += batch.pieces.len();
        }
        if let Some(common) = common {
            gather.divide(common);
        }
        let reads = gather.into_groups(ranges, options, &Control::new())?;
        Ok(Self { regions, batches, reads, slab_bytes })
    }

    /// Returns the batches, in the order in which they are handed out.
    #[must_use]
    pub fn batches(&self) -> &[SlabBatch] {
        &self.batches
    }

    /// Returns the copies that empty a batch, in the order of their offsets in the slab.
    pub fn copies(&self, batch: &SlabBatch) -> impl Iterator<Item = SlabCopy> {
        batch.pieces.iter().map(|piece| {
            let of = &self.regions[piece.item];
            SlabCopy {
                target: of.target,
                at: piece.at,
                length: piece.length,
                to: match &piece.part {
                    ItemPart::Bytes(from) => To::Bytes(of.begin.unwrap_or_default() + from),
                    ItemPart::Rectangle(offsets, sizes) => {
                        To::Box(Region { offsets: sum(offsets, &of.offsets), sizes: sizes.clone() })
                    }
                },
            }
        })
    }

    /// Returns the number of a batch's device.
    #[must_use]
    pub fn device(&self, batch: &SlabBatch) -> u32 {
        self.regions[batch.pieces[0].item].device
    }

    /// Returns the bytes of a slab.
    #[must_use]
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Returns the best number of slabs to fill at a time.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.reads.workers().min(self.batches.len())
    }
}

/// Bytes of a slab, and the part of a target that they fill.
#[derive(Clone, Debug)]
pub struct SlabCopy {
    /// Number of the target.
    pub target: usize,
    /// First byte in the slab.
    pub at: u64,
    /// Length in bytes.
    pub length: u64,
    /// Destination.
    pub to: To,
}

/// Destinations within a target.
#[derive(Clone, Debug)]
pub enum To {
    /// One run of memory, from this byte on, in units of stored elements.
    Bytes(u64),
    /// A rectangle, in row-major order.
    Box(Region),
}

fn sum(a: &[u64], b: &[u64]) -> Dims {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Packs items in the order of their files.
fn pack_sorted(items: &[SlabItem], slab_bytes: u64, verify: bool) -> Vec<SlabBatch> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|&i| (items[i].file, items[i].offset));
    let sorted: Vec<SlabItem> = order.iter().map(|&i| items[i].clone()).collect();
    let mut batches = pack(&sorted, slab_bytes, verify);
    for piece in batches.iter_mut().flat_map(|batch| &mut batch.pieces) {
        piece.item = order[piece.item];
    }
    batches
}

fn place(at: u64) -> Result<Destination> {
    let at = usize::try_from(at).map_err(|_| Error::Plan("slab too large".into()))?;
    Ok(Destination(std::ptr::without_provenance_mut(at)))
}

fn item(index: &Index, of: &SlabRegion) -> Result<SlabItem> {
    let view = index.chunk(of.chunk);
    let tensor = index.tensor(view.tensor);
    let refuse = |reason: String| Error::tensor_plan(Some(index.path()), tensor.name, reason);
    let (Kind::Tensor, Some(dtype)) = (tensor.kind, tensor.dtype) else {
        return Err(refuse("it is a value, not a tensor".into()));
    };
    if !Region::new(&of.chunk_offsets, &of.sizes).fits(&view.sizes) {
        return Err(refuse(format!(
            "{:?} elements at {:?} of a chunk of {:?}",
            of.sizes.as_slice(),
            of.chunk_offsets.as_slice(),
            view.sizes.as_slice()
        )));
    }
    let itemsize = dtype.size();
    let empty = of.sizes.contains(&0);
    let (first, _) = view.bytes_of(itemsize, &of.chunk_offsets);
    let first = if empty { 0 } else { first };
    let stands_for_itself = view.signs == Signs::default() && view.coded.is_none();
    let strides = view.strides.unwrap_or_else(|| row_major(&view.sizes));
    Ok(SlabItem {
        file: view.file,
        offset: view.offset + first,
        chunk_begin: first,
        itemsize,
        sizes: of.sizes.clone(),
        // Coded or sign-flipped bytes cannot be delivered unchanged.
        flat: of.begin.is_some() && stands_for_itself && (empty || is_run(&of.sizes, &strides)),
        group: of.device,
    })
}
