//! Entry points of the fuzzers, and of the tests that replay their inputs. Each parses bytes, and
//! uses everything that passes the checks. It returns whether the input was accepted. A panic, a
//! large allocation or a hang is a finding.

use std::path::Path;

use crate::format::{Index, Kind, SourceKind, Value, cover};
use crate::geometry::{Region, element_count};

pub use crate::foreign::fuzzing::{archive, metadata, recovery, tensor_pickle, torch_file};

/// Parses an index, as it is and with a correct digest: an attacker can compute digests too.
pub fn index(bytes: &[u8]) -> bool {
    const DIGEST_AT: usize = 40;
    let mut accepted = open_index(bytes.to_vec());
    if bytes.len() >= DIGEST_AT + 8 {
        let mut sealed = bytes.to_vec();
        // Corrects the length too, otherwise few mutations that insert or delete bytes would get
        // further.
        sealed[32..40].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        sealed[DIGEST_AT..DIGEST_AT + 8].fill(0);
        let digest = crate::format::block_digest(&sealed);
        sealed[DIGEST_AT..DIGEST_AT + 8].copy_from_slice(&digest.to_le_bytes());
        accepted |= open_index(sealed);
    }
    accepted
}

fn open_index(bytes: Vec<u8>) -> bool {
    let Ok(index) = Index::from_bytes(bytes, Path::new("folder/index.dcprs")) else {
        return false;
    };
    look_everywhere(&index);
    true
}

/// Makes every possible look-up. The index, and the files that it names, limit the total cost.
fn look_everywhere(index: &Index) {
    let mut of_files = vec![0_u64; index.file_count() as usize];
    let mut names = 0;
    for t in 0..index.tensor_count() {
        let tensor = index.tensor(t);
        assert_eq!(index.find(tensor.name), Some(t));
        names += tensor.name.len();
        let _ = index.planner_path(t);
        for c in tensor.chunks.clone() {
            let chunk = index.chunk(c);
            let file = index.file(chunk.file);
            assert!(chunk.offset >= file.data_start && chunk.offset + chunk.length <= file.size);
            of_files[chunk.file as usize] += chunk.length;
            for d in chunk.digests.into_iter().flatten().take(4) {
                index.digest(d);
            }
            if let Some(dtype) = tensor.dtype {
                let bytes = element_count(&chunk.sizes).unwrap() * dtype.size();
                assert!(bytes <= chunk.length || chunk.strides.is_some());
                for (dim, size) in chunk.sizes.iter().enumerate() {
                    let extent = index.chunk_extent(c, dim);
                    assert_eq!(
                        (extent.start, extent.end - extent.start),
                        (chunk.offsets[dim], *size)
                    );
                }
            }
        }
        if tensor.kind == Kind::Tensor && tensor.chunks.end - tensor.chunks.start <= 64 {
            cover_all(index, t, &tensor.shape);
        }
        assert!(index.file_count() == 0 || !index.file(0).name.contains('\0'));
    }
    assert!(names <= index.bytes().len());
    for (number, bytes) in (0..).zip(of_files) {
        assert!(bytes <= index.file(number).size || index.source() == SourceKind::Torch);
    }
    let _ = index.planner_root();
}

/// Checks that the parts of a tensor cover every element once, or that there is a hole.
fn cover_all(index: &Index, tensor: u32, shape: &[u64]) {
    let whole = Region::new(&vec![0; shape.len()], shape);
    if let Ok(parts) = cover(index, tensor, &whole) {
        let covered: u128 =
            parts.iter().map(|part| u128::from(element_count(&part.sizes).unwrap())).sum();
        assert_eq!(covered, u128::from(element_count(shape).unwrap()));
    }
}

/// Parses the header of a safetensors file.
pub fn header(bytes: &[u8]) -> bool {
    let Ok(header) = crate::format::safetensors::parse(bytes, bytes.len() as u64) else {
        return false;
    };
    for tensor in &header.tensors {
        assert!(header.data_start + tensor.end <= bytes.len() as u64 && tensor.begin <= tensor.end);
        let _ = tensor.dtype.to_torch(&tensor.shape);
    }
    true
}

