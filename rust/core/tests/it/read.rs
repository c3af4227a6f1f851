//! The read engine on real files: every mode delivers the same bytes, and damage is an error that
//! names its place.
#![allow(unsafe_code)] // `read` writes to memory that its caller vouches for.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use dcp_rs_core::copy::Accumulate;
use dcp_rs_core::paths::Links;
use dcp_rs_core::read::{
    Catalog, Destination, FileProbe, FileRef, IoMode, Operation, ReadOptions, ReadReq, ReadStats,
    Sequential, Sharing, Verify, read,
};
use dcp_rs_core::store::{Connection, FetchRange, Folder, Remote, StoringConnection};
use dcp_rs_core::{Control, Dtype, Error};
use smallvec::smallvec;

const MIB: usize = 1 << 20;
const MODES: [IoMode; 4] = [IoMode::Auto, IoMode::Mmap, IoMode::Direct, IoMode::Buffered];

struct Digests(Vec<u64>);

impl Catalog for Digests {
    fn tensor_name(&self, tensor: u32) -> String {
        format!("layers.{tensor}.weight")
    }
    fn digest(&self, i: u64) -> u64 {
        self.0[usize::try_from(i).unwrap()]
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

fn written(dir: &Path, name: &str, bytes: &[u8]) -> FileRef {
    let path = dir.join(name);
    File::create(&path).unwrap().write_all(bytes).unwrap();
    let links = Links::Within { folder: dir.into(), last: false };
    FileRef { links, ..FileRef::new(path, bytes.len() as u64) }
}

/// On the disk of the build folder: a temporary folder may be in memory, where direct I/O and
/// residency mean little.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn drop_cache(file: &FileRef) {
    let file = File::open(&file.path).unwrap();
    file.sync_all().unwrap();
    #[cfg(target_os = "linux")]
    // SAFETY: advice on an open descriptor.
    unsafe {
        libc::posix_fadvise(
            std::os::fd::AsRawFd::as_raw_fd(&file),
            0,
            0,
            libc::POSIX_FADV_DONTNEED,
        );
    }
}

/// A request for `len` bytes at `src_offset` of the chunk `[offset, offset + length)`.
fn run(file: u32, offset: usize, length: usize, src_offset: usize, dst: &mut [u8]) -> ReadReq {
    let to = Destination(dst.as_mut_ptr());
    ReadReq {
        shape: smallvec![dst.len() as u64],
        src_offset: src_offset as u64,
        ..ReadReq::bytes(file, 7, offset as u64, length as u64, to)
    }
}

fn options(io: IoMode) -> ReadOptions {
    ReadOptions { io, threads: 2, ..ReadOptions::default() }
}

fn go(files: &[FileRef], reqs: &[ReadReq], options: &ReadOptions) -> Result<ReadStats, Error> {
    // SAFETY: the tests build requests from exclusive slices that outlive the call.
    unsafe { read(files, reqs, &Digests(vec![]), options, &Control::new()) }
}

#[test]
fn every_mode_delivers_the_same() {
    let dir = folder();
    let data: Vec<_> =
        [(5 * MIB + 77, 1), (3 * MIB, 2), (100, 3)].map(|(len, seed)| noise(len, seed)).into();
    let files: Vec<_> =
        data.iter().enumerate().map(|(i, d)| written(dir.path(), &i.to_string(), d)).collect();
    for io in MODES {
        for cold in [false, true] {
            files.iter().filter(|_| cold).for_each(drop_cache);
            let mut big = vec![0u8; data[0].len() - 100];
            let mut whole = vec![0u8; data[1].len()];
            let mut small: Vec<_> = (0..100).map(|_| vec![0u8; 1]).collect();
            let mut reqs = vec![
                run(0, 50, data[0].len() - 50, 50, &mut big),
                run(1, 0, data[1].len(), 0, &mut whole),
            ];
            reqs.extend(small.iter_mut().enumerate().map(|(i, s)| run(2, i, 1, 0, s)));
            let control = Control::new();
            // SAFETY: the destinations are exclusive and outlive the call.
            let stats =
                unsafe { read(&files, &reqs, &Digests(vec![]), &options(io), &control) }.unwrap();
            assert!(big == data[0][100..], "{io:?} cold {cold}");
            assert!(whole == data[1]);
            assert!(small.concat() == data[2]);
            assert_eq!(stats.bytes_wanted, (big.len() + whole.len() + 100) as u64);
            assert_eq!(control.done(), stats.bytes_wanted);
            assert!(stats.bytes_read >= stats.bytes_wanted, "{stats:?}");
            assert!(stats.bytes_read * 100 <= stats.bytes_wanted * 105 + 409_600, "{stats:?}");
        }
    }
}

#[test]
fn strided_sources_and_destinations() {
    let dir = folder();
    let (rows, cols) = (700, 1500);
    let data = noise(64 + rows * cols * 4, 9);
    let file = written(dir.path(), "f", &data);
    let at = |r: usize, c: usize| 64 + (r * cols + c) * 4;
    let shared = ReadOptions { shared: Sharing::Guess, ..options(IoMode::Auto) };
    for options in MODES.map(options).into_iter().chain([shared]) {
        for cold in [false, true] {
            if cold {
                drop_cache(&file);
            }
            // columns 100..600 of all rows, into a destination with rows of 700 elements; and the
            // transpose of columns 600..900
            let mut columns = vec![0u8; rows * 700 * 4];
            let mut transposed = vec![0u8; rows * 300 * 4];
            let template = run(0, 64, rows * cols * 4, 0, &mut []);
            let wide = |x: usize| x as u64;
            let reqs = [
                ReadReq {
                    itemsize: 4,
                    shape: smallvec![wide(rows), 500],
                    src_offset: 400,
                    src_strides: smallvec![wide(cols * 4), 4],
                    dst: Destination(columns.as_mut_ptr()),
                    dst_strides: smallvec![2800, 4],
                    ..template.clone()
                },
                ReadReq {
                    itemsize: 4,
                    shape: smallvec![wide(rows), 300],
                    src_offset: 2400,
                    src_strides: smallvec![wide(cols * 4), 4],
                    dst: Destination(transposed.as_mut_ptr()),
                    dst_strides: smallvec![4, wide(rows * 4)],
                    ..template
                },
            ];
            let stats = go(std::slice::from_ref(&file), &reqs, &options).unwrap();
            // Rows of 2000 and 1200 bytes, cold or not: through the page cache.
            // Where a mapping cannot be populated, nothing is mapped unasked.
            let maps = cfg!(all(target_os = "linux", not(posix_only)));
            assert!(
                !(maps && options.shared == Sharing::Guess)
                    || stats.bytes_mapped == stats.bytes_wanted,
                "{stats:?}"
            );
            for r in 0..rows {
                assert!(
                    columns[r * 2800..r * 2800 + 2000] == data[at(r, 100)..at(r, 600)],
                    "{options:?} {r}"
                );
                assert!(
                    columns[r * 2800 + 2000..(r + 1) * 2800].iter().all(|&b| b == 0),
                    "wrote between rows"
                );
                for c in 0..300 {
                    let got = &transposed[(c * rows + r) * 4..][..4];
                    assert_eq!(got, &data[at(r, 600 + c)..][..4], "{options:?} {r} {c}");
                }
            }
        }
    }
}

#[test]
fn thin_rows_that_are_read_through_are_right() {
    let dir = folder();
    let (rows, pitch, width) = (4096, 16 << 10, 4 << 10);
    let data = noise(96 + rows * pitch, 11);
    let file = written(dir.path(), "f", &data);
    drop_cache(&file);
    let mut columns = vec![0u8; rows * width];
    let wide = |x: usize| x as u64;
    let req = ReadReq {
        shape: smallvec![wide(rows), wide(width)],
        src_offset: wide(width),
        src_strides: smallvec![wide(pitch), 1],
        dst: Destination(columns.as_mut_ptr()),
        dst_strides: smallvec![wide(width), 1],
        ..run(0, 96, rows * pitch, 0, &mut [])
    };
    let few = ReadOptions { max_inflight_bytes: 3 << 20, ..options(IoMode::Direct) };
    let stats = go(std::slice::from_ref(&file), &[req], &few).unwrap();
    for (row, got) in columns.chunks_exact(width).enumerate() {
        let at = 96 + row * pitch + width;
        assert!(got == &data[at..at + width], "row {row}");
    }
    assert_eq!(stats.bytes_wanted, wide(rows * width));
    // Never more than all of it, and what is read to whole blocks twice.
    assert!(stats.bytes_read <= wide(rows * pitch) + stats.jobs * 2 * 4096, "{stats:?}");
}

#[test]
fn nothing_wanted_is_nothing_done() {
    let missing = FileRef::new("/nonexistent/file", 10);
    assert_eq!(go(&[], &[], &options(IoMode::Auto)).unwrap(), ReadStats::default());
    let empty = run(0, 0, 0, 0, &mut []);
    assert_eq!(go(&[missing], &[empty], &options(IoMode::Auto)).unwrap(), ReadStats::default());
}

fn corrupt(result: Result<ReadStats, Error>) -> (String, String, Option<u64>, String) {
    match result {
        Err(Error::CorruptData { path, tensor, offset, reason }) => {
            (path.file_name().unwrap().to_string_lossy().into(), tensor, offset, reason)
        }
        other => panic!("expected corrupt data, got {other:?}"),
    }
}

#[test]
fn files_are_checked_before_reading() {
    let dir = folder();
    let data = noise(10_000, 4);
    let good = written(dir.path(), "good", &data);
    let mut dst = vec![0u8; 100];
    let req = run(0, 0, 10_000, 0, &mut dst);
    for io in MODES {
        let attempt =
            |file: FileRef| corrupt(go(&[file], std::slice::from_ref(&req), &options(io)));
        let (name, _, offset, reason) =
            attempt(FileRef { path: dir.path().join("gone"), ..good.clone() });
        assert_eq!((name.as_str(), reason.as_str()), ("gone", "the file is missing"));
        assert_eq!(offset, None);
        let (_, _, _, reason) = attempt(FileRef { size: 10_001, ..good.clone() });
        assert!(reason.contains("10000") && reason.contains("10001"), "{reason}");
        let (_, _, _, reason) =
            attempt(FileRef { mtime_ns: 12345, mend: "index it anew", ..good.clone() });
        assert!(reason.contains("modified") && reason.ends_with("; index it anew"), "{reason}");
        let link = dir.path().join("link");
        let _ = std::os::unix::fs::symlink(&good.path, &link);
        let (_, _, _, reason) = attempt(FileRef { path: link.clone(), ..good.clone() });
        assert!(reason.contains("symbolic link"), "{reason}");
        let followed = FileRef { path: link, links: Links::Any, remote: None, ..good.clone() };
        go(&[followed], std::slice::from_ref(&req), &options(io)).unwrap();
        let folder = FileRef { path: dir.path().into(), ..good.clone() };
        assert!(attempt(folder).3.contains("regular"));
    }
    assert!(dst == data[..100]);
}

/// Its last page was there, with zeros after the end.
#[test]
fn a_file_that_was_cut_after_it_was_checked_is_refused() {
    let dir = folder();
    // Long ones are mapped at a multiple of a huge page.
    for length in [MIB, 4 * MIB] {
        let file = written(dir.path(), "f", &vec![1; length]);
        let files = std::slice::from_ref(&file);
        let mut dst = vec![0u8; length];
        let reqs = [run(0, 0, length, 0, &mut dst)];
        let probe = FileProbe::new(files, &reqs, &options(IoMode::Mmap), &Digests(vec![])).unwrap();
        File::options().write(true).open(&file.path).unwrap().set_len(length as u64 - 100).unwrap();
        let mut reader = Sequential::new(None);
        // SAFETY: the destination is exclusive and outlives the call.
        let result = unsafe {
            reader.read(files, &reqs, &probe, Verify::Nothing, &Digests(vec![]), &Control::new())
        };
        let (name, .., reason) = corrupt(result.map(|()| reader.stats()));
        assert_eq!(name, "f");
        assert!(reason.contains(&format!("{}", length - 100)), "{reason}");
    }
}

#[test]
fn verify_names_the_block_that_differs() {
    let dir = folder();
    let length = 3 * MIB + 123;
    let mut data = noise(4096 + length, 5);
    let digests: Vec<u64> = data[4096..].chunks(MIB).map(twox_hash::XxHash3_64::oneshot).collect();
    let file = written(dir.path(), "f", &data);
    let catalog = Digests([vec![1, 2, 3], digests].concat());
    let verified = |io, reqs: &[ReadReq]| {
        let options = ReadOptions { verify: Verify::All, ..options(io) };
        // SAFETY: the destinations are exclusive and outlive the call.
        unsafe { read(std::slice::from_ref(&file), reqs, &catalog, &options, &Control::new()) }
    };
    for io in MODES {
        let mut dst = vec![0u8; length];
        let mut req = run(0, 4096, length, 0, &mut dst);
        req.digests = Some(3);
        let stats = verified(io, std::slice::from_ref(&req)).unwrap();
        assert_eq!(stats.bytes_verified, length as u64);
        assert!(dst == data[4096..], "{io:?}");
        // A strided part: every block it touches is hashed.
        let mut part = req.clone();
        part.shape = smallvec![3000, 10];
        part.src_strides = smallvec![1000, 1];
        part.dst_strides = smallvec![10, 1];
        let stats = verified(io, &[part]).unwrap();
        assert!(stats.bytes_verified >= 3 * MIB as u64, "{stats:?}");
        assert_eq!(dst[10..20], data[5096..5106]);
    }
    // One wrong bit in the third block.
    let at = 4096 + 2 * MIB + 500_000;
    data[at] ^= 1;
    File::options()
        .write(true)
        .open(&file.path)
        .unwrap()
        .write_all_at(&data[at..=at], at as u64)
        .unwrap();
    for io in MODES {
        for (offset, len) in [(0, length), (2 * MIB + 5, 10), (2 * MIB - 5, 10)] {
            let mut dst = vec![0u8; len];
            let mut req = run(0, 4096, length, offset, &mut dst);
            req.digests = Some(3);
            let (name, tensor, offset, reason) = corrupt(verified(io, &[req]));
            assert_eq!(
                (name.as_str(), tensor.as_str(), offset),
                ("f", "layers.7.weight", Some((4096 + 2 * MIB) as u64))
            );
            assert!(reason.contains("block 2") && reason.contains("expected"), "{reason}");
        }
        let mut dst = vec![0u8; 2 * MIB];
        let mut req = run(0, 4096, length, 0, &mut dst);
        req.digests = Some(3);
        verified(io, &[req]).unwrap();
    }
}

/// A store with one file.
#[derive(Clone, Debug)]
struct OneFile(Arc<Vec<u8>>);

impl Remote for OneFile {
    fn connect(&self, _: usize) -> Result<Arc<dyn Connection>, Error> {
        Ok(Arc::new(self.clone()))
    }

