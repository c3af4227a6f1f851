//! What this machine can do at best, and how near the read engine comes, in one run: ratios hold, figures do not.
//!
//! `cargo run --release --example limits -- [FOLDER] [ROUNDS]` makes files of 2.28 GB in the folder (kept for the next run; needs
//! as much memory again), and prints medians of interleaved rounds: warm, cold, many small tensors, shards, verify.
#![allow(unsafe_code)] // Measures raw copies and mappings.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use dcp_rs_core::Control;
use dcp_rs_core::copy::{copy_streaming, streaming_kernel};
use dcp_rs_core::format::block_digest;
use dcp_rs_core::read::{Catalog, Destination, FileRef, IoMode, ReadOptions, ReadReq, ReadStats, read};
use memmap2::{MmapMut, MmapOptions};
use smallvec::smallvec;

const MIB: usize = 1 << 20;
const FILES: usize = 4;
const PIECE: usize = 2 * MIB;

struct Digests(Vec<u64>);

impl Catalog for Digests {
    fn tensor_name(&self, tensor: u32) -> String {
        tensor.to_string()
    }
    fn digest(&self, i: u64) -> u64 {
        self.0[usize::try_from(i).unwrap_or(usize::MAX)]
    }
}

/// Sizes in bytes of 145 bf16 tensors of a small model: embeddings, 20 layers of 7, norms; 2.28 GB.
fn tensor_sizes() -> Vec<usize> {
    let hidden = 3072;
    let mut sizes = vec![64_000 * hidden * 2];
    for _ in 0..20 {
        sizes.extend([hidden * hidden, hidden * hidden / 4, hidden * hidden / 4].map(|n| n * 2));
        sizes.extend([hidden * 8192, hidden * 8192, hidden, hidden].map(|n| n * 2));
    }
    sizes.extend([hidden * 2; 4]);
    sizes
}

struct Data {
    files: Vec<FileRef>,
    /// (file, offset, length) of each tensor.
    tensors: Vec<(usize, usize, usize)>,
    digests: Vec<u64>,
    total: usize,
}

fn data(folder: &Path) -> Data {
    let sizes = tensor_sizes();
    let total: usize = sizes.iter().sum();
    let (mut tensors, mut offsets) = (vec![], vec![4096; FILES]);
    for (i, size) in sizes.into_iter().enumerate() {
        let file = if i == 0 { 0 } else { i % FILES };
        tensors.push((file, offsets[file], size));
        offsets[file] += size;
    }
    let block: Vec<u8> = (0..MIB as u64)
        .map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0])
        .collect();
    let files = (0..FILES)
        .map(|i| {
            let path = folder.join(format!("limits-{i}"));
            if path.metadata().map_or(0, |m| m.len()) != offsets[i] as u64 {
                let mut file = File::create(&path).unwrap();
                let mut left = offsets[i];
                while left > 0 {
                    left -= file.write(&block[..left.min(MIB)]).unwrap();
                }
                file.sync_all().unwrap();
            }
            file_ref(path)
        })
        .collect();
    Data {
        files,
        tensors,
        digests: vec![],
        total,
    }
}

fn file_ref(path: PathBuf) -> FileRef {
    FileRef {
        size: path.metadata().unwrap().len(),
        path,
        mtime_ns: 0,
        follow_symlinks: false,
    }
}

fn drop_cache(data: &Data) {
    for file in &data.files {
        let file = File::open(&file.path).unwrap();
        // SAFETY: advice on an open descriptor.
        unsafe { libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(&file), 0, 0, libc::POSIX_FADV_DONTNEED) };
        let size = file.metadata().unwrap().len();
        let left = dcp_rs_core::store::resident_bytes(&file, 0, size).unwrap_or(0);
        assert!(left < size / 50, "{left} bytes stayed in the page cache");
    }
}

