//! The crate's public interface: open a checkpoint, list its tensors, read them into memory, verify
//! it.
//!
//! Everything here is safe to call and runs on the engine that the Python package reads with.

#![allow(unsafe_code)] // a batch keeps addresses of its buffers, and their lifetime separately

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use crate::checkpoint;
use crate::checkpoint::gather::{Gather, Memory, Source};
use crate::checkpoint::verify::{Verified, verify};
use crate::format::{Index, Kind};
use crate::geometry::Region;
use crate::geometry::{Dims, element_count, row_major};
use crate::read::{Destination, ReadOptions, Verify};
use crate::{Control, Dtype, Error, Result};

/// An open checkpoint.
///
/// Opening reads the index and no tensor. Threads can share a `Checkpoint`, and their reads run at
/// the same time. It opens each data file again for every read, and keeps none open.
///
/// Do not change or truncate the files of an open checkpoint. Replace them by rename, as every save
/// does. Large reads map files into memory, and truncating a mapped file ends the process with
/// `SIGBUS`.
///
/// ```
/// # let path = "../../tests/fixtures/stock/torch-2.15.0/hf";
/// use dcp_rs_core::Checkpoint;
///
/// let checkpoint = Checkpoint::open(path)?;
/// let a = checkpoint.tensor("a")?;
/// assert_eq!((a.dtype.name(), &a.shape[..]), ("float32", &[2, 3][..]));
///
/// let mut bytes = vec![0; a.nbytes()];
/// checkpoint.read_into("a", &mut bytes)?;
/// assert_eq!(bytes[4..8], 1.0_f32.to_le_bytes());
/// # Ok::<(), dcp_rs_core::Error>(())
/// ```
pub struct Checkpoint {
    index: Arc<Index>,
    options: OpenOptions,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo<'a> {
    /// Its fully qualified name, as in `layers.0.weight`.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sizes, the slowest dimension first; empty for a scalar.
    pub shape: Vec<u64>,
}

impl TensorInfo<'_> {
    /// Returns the number of bytes of all its elements.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        nbytes(self.dtype, &self.shape)
    }
}

/// Returns the bytes of a tensor or of a part of one. An index with a tensor beyond 63 bits does
/// not open.
fn nbytes(dtype: Dtype, sizes: &[u64]) -> usize {
    let bytes = element_count(sizes).and_then(|count| count.checked_mul(dtype.size()));
    // On a 32-bit machine no buffer has this length, so none is accepted.
    bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
}