    fn connect_to_store(&self, _: usize) -> Result<Arc<dyn StoringConnection>, Error> {
        Err(Error::Unsupported("it is only read from".into()))
    }
}

impl Connection for OneFile {
    fn look(&self, _: &Path, _: &Control) -> Result<Option<u64>, Error> {
        Ok(Some(self.0.len() as u64))
    }

    fn list(&self, _: &Path, _: &Control) -> Result<Option<Folder>, Error> {
        Ok(None)
    }

    fn start(
        &self,
        _: &Path,
        _: u64,
        _: bool,
        _: &Control,
    ) -> Result<Option<(Vec<u8>, u64)>, Error> {
        Ok(None)
    }

    fn fetch(&self, _: &Path, _: u64, ranges: Vec<FetchRange>, _: &Control) -> Result<(), Error> {
        for mut range in ranges {
            let bytes = &self.0[range.start.try_into().unwrap()..range.end.try_into().unwrap()];
            range.deliver(range.start, bytes);
        }
        Ok(())
    }
}

#[test]
fn of_tensors_that_begin_at_one_byte_the_damaged_one_is_named() {
    let lengths = [100_000, 200_000];
    let data = noise(lengths[1], 7);
    let dir = folder();
    let remote: Arc<dyn Remote> = Arc::new(OneFile(Arc::new(data.clone())));
    let file = FileRef { remote: Some(remote), ..written(dir.path(), "f", &data) };
    for damaged in [0, 1] {
        let mut digests = lengths.map(|length| twox_hash::XxHash3_64::oneshot(&data[..length]));
        digests[damaged] ^= 1;
        let mut dsts = lengths.map(|length| vec![0u8; length]);
        let reqs: Vec<_> = (0..2)
            .map(|tensor| ReadReq {
                tensor,
                digests: Some(tensor.into()),
                ..run(0, 0, lengths[tensor as usize], 0, &mut dsts[tensor as usize])
            })
            .collect();
        let options = ReadOptions { verify: Verify::All, ..options(IoMode::Auto) };
        let catalog = Digests(digests.to_vec());
        // SAFETY: the destinations are exclusive and outlive the call.
        let result = unsafe {
            read(std::slice::from_ref(&file), &reqs, &catalog, &options, &Control::new())
        };
        let (_, tensor, ..) = corrupt(result);
        assert_eq!(tensor, format!("layers.{damaged}.weight"));
    }
}

#[test]
fn cancellation_stops_the_work() {
    let dir = folder();
    let data = noise(MIB, 6);
    let file = written(dir.path(), "f", &data);
    let mut dst = vec![0u8; MIB];
    let req = run(0, 0, MIB, 0, &mut dst);
    let control = Control::new();
    control.cancel();
    for io in MODES {
        // SAFETY: the destination is exclusive and outlives the call.
        let result = unsafe {
            read(
                std::slice::from_ref(&file),
                std::slice::from_ref(&req),
                &Digests(vec![]),
                &options(io),
                &control,
            )
        };
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
    }
    assert_eq!(control.done(), 0);
}

/// Cancels when the engine asks for the first digest, which is in the middle of the work.
struct Canceller<'a>(&'a Control, u64);