fn warm_cache(data: &Data) {
    let mut buffer = vec![0u8; 4 * MIB];
    for file in &data.files {
        let (file, size) = (File::open(&file.path).unwrap(), file.size);
        let mut at = 0;
        while at < size {
            at += file.read_at(&mut buffer, at).unwrap() as u64;
        }
    }
}

fn parallel(threads: usize, pieces: usize, each: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= pieces {
                        break;
                    }
                    each(i);
                }
            });
        }
    });
}

/// (file, offset, length, place in the destination) of every piece.
fn pieces(data: &Data, size: usize) -> Vec<(usize, usize, usize, usize)> {
    let (mut all, mut place) = (vec![], 0);
    for (i, file) in data.files.iter().enumerate() {
        let size_of = usize::try_from(file.size).unwrap();
        for at in (4096..size_of).step_by(size) {
            let len = size.min(size_of - at);
            all.push((i, at, len, place));
            place += len;
        }
    }
    all
}

type Case<'a> = (&'a str, Box<dyn Fn() -> usize + 'a>);

/// Runs all cases in turn, `rounds` times; prints the median of each, and its ratio to the first.
fn table(title: &str, rounds: usize, before: impl Fn(), cases: &[Case]) {
    println!("\n{title}");
    let mut times = vec![vec![]; cases.len()];
    let mut bytes = vec![0; cases.len()];
    for _ in 0..rounds {
        for (i, (_, case)) in cases.iter().enumerate() {
            before();
            let start = Instant::now();
            bytes[i] = case();
            times[i].push(start.elapsed().as_secs_f64());
        }
    }
    let mut first = 0.0;
    for (i, (name, _)) in cases.iter().enumerate() {
        times[i].sort_by(f64::total_cmp);
        let median = times[i][rounds / 2];
        #[expect(clippy::cast_precision_loss, reason = "a figure to print")]
        let rate = bytes[i] as f64 / median / 1e9;
        if i == 0 {
            first = rate;
        }
        println!(
            "  {name:52} {rate:7.2} GB/s  {:9.3} ms  x {:.2}",
            median * 1e3,
            rate / first
        );
    }
}

