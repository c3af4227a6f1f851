//! Every rule of section 3 of `docs/format.md`, checked once when an index is opened.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use zerocopy::FromBytes as _;
use zerocopy::little_endian::U64;

use super::digest::index_digest;
use super::layout::{
    CHUNK_CONJUGATE, CHUNK_DIGESTS, CHUNK_NEGATIVE, CHUNK_STRIDED, COMPAT_CONTENTS, ChunkRecord,
    DIGEST_AT, FILE_EXTERNAL, FILE_LINKED, HEADER_LEN, Header, INCOMPAT_LINKED, INCOMPAT_SIGNS,
    KNOWN_INCOMPAT, MAGIC, MAX_NDIM, NO_SPLIT, SECTIONS, Section, SectionRecord, SourceKind,
    TENSOR_MEMORY_FORMAT, TensorRecord, VERSION,
};
use super::{BLOCK_SIZE, Index, Value, block_count, name};
use crate::copy::Signs;
use crate::geometry::{Dims, element_count, strided_length};
use crate::{Dtype, Error, Result, parallel};

/// Number of chunks from which on all cores check them.
const MANY_CHUNKS: usize = 1 << 13;
/// Chunks that a core takes at a time, or all chunks of a tensor that has more.
const CHUNKS_AT_A_TIME: u64 = 1 << 13;

type SectionRanges = [Range<usize>; 7];

/// Checks the header of an index of `size` bytes that begins with `bytes`.
pub(super) fn header<'a>(bytes: &'a [u8], size: u64, path: &Path) -> Result<&'a Header> {
    let bad =
        |offset: usize, reason: String| Err(Error::corrupt_index(path, offset as u64, reason));
    let Ok((header, _)) = Header::ref_from_prefix(bytes) else {
        return bad(bytes.len(), format!("{} bytes are too few for a header", bytes.len()));
    };
    if header.magic != MAGIC {
        return bad(0, "not a dcp-rs index: the magic differs".into());
    }
    if header.version.get() != VERSION {
        return Err(Error::Unsupported(format!(
            "{}: format version {}; this release reads version {VERSION}",
            path.display(),
            header.version
        )));
    }
    if header.header_len.get() as usize != HEADER_LEN {
        return bad(12, format!("header length is {}, not {HEADER_LEN}", header.header_len));
    }
    if header.file_len.get() != size {
        return bad(
            32,
            format!("the file is {size} bytes long, its header says {}", header.file_len),
        );
    }
    Ok(header)
}

/// Checks the header, and returns the ranges of the sections and of the contents.
pub(super) fn sections(bytes: &[u8], path: &Path) -> Result<(SectionRanges, Option<Range<usize>>)> {
    let bad =
        |offset: usize, reason: String| Err(Error::corrupt_index(path, offset as u64, reason));
    let header = header(bytes, bytes.len() as u64, path)?;
    let unknown = header.incompat.get() & !KNOWN_INCOMPAT;
    if unknown != 0 {
        return Err(Error::Unsupported(format!(
            "{}: needs features that this release does not know: bits {unknown:#x}",
            path.display()
        )));
    }
    if header.block_size.get() != BLOCK_SIZE {
        return bad(72, format!("block size is {}, not {BLOCK_SIZE}", header.block_size));
    }
    if SourceKind::from_code(header.source.get()).is_none() {
        return bad(80, format!("unknown source {}", header.source));
    }
    let mut ranges = [const { 0..0 }; 7];
    for (section, width) in SECTIONS {
        let number = section as usize;
        ranges[number] = match range(&header.sections[number], width, bytes.len()) {
            Ok(range) => range,
            Err(reason) => return bad(96 + 16 * number, format!("section {number}: {reason}")),
        };
    }
    if header.compat.get() & COMPAT_CONTENTS == 0 {
        return Ok((ranges, None));
    }
    match range(&header.contents, 16, bytes.len()) {
        Ok(contents) => Ok((ranges, Some(contents))),
        Err(reason) => bad(CONTENTS_AT, format!("section of contents: {reason}")),
    }
}