impl Checkpoint {
    /// Opens the checkpoint at `path` with the default options.
    ///
    /// `path` is a folder with an `index.dcprs`, a folder of torch's DCP (`.metadata` and `.distcp`
    /// files), a folder of safetensors files with or without their `.index.json`, a file of
    /// `torch.save`, or a single safetensors file. Nothing is converted: tensors are read from
    /// those files in place.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no checkpoint, [`Error::CorruptIndex`] if its index or a
    /// header is damaged, [`Error::UnsafePickle`] if a pickle asks for code,
    /// [`Error::Unsupported`], [`Error::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        OpenOptions::new().open(path)
    }

    /// Returns the index file, or the path of a checkpoint that has none.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.index.path()
    }

    /// Returns the names of all tensors, sorted by their bytes. Skips entries that are not tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors().map(|tensor| tensor.name)
    }

    /// Returns all tensors, sorted by the bytes of their names.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        (0..self.index.tensor_count()).filter_map(|tensor| self.info(tensor))
    }

    /// Returns one tensor.
    ///
    /// # Errors
    /// [`Error::TensorPlan`] if there is no tensor of this name.
    pub fn tensor(&self, name: &str) -> Result<TensorInfo<'_>> {
        self.find(name).map(|(_, info)| info)
    }

    fn info(&self, tensor: u32) -> Option<TensorInfo<'_>> {
        let view = self.index.tensor(tensor);
        Some(TensorInfo {
            name: view.name,
            dtype: view.dtype.filter(|_| view.kind == Kind::Tensor)?,
            shape: view.shape.to_vec(),
        })
    }

    fn find(&self, name: &str) -> Result<(u32, TensorInfo<'_>)> {
        let what = match self.index.find(name) {
            Some(tensor) => match self.info(tensor) {
                Some(info) => return Ok((tensor, info)),
                None => "holds a value of this name, not a tensor",
            },
            None => "holds no tensor of this name",
        };
        let reason = format!("{} {what}", self.path().display());
        Err(Error::tensor_plan(Some(self.path()), name, reason))
    }

    /// Reads a whole tensor: its elements in row-major order, little-endian.
    ///
    /// # Errors
    /// - [`Error::TensorPlan`] if there is no such tensor, or `buffer` does not have its length
    ///   ([`TensorInfo::nbytes`]).
    /// - [`Error::CorruptData`] if a file is missing, has the wrong length, or does not match a
    ///   digest.
    /// - [`Error::Io`].
    ///
    /// After an error, some of `buffer` may be written.
    pub fn read_into(&self, name: &str, buffer: &mut [u8]) -> Result<()> {
        let mut batch = self.batch();
        batch.add(name, buffer)?;
        batch.read(&Control::new())
    }

    /// Reads the rectangle of a tensor with these `offsets` and `sizes`: its elements in row-major
    /// order.
    ///
    /// ```
    /// # let path = "../../tests/fixtures/stock/torch-2.15.0/hf";
    /// # let checkpoint = dcp_rs_core::Checkpoint::open(path)?;
    /// // The last two columns of a [2, 3] tensor of float32.
    /// let mut bytes = [0; 2 * 2 * 4];
    /// checkpoint.read_region_into("a", &[0, 1], &[2, 2], &mut bytes)?;
    /// assert_eq!(bytes[8..12], 4.0_f32.to_le_bytes());
    /// # Ok::<(), dcp_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`read_into`](Self::read_into), and [`Error::TensorPlan`] if the rectangle is not
    /// inside the tensor.
    pub fn read_region_into(
        &self,
        name: &str,
        offsets: &[u64],
        sizes: &[u64],
        buffer: &mut [u8],
    ) -> Result<()> {
        let mut batch = self.batch();
        batch.add_region(name, offsets, sizes, buffer)?;
        batch.read(&Control::new())
    }

    /// Starts a batch of reads. One batch of many tensors is faster than a read for each, because
    /// all cores work on it and files are read in order.
    ///
    /// ```
    /// # let path = "../../tests/fixtures/stock/torch-2.15.0/hf";
    /// use dcp_rs_core::{Checkpoint, Control};
    ///
    /// let checkpoint = Checkpoint::open(path)?;
    /// let (mut a, mut row) = ([0; 24], [0; 12]);
    /// let mut batch = checkpoint.batch();
    /// batch.add("a", &mut a)?;
    /// batch.add_region("a", &[1, 0], &[1, 3], &mut row)?;
    /// batch.read(&Control::new())?;
    /// assert_eq!(a[12..], row);
    /// # Ok::<(), dcp_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn batch(&self) -> ReadBatch<'_> {
        ReadBatch {
            checkpoint: self,
            gather: Gather::new(Arc::clone(&self.index), self.options.allow_external),
            buffers: PhantomData,
        }
    }

    /// Reads every file, and compares everything that has a digest or a checksum. `control` counts
    /// the bytes and can stop the work.
    ///
    /// Damage is not an error: [`Verified::problems`] lists it.
    ///
    /// ```
    /// # let path = "../../tests/compat/v1/sharded";
    /// # use dcp_rs_core::{Checkpoint, Control};
    /// let verified = Checkpoint::open(path)?.verify(&Control::new())?;
    /// assert!(verified.problems.is_empty() && verified.bytes_without_digest == 0);
    /// # Ok::<(), dcp_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Interrupted`] after [`Control::cancel`]; [`Error::Io`].
    pub fn verify(&self, control: &Control) -> Result<Verified> {
        verify(&self.index, self.options.allow_external, self.options.threads, control)
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.path())
            .field("entries", &self.index.tensor_count())
            .finish_non_exhaustive()
    }
}

/// Options for opening a checkpoint.
///
/// ```
/// # let path = "../../tests/compat/v1/sharded";
/// use dcp_rs_core::OpenOptions;
///
/// let checkpoint = OpenOptions::new().threads(2).check_digests(true).open(path)?;
/// # assert!(checkpoint.names().count() > 0);
/// # Ok::<(), dcp_rs_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    rank: Option<u32>,
    threads: usize,
    check_digests: bool,
    allow_external: bool,
}

impl OpenOptions {
    /// Returns the defaults of [`Checkpoint::open`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens what this rank saved for itself, in a checkpoint without an index of all ranks.
    #[must_use]
    pub fn rank(mut self, rank: u32) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Sets the threads of one call. The default is 0: as many as the cores that this process may
    /// use.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Compares the data with its digests, if the checkpoint has them. Default: no.
    #[must_use]
    pub fn check_digests(mut self, check: bool) -> Self {
        self.check_digests = check;
        self
    }

    /// Follows an index, and symbolic links, to data files outside of its folder. Default: no.
    /// Enable it only for checkpoints that you trust.
    #[must_use]
    pub fn allow_external(mut self, allow: bool) -> Self {
        self.allow_external = allow;
        self
    }

