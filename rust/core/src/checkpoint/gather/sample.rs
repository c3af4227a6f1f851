//! Bytes that several ranks of a machine read, estimated from one message of fixed size for each
//! rank.
//!
//! The data files are laid end to end and cut into equal sections. For each section, a rank reports
//! how much of it it reads, and a fingerprint of which bytes. Ranks share a section if two of them
//! read the same bytes, or if all together read more than the section has. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Gather, Source};
use crate::format::{Index, Overlap, touching};
use crate::geometry::Region;
use crate::read::{ReadReq, span};
use crate::{Error, Result};

/// Most sections of a checkpoint.
const SECTIONS: u64 = 256;
/// Fewest bytes of a section.
const MIN_SECTION: u64 = 1 << 20;
/// Value for a section that is read whole.
const WHOLE: u64 = 1 << 12;
/// Ranks share a section if together they read more of it than this. Then they cannot all read
/// different bytes.
const SHARED: u64 = WHOLE + WHOLE / 4;
/// Bytes of a message for each section: the amount, and the fingerprint.
const ENTRY: usize = 4;
/// Rows shorter than this count as read together with the bytes between them, if they are at most
/// [`MAX_PITCH`] apart. They are columns of a matrix, and other ranks read the rest.
const SHORT_ROW: u64 = 32 << 10;
const MAX_PITCH: u64 = 256 << 10;

/// Division of a checkpoint into sections. It is the same on every rank that opened the checkpoint.
#[derive(Clone, Debug)]
struct Sections {
    /// First byte of each file, followed by the end of the last file.
    starts: Arc<[u64]>,
    size: u64,
}

impl Sections {
    fn new(sizes: impl Iterator<Item = u64>) -> Self {
        let mut starts = vec![0];
        let mut end = 0_u64;
        starts.extend(sizes.map(|size| {
            end = end.saturating_add(size);
            end
        }));
        Self { starts: starts.into(), size: end.div_ceil(SECTIONS).max(MIN_SECTION) }
    }

    /// Returns the sections of bytes `start..end` of a file, and the range in each.
    fn of(&self, file: u32, start: u64, end: u64) -> impl Iterator<Item = (usize, u64, u64)> {
        let (first, last) = (self.starts[file as usize], self.starts[file as usize + 1]);
        let (start, end) =
            (first.saturating_add(start).min(last), first.saturating_add(end).min(last));
        let size = self.size;
        (start / size..end.div_ceil(size)).map(move |section| {
            let begin = section * size;
            let part = (start.max(begin) - begin, end.min(begin.saturating_add(size)) - begin);
            (usize::try_from(section).expect("256 at most"), part.0, part.1)
        })
    }
}

/// Bytes that one rank reads, in all of its batches.
pub struct Sample {
    index: Arc<Index>,
    sections: Sections,
    /// Bytes and fingerprint of each section.
    read: Vec<(u64, u64)>,
}

impl Sample {
    /// Makes an empty sample.
    #[must_use]
    pub fn new(index: Arc<Index>) -> Self {
        let sections = Sections::new((0..index.file_count()).map(|file| index.file(file).size));
        Self { index, sections, read: vec![(0, 0); usize::try_from(SECTIONS).expect("256")] }
    }

    /// Adds the destinations of a batch of the same index that are filled in place.
    pub fn add_batch(&mut self, batch: &Gather) {
        let numbers = batch.numbers();
        for request in &batch.requests {
            let (start, _) = span(request);
            let file = numbers[request.file as usize];
            self.add_rectangle(file, start, request.itemsize, &request.shape, &request.src_strides);
        }
    }

    /// Adds a region. Skips an invalid region, and parts that no chunk holds: the read itself
    /// reports them.
    pub fn add(&mut self, source: Source, region: &Region) {
        match source {
            Source::Chunk(chunk) => self.add_part(chunk, &region.offsets, &region.sizes),
            Source::Tensor(tensor) if region.fits(&self.index.tensor(tensor).shape) => {
                let index = Arc::clone(&self.index);
                for Overlap { chunk, chunk_offsets, sizes, .. } in touching(&index, tensor, region)
                {
                    self.add_part(chunk, &chunk_offsets, &sizes);
                }
            }
            Source::Tensor(_) => {}
        }
    }

