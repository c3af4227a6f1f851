//! Translation of regions of stored tensors to requests for the read engine: byte ranges of files,
//! and their destinations in memory.

#![allow(unsafe_code)] // destinations are addresses that the caller guarantees

mod arrange;
mod groups;
mod sample;

use std::borrow::Cow;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use self::arrange::DeviceDestination;
pub use self::arrange::{DeviceTensor, Passes, SlabRegion};
pub(crate) use self::groups::ReadGroups;
pub use self::sample::{Sample, SharedSections, compare};
use super::data_files::{check_each, explain, file_ref, passing_over};
use crate::copy::SignBits;
use crate::format::{ChunkView, CodedChunk, Index, Overlap};
use crate::geometry::memory::Footprint;
use crate::geometry::{Dims, Region};
use crate::read::{
    self, CodedReq, Destination, FileRef, Operation, ReadOptions, ReadReq, ReadStats, Sharing,
};
use crate::{Control, Dtype, Error, Result};

/// Source of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A tensor. All chunks that hold parts of it are read.
    Tensor(u32),
    /// One chunk, for planners that plan by chunks.
    Chunk(u64),
}

/// Memory for a rectangle: its address, and the step in bytes along each dimension.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Destination of the first element.
    pub address: Destination,
    /// Bytes from an element to the next of each dimension.
    pub strides: Dims,
}

/// A batch of reads from one checkpoint.
pub struct Gather {
    index: Arc<Index>,
    allow_external: bool,
    files: Vec<FileRef>,
    /// Position in `files` of each file of the index.
    places: Vec<Option<u32>>,
    requests: Vec<ReadReq>,
    /// Place in the plan of each request, and then of what is added next.
    at: Vec<u64>,
    next_at: u64,
    device_targets: Vec<DeviceDestination>,
    /// For each of `files`, true if other ranks read it too; set once that is known.
    common: Option<Arc<[bool]>>,
}

impl Gather {
    /// Makes an empty batch.
    pub fn new(index: Arc<Index>, allow_external: bool) -> Self {
        Self {
            places: vec![None; index.file_count() as usize],
            index,
            allow_external,
            files: Vec::new(),
            requests: Vec::new(),
            at: Vec::new(),
            next_at: 0,
            device_targets: Vec::new(),
            common: None,
        }
    }

    /// Sets the place in the plan of everything that is added next. Destinations that share memory
    /// are filled in the order of stock DCP's readers: file by file, in the order in which the plan
    /// first reaches the files, and in the plan's order within a file.
    pub fn set_place(&mut self, place: u64) {
        self.next_at = place;
    }

    fn refuse(&self, tensor: &str, reason: String) -> Error {
        Error::tensor_plan(Some(self.index.path()), tensor, reason)
    }

    /// Adds a region to read into memory.
    pub fn add(&mut self, source: Source, region: &Region, to: &Memory) -> Result<()> {
        self.add_with(source, region, to, Operation::Copy)
    }

    /// Does the same as [`add`](Self::add), with an operation that suits the elements.
    pub fn add_with(
        &mut self,
        source: Source,
        region: &Region,
        to: &Memory,
        operation: Operation,
    ) -> Result<()> {
        let index = Arc::clone(&self.index);
        let (tensor, dtype) = self.check(source, region)?;
        let size = operation.element_size(dtype.size());
        self.check_memory(index.name(tensor), size, &region.sizes, to)?;
        for part in parts(&index, source, region)? {
            let memory = Memory {
                address: step_by(to.address, &part.region_offsets, &to.strides)?,
                strides: to.strides.clone(),
            };
            self.add_part(
                &index.chunk(part.chunk),
                dtype,
                &part.chunk_offsets,
                &part.sizes,
                memory,
                operation,
            )?;
        }
        Ok(())
    }

    /// Checks a region, and returns its tensor and dtype.
    fn check(&self, source: Source, region: &Region) -> Result<(u32, Dtype)> {
        let (tensor, chunk) = match source {
            Source::Tensor(tensor) => (tensor, None),
            Source::Chunk(chunk) => (self.index.chunk(chunk).tensor, Some(chunk)),
        };
        let view = self.index.tensor(tensor);
        let Some(dtype) = view.dtype else {
            return Err(self.refuse(view.name, "it is a value, not a tensor".into()));
        };
        let (whole, of) = match chunk {
            None => (view.shape, ""),
            Some(chunk) => (self.index.chunk(chunk).sizes, "a chunk of "),
        };
        if region.fits(&whole) {
            return Ok((tensor, dtype));
        }
        let reason = format!(
            "{:?} elements at {:?} of {of}{:?}",
            region.sizes.as_slice(),
            region.offsets.as_slice(),
            whole.as_slice()
        );
        Err(self.refuse(view.name, reason))
    }

