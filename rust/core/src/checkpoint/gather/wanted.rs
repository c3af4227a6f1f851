//! What of a checkpoint a rank wants, for the others of its machine; and what it does with what they say.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Gather, Source, bytes_of};
use crate::format::Index;
use crate::geometry::overlap::{self, Overlap, Region};
use crate::read::{Common, ReadReq, Sketch, file_key, span};

/// What one rank wants, all of its batches together.
pub struct Wanted {
    index: Arc<Index>,
    /// By the numbers of files in the index.
    keys: HashMap<u32, u64>,
    sketch: Sketch,
}

impl Wanted {
    /// Nothing, yet.
    #[must_use]
    pub fn new(index: Arc<Index>) -> Self {
        Self {
            index,
            keys: HashMap::new(),
            sketch: Sketch::default(),
        }
    }

    /// The sample of it.
    #[must_use]
    pub fn sketch(&self) -> &Sketch {
        &self.sketch
    }

    fn key(&mut self, file: u32) -> u64 {
        let index = &self.index;
        *self.keys.entry(file).or_insert_with(|| file_key(index.file(file).name))
    }

    /// Adds what is filled in place of a batch of the same index.
    pub fn add_batch(&mut self, batch: &Gather) {
        let numbers = batch.numbers();
        for request in &batch.requests {
            let file = numbers[request.file as usize];
            let key = self.key(file);
            let (start, _) = span(request);
            self.sketch
                .add(file, key, start, request.itemsize, &request.shape, &request.src_strides);
        }
    }

    /// Adds a region. What is none of its source, or held by no chunk, is left out: who reads it says so.
    pub fn add(&mut self, source: Source, region: &Region) {
        match source {
            Source::Chunk(chunk) => self.add_part(chunk, &region.offsets, &region.sizes),
            Source::Tensor(tensor) if region.fits(&self.index.tensor(tensor).shape) => {
                let index = Arc::clone(&self.index);
                for Overlap {
                    chunk,
                    chunk_offsets,
                    sizes,
                    ..
                } in overlap::touching(&index, tensor, region)
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
        let (first, strides) = bytes_of(&view, itemsize, offsets);
        let key = self.key(view.file);
        self.sketch
            .add(view.file, key, view.offset + first, itemsize, sizes, &strides);
    }
}

impl Gather {
    /// What is known of what others want. Of a file of which they want a part, that becomes a file of its own. Comes after the turns were found, whose order
    /// goes by files.
    pub fn divide(&mut self, common: &Common) {
        if self.common.is_some() {
            return;
        }
        let numbers = self.numbers();
        let stretch = |request: &ReadReq| {
            let (start, end) = span(request);
            (numbers[request.file as usize], start, end)
        };
        let judged = common.judge(&self.requests.iter().map(stretch).collect::<Vec<_>>());
        // The entry of what others want, and of what they do not.
        let mut entries: Vec<[Option<u32>; 2]> = vec![[None; 2]; self.files.len()];
        let mut known = vec![false; self.files.len()];
        for (request, is_common) in self.requests.iter_mut().zip(judged) {
            let file = request.file as usize;
            let is_first = entries[file] == [None; 2];
            request.file = *entries[file][usize::from(is_common)].get_or_insert_with(|| {
                if is_first {
                    known[file] = is_common;
                    return request.file;
                }
                known.push(is_common);
                self.files.push(self.files[file].clone());
                u32::try_from(self.files.len() - 1).expect("fewer than 2^31 files have records in memory")
            });
        }
        self.common = Some(known.into());
    }

    /// The numbers in the index of the batch's files.
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
    use crate::copy::Signs;
    use crate::format::{ChunkEntry, FileEntry, IndexBuilder, Kind, SourceKind, TensorEntry};
    use crate::geometry::Dims;
    use crate::read::{Destination, ReadOptions, Sharing, compare};

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
                linked: false,
                head_digest: None,
                mtime_ns: 0,
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
                .add_tensor(TensorEntry {
                    name: name.into(),
                    kind: Kind::Tensor,
                    dtype: Some(Dtype::UINT8),
                    shape: Dims::from_slice(&[rows, 1024]),
                    flags: 0,
                    path: None,
                    position: None,
                })
                .unwrap();
            builder
                .add_chunk(ChunkEntry {
                    tensor,
                    file: u32::from(i > 0),
                    offset: i.saturating_sub(1) * ROWS * 1024,
                    length: rows * 1024,
                    offsets: Dims::from_slice(&[0, 0]),
                    sizes: Dims::from_slice(&[rows, 1024]),
                    strides: None,
                    signs: Signs::default(),
                    digests: None,
                    content: None,
                    frozen: false,
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

    /// All of these tensors, in one batch.
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

    fn judged(wanted: &[Wanted]) -> Vec<Common> {
        let told: Vec<_> = wanted.iter().map(|wanted| wanted.sketch().to_bytes()).collect();
        let answers = compare(&told.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
        let judged = |(wanted, answer): (&Wanted, Vec<u8>)| wanted.sketch().judged(&answer).unwrap();
        wanted.iter().zip(answers).map(judged).collect()
    }

    #[test]
    fn a_file_of_which_others_want_a_part_is_read_in_two_ways() {
        let index = index();
        let names: Vec<_> = (0..4).map(|i| format!("layer{i}")).collect();
        let wants = |layer: &str| {
            let batch = batch(&index, &["bias", layer, "embedding"]);
            let mut wanted = Wanted::new(Arc::clone(&index));
            wanted.add_batch(&batch);
            (batch, wanted)
        };
        let (batches, wanted): (Vec<_>, Vec<_>) = names.iter().map(|name| wants(name)).unzip();
        for (mut batch, common) in batches.into_iter().zip(judged(&wanted)) {
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
        let mut by_batch = Wanted::new(Arc::clone(&index));
        by_batch.add_batch(&batch(&index, &["layer1", "bias"]));
        let mut by_region = Wanted::new(Arc::clone(&index));
        for name in ["bias", "layer1"] {
            let (source, region) = region(&index, name);
            by_region.add(source, &region);
        }
        assert_eq!(by_batch.sketch().to_bytes(), by_region.sketch().to_bytes());
        let (Source::Tensor(layer), whole) = region(&index, "layer1") else {
            panic!("a tensor")
        };
        let mut by_chunk = Wanted::new(Arc::clone(&index));
        let chunk = index.tensor(layer).chunks.start;
        by_chunk.add(Source::Chunk(chunk), &whole);
        by_chunk.add(Source::Chunk(chunk), &Region::new(&[1, 0], &[ROWS, 1024]));
        by_chunk.add(Source::Tensor(layer), &Region::new(&[0], &[1]));
        let (source, bias) = region(&index, "bias");
        by_chunk.add(source, &bias);
        assert_eq!(
            by_batch.sketch().to_bytes(),
            by_chunk.sketch().to_bytes(),
            "what does not fit is left out"
        );
    }
}
