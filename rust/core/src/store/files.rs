//! Access to files on a file system or on a store.
#![allow(unsafe_code)] // fetched bytes go to a buffer by its address

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::open_file;
use super::remote::{Connection, Destination, FetchRange, Remote, Run, fetch};
use crate::format::{INDEX_NAME, Index};
use crate::{Control, Error, Result, parallel};

/// Bytes of the first request for a remote file. This is all of most files.
const FIRST: u64 = 4 << 20;
/// Bytes of each request for the rest.
const PART: u64 = 8 << 20;
/// The rest is fetched in steps of this many bytes, or of the bytes so far if they are more.
const STEP: usize = 64 << 20;
/// Limit on a JSON file, that of the headers of safetensors.
pub(crate) const MOST_JSON: u64 = 100_000_000;
/// Limit on an index that is read into memory: tens of millions of chunks.
pub(crate) const MOST_INDEX: u64 = 4 << 30;
/// Concurrent small requests to a store.
const LOOKS: usize = 32;

/// Place of files: the file system, or a store.
#[derive(Clone, Copy)]
pub(crate) enum Files<'a> {
    /// On the file system.
    Local,
    /// On the store of a connection.
    Remote(&'a dyn Connection, &'a Control),
}

/// Files of one call. On a store they have a connection, which lasts as long as the call.
pub(crate) struct Storage<'a> {
    connection: Option<Arc<dyn Connection>>,
    control: &'a Control,
}

impl<'a> Storage<'a> {
    /// Connects to the store, if there is one, with `threads` receiving threads; 0 means as many as
    /// cores.
    pub fn new(
        remote: Option<&Arc<dyn Remote>>,
        threads: usize,
        control: &'a Control,
    ) -> Result<Self> {
        Ok(Self { connection: remote.map(|remote| remote.connect(threads)).transpose()?, control })
    }

    pub fn files(&self) -> Files<'_> {
        match &self.connection {
            Some(connection) => Files::Remote(&**connection, self.control),
            None => Files::Local,
        }
    }
}

/// Length and modification time of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stat {
    pub size: u64,
    /// In nanoseconds since 1970; 0 for a remote file, which is identified by its tag.
    pub mtime_ns: i64,
}