    /// Adds a rectangle that has been checked.
    fn add_part(
        &mut self,
        view: &ChunkView,
        dtype: Dtype,
        offsets: &[u64],
        sizes: &[u64],
        to: Memory,
        operation: Operation,
    ) -> Result<()> {
        if sizes.contains(&0) {
            return Ok(());
        }
        if let Some(chunk) = &view.coded {
            return self.add_coded(view, chunk, offsets, sizes, &to, operation);
        }
        let signs = view.signs.bits(dtype).expect("checked at open");
        let (signs, operation) = match operation {
            // The destination has a sum, whose sign must not change, so the factor is negated
            // instead. Real numbers have no other sign bit.
            Operation::Accumulate(sink) if !signs.is_empty() => {
                (SignBits::default(), Operation::Accumulate(sink.negated()))
            }
            operation => (signs, operation),
        };
        let itemsize = dtype.size();
        let (src_offset, src_strides) = view.bytes_of(itemsize, offsets);
        let file = self.place(view.file)?;
        self.push(ReadReq {
            file,
            tensor: view.tensor,
            chunk_offset: view.offset,
            chunk_length: view.length,
            digests: view.digests.as_ref().map(|range| range.start),
            itemsize,
            shape: Dims::from_slice(sizes),
            src_offset,
            src_strides,
            dst: to.address,
            dst_strides: to.strides,
            signs,
            operation,
            coded: None,
        });
        Ok(())
    }

    /// Adds a rectangle of a coded chunk, in terms of the tensor that the codes decode to.
    fn add_coded(
        &mut self,
        view: &ChunkView,
        chunk: &CodedChunk,
        offsets: &[u64],
        sizes: &[u64],
        to: &Memory,
        operation: Operation,
    ) -> Result<()> {
        let region = chunk.region(offsets, sizes);
        let base = Arc::clone(&chunk.of.index);
        let mut files = SmallVec::new();
        for part in chunk.of.parts(&region.offsets, &region.sizes) {
            for held in base.parts_of(part.tensor, &part.region)? {
                // The view has the same files as its base, with the same numbers.
                let file = base.chunk_file(held.chunk);
                let place = self.place(file)?;
                if !files.contains(&(file, place)) {
                    files.push((file, place));
                }
            }
        }
        let (src_offset, src_strides) = view.bytes_of(1, offsets);
        let file = self.place(view.file)?;
        self.push(ReadReq {
            file,
            tensor: view.tensor,
            chunk_offset: view.offset,
            chunk_length: view.length,
            digests: None,
            itemsize: chunk.of.target.dtype().size(),
            shape: region.sizes,
            src_offset,
            src_strides: chunk
                .dims
                .iter()
                .map(|dim| dim.map_or(0, |dim| src_strides[dim]))
                .collect(),
            dst: to.address,
            dst_strides: chunk
                .dims
                .iter()
                .map(|dim| dim.map_or(0, |dim| to.strides[dim]))
                .collect(),
            signs: SignBits::default(),
            operation,
            coded: Some(Arc::new(CodedReq {
                of: Arc::clone(&chunk.of),
                offsets: region.offsets,
                files,
            })),
        });
        Ok(())
    }

    /// Adds some bytes of a chunk, as they are stored.
    pub fn add_bytes(&mut self, chunk: u64, from: u64, length: u64, to: Destination) -> Result<()> {
        let view = self.index.chunk(chunk);
        if from.checked_add(length).is_none_or(|end| end > view.length) {
            return Err(Error::Plan(format!("bytes beyond the {} of a chunk", view.length)));
        }
        if length > 0 {
            let file = self.place(view.file)?;
            self.push(ReadReq {
                digests: view.digests.map(|range| range.start),
                shape: Dims::from_slice(&[length]),
                src_offset: from,
                ..ReadReq::bytes(file, view.tensor, view.offset, view.length, to)
            });
        }
        Ok(())
    }

    fn push(&mut self, request: ReadReq) {
        self.requests.push(request);
        self.at.push(self.next_at);
    }

    fn check_memory(&self, tensor: &str, itemsize: u64, sizes: &[u64], to: &Memory) -> Result<()> {
        let footprint = Footprint::new(0, to.address.0.addr() as u64, itemsize, sizes, &to.strides);
        self.check_footprint(tensor, footprint).map(drop)
    }