#[derive(Clone, Copy)]
struct Address(*mut u8);
// SAFETY: the example's threads write disjoint ranges of memory that outlives them.
unsafe impl Sync for Address {}
// SAFETY: as above.
unsafe impl Send for Address {}
impl Address {
    fn at(self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

fn requests(data: &Data, destination: Address, digests: bool) -> Vec<ReadReq> {
    let (mut place, mut digest) = (0, 0);
    let mut reqs = vec![];
    for (i, &(file, offset, length)) in data.tensors.iter().enumerate() {
        reqs.push(ReadReq {
            file: u32::try_from(file).unwrap(),
            tensor: u32::try_from(i).unwrap(),
            chunk_offset: offset as u64,
            chunk_length: length as u64,
            digests: digests.then_some(digest),
            itemsize: 2,
            shape: smallvec![length as u64 / 2],
            src_offset: 0,
            src_strides: smallvec![2],
            dst: Destination(destination.at(place)),
            dst_strides: smallvec![2],
        });
        place += length;
        digest += length.div_ceil(MIB) as u64;
    }
    reqs
}

fn engine(data: &Data, reqs: &[ReadReq], io: IoMode, verify: bool) -> ReadStats {
    let options = ReadOptions {
        io,
        verify,
        ..ReadOptions::default()
    };
    // SAFETY: the destination of every request is its own part of memory that outlives the call.
    unsafe {
        read(
            &data.files,
            reqs,
            &Digests(data.digests.clone()),
            &options,
            &Control::new(),
        )
    }
    .unwrap()
}

fn bytes(stats: ReadStats) -> usize {
    usize::try_from(stats.bytes_wanted).unwrap()
}

fn main() {
    let mut args = std::env::args().skip(1);
    let folder = PathBuf::from(args.next().unwrap_or_else(|| "benches/data".into()));
    let rounds = args.next().map_or(7, |n| n.parse().expect("a number of rounds"));
    let only = args.next().unwrap_or_default();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::fs::create_dir_all(&folder).unwrap();
    let mut data = data(&folder);
    let mut memory = MmapMut::map_anon(data.total).unwrap();
    memory.fill(1);
    let memory = Address(memory.as_mut_ptr());
    println!(
        "{} bytes, {} tensors, {FILES} files, {threads} threads, {} stores",
        data.total,
        data.tensors.len(),
        streaming_kernel()
    );
    warm_cache(&data);
    for &(file, offset, length) in &data.tensors {
        let file = File::open(&data.files[file].path).unwrap();
        let mut buffer = vec![0; MIB];
        for at in (0..length).step_by(MIB) {
            let part = &mut buffer[..MIB.min(length - at)];
            file.read_exact_at(part, (offset + at) as u64).unwrap();
            data.digests.push(block_digest(part));
        }
    }
    if only.is_empty() || only.contains("warm") {
        warm(&data, memory, threads, rounds);
    }
    if only.is_empty() || only.contains("small") {
        small(&data, memory, rounds);
    }
    if only.is_empty() || only.contains("shards") {
        shards(&data, memory, rounds);
    }
    if only.is_empty() || only.contains("cold") {
        cold(&data, memory, rounds.min(5));
    }
}

fn map(data: &Data, populate: bool) -> Vec<memmap2::MmapRaw> {
    let open = |file: &FileRef| File::open(&file.path).unwrap();
    let mut options = MmapOptions::new();
    if populate {
        options.populate();
    }
    data.files
        .iter()
        .map(|file| options.map_raw_read_only(&open(file)).unwrap())
        .collect()
}

fn warm(data: &Data, memory: Address, threads: usize, rounds: usize) {
    type Copy = unsafe fn(*mut u8, *const u8, usize);
    unsafe fn plain(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: as the caller vouches.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
    }
    let pieces = pieces(data, PIECE);
    let total = pieces.iter().map(|p| p.2).sum();
    let copy_all = |maps: &[memmap2::MmapRaw], copy: Copy| {
        let from: Vec<_> = maps.iter().map(|m| Address(m.as_mut_ptr())).collect();
        parallel(threads, pieces.len(), |i| {
            let (file, at, len, place) = pieces[i];
            // SAFETY: the pieces lie within the files and the destination, and do not overlap.
            unsafe { copy(memory.at(place), from[file].at(at), len) };
        });
        total
    };
    let pread = |buffer: usize| {
        let files: Vec<_> = data.files.iter().map(|f| File::open(&f.path).unwrap()).collect();
        parallel(threads, pieces.len(), |i| {
            thread_local!(static BOUNCE: std::cell::RefCell<Vec<u8>> = std::cell::RefCell::new(vec![0; MIB]));
            let (file, at, len, place) = pieces[i];
            let mut done = 0;
            while done < len {
                let n = buffer.min(len - done);
                BOUNCE.with_borrow_mut(|bounce| {
                    files[file].read_exact_at(&mut bounce[..n], (at + done) as u64).unwrap();
                    // SAFETY: the piece lies within the destination, and no other does.
                    unsafe { copy_streaming(memory.at(place + done), bounce.as_ptr(), n) };
                });
                done += n;
            }
        });
        total
    };
    let kept = map(data, true);
    let (plain_reqs, checked_reqs) = (requests(data, memory, false), requests(data, memory, true));
    let cases: Vec<Case> = vec![
        (
            "limit: kept mapping, streaming stores",
            Box::new(|| copy_all(&kept, copy_streaming)),
        ),
        ("kept mapping, memcpy", Box::new(|| copy_all(&kept, plain))),
        (
            "fresh mapping, streaming stores",
            Box::new(|| copy_all(&map(data, false), copy_streaming)),
        ),
        ("fresh mapping, memcpy", Box::new(|| copy_all(&map(data, false), plain))),
        (
            "fresh populated mapping, streaming stores",
            Box::new(|| copy_all(&map(data, true), copy_streaming)),
        ),
        ("pread into 512 KiB, streaming stores", Box::new(|| pread(512 << 10))),
        ("pread into 128 KiB, streaming stores", Box::new(|| pread(128 << 10))),
        (
            "engine, auto",
            Box::new(|| bytes(engine(data, &plain_reqs, IoMode::Auto, false))),
        ),
        (
            "engine, mmap",
            Box::new(|| bytes(engine(data, &plain_reqs, IoMode::Mmap, false))),
        ),
        (
            "engine, buffered",
            Box::new(|| bytes(engine(data, &plain_reqs, IoMode::Buffered, false))),
        ),
        (
            "engine, direct (of a resident file)",
            Box::new(|| bytes(engine(data, &plain_reqs, IoMode::Direct, false))),
        ),
        (
            "engine, auto, verify",
            Box::new(|| bytes(engine(data, &checked_reqs, IoMode::Auto, true))),
        ),
    ];
    table("warm, one batch of the whole", rounds, || (), &cases);
}

fn small(data: &Data, memory: Address, rounds: usize) {
    for (count, size, gap) in [(20_000, 4096, 0), (20_000, 4096, 4096), (200_000, 256, 0)] {
        let (_, offset, length) = data.tensors[0];
        assert!(count * (size + gap) <= length, "the first tensor is large enough");
        let reqs: Vec<_> = (0..count)
            .map(|i| ReadReq {
                chunk_offset: (offset + i * (size + gap)) as u64,
                chunk_length: size as u64,
                shape: smallvec![(size / 256) as u64, 64],
                itemsize: 4,
                src_strides: smallvec![256, 4],
                dst: Destination(memory.at(i * (size + 64))),
                dst_strides: smallvec![256, 4],
                ..requests(data, memory, false)[0].clone()
            })
            .collect();
        let shuffled: Vec<_> = (0..count).map(|i| reqs[i * 7919 % count].clone()).collect();
        let copy_all = || {
            let kept = map(data, false);
            for req in &reqs {
                let from = kept[0]
                    .as_ptr()
                    .wrapping_add(usize::try_from(req.chunk_offset).unwrap());
                // SAFETY: within the mapping and the destination.
                unsafe { std::ptr::copy_nonoverlapping(from, req.dst.0, size) };
            }
            count * size
        };
        let cases: Vec<Case> = vec![
            ("fresh mapping, memcpy, one thread", Box::new(copy_all)),
            (
                "engine, auto",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Auto, false))),
            ),
            (
                "engine, auto, shuffled",
                Box::new(|| bytes(engine(data, &shuffled, IoMode::Auto, false))),
            ),
            (
                "engine, buffered",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Buffered, false))),
            ),
        ];
        table(
            &format!("warm, {count} tensors of {size} bytes, {gap} bytes between"),
            rounds,
            || (),
            &cases,
        );
    }
    for size in [4096, 65_536, 1 << 20, 8 << 20] {
        let mut req = requests(data, memory, false)[0].clone();
        req.shape = smallvec![size / 2];
        let reqs = [req];
        let cases: Vec<Case> = vec![
            (
                "engine, mmap",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Mmap, false))),
            ),
            (
                "engine, auto",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Auto, false))),
            ),
            (
                "engine, buffered",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Buffered, false))),
            ),
        ];
        table(
            &format!("warm, one request of {size} bytes"),
            rounds * 10,
            || (),
            &cases,
        );
    }
}