impl<'a> Files<'a> {
    /// Returns whether every check of a file is a request to a store.
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Remote(..))
    }

    /// Returns the number of threads that check files, if `threads` were asked for.
    pub fn threads(&self, threads: usize) -> usize {
        if self.is_remote() { LOOKS } else { threads }
    }

    /// Returns whether the file exists.
    pub fn has(&self, path: &Path) -> Result<bool> {
        match *self {
            Self::Local => Ok(path.is_file()),
            Self::Remote(connection, control) => Ok(connection.look(path, control)?.is_some()),
        }
    }

    /// Returns all bytes of a file of at most `most` bytes; `None` if it does not exist.
    ///
    /// # Errors
    /// [`Error::CorruptIndex`] for a longer file. Nothing more than its start was read.
    pub fn read(&self, path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
        match *self {
            Self::Local => {
                let failed = |e| Error::io("read", path, e);
                let file = match open_file(path) {
                    Ok(file) => file,
                    Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
                    Err(e) => return Err(failed(e)),
                };
                check_size(path, file.metadata().map_err(failed)?.len(), most)?;
                let mut bytes = Vec::new();
                file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
                check_size(path, bytes.len() as u64, most)?; // it may have grown
                Ok(Some(bytes))
            }
            Self::Remote(connection, control) => {
                match connection.start(path, FIRST, false, control)? {
                    Some((bytes, size)) => {
                        check_size(path, size, most)?;
                        rest(connection, control, path, bytes, size).map(Some)
                    }
                    None => Ok(None),
                }
            }
        }
    }

    /// Returns all bytes of an index; `None` if it does not exist. On a store, the start of a large
    /// one is checked before the rest is fetched.
    pub fn read_index(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        let Self::Remote(connection, control) = *self else {
            return self.read(path, MOST_INDEX);
        };
        let Some((bytes, size)) = connection.start(path, FIRST, false, control)? else {
            return Ok(None);
        };
        check_size(path, size, MOST_INDEX)?;
        Index::check_start(&bytes, size, path)?;
        rest(connection, control, path, bytes, size).map(Some)
    }

    /// Returns length and time of a data file of a checkpoint. It is an error if the file does not
    /// exist.
    pub fn stat(&self, path: &Path) -> Result<Stat> {
        match *self {
            Self::Local => match std::fs::metadata(path) {
                Ok(found) if found.is_file() => Ok(Stat {
                    size: found.len(),
                    mtime_ns: found
                        .mtime()
                        .saturating_mul(1_000_000_000)
                        .saturating_add(found.mtime_nsec()),
                }),
                Ok(_) => Err(Error::corrupt_file(path, "it is not a file")),
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    Err(Error::corrupt_file(path, "it is missing"))
                }
                Err(e) => Err(Error::io("look at", path, e)),
            },
            Self::Remote(connection, control) => match connection.look(path, control)? {
                Some(size) => Ok(Stat { size, mtime_ns: 0 }),
                None => Err(Error::corrupt_file(path, "it is missing")),
            },
        }
    }

    /// Returns the result of [`stat`](Self::stat) and the start of a data file, with one request.
    pub fn stat_with_start(&self, path: &Path, most: u64) -> Result<(Stat, Vec<u8>)> {
        match *self {
            Self::Local => {
                let stat = self.stat(path)?;
                let bytes = self.open(path)?.fetch(path, stat.size, 0, most.min(stat.size))?;
                Ok((stat, bytes))
            }
            Self::Remote(connection, control) => {
                match connection.start(path, most, false, control)? {
                    Some((bytes, size)) => Ok((Stat { size, mtime_ns: 0 }, bytes)),
                    None => Err(Error::corrupt_file(path, "it is missing")),
                }
            }
        }
    }

    /// Opens a data file to read ranges of it.
    pub fn open(&self, path: &Path) -> Result<Opened<'a>> {
        match *self {
            Self::Local => match open_file(path) {
                Ok(file) => Ok(Opened::File(file)),
                Err(e) => Err(Error::io("open", path, e)),
            },
            Self::Remote(connection, control) => Ok(Opened::Remote(connection, control)),
        }
    }
}

fn check_size(path: &Path, size: u64, most: u64) -> Result<()> {
    if size <= most {
        return Ok(());
    }
    Err(Error::corrupt_index(path, 0, format!("it has {size} bytes, more than {most}")))
}

/// A file to read ranges of.
pub(crate) enum Opened<'a> {
    File(File),
    Remote(&'a dyn Connection, &'a Control),
    /// A file in memory.
    Memory(&'a [u8]),
    /// A file of which nothing more can be read, because everything was fetched before.
    Nowhere,
}

impl Opened<'_> {
    /// Returns whether every read is a request to a store.
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Remote(..))
    }

    /// Reads `[at, at + len)`, which must be inside the file of `size` bytes.
    pub fn fetch(&self, path: &Path, size: u64, at: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = self.fetch_all(path, size, &[(at, len)])?;
        Ok(bytes.pop().unwrap_or_default())
    }

    /// Reads several ranges (first byte, length) of the file. On a store they are read at the same
    /// time.
    pub fn fetch_all(&self, path: &Path, size: u64, ranges: &[(u64, u64)]) -> Result<Vec<Vec<u8>>> {
        let mut buffers = Vec::with_capacity(ranges.len());
        for &(at, len) in ranges {
            let end = at.checked_add(len).filter(|&end| end <= size);
            let (Some(_), Ok(len)) = (end, usize::try_from(len)) else {
                let reason = format!("{len} bytes are wanted here, of a file of {size} bytes");
                return Err(Error::corrupt_data(path, "", at, reason));
            };
            buffers.push(vec![0; len]);
        }
        match self {
            Self::File(file) => read_exact(file, path, &mut buffers, ranges)?,
            Self::Remote(connection, control) => {
                let parts = buffers
                    .iter_mut()
                    .zip(ranges)
                    .filter(|(_, (_, len))| *len > 0)
                    .flat_map(|(buffer, &(at, len))| {
                        parts(at, len, Destination(buffer.as_mut_ptr()))
                    })
                    .collect();
                // SAFETY: each range is inside the file and has a buffer of its length, which
                // nothing else uses meanwhile.
                unsafe { fetch(*connection, path, size, parts, control)? };
            }
            Self::Memory(bytes) => {
                for (buffer, &(at, len)) in buffers.iter_mut().zip(ranges) {
                    let place = usize::try_from(at).ok().zip(usize::try_from(at + len).ok());
                    if let Some(part) = place.and_then(|(at, end)| bytes.get(at..end)) {
                        buffer.copy_from_slice(part);
                    }
                }
            }
            Self::Nowhere => {
                if let Some((at, len)) = ranges.first() {
                    let reason = format!("{len} bytes are wanted here, which are not in memory");
                    return Err(Error::corrupt_data(path, "", *at, reason));
                }
            }
        }
        Ok(buffers)
    }
}

