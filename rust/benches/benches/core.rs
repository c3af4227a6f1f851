//! The core's parts by themselves: `cargo bench -p dcp-rs-benches`. What a user waits for is
//! measured by `make bench`.
#![allow(unsafe_code, missing_docs)] // copies raw memory; criterion's macros document nothing

use std::hint::black_box;
use std::path::Path;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dcp_rs_benches::{chunk, file, tensor};
use dcp_rs_core::copy::{Loop, Stores, copy_strided};
use dcp_rs_core::format::{BLOCK_SIZE, Index, IndexBuilder, Kind, SourceKind, block_digest, cover};
use dcp_rs_core::geometry::{Dims, Region};
use dcp_rs_core::read::{Catalog, Destination, FileRef, IoMode, ReadOptions, ReadReq, read};
use dcp_rs_core::save_plan::{assign, encode};
use dcp_rs_core::write::SaveItem;
use dcp_rs_core::{Control, Dtype};

const MIB: usize = 1 << 20;
const ROWS: u64 = 64;
const COLUMNS: u64 = 16;

/// An index of `tensors` of float32, each cut into rows by `ranks`.
fn index(tensors: u64, ranks: u64) -> Vec<u8> {
    let mut builder = IndexBuilder::new(SourceKind::Native);
    for rank in 0..ranks {
        add_rank(&mut builder, tensors, rank, ranks);
    }
    builder.build().expect("a valid index")
}

/// The file of one rank, and its rows of every tensor.
fn add_rank(builder: &mut IndexBuilder, tensors: u64, rank: u64, ranks: u64) {
    let length = ROWS * COLUMNS * 4;
    let file =
        file(format!("g00000001-{rank:016x}-r{rank:05}-f00000.safetensors"), tensors * length);
    let file = builder.add_file(file).expect("a new file");
    for t in 0..tensors {
        let name = format!("model.layers.{t:05}.weight");
        let entry = tensor(name, "float32", &[ROWS * ranks, COLUMNS]);
        let number = builder.add_tensor(entry).expect("the same as of other ranks");
        let place = (number, file);
        let chunk = chunk(place, t * length, length, &[ROWS * rank, 0], &[ROWS, COLUMNS]);
        builder.add_chunk(chunk).expect("a new chunk");
    }
}

fn open(bytes: Vec<u8>) -> Index {
    Index::from_bytes(bytes, Path::new("index.dcprs")).expect("a valid index")
}

fn opening(c: &mut Criterion) {
    let mut group = c.benchmark_group("open an index, by chunks");
    for (tensors, ranks) in [(100, 16), (1_000, 16), (1_000, 160)] {
        let bytes = index(tensors, ranks);
        group.throughput(Throughput::Elements(tensors * ranks));
        group.bench_function(BenchmarkId::from_parameter(tensors * ranks), |b| {
            b.iter_batched(|| bytes.clone(), open, BatchSize::LargeInput);
        });
    }
}

/// Returns the request of every rank of a save: its rows of each tensor, which `holders` ranks
/// share.
fn requests(tensors: u64, ranks: u64, holders: u64) -> Vec<Vec<u8>> {
    let parts = (ranks / holders).max(1);
    let item = |t, part| SaveItem {
        name: format!("model.layers.{t:05}.weight"),
        kind: Kind::Tensor,
        dtype: Dtype::from_name("float32"),
        shape: Dims::from_slice(&[ROWS * parts, COLUMNS]),
        flags: 0,
        path: None,
        position: None,
        offsets: Dims::from_slice(&[ROWS * part, 0]),
        sizes: Dims::from_slice(&[ROWS, COLUMNS]),
        length: ROWS * COLUMNS * 4,
    };
    let request = |rank| encode(&(0..tensors).map(|t| item(t, rank % parts)).collect::<Vec<_>>());
    (0..ranks).map(request).collect()
}

fn assigning(c: &mut Criterion) {
    let tensors = 100;
    let mut group = c.benchmark_group("assign a save of 100 tensors, by ranks");
    for (who, holders) in [("one holds each part", 1), ("8 hold each part", 8)] {
        for ranks in [512, 4096, 16_384] {
            let requests = requests(tensors, ranks, holders);
            group.throughput(Throughput::Elements(tensors * ranks));
            group.bench_function(BenchmarkId::new(who, ranks), |b| {
                b.iter(|| assign(black_box(&requests)).expect("all of each tensor is there"));
            });
        }
    }
}

/// The index of one rank of `ranks`.
fn index_of_rank(tensors: u64, rank: u64, ranks: u64) -> Index {
    let mut builder = IndexBuilder::new(SourceKind::Native);
    add_rank(&mut builder, tensors, rank, ranks);
    open(builder.build().expect("a valid index"))
}