/// Returns the range of a section with records of `width` bytes, in an index of `len` bytes.
fn range(
    record: &SectionRecord,
    width: usize,
    len: usize,
) -> std::result::Result<Range<usize>, String> {
    let (offset, length) = (record.offset.get(), record.length.get());
    let fits = offset
        .checked_add(length)
        .is_some_and(|end| offset >= HEADER_LEN as u64 && end <= len as u64);
    if !fits || offset % 8 != 0 || length % width as u64 != 0 {
        return Err(format!("{length} bytes at {offset}"));
    }
    let start = usize::try_from(offset).expect("checked against the length");
    Ok(start..start + usize::try_from(length).expect("checked against the length"))
}

/// Offset of the header field with the range of the contents.
const CONTENTS_AT: usize = std::mem::offset_of!(Header, contents);

/// Checks the digest, and also every record: a matching digest does not make a record trustworthy.
pub(super) fn check(index: &Index) -> Result<()> {
    if index.chunk_records().len() < MANY_CHUNKS {
        return digest(index).and_then(|()| records(index, 1));
    }
    let (digest, records) =
        parallel::both(|| digest(index), || records(index, parallel::available()));
    // A wrong digest takes precedence, whatever is wrong with the records.
    digest.and(records)
}

fn digest(index: &Index) -> Result<()> {
    let (digest, expected) = (index_digest(index.bytes(), DIGEST_AT), index.header().digest.get());
    if digest == expected {
        return Ok(());
    }
    let reason = format!("digest is {digest:016x}, expected {expected:016x}");
    Err(Error::corrupt_index(index.path(), DIGEST_AT as u64, reason))
}

fn records(index: &Index, workers: usize) -> Result<()> {
    let check = Check { index };
    check.root()?;
    check.files()?;
    check.tensors()?;
    check.contents()?;
    check.digests()?;
    if workers == 1 {
        return check.payload(1).and_then(|()| check.chunks(1));
    }
    let (payload, chunks) = parallel::both(|| check.payload(workers), || check.chunks(workers));
    payload.and(chunks)
}

struct Check<'a> {
    index: &'a Index,
}

