//! Reading payloads once, front to back: from the disk past the page cache where they are not in it.

use std::fs::File;

use super::data_header::DataHeader;
use crate::paths::Links;
use crate::store::{Buffer, FileRef, Files, direct_align, read_at, read_direct_at, resident_bytes};
use crate::{Error, Result};

/// What direct reads are aligned to here; a file that needs more is read through the page cache.
const ALIGNMENT: u64 = 4096;
/// Bytes of a chunk, on average, from which direct reads pay.
const DIRECT_MIN: u64 = 64 << 10;

/// One thread's view of the files; keeps the last one open.
pub(super) struct PayloadReader<'a> {
    files: Files<'a>,
    fetched: Vec<u8>,
    buffer: Buffer,
    open: Option<Open<'a>>,
}

struct Open<'a> {
    header: &'a DataHeader,
    file: File,
    is_direct: bool,
}

impl<'a> PayloadReader<'a> {
    pub(super) fn new(files: Files<'a>) -> Self {
        Self {
            files,
            fetched: Vec::new(),
            buffer: Buffer::default(),
            open: None,
        }
    }

    /// `length` bytes at `offset` of the file: of one on the file system, a block at most.
    pub(super) fn read(&mut self, header: &'a DataHeader, offset: u64, length: u64) -> Result<&[u8]> {
        if self.files.is_remote() {
            let file = self.files.open(&header.path)?;
            self.fetched = file.fetch(&header.path, header.entry.size, offset, length)?;
            return Ok(&self.fetched);
        }
        let open = match self.open.take() {
            Some(open) if std::ptr::eq(open.header, header) => open,
            _ => Open::new(header)?,
        };
        let Open { file, is_direct, .. } = self.open.insert(open);
        let (begin, end) = if *is_direct {
            (
                offset - offset % ALIGNMENT,
                (offset + length).next_multiple_of(ALIGNMENT),
            )
        } else {
            (offset, offset + length)
        };
        let (skipped, need) = (to_usize(offset - begin), to_usize(offset + length - begin));
        let failed = |error| Error::io("read", &header.path, error);
        let bytes = &mut self.buffer.at_least(to_usize(end - begin)).map_err(failed)?[..to_usize(end - begin)];
        let read = if *is_direct {
            read_direct_at(file, bytes, begin, need, to_usize(ALIGNMENT))
        } else {
            read_at(file, bytes, begin)
        };
        read.map_err(failed)?;
        Ok(&bytes[skipped..need])
    }
}

impl<'a> Open<'a> {
    fn new(header: &'a DataHeader) -> Result<Self> {
        let size = header.entry.size;
        let file = FileRef {
            path: header.path.clone(),
            size,
            mtime_ns: 0,
            mend: "",
            links: Links::Any,
            remote: None,
        };
        let plain = file.open(false)?;
        let is_cached = resident_bytes(&plain, 0, size).is_some_and(|resident| resident > size / 2);
        // Many small chunks are better off with what the kernel reads ahead.
        let is_coarse = size / (header.chunks.len() as u64).max(1) >= DIRECT_MIN;
        if !is_cached
            && is_coarse
            && direct_align(&plain).is_some_and(|alignment| ALIGNMENT.is_multiple_of(alignment))
            && let Ok(direct) = file.open(true)
        {
            return Ok(Self {
                header,
                file: direct,
                is_direct: true,
            });
        }
        Ok(Self {
            header,
            file: plain,
            is_direct: false,
        })
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("a block at most")
}