/// The part that shard `i` of `n` columns takes of every tensor, seen as rows of 8 KiB.
fn columns(data: &Data, memory: Address, i: u64, n: u64, transpose: bool) -> Vec<ReadReq> {
    let (row, mut reqs) = (8192, requests(data, memory, false));
    let mut place = 0;
    for req in &mut reqs {
        let (rows, width) = (req.chunk_length / row, row / n);
        req.shape = smallvec![rows, width / 2];
        req.src_offset = i * width;
        req.src_strides = smallvec![row, 2];
        req.dst_strides = if transpose {
            smallvec![2, rows * 2]
        } else {
            smallvec![width, 2]
        };
        req.dst = Destination(memory.at(place));
        place += usize::try_from(rows * width).unwrap();
    }
    reqs
}

fn shards(data: &Data, memory: Address, rounds: usize) {
    let whole = requests(data, memory, false);
    let quarter = columns(data, memory, 1, 4, false);
    let half = columns(data, memory, 1, 2, false);
    let thin = columns(data, memory, 3, 64, false);
    let transposed = columns(data, memory, 0, 1, true);
    let cases: Vec<Case> = vec![
        ("whole", Box::new(|| bytes(engine(data, &whole, IoMode::Mmap, false)))),
        (
            "columns, a half",
            Box::new(|| bytes(engine(data, &half, IoMode::Mmap, false))),
        ),
        (
            "columns, a quarter",
            Box::new(|| bytes(engine(data, &quarter, IoMode::Mmap, false))),
        ),
        (
            "columns, a 64th (128 bytes a row)",
            Box::new(|| bytes(engine(data, &thin, IoMode::Mmap, false))),
        ),
        (
            "columns, a quarter, buffered",
            Box::new(|| bytes(engine(data, &quarter, IoMode::Buffered, false))),
        ),
        (
            "transposed",
            Box::new(|| bytes(engine(data, &transposed, IoMode::Mmap, false))),
        ),
    ];
    table("warm, shards (bytes wanted a second)", rounds, || (), &cases);
}