fn merging(c: &mut Criterion) {
    let tensors = 100;
    let mut group = c.benchmark_group("merge the indexes of ranks, of 100 tensors");
    for ranks in [64, 512, 4096] {
        let parts: Vec<Index> =
            (0..ranks).map(|rank| index_of_rank(tensors, rank, ranks)).collect();
        group.throughput(Throughput::Elements(tensors * ranks));
        group.sample_size(10);
        group.bench_function(BenchmarkId::from_parameter(ranks), |b| {
            b.iter(|| {
                let mut builder = IndexBuilder::new(SourceKind::Native);
                for part in &parts {
                    builder.merge(part).expect("they agree");
                }
                builder.build().expect("a valid index")
            });
        });
    }
}

fn looking_up(c: &mut Criterion) {
    let tensors = 20_000;
    let index = open(index(tensors, 1));
    let names: Vec<String> = (0..index.tensor_count()).map(|t| index.name(t).to_owned()).collect();
    let mut group = c.benchmark_group("find 20,000 names");
    group.throughput(Throughput::Elements(tensors));
    group.bench_function("anywhere", |b| {
        b.iter(|| names.iter().filter_map(|name| index.find(black_box(name))).count());
    });
    group.bench_function("next to the last", |b| {
        b.iter(|| {
            names.iter().fold(0, |near, name| {
                index.find_near(black_box(name), near).map_or(near, |t| t + 1)
            })
        });
    });
}

fn planning(c: &mut Criterion) {
    let mut group = c.benchmark_group("cover a region, by ranks that saved");
    for ranks in [8, 64, 512, 4096] {
        let index = open(index(1, ranks));
        let (row, rows) = (ROWS * ranks / 2 + 1, ROWS);
        let of_few = Region::new(&[row, 0], &[rows, COLUMNS]);
        group.throughput(Throughput::Elements(2));
        group.bench_function(BenchmarkId::new("2 of the chunks", ranks), |b| {
            b.iter(|| cover(&index, 0, black_box(&of_few)).expect("all of it is there"));
        });
        let of_all = Region::new(&[0, 0], &[ROWS * ranks, COLUMNS / 2]);
        group.throughput(Throughput::Elements(ranks));
        group.bench_function(BenchmarkId::new("all of them", ranks), |b| {
            b.iter(|| cover(&index, 0, black_box(&of_all)).expect("all of it is there"));
        });
    }
}

fn copying(c: &mut Criterion) {
    let mut group = c.benchmark_group("copy 64 MiB");
    let len = 64 * MIB;
    let (from, mut to) = (vec![7_u8; len], vec![1_u8; len]);
    group.throughput(Throughput::Bytes(len as u64));
    for stores in [Stores::Cached, Stores::Streaming] {
        for run in [len, 8192, 256] {
            let loops: &[Loop] =
                &[Loop { n: (len / run) as u64, src: run as u64, dst: run as u64 }];
            let loops = if run == len { &[] } else { loops };
            group.bench_function(BenchmarkId::new(format!("{stores:?}, runs of"), run), |b| {
                // SAFETY: both buffers are `len` long, which is what the loops reach.
                b.iter(|| unsafe {
                    copy_strided(to.as_mut_ptr(), from.as_ptr(), loops, run as u64, stores);
                });
            });
        }
    }
}

fn hashing(c: &mut Criterion) {
    let block = vec![7_u8; usize::try_from(BLOCK_SIZE).expect("1 MiB")];
    let mut group = c.benchmark_group("digest");
    group.throughput(Throughput::Bytes(BLOCK_SIZE));
    group.bench_function("a block", |b| b.iter(|| block_digest(black_box(&block))));
}

struct Nothing;

impl Catalog for Nothing {
    fn tensor_name(&self, _: u32) -> String {
        String::new()
    }
    fn digest(&self, _: u64) -> u64 {
        0
    }
}

fn reading(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("data");
    let total = 64 * MIB;
    std::fs::write(&path, vec![7_u8; total]).expect("64 MiB of space");
    let files = [FileRef::new(path, total as u64)];
    let mut to = vec![1_u8; total];
    let mut group = c.benchmark_group("read 64 MiB from the page cache");
    group.throughput(Throughput::Bytes(total as u64));
    for size in [4 << 10, 64 << 10, 16 * MIB] {
        let requests: Vec<ReadReq> = (0..total)
            .step_by(size)
            .map(|at| {
                let to = Destination(to[at..].as_mut_ptr());
                ReadReq::bytes(0, 0, at as u64, size as u64, to)
            })
            .collect();
        for io in [IoMode::Mmap, IoMode::Buffered] {
            let options = ReadOptions { io, ..ReadOptions::default() };
            group.bench_function(BenchmarkId::new(format!("{io:?}, chunks of"), size), |b| {
                b.iter(|| {
                    // SAFETY: requests fill parts of `to` that are apart; the file stays as it is.
                    unsafe { read(&files, &requests, &Nothing, &options, &Control::default()) }
                        .expect("reads")
                });
            });
        }
    }
}

criterion_group!(
    benches, opening, assigning, merging, looking_up, planning, copying, hashing, reading
);
criterion_main!(benches);