/// Decodes planner data, and checks that encoding it again gives the same bytes.
pub fn value(bytes: &[u8]) -> bool {
    let Ok(value) = Value::decode(bytes) else {
        return false;
    };
    let mut again = Vec::new();
    value.encode(&mut again).unwrap();
    assert_eq!(again, bytes);
    true
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns the seed inputs of a target, from `rust/fuzz/seeds`.
    fn seeds(target: &str) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
        let mut paths: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().map(|path| fs::read(path).unwrap()).collect()
    }

    /// A small random number generator, with the same numbers in every run.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, limit: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            usize::try_from(self.0 >> 11).unwrap() % limit.max(1)
        }
    }

    /// Mutates an input like a fuzzer without feedback: it changes, removes and repeats bytes, and
    /// inserts numbers that are likely to break a parser.
    fn mutate(seed: &[u8], other: &[u8], numbers: &mut Numbers) -> Vec<u8> {
        const NASTY: [u64; 8] = [0, 1, 0x7f, 0xff, 0xffff_ffff, i64::MAX as u64, 1 << 63, u64::MAX];
        let mut bytes = seed.to_vec();
        for _ in 0..=numbers.below(3) {
            let at = numbers.below(bytes.len());
            match numbers.below(7) {
                _ if bytes.is_empty() => bytes.push(1),
                0 => bytes.truncate(at),
                1 => bytes[at] ^= 1 << numbers.below(8),
                2 => bytes[at] = u8::try_from(numbers.below(256)).unwrap(),
                3 => {
                    let number = NASTY[numbers.below(NASTY.len())].to_le_bytes();
                    let width = [1, 2, 4, 8][numbers.below(4)].min(bytes.len() - at);
                    bytes[at..at + width].copy_from_slice(&number[..width]);
                }
                4 => {
                    let end = (at + numbers.below(40)).min(bytes.len());
                    let piece = bytes[at..end].to_vec();
                    let to = numbers.below(bytes.len());
                    bytes.splice(to..to, piece);
                }
                5 => {
                    let end = (at + numbers.below(40)).min(bytes.len());
                    bytes.drain(at..end);
                }
                _ => {
                    let from = numbers.below(other.len());
                    bytes.truncate(at);
                    bytes.extend(&other[from..]);
                }
            }
        }
        bytes
    }

    /// Replays the seeds, which are all valid, and mutations of them.
    fn replay(target: &str, run: fn(&[u8]) -> bool) {
        let rounds: usize =
            std::env::var("FUZZ_ROUNDS").map_or(400, |rounds| rounds.parse().unwrap());
        let seeds = seeds(target);
        assert!(seeds.iter().all(|seed| run(seed)), "{target}: a seed is refused");
        let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
        for seed in &seeds {
            for _ in 0..rounds {
                let other = &seeds[numbers.below(seeds.len())];
                run(&mutate(seed, other, &mut numbers));
            }
        }
    }

    #[test]
    fn every_target_is_replayed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/fuzz_targets");
        let tests = include_str!("fuzzing.rs");
        for entry in fs::read_dir(folder).unwrap() {
            let target = entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned();
            assert!(!seeds(&target).is_empty());
            assert!(tests.contains(&format!("replay(\"{target}\", ")), "{target}");
        }
    }

    #[test]
    fn replay_index() {
        replay("index", index);
    }

    #[test]
    fn replay_header() {
        replay("header", header);
        replay("header", |bytes| {
            crate::format::safetensors::tests::compare(bytes)
                .unwrap_or_else(|difference| panic!("{difference}"));
            true
        });
    }

    #[test]
    fn replay_value() {
        replay("value", value);
    }

    #[test]
    fn replay_metadata() {
        replay("metadata", metadata);
    }

    #[test]
    fn replay_tensor_pickle() {
        replay("tensor_pickle", tensor_pickle);
    }

    #[test]
    fn replay_torch_file() {
        replay("torch_file", torch_file);
    }

    #[test]
    fn replay_archive() {
        replay("archive", archive);
    }

    #[test]
    fn replay_recovery() {
        replay("recovery", recovery);
    }
}