impl Catalog for Canceller<'_> {
    fn tensor_name(&self, _: u32) -> String {
        String::new()
    }
    fn digest(&self, _: u64) -> u64 {
        self.0.cancel();
        self.1
    }
}

#[test]
fn work_under_way_is_cancelled() {
    let dir = folder();
    let length = 64 * MIB;
    let file = written(dir.path(), "f", &vec![7; length]);
    let mut dst = vec![0u8; length];
    let mut req = run(0, 0, length, 0, &mut dst);
    req.digests = Some(0);
    for io in MODES {
        let control = Control::new();
        let catalog = Canceller(&control, twox_hash::XxHash3_64::oneshot(&vec![7; MIB]));
        let options = ReadOptions { verify: Verify::All, ..options(io) };
        // SAFETY: the destination is exclusive and outlives the call.
        let result = unsafe {
            read(
                std::slice::from_ref(&file),
                std::slice::from_ref(&req),
                &catalog,
                &options,
                &control,
            )
        };
        assert!(matches!(result, Err(Error::Interrupted)), "{io:?} {result:?}");
        assert!(
            control.done() < length as u64 / 2,
            "{io:?}: {} bytes after the call",
            control.done()
        );
    }
}

#[test]
fn a_request_outside_its_file_is_refused() {
    let dir = folder();
    let file = written(dir.path(), "f", &[0; 100]);
    let mut dst = vec![0u8; 60];
    let error = go(&[file], &[run(0, 50, 60, 0, &mut dst)], &options(IoMode::Auto)).unwrap_err();
    assert!(
        matches!(&error, Error::TensorPlan { tensor, .. } if tensor == "layers.7.weight"),
        "{error}"
    );
}