    fn add_part(&mut self, chunk: u64, offsets: &[u64], sizes: &[u64]) {
        let view = self.index.chunk(chunk);
        let Some(dtype) = self.index.tensor(view.tensor).dtype else {
            return;
        };
        if !Region::new(offsets, sizes).fits(&view.sizes) {
            return;
        }
        let itemsize = dtype.size();
        let (first, strides) = view.bytes_of(itemsize, offsets);
        self.add_rectangle(view.file, view.offset + first, itemsize, sizes, &strides);
    }

    /// Adds elements of `itemsize` bytes from `start` on, with the given shape and strides in
    /// bytes.
    fn add_rectangle(
        &mut self,
        file: u32,
        start: u64,
        itemsize: u64,
        shape: &[u64],
        strides: &[u64],
    ) {
        if shape.contains(&0) {
            return;
        }
        let mut loops: SmallVec<[(u64, u64); 4]> =
            shape.iter().copied().zip(strides.iter().copied()).collect();
        loops.retain(|(count, _)| *count > 1);
        loops.sort_unstable_by_key(|&(_, stride)| std::cmp::Reverse(stride));
        let mut run = itemsize;
        while let Some(&(count, stride)) = loops.last()
            && (stride <= run || run < SHORT_ROW && stride <= MAX_PITCH)
        {
            run = run.saturating_add((count - 1).saturating_mul(stride));
            loops.pop();
        }
        self.add_rows(file, start, run, &loops);
    }

    fn add_rows(&mut self, file: u32, start: u64, run: u64, loops: &[(u64, u64)]) {
        if let Some((&(count, stride), inner)) = loops.split_first() {
            for i in 0..count {
                self.add_rows(file, start.saturating_add(i.saturating_mul(stride)), run, inner);
            }
            return;
        }
        for (section, begin, end) in self.sections.of(file, start, start.saturating_add(run)) {
            let (bytes, fingerprint) = &mut self.read[section];
            *bytes = bytes.saturating_add(end - begin);
            // A sum does not depend on the order.
            *fingerprint = fingerprint.wrapping_add(hash(begin, end));
        }
    }

    /// Returns the message for the coordinator.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let entry = |&(bytes, fingerprint): &(u64, u64)| {
            // Rounded up, so that a small part is not reported as none.
            let part = bytes.saturating_mul(WHOLE).div_ceil(self.sections.size);
            let part = u16::try_from(part).unwrap_or(u16::MAX);
            let [a, b] = part.to_le_bytes();
            let [.., c, d] = fingerprint.to_le_bytes();
            [a, b, c, d]
        };
        self.read.iter().flat_map(entry).collect()
    }

    /// Combines the sample with this rank's answer from [`compare`]. Returns `None` if it is not an
    /// answer.
    #[must_use]
    pub fn with_reply(&self, reply: &[u8]) -> Option<SharedSections> {
        (reply.len() == self.read.len() / 8)
            .then(|| SharedSections { sections: self.sections.clone(), shared: reply.into() })
    }
}