fn read_exact(
    file: &File,
    path: &Path,
    buffers: &mut [Vec<u8>],
    ranges: &[(u64, u64)],
) -> Result<()> {
    buffers.iter_mut().zip(ranges).try_for_each(|(buffer, (at, _))| {
        let read = file.read_exact_at(buffer, *at);
        read.map_err(|e| Error::io("read", path, e))
    })
}

/// Splits a range of a file into requests of at most [`PART`] bytes.
fn parts(at: u64, len: u64, to: Destination) -> impl Iterator<Item = FetchRange> {
    (0..len.div_ceil(PART)).map(move |number| {
        let from = number * PART;
        let len = PART.min(len - from);
        // Sizes of memory fit in a `usize`.
        let to = Destination(to.0.wrapping_add(usize::try_from(from).unwrap_or(usize::MAX)));
        FetchRange::new(
            at + from,
            at + from + len,
            vec![Run { at: at + from, len, to, expected: None }],
        )
    })
}

/// Completes a remote file of which the first bytes are known. Its length comes from the store, so
/// the buffer grows only with the bytes that arrive.
fn rest(
    connection: &dyn Connection,
    control: &Control,
    path: &Path,
    mut bytes: Vec<u8>,
    size: u64,
) -> Result<Vec<u8>> {
    let whole = usize::try_from(size)
        .map_err(|_| Error::Unsupported(format!("{}: too large", path.display())))?;
    while bytes.len() < whole {
        let here = bytes.len();
        let next = whole.min(here.saturating_add(here.max(STEP)));
        if bytes.try_reserve_exact(next - here).is_err() {
            return Err(Error::Unsupported(format!(
                "{}: there is no memory for its {size} bytes",
                path.display()
            )));
        }
        bytes.resize(next, 0);
        let to = Destination(bytes[here..].as_mut_ptr());
        let parts = parts(here as u64, (next - here) as u64, to).collect();
        // SAFETY: the buffer extends to the end of the parts, and nothing else uses it meanwhile.
        unsafe { fetch(connection, path, size, parts, control)? };
    }
    Ok(bytes)
}

/// Limit on a file beside an index: a longer one is no note of a run.
const MOST_NOTE: u64 = 1 << 20;

/// Returns all bytes of several files of a store; `None` for a file that does not exist, and no
/// bytes for one that is neither an index nor short enough for a note.
///
/// # Errors
/// Those of [`Connection`].
pub fn read_files(
    paths: &[PathBuf],
    connection: &dyn Connection,
    control: &Control,
) -> Result<Vec<Option<Vec<u8>>>> {
    let files = Files::Remote(connection, control);
    parallel::map(paths.len(), LOOKS, |number| {
        let path = &paths[number];
        if path.file_name().is_some_and(|name| name == INDEX_NAME) {
            return files.read(path, MOST_INDEX);
        }
        let found = connection.start(path, MOST_NOTE, false, control)?;
        Ok(found.map(|(bytes, size)| if size > MOST_NOTE { Vec::new() } else { bytes }))
    })
}