#[test]
fn one_thread_and_little_memory_suffice() {
    let dir = folder();
    let data = noise(9 * MIB, 8);
    let file = written(dir.path(), "f", &data);
    for io in MODES {
        drop_cache(&file);
        let mut dst = vec![0u8; data.len() - 1];
        let req = run(0, 0, data.len(), 1, &mut dst);
        let options = ReadOptions { threads: 1, max_inflight_bytes: 1, ..options(io) };
        go(std::slice::from_ref(&file), &[req], &options).unwrap();
        assert!(dst == data[1..], "{io:?}");
    }
}

#[test]
fn elements_are_added_to_sums_in_every_mode() {
    let dir = folder();
    let data = noise(6 * MIB, 5);
    // Rows 1.. of columns 16..80 of a matrix of bfloat16 with 128 columns, after an odd number of
    // bytes.
    let (offset, rows, columns, width) = (77_usize, 20_000_usize, 128_usize, 64_usize);
    let file = written(dir.path(), "a", &data);
    let digests: Vec<u64> = data[offset..offset + 2 * rows * columns]
        .chunks(MIB)
        .map(dcp_rs_core::format::block_digest)
        .collect();
    let stored = |row: usize, column: usize| {
        let at = offset + 2 * (row * columns + column);
        f32::from_bits(u32::from(u16::from_le_bytes([data[at], data[at + 1]])) << 16)
    };
    let sink = Accumulate::new(Dtype::from_name("bfloat16").unwrap(), -0.75, false).unwrap();
    for (io, verify) in MODES.into_iter().flat_map(|io| [(io, false), (io, true)]) {
        drop_cache(&file);
        let mut sums = vec![1.0_f32; (rows - 1) * width];
        let mut all = vec![2.0_f32; rows * columns];
        let req = |sums: &mut [f32], row: usize, column: usize, shape: [u64; 2]| ReadReq {
            digests: Some(0),
            itemsize: 2,
            shape: smallvec![shape[0], shape[1]],
            src_strides: smallvec![2 * columns as u64, 2],
            dst: Destination(sums.as_mut_ptr().cast()),
            dst_strides: smallvec![4 * shape[1], 4],
            operation: Operation::Accumulate(sink),
            ..run(0, offset, 2 * rows * columns, 2 * (row * columns + column), &mut [])
        };
        let reqs = [
            req(&mut sums, 1, 16, [rows as u64 - 1, width as u64]),
            req(&mut all, 0, 0, [rows as u64, columns as u64]),
        ];
        let options = ReadOptions {
            verify: if verify { Verify::All } else { Verify::Nothing },
            ..options(io)
        };
        // SAFETY: the requests are of exclusive vectors with an element for each of theirs.
        let stats = unsafe {
            read(
                std::slice::from_ref(&file),
                &reqs,
                &Digests(digests.clone()),
                &options,
                &Control::new(),
            )
        };
        assert!((stats.unwrap().bytes_verified > 0) == verify, "{io:?}");
        let same = |got: f32, row, column, before: f32| {
            let expected = stored(row, column).mul_add(-0.75, before);
            assert!(
                got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(),
                "{io:?} {verify} {row} {column}: {got}, not {expected}"
            );
        };
        for row in 1..rows {
            for column in 0..width {
                same(sums[(row - 1) * width + column], row, column + 16, 1.0);
            }
        }
        for row in 0..rows {
            for column in 0..columns {
                same(all[row * columns + column], row, column, 2.0);
            }
        }
    }
}