    /// Opens the checkpoint at `path`, as [`Checkpoint::open`] does.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Checkpoint> {
        let index =
            checkpoint::open(path.as_ref(), self.rank, None, self.threads, &Control::new())?;
        Ok(Checkpoint { index: Arc::new(index), options: self.clone() })
    }
}

/// Reads of one checkpoint that are carried out together, made by [`Checkpoint::batch`].
///
/// A batch borrows its buffers until it is read:
///
/// ```compile_fail,E0505
/// # let path = "../../tests/fixtures/stock/torch-2.15.0/hf";
/// # use dcp_rs_core::{Checkpoint, Control};
/// # let checkpoint = Checkpoint::open(path).unwrap();
/// let mut buffer = vec![0; 24];
/// let mut batch = checkpoint.batch();
/// batch.add("a", &mut buffer).unwrap();
/// drop(buffer);
/// batch.read(&Control::new()).unwrap();
/// ```
pub struct ReadBatch<'a> {
    checkpoint: &'a Checkpoint,
    gather: Gather,
    /// The requests in `gather` write to these.
    buffers: PhantomData<&'a mut [u8]>,
}

impl<'a> ReadBatch<'a> {
    /// Adds a whole tensor, like [`Checkpoint::read_into`], but does not read it yet.
    ///
    /// # Errors
    /// [`Error::TensorPlan`], as in [`Checkpoint::read_into`]. The batch remains usable.
    pub fn add(&mut self, name: &str, buffer: &'a mut [u8]) -> Result<()> {
        let (tensor, info) = self.checkpoint.find(name)?;
        let whole = Region::new(&Dims::from_elem(0, info.shape.len()), &info.shape);
        self.push(tensor, &info, &whole, buffer)
    }

    /// Adds a rectangle of a tensor, like [`Checkpoint::read_region_into`], but does not read it
    /// yet.
    ///
    /// # Errors
    /// [`Error::TensorPlan`], as in [`Checkpoint::read_region_into`]. The batch remains usable.
    pub fn add_region(
        &mut self,
        name: &str,
        offsets: &[u64],
        sizes: &[u64],
        buffer: &'a mut [u8],
    ) -> Result<()> {
        let (tensor, info) = self.checkpoint.find(name)?;
        self.push(tensor, &info, &Region::new(offsets, sizes), buffer)
    }

    fn push(
        &mut self,
        tensor: u32,
        info: &TensorInfo<'_>,
        region: &Region,
        buffer: &'a mut [u8],
    ) -> Result<()> {
        let refuse =
            |reason| Err(Error::tensor_plan(Some(self.checkpoint.path()), info.name, reason));
        let (sizes, offsets) = (region.sizes.as_slice(), region.offsets.as_slice());
        if !region.fits(&info.shape) {
            let shape = &info.shape;
            return refuse(format!(
                "{sizes:?} elements at {offsets:?} do not lie within {shape:?}"
            ));
        }
        let needed = nbytes(info.dtype, sizes);
        if buffer.len() != needed {
            let (dtype, length) = (info.dtype.name(), buffer.len());
            return refuse(format!(
                "{sizes:?} elements of {dtype} take {needed} bytes, and the buffer has {length}"
            ));
        }
        let before = self.gather.len();
        let strides = row_major(sizes).iter().map(|stride| stride * info.dtype.size()).collect();
        let to = Memory { address: Destination(buffer.as_mut_ptr()), strides };
        let added = self.gather.add(Source::Tensor(tensor), region, &to);
        if added.is_err() {
            // Reads nothing of it, so that the buffer stays as it is after an error.
            self.gather.truncate(before);
        }
        added
    }

    /// Carries out the batch. `control` counts the bytes and can stop the work.
    ///
    /// # Errors
    /// Those of [`Checkpoint::read_into`]; [`Error::Interrupted`] after [`Control::cancel`]. After
    /// an error, some of the buffers may be written.
    pub fn read(self, control: &Control) -> Result<()> {
        let options = ReadOptions {
            threads: self.checkpoint.options.threads,
            verify: if self.checkpoint.options.check_digests {
                Verify::All
            } else {
                Verify::Nothing
            },
            ..ReadOptions::default()
        };
        // SAFETY: each request writes within one buffer, whose length was compared with the
        // request. The buffers are borrowed exclusively as long as `self` lives, and every value of
        // a `u8` is valid. The caller does not truncate files, as the documentation of `Checkpoint`
        // demands.
        unsafe { self.gather.read(&options, control) }.map(drop)
    }
}

impl fmt::Debug for ReadBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadBatch")
            .field("checkpoint", self.checkpoint)
            .field("parts", &self.gather.len())
            .finish_non_exhaustive()
    }
}