fn hash(begin: u64, end: u64) -> u64 {
    let mut bits = begin.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ end;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// Compares the messages of one machine's ranks, from [`Sample::to_bytes`]. Returns for each rank a
/// bit for each section, which is set if the rank shares the section.
///
/// # Errors
/// [`Error::Plan`] if a message is invalid.
pub fn compare(messages: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
    let sections = usize::try_from(SECTIONS).expect("256");
    let mut answers = vec![vec![0_u8; sections / 8]; messages.len()];
    let entries: Vec<&[[u8; ENTRY]]> =
        messages.iter().map(|message| message.as_chunks().0).collect();
    if messages.iter().any(|message| message.len() != sections * ENTRY) {
        let reason = "a rank sent an invalid message about the sections that it reads";
        return Err(Error::Plan(reason.into()));
    }
    for section in 0..sections {
        let part = |entry: [u8; ENTRY]| u64::from(u16::from_le_bytes([entry[0], entry[1]]));
        let all =
            || entries.iter().map(|entries| entries[section]).filter(|&entry| part(entry) > 0);
        let is_crowded = all().map(part).sum::<u64>() > SHARED && all().count() > 1;
        let mut same: HashMap<[u8; ENTRY], usize> = HashMap::new();
        all().for_each(|entry| *same.entry(entry).or_default() += 1);
        for (answer, entries) in answers.iter_mut().zip(&entries) {
            let readers = same.get(&entries[section]).copied().unwrap_or_default();
            let is_shared = readers > 1 || is_crowded && readers > 0;
            answer[section / 8] |= u8::from(is_shared) << (section % 8);
        }
    }
    Ok(answers)
}

/// Sections that a rank shares with other ranks.
#[derive(Clone, Debug)]
pub struct SharedSections {
    sections: Sections,
    /// A bit for each section.
    shared: Arc<[u8]>,
}

impl SharedSections {
    /// Returns whether most of the bytes `start..end` of a file are shared.
    fn has(&self, file: u32, start: u64, end: u64) -> bool {
        let (mut shared, mut all) = (0_u64, 0_u64);
        for (section, begin, end) in self.sections.of(file, start, end) {
            all += end - begin;
            if self.shared[section / 8] >> (section % 8) & 1 == 1 {
                shared += end - begin;
            }
        }
        shared > all / 2
    }
}

impl Gather {
    /// Splits each file in two: the part that other ranks read too, and the rest. Call it after the
    /// passes were found, because their order depends on the files.
    pub fn divide(&mut self, common: &SharedSections) {
        if self.common.is_some() {
            return;
        }
        let numbers = self.numbers();
        let is_common = |request: &ReadReq| {
            let (start, end) = span(request);
            common.has(numbers[request.file as usize], start, end)
        };
        let is_common: Vec<bool> = self.requests.iter().map(is_common).collect();
        // A file stays as it is if all of its requests agree. Otherwise it is there twice, and the
        // second one is shared.
        let mut met = vec![[false; 2]; self.files.len()];
        for (request, &is_common) in self.requests.iter().zip(&is_common) {
            met[request.file as usize][usize::from(is_common)] = true;
        }
        let mut shared: Vec<bool> = met.iter().map(|met| *met == [false, true]).collect();
        let mut second: Vec<Option<u32>> = vec![None; met.len()];
        for file in (0..met.len()).filter(|&file| met[file] == [true, true]) {
            let number =
                u32::try_from(self.files.len()).expect("fewer files than memory has bytes");
            second[file] = Some(number);
            self.files.push(self.files[file].clone());
            shared.push(true);
        }
        for (request, is_common) in self.requests.iter_mut().zip(is_common) {
            if let Some(second) = second[request.file as usize].filter(|_| is_common) {
                request.read_from(second);
            }
        }
        self.common = Some(shared.into());
    }

    /// Returns the number in the index of each file of the batch.
    fn numbers(&self) -> Vec<u32> {
        let mut numbers = vec![0; self.files.len()];
        for (number, place) in (0..).zip(&self.places) {
            if let Some(place) = place {
                numbers[*place as usize] = number;
            }
        }
        numbers
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Dtype;
    use crate::checkpoint::Memory;
    use crate::format::{ChunkEntry, FileEntry, IndexBuilder, SourceKind, TensorEntry};
    use crate::geometry::Dims;
    use crate::read::{Destination, ReadOptions, Sharing};

    const ROWS: u64 = 1 << 13;

    /// An embedding and four layers of 8 MiB in file 1, each a chunk; and a small tensor in file 0.
    fn index() -> Arc<Index> {
        let mut builder = IndexBuilder::new(SourceKind::Native);
        for name in ["small", "large"] {
            let entry = FileEntry {
                name: name.into(),
                size: 64 << 20,
                data_start: 0,
                external: false,
                ..FileEntry::default()
            };
            builder.add_file(entry).unwrap();
        }
        for (i, (name, rows)) in (0_u64..).zip([
            ("bias", 1),
            ("embedding", ROWS),
            ("layer0", ROWS),
            ("layer1", ROWS),
            ("layer2", ROWS),
            ("layer3", ROWS),
        ]) {
            let tensor = builder
                .add_tensor(TensorEntry::tensor(
                    name,
                    Dtype::UINT8,
                    Dims::from_slice(&[rows, 1024]),
                ))
                .unwrap();
            builder
                .add_chunk(ChunkEntry {
                    tensor,
                    file: u32::from(i > 0),
                    offset: i.saturating_sub(1) * ROWS * 1024,
                    length: rows * 1024,
                    offsets: Dims::from_slice(&[0, 0]),
                    sizes: Dims::from_slice(&[rows, 1024]),
                    ..ChunkEntry::default()
                })
                .unwrap();
        }
        Arc::new(Index::from_bytes(builder.build().unwrap(), Path::new("x")).unwrap())
    }

    fn region(index: &Index, name: &str) -> (Source, Region) {
        let tensor = index.find(name).unwrap();
        let shape = index.tensor(tensor).shape;
        (Source::Tensor(tensor), Region::new(&[0, 0], &shape))
    }

    /// Returns a batch of these tensors.
    fn batch(index: &Arc<Index>, names: &[&str]) -> Gather {
        let mut gather = Gather::new(Arc::clone(index), true);
        for (i, name) in names.iter().enumerate() {
            let (source, region) = region(index, name);
            let to = Memory {
                address: Destination(std::ptr::without_provenance_mut((i + 1) << 30)),
                strides: Dims::from_slice(&[1024, 1]),
            };
            gather.add(source, &region, &to).unwrap();
        }
        gather
    }

    fn compared(wanted: &[Sample]) -> Vec<SharedSections> {
        let sent: Vec<_> = wanted.iter().map(Sample::to_bytes).collect();
        let answers = compare(&sent.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
        let reply = |(wanted, answer): (&Sample, Vec<u8>)| wanted.with_reply(&answer).unwrap();
        wanted.iter().zip(answers).map(reply).collect()
    }

    /// Returns the sample of a rank that reads these ranges of file 1.
    fn reads(stretches: &[(u64, u64)]) -> Sample {
        let mut wanted = Sample::new(index());
        for &(start, end) in stretches {
            wanted.add_rectangle(1, start, 1, &[end - start], &[1]);
        }
        wanted
    }

    /// Returns whether each rank's first range is shared.
    fn shared(ranks: &[&[(u64, u64)]]) -> Vec<bool> {
        let common = compared(&ranks.iter().map(|rank| reads(rank)).collect::<Vec<_>>());
        let first =
            |(common, rank): (SharedSections, &&[(u64, u64)])| common.has(1, rank[0].0, rank[0].1);
        common.into_iter().zip(ranks).map(first).collect()
    }

    #[test]
    fn the_same_bytes_are_shared_and_bytes_beside_each_other_are_not() {
        const MIB: u64 = 1 << 20;
        assert_eq!(shared(&[&[(0, 64 * MIB)], &[(0, 64 * MIB)]]), [true; 2], "replicas");
        assert_eq!(shared(&[&[(0, 64 * MIB)]]), [false], "alone on the machine");
        assert_eq!(shared(&[&[(0, MIB), (0, MIB)]]), [false], "twice, by one rank");
        let stages = [[(0, 16 * MIB)], [(16 * MIB, 32 * MIB)], [(32 * MIB, 48 * MIB)]];
        assert_eq!(shared(&stages.each_ref().map(|stage| &stage[..])), [false; 3]);
        // Within one section: both ranks read the same half, or each reads another half.
        assert_eq!(shared(&[&[(0, MIB / 2)], &[(0, MIB / 2)]]), [true; 2]);
        assert_eq!(shared(&[&[(0, MIB / 2)], &[(MIB / 2, MIB)]]), [false; 2]);
        // In any order, and along with ranges of one rank only.
        let (one, two, own) = ((0, 5 * MIB), (9 * MIB, 20 * MIB), (30 * MIB, 60 * MIB));
        assert_eq!(shared(&[&[one, two], &[two, one, own]]), [true; 2]);
        assert_eq!(shared(&[&[own, one], &[one]]), [false, true]);
        // Not quite the same ranges, but together more than the section has.
        assert_eq!(shared(&[&[(0, 8 * MIB)], &[(9, 8 * MIB)], &[(7, 9 * MIB)]]), [true; 3]);
    }

    #[test]
    fn columns_are_read_with_what_lies_between_them_and_long_rows_are_not() {
        for (row, pitch, is_shared) in
            [(4096, 16384, true), (65536, 1 << 18, false), (4096, 1 << 20, false)]
        {
            let columns = |rank: u64| {
                let mut wanted = Sample::new(index());
                wanted.add_rectangle(1, rank * row, 2, &[60, row / 2], &[pitch, 2]);
                wanted
            };
            for (rank, common) in (0..).zip(compared(&[0, 1, 2, 3].map(columns))) {
                assert_eq!(common.has(1, rank * row, 59 * pitch), is_shared, "{row} of {pitch}");
            }
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let message = reads(&[(0, 9)]).to_bytes();
        assert!(matches!(compare(&[&message, &message[1..]]), Err(Error::Plan(_))));
        assert!(reads(&[]).with_reply(&message).is_none());
    }

    #[test]
    fn a_file_of_which_others_want_a_part_is_read_in_two_ways() {
        let index = index();
        let names: Vec<_> = (0..4).map(|i| format!("layer{i}")).collect();
        let wants = |layer: &str| {
            let batch = batch(&index, &["bias", layer, "embedding"]);
            let mut wanted = Sample::new(Arc::clone(&index));
            wanted.add_batch(&batch);
            (batch, wanted)
        };
        let (batches, wanted): (Vec<_>, Vec<_>) = names.iter().map(|name| wants(name)).unzip();
        for (mut batch, common) in batches.into_iter().zip(compared(&wanted)) {
            for _ in 0..2 {
                batch.divide(&common);
                let options = ReadOptions::default();
                let Sharing::Known(known) = batch.options(&options).into_owned().shared else {
                    panic!("it is not known");
                };
                assert_eq!(batch.files.len(), known.len());
                let ways: Vec<_> = (batch.requests.iter())
                    .map(|request| {
                        (
                            batch.files[request.file as usize].path.clone(),
                            known[request.file as usize],
                        )
                    })
                    .collect();
                let path = |name: &str| Path::new("x").with_file_name(name);
                assert_eq!(ways[1..], [(path("large"), false), (path("large"), true)]);
                assert_eq!(ways[0].0, path("small"));
                assert_eq!(known.len(), 3);
            }
        }
    }

    #[test]
    fn regions_are_the_same_wants_as_batches() {
        let index = index();
        let mut by_batch = Sample::new(Arc::clone(&index));
        by_batch.add_batch(&batch(&index, &["layer1", "bias"]));
        let mut by_region = Sample::new(Arc::clone(&index));
        for name in ["bias", "layer1"] {
            let (source, region) = region(&index, name);
            by_region.add(source, &region);
        }
        assert_eq!(by_batch.to_bytes(), by_region.to_bytes());
        let (Source::Tensor(layer), whole) = region(&index, "layer1") else { panic!("a tensor") };
        let mut by_chunk = Sample::new(Arc::clone(&index));
        let chunk = index.tensor(layer).chunks.start;
        by_chunk.add(Source::Chunk(chunk), &whole);
        by_chunk.add(Source::Chunk(chunk), &Region::new(&[1, 0], &[ROWS, 1024]));
        by_chunk.add(Source::Tensor(layer), &Region::new(&[0], &[1]));
        let (source, bias) = region(&index, "bias");
        by_chunk.add(source, &bias);
        assert_eq!(by_batch.to_bytes(), by_chunk.to_bytes(), "what does not fit is left out");
    }
}