    /// Refuses a destination that overlaps itself or exceeds the address space.
    fn check_footprint(&self, tensor: &str, footprint: Option<Footprint>) -> Result<Footprint> {
        match footprint {
            Some(footprint) if !footprint.overlaps_itself() => Ok(footprint),
            Some(_) => {
                let reason = "the destination has several elements in one place of memory; give \
                    it memory of its own";
                Err(self.refuse(tensor, reason.into()))
            }
            None => Err(self.refuse(tensor, "the destination ends beyond all memory".into())),
        }
    }

    fn place(&mut self, file: u32) -> Result<u32> {
        if let Some(place) = self.places[file as usize] {
            return Ok(place);
        }
        let place = u32::try_from(self.files.len()).expect("no more than the index has");
        self.files.push(file_ref(&self.index, file, self.allow_external)?);
        self.places[file as usize] = Some(place);
        Ok(place)
    }

    /// Returns the files where they are read from now. Files of tiers may be passed over.
    fn files_now(&self) -> Result<Cow<'_, [FileRef]>> {
        if self.index.tiers().is_none() {
            return Ok(Cow::Borrowed(&self.files));
        }
        let mut files = self.files.clone();
        for (file, place) in (0..).zip(&self.places) {
            let Some(place) = *place else { continue };
            let then = &self.files[place as usize].path;
            let now = file_ref(&self.index, file, self.allow_external)?;
            if now.path != *then {
                // A file may be there twice, as other ranks read a part of it.
                for same in files.iter_mut().filter(|same| same.path == *then) {
                    *same = now.clone();
                }
            }
        }
        Ok(Cow::Owned(files))
    }

    /// Returns the index.
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// Returns the number of rectangles that were added, without empty ones.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Removes all rectangles after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.requests.truncate(len);
        self.at.truncate(len);
    }

    /// Returns whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Checks the files of everything that was added, as [`check_files`](super::check_files) does.
    pub fn check_files(&self, control: &Control) -> Result<()> {
        passing_over(&self.index, || check_each(&self.index, &*self.files_now()?, control))
    }

    /// Returns these options with the files that other ranks read too.
    fn options<'a>(&self, options: &'a ReadOptions) -> Cow<'a, ReadOptions> {
        match &self.common {
            None => Cow::Borrowed(options),
            Some(files) => Cow::Owned(ReadOptions {
                shared: Sharing::Known(Arc::clone(files)),
                ..options.clone()
            }),
        }
    }

    /// Reads everything that was added. Destinations that share memory are filled in several
    /// passes.
    ///
    /// # Errors
    /// Those of [`read::read`].
    ///
    /// # Safety
    /// Every destination is valid for writes to all its elements, from any thread, until this
    /// returns.
    pub unsafe fn read(&self, options: &ReadOptions, control: &Control) -> Result<ReadStats> {
        let passes = self.arrange();
        let mut all = ReadStats::default();
        for pass in 0..passes.len() {
            // SAFETY: the caller guarantees it.
            all += unsafe { self.read_pass(&passes, pass, options, control)? };
        }
        Ok(all)
    }

    /// Reads one pass.
    ///
    /// # Errors
    /// Those of [`read::read`].
    ///
    /// # Safety
    /// That of [`read`](Self::read).
    pub unsafe fn read_pass(
        &self,
        passes: &Passes,
        pass: usize,
        options: &ReadOptions,
        control: &Control,
    ) -> Result<ReadStats> {
        let requests = passes.requests(pass, &self.requests);
        let options = &self.options(options);
        passing_over(&self.index, || {
            let files = self.files_now()?;
            // SAFETY: the caller guarantees it, and no two requests of a pass share a byte. Files
            // are never truncated (section 9 of the format).
            let read = unsafe { read::read(&files, &requests, &*self.index, options, control) };
            read.map_err(|error| explain(&self.index, error, control))
        })
    }
}

/// Returns the destination at `offsets` from an address.
fn step_by(address: Destination, offsets: &[u64], strides: &[u64]) -> Result<Destination> {
    let bytes: u64 = offsets.iter().zip(strides).map(|(offset, stride)| offset * stride).sum();
    let bytes = usize::try_from(bytes).map_err(|_| Error::Plan("destination too large".into()))?;
    Ok(Destination(address.0.wrapping_add(bytes)))
}

/// Returns the parts of a checked region, and the chunks that hold them.
fn parts(index: &Index, source: Source, region: &Region) -> Result<SmallVec<[Overlap; 1]>> {
    match source {
        Source::Tensor(tensor) => Ok(index.parts_of(tensor, region)?.into()),
        Source::Chunk(chunk) => Ok(smallvec![Overlap {
            chunk,
            chunk_offsets: region.offsets.clone(),
            region_offsets: Dims::from_elem(0, region.sizes.len()),
            sizes: region.sizes.clone(),
        }]),
    }
}