fn cold(data: &Data, memory: Address, rounds: usize) {
    let reqs = requests(data, memory, false);
    let quarter = columns(data, memory, 1, 4, false);
    let direct = |size: usize, depth: usize| {
        let pieces = pieces(data, size);
        let open = |f: &FileRef| {
            let mut options = File::options();
            std::os::unix::fs::OpenOptionsExt::custom_flags(options.read(true), libc::O_DIRECT);
            options.open(&f.path).unwrap()
        };
        let files: Vec<_> = data.files.iter().map(open).collect();
        parallel(depth, pieces.len(), |i| {
            thread_local!(static BOUNCE: std::cell::RefCell<MmapMut> = std::cell::RefCell::new(MmapMut::map_anon(4 * MIB).unwrap()));
            let (file, at, len, _) = pieces[i];
            BOUNCE.with_borrow_mut(|bounce| {
                let n = files[file]
                    .read_at(&mut bounce[..len.next_multiple_of(4096)], at as u64)
                    .unwrap();
                assert!(n >= len);
            });
        });
        data.total
    };
    let cases: Vec<Case> = vec![
        (
            "limit: O_DIRECT, 1 MiB, 16 in flight, nothing copied",
            Box::new(|| direct(MIB, 16)),
        ),
        ("O_DIRECT, 2 MiB, 16 in flight", Box::new(|| direct(2 * MIB, 16))),
        ("O_DIRECT, 256 KiB, 16 in flight", Box::new(|| direct(256 << 10, 16))),
        (
            "engine, auto",
            Box::new(|| bytes(engine(data, &reqs, IoMode::Auto, false))),
        ),
        (
            "engine, buffered",
            Box::new(|| bytes(engine(data, &reqs, IoMode::Buffered, false))),
        ),
        (
            "engine, mmap",
            Box::new(|| bytes(engine(data, &reqs, IoMode::Mmap, false))),
        ),
        (
            "engine, auto, columns, a quarter",
            Box::new(|| bytes(engine(data, &quarter, IoMode::Auto, false))),
        ),
    ];
    table(
        "cold (page cache dropped and checked)",
        rounds,
        || drop_cache(data),
        &cases,
    );
    drop_cache(data);
    let stats = engine(data, &quarter, IoMode::Auto, false);
    println!(
        "  columns, a quarter: {} bytes read for {} wanted",
        stats.bytes_read, stats.bytes_wanted
    );
}