impl Check<'_> {
    fn bad<T>(&self, section: Section, record: usize, reason: impl Into<String>) -> Result<T> {
        let width = SECTIONS[section as usize].1;
        let offset = self.index.section_start(section) + (record * width) as u64;
        Err(Error::corrupt_index(self.index.path(), offset, reason))
    }

    fn text(&self, offset: u64, len: u32) -> Option<&str> {
        let strings = self.index.section(Section::Strings);
        let at = usize::try_from(offset).ok()?;
        let bytes = strings.get(at..at.checked_add(len as usize)?)?;
        std::str::from_utf8(bytes).ok()
    }

    fn has_dims(&self, at: u64, count: usize) -> bool {
        at.checked_add(count as u64).is_some_and(|end| end <= self.index.dims_pool().len() as u64)
    }

    fn root(&self) -> Result<()> {
        let planner = self.index.section(Section::Planner);
        let rest = match Value::decode_prefix(planner) {
            Ok((_, rest)) => rest,
            Err((at, reason)) => {
                return self.bad(Section::Planner, at, format!("planner data: {reason}"));
            }
        };
        let begin = planner.len() - rest.len();
        match Value::decode_prefix(rest) {
            Ok((nesting, _)) if nesting.is_nesting() => Ok(()),
            Ok(_) => self.bad(Section::Planner, begin, "nesting is not a list of containers"),
            Err((at, reason)) => {
                self.bad(Section::Planner, begin + at, format!("nesting: {reason}"))
            }
        }
    }

    /// Returns whether names, or paths, must share bytes, because together they are longer than
    /// their section. If none are shared, reading all of them takes time and memory in proportion
    /// to the index.
    fn is_shared(total: &mut usize, len: u32, section: &[u8]) -> bool {
        *total = total.saturating_add(len as usize);
        *total > section.len()
    }

    fn files(&self) -> Result<()> {
        let strings = self.index.section(Section::Strings);
        let mut names = 0;
        let records = self.index.file_records();
        if u32::try_from(records.len()).is_err() {
            return self.bad(Section::Files, 0, "too many files");
        }
        let mut known = HashSet::with_capacity(records.len());
        for (i, record) in records.iter().enumerate() {
            let Some(name) = self.text(record.name_offset.get(), record.name_len.get()) else {
                return self.bad(Section::Files, i, "name of a file is outside the strings");
            };
            if Self::is_shared(&mut names, record.name_len.get(), strings) {
                return self.bad(Section::Files, i, "names of files share bytes");
            }
            // Otherwise chunks in two files of one name could share bytes.
            if !known.insert(name) {
                return self.bad(Section::Files, i, format!("file {name:?} is named twice"));
            }
            let external = record.flags.get() & FILE_EXTERNAL != 0;
            if let Err(reason) = name::check_file_name(name, external) {
                return self.bad(Section::Files, i, format!("{reason}: {name:?}"));
            }
            if record.flags.get() & FILE_LINKED != 0
                && (external
                    || self.index.source() != SourceKind::Native
                    || self.index.header().incompat.get() & INCOMPAT_LINKED == 0)
            {
                let reason = format!(
                    "{name:?} is a link, in an index that does not say so, or to what others wrote"
                );
                return self.bad(Section::Files, i, reason);
            }
            if record.data_start.get() > record.file_size.get() {
                return self.bad(
                    Section::Files,
                    i,
                    format!("payload of {name:?} begins after its end"),
                );
            }
            if i64::try_from(record.file_size.get()).is_err() {
                return self.bad(Section::Files, i, format!("size of {name:?} is too large"));
            }
        }
        Ok(())
    }

    fn tensors(&self) -> Result<()> {
        let records = self.index.tensor_records();
        if u32::try_from(records.len()).is_err() {
            return self.bad(Section::Tensors, 0, "too many tensors");
        }
        let (strings, planner) =
            (self.index.section(Section::Strings), self.index.section(Section::Planner));
        let (mut names, mut paths) = (0, 0);
        let mut next_chunk = 0;
        let mut previous: Option<&str> = None;
        for (i, record) in records.iter().enumerate() {
            let Some(name) = self.text(record.name_offset.get(), record.name_len.get()) else {
                return self.bad(Section::Tensors, i, "FQN is outside the strings");
            };
            if Self::is_shared(&mut names, record.name_len.get(), strings)
                || Self::is_shared(&mut paths, record.path_len.get(), planner)
            {
                return self.bad(Section::Tensors, i, "names or paths share bytes");
            }
            if previous.is_some_and(|previous| previous.as_bytes() >= name.as_bytes()) {
                return self.bad(Section::Tensors, i, format!("{name:?} is out of order"));
            }
            previous = Some(name);
            if let Err(reason) = self.tensor(record) {
                return self.bad(Section::Tensors, i, format!("tensor {name:?}: {reason}"));
            }
            if record.first_chunk.get() != next_chunk {
                return self.bad(
                    Section::Tensors,
                    i,
                    format!("tensor {name:?}: its chunks are out of order"),
                );
            }
            next_chunk = match next_chunk.checked_add(record.chunk_count.get()) {
                Some(end) if end <= self.index.chunk_count() => end,
                _ => {
                    return self.bad(
                        Section::Tensors,
                        i,
                        format!("tensor {name:?}: more chunks than there are"),
                    );
                }
            };
        }
        if next_chunk != self.index.chunk_count() {
            return self.bad(Section::Chunks, 0, "chunks that belong to no tensor");
        }
        Ok(())
    }

    fn contents(&self) -> Result<()> {
        match self.index.contents_len() {
            Some(length) if length != 16 * self.index.chunk_records().len() => {
                let reason =
                    format!("section of contents: {length} bytes, and not 16 for each chunk");
                Err(Error::corrupt_index(self.index.path(), CONTENTS_AT as u64, reason))
            }
            _ => Ok(()),
        }
    }

    fn tensor(&self, record: &TensorRecord) -> std::result::Result<(), &'static str> {
        let ndim = usize::from(record.ndim);
        if ndim > MAX_NDIM || !self.has_dims(record.shape.get(), ndim) {
            return Err("shape is outside the dims");
        }
        match record.kind {
            0 => {
                let dtype = Dtype::from_code(record.dtype).ok_or("unknown dtype")?;
                let at =
                    usize::try_from(record.shape.get()).map_err(|_| "shape is outside the dims")?;
                let shape: Dims =
                    self.index.dims_pool()[at..at + ndim].iter().map(|d| d.get()).collect();
                // A shape with a size of 0 may still be too large: strides are products of the
                // other sizes.
                shape
                    .iter()
                    .filter(|&&size| size != 0)
                    .try_fold(dtype.size(), |bytes, &size| bytes.checked_mul(size))
                    .filter(|&bytes| i64::try_from(bytes).is_ok())
                    .ok_or("shape is too large")?;
                if record.flags & TENSOR_MEMORY_FORMAT == TENSOR_MEMORY_FORMAT {
                    return Err("unknown memory format");
                }
            }
            1 if record.dtype != 0 || ndim != 0 || record.chunk_count.get() != 1 => {
                return Err("bytes with a dtype, a shape, or not exactly one chunk");
            }
            1 => {}
            _ => return Err("unknown kind"),
        }
        // Chunks over such files may share bytes. With many of them, a small file could make a
        // tensor of any size.
        if self.index.source() == SourceKind::Torch && record.chunk_count.get() > 1 {
            return Err("more than one chunk, in an index over files of torch.save");
        }
        if record.split_dim.get() != NO_SPLIT && record.split_dim.get() as usize >= ndim {
            return Err("split dimension is not one of the tensor's");
        }
        let path_len = record.path_len.get() as usize;
        if path_len > 0 {
            let planner = self.index.section(Section::Planner);
            let path = usize::try_from(record.path_offset.get())
                .ok()
                .and_then(|at| planner.get(at..at.checked_add(path_len)?))
                .ok_or("path is outside the planner data")?;
            if !Value::decode(path).is_ok_and(|path| path.is_path()) {
                return Err("path is not a tuple of keys and places");
            }
        }
        Ok(())
    }

    /// Checks the chunks of all tensors, some tensors at a time.
    fn chunks(&self, workers: usize) -> Result<()> {
        let tensors = self.index.tensor_records();
        let (mut runs, mut start, mut count) = (Vec::new(), 0, 0);
        for (t, tensor) in tensors.iter().enumerate() {
            count += tensor.chunk_count.get();
            if count >= CHUNKS_AT_A_TIME || t + 1 == tensors.len() {
                runs.push(start..t + 1);
                (start, count) = (t + 1, 0);
            }
        }
        parallel::for_each(runs.len(), workers, |run| self.chunks_of(runs[run].clone()))
    }

    fn chunks_of(&self, tensors: Range<usize>) -> Result<()> {
        let chunks = self.index.chunk_records();
        let first = self.index.tensor_records()[tensors.start].first_chunk.get();
        let mut at = usize::try_from(first).expect("checked with the tensors");
        for t in tensors {
            let tensor = &self.index.tensor_records()[t];
            let count =
                usize::try_from(tensor.chunk_count.get()).expect("checked with the tensors");
            let mut previous = None;
            for record in &chunks[at..at + count] {
                previous = match self.chunk(t, tensor, record, previous) {
                    Ok(dims) => Some(dims),
                    Err(reason) => {
                        #[expect(
                            clippy::cast_possible_truncation,
                            reason = "checked with the tensors"
                        )]
                        let name = self.index.name(t as u32);
                        return self.bad(
                            Section::Chunks,
                            at,
                            format!("a chunk of tensor {name:?}: {reason}"),
                        );
                    }
                };
                at += 1;
            }
        }
        Ok(())
    }

    /// Checks that chunks share no digests: together they may not have more than the section.
    fn digests(&self) -> Result<()> {
        let mut left = self.index.section(Section::Digests).len() as u64 / 8;
        for (at, chunk) in self.index.chunk_records().iter().enumerate() {
            if chunk.flags.get() & CHUNK_DIGESTS != 0 {
                left = match left.checked_sub(block_count(chunk.length.get())) {
                    Some(left) => left,
                    None => return self.bad(Section::Chunks, at, "chunks share digests"),
                };
            }
        }
        Ok(())
    }

    /// Checks that chunks share no bytes of a file. Then all chunks together are at most as long as
    /// the files. Files of `torch.save` are exempt, because their tensors are views of storages.
    fn payload(&self, workers: usize) -> Result<()> {
        let (files, chunks) = (self.index.file_records(), self.index.chunk_records());
        // The position of each file's first range among the ranges of all files.
        let mut next = vec![0_usize; files.len() + 1];
        for (at, chunk) in chunks.iter().enumerate() {
            match next.get_mut(chunk.file.get() as usize + 1) {
                Some(count) => *count += 1,
                None => return self.bad(Section::Chunks, at, "no such file"),
            }
        }
        if self.index.source() == SourceKind::Torch {
            return Ok(());
        }
        for file in 0..files.len() {
            next[file + 1] += next[file];
        }
        let mut ranges = vec![(0_u64, 0_u64); chunks.len()];
        for chunk in chunks {
            let (next, offset) = (&mut next[chunk.file.get() as usize], chunk.offset.get());
            ranges[*next] = (offset, offset.saturating_add(chunk.length.get()));
            *next += 1;
        }
        // Now each entry of `next` is the end of its file's ranges.
        let mut rest = ranges.as_mut_slice();
        let mut begin = 0;
        let by_file: Vec<Mutex<&mut [(u64, u64)]>> = next[..files.len()]
            .iter()
            .map(|&end| {
                let (own, others) = std::mem::take(&mut rest).split_at_mut(end - begin);
                (rest, begin) = (others, end);
                Mutex::new(own)
            })
            .collect();
        parallel::for_each(by_file.len(), workers, |file| {
            let mut ranges = parallel::lock(&by_file[file]);
            if !ranges.is_sorted() {
                ranges.sort_unstable();
            }
            let mut end = 0;
            for &(from, to) in ranges.iter().filter(|(from, to)| from < to) {
                if from < end {
                    return self.shared(file, from);
                }
                end = to;
            }
            Ok(())
        })
    }

    /// Returns the error for a chunk that begins inside the bytes of another one.
    fn shared(&self, file: usize, from: u64) -> Result<()> {
        let chunks = self.index.chunk_records();
        let holds = |chunk: &ChunkRecord| {
            let offset = chunk.offset.get();
            chunk.file.get() as usize == file
                && offset <= from
                && from - offset < chunk.length.get()
        };
        let mut both = (0..chunks.len()).filter(|&at| holds(&chunks[at]));
        let (first, second) = (both.next().unwrap_or(0), both.next().unwrap_or(0));
        let name = |at: usize| match chunks[at].tensor.get() {
            tensor if (tensor as usize) < self.index.tensor_records().len() => {
                self.index.name(tensor)
            }
            _ => "",
        };
        let reason = format!(
            "chunks share bytes of a file: those of {:?} and {:?} at byte {from} of {:?}",
            name(first),
            name(second),
            self.index.file(u32::try_from(file).unwrap_or(u32::MAX)).name,
        );
        self.bad(Section::Chunks, second, reason)
    }

    /// Checks one chunk against its tensor and the previous chunk. Returns its offsets and sizes.
    fn chunk(
        &self,
        t: usize,
        tensor: &TensorRecord,
        record: &ChunkRecord,
        previous: Option<&[U64]>,
    ) -> std::result::Result<&[U64], &'static str> {
        if record.tensor.get() as usize != t {
            return Err("it names another tensor");
        }
        self.chunk_place(record)?;
        let ndim = usize::from(tensor.ndim);
        let strided = record.flags.get() & CHUNK_STRIDED != 0;
        if strided && (tensor.kind != 0 || self.index.source() == SourceKind::Native) {
            return Err("it has strides, but is not an adopted tensor");
        }
        let signs = Signs {
            conjugate: record.flags.get() & CHUNK_CONJUGATE != 0,
            negative: record.flags.get() & CHUNK_NEGATIVE != 0,
        };
        if signs != Signs::default() {
            self.signs(tensor, signs)?;
        }
        if !self.has_dims(record.dims.get(), ndim * if strided { 3 } else { 2 }) {
            return Err("dims are outside their section");
        }
        let at = usize::try_from(record.dims.get()).expect("checked against the section");
        let dims = self.index.dims_pool();
        let extent = &dims[at..at + 2 * ndim];
        if previous.is_some_and(|previous| previous >= extent) {
            return Err("it is out of order");
        }
        if tensor.kind != 0 {
            return Ok(extent);
        }
        let (offsets, sizes) = extent.split_at(ndim);
        let shape = usize::try_from(tensor.shape.get()).expect("checked with the tensor");
        let shape = &dims[shape..shape + ndim];
        for ((offset, size), whole) in offsets.iter().zip(sizes).zip(shape) {
            if offset.get().checked_add(size.get()).is_none_or(|end| end > whole.get()) {
                return Err("it lies outside the tensor");
            }
        }
        let itemsize = Dtype::from_code(tensor.dtype).expect("checked with the tensor").size();
        let counts: Dims = sizes.iter().map(|d| d.get()).collect();
        let needed = if strided {
            let strides: Dims =
                dims[at + 2 * ndim..at + 3 * ndim].iter().map(|d| d.get()).collect();
            if strides.iter().any(|&stride| i64::try_from(stride).is_err()) {
                return Err("a stride is too large");
            }
            strided_length(&counts, &strides, itemsize)
        } else {
            element_count(&counts).and_then(|n| n.checked_mul(itemsize))
        };
        if needed != Some(record.length.get()) {
            return Err("its length does not match its sizes");
        }
        if tensor.split_dim.get() != NO_SPLIT {
            let split = tensor.split_dim.get() as usize;
            if (0..ndim).any(|d| d != split && sizes[d] != shape[d]) {
                return Err("it does not span the other dimensions");
            }
            if previous
                .is_some_and(|p| p[split].get() + p[ndim + split].get() > offsets[split].get())
            {
                return Err("it begins before the previous one ends");
            }
        }
        Ok(extent)
    }

    /// Checks a chunk whose signs change when it is read.
    fn signs(&self, tensor: &TensorRecord, signs: Signs) -> std::result::Result<(), &'static str> {
        if self.index.source() == SourceKind::Native
            || self.index.header().incompat.get() & INCOMPAT_SIGNS == 0
        {
            return Err("its sign bits differ from its bytes, and is not an adopted tensor");
        }
        match Dtype::from_code(tensor.dtype).and_then(|dtype| signs.bits(dtype)) {
            Some(_) => Ok(()),
            None => Err("its sign bits differ from its bytes, which have none"),
        }
    }

    /// Checks the ranges of a chunk's bytes and digests.
    fn chunk_place(&self, record: &ChunkRecord) -> std::result::Result<(), &'static str> {
        let Some(file) = self.index.file_records().get(record.file.get() as usize) else {
            return Err("no such file");
        };
        let end = record.offset.get().checked_add(record.length.get());
        if record.offset.get() < file.data_start.get()
            || end.is_none_or(|end| end > file.file_size.get())
        {
            return Err("it is outside its file");
        }
        if record.flags.get() & CHUNK_DIGESTS != 0 {
            let digests = self.index.section(Section::Digests).len() as u64 / 8;
            let end = record.digest.get().checked_add(block_count(record.length.get()));
            if end.is_none_or(|end| end > digests) {
                return Err("digests are outside their section");
            }
        }
        Ok(())
    }
}
