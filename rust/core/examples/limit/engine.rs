//! How near the read engine comes to the limit, in one run.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use dcp_rs_core::Control;
use dcp_rs_core::copy::{SignBits, streaming_kernel};
use dcp_rs_core::format::block_digest;
use dcp_rs_core::paths::Links;
use dcp_rs_core::read::{Catalog, Destination, FileRef, IoMode, ReadOptions, ReadReq, ReadStats, read};
use smallvec::smallvec;

use crate::raw::{self, Address, PIECE, cores};
use crate::{Failure, cases};

pub const MIB: usize = 1 << 20;
const FILES: usize = 4;

struct Digests(Vec<u64>);

impl Catalog for Digests {
    fn tensor_name(&self, tensor: u32) -> String {
        tensor.to_string()
    }
    fn digest(&self, i: u64) -> u64 {
        self.0[usize::try_from(i).unwrap_or(usize::MAX)]
    }
}

/// Sizes in bytes of the 145 bf16 tensors that `benches` loads: an embedding, and 16 layers of 9; 2.28 GB.
fn tensor_sizes() -> Vec<usize> {
    let (hidden, vocab) = (2048, 81_920);
    let mut sizes = vec![vocab * hidden];
    for _ in 0..16 {
        sizes.extend([
            hidden * hidden,
            hidden / 4 * hidden,
            hidden / 4 * hidden,
            hidden * hidden,
        ]);
        sizes.extend([4 * hidden * hidden; 3]);
        sizes.extend([hidden; 2]);
    }
    sizes.iter().map(|n| n * 2).collect()
}

pub struct Data {
    pub files: Vec<FileRef>,
    /// (file, offset, length) of each tensor.
    pub tensors: Vec<(usize, usize, usize)>,
    pub digests: Vec<u64>,
    pub total: usize,
}

impl Data {
    pub fn paths(&self) -> Vec<&Path> {
        self.files.iter().map(|file| file.path.as_path()).collect()
    }
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
            let path = folder.join(format!("limit-{i}"));
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
        mend: "",
        links: Links::Any,
        remote: None,
    }
}

pub fn drop_cache(data: &Data) {
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

pub type Case<'a> = (&'a str, Box<dyn Fn() -> usize + 'a>);

/// Runs all cases in turn, `rounds` times; prints the median of each, and its ratio to the first.
pub fn table(title: &str, rounds: usize, before: impl Fn(), cases: &[Case]) {
    println!("\n{title}");
    let mut times = vec![vec![]; cases.len()];
    let mut bytes = vec![0; cases.len()];
    for round in 0..rounds {
        for i in 0..cases.len() {
            // There and back: what a case leaves behind is not always for the same one.
            let i = if round % 2 == 0 { i } else { cases.len() - 1 - i };
            let case = &cases[i].1;
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

pub fn requests(data: &Data, destination: Address, digests: bool) -> Vec<ReadReq> {
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
            signs: SignBits::default(),
        });
        place += length;
        digest += length.div_ceil(MIB) as u64;
    }
    reqs
}

pub fn engine(data: &Data, reqs: &[ReadReq], io: IoMode, verify: bool) -> ReadStats {
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

pub fn bytes(stats: ReadStats) -> usize {
    usize::try_from(stats.bytes_wanted).unwrap()
}

fn digests(data: &Data) -> Vec<u64> {
    let (mut digests, mut buffer) = (vec![], vec![0; MIB]);
    for &(file, offset, length) in &data.tensors {
        let file = File::open(&data.files[file].path).unwrap();
        for at in (0..length).step_by(MIB) {
            let part = &mut buffer[..MIB.min(length - at)];
            file.read_exact_at(part, (offset + at) as u64).unwrap();
            digests.push(block_digest(part));
        }
    }
    digests
}

/// `FOLDER [ROUNDS] [CASES]`
pub fn run(words: &[String]) -> Result<(), Failure> {
    let folder = Path::new(words.first().ok_or("a folder is missing")?);
    let rounds = words.get(1).map_or(Ok(7), |n| n.parse())?;
    let wanted = |case| words.get(2).is_none_or(|cases| cases.contains(case));
    std::fs::create_dir_all(folder)?;
    let mut data = data(folder);
    let room = raw::pieces(&data.paths(), PIECE)?.1;
    let mut memory = raw::memory(room)?;
    let memory = Address(memory.as_mut_ptr());
    println!(
        "{} bytes, {} tensors, {FILES} files, {} threads, {} stores",
        data.total,
        data.tensors.len(),
        cores(),
        streaming_kernel()
    );
    warm_cache(&data);
    data.digests = digests(&data);
    if wanted("warm") {
        cases::warm(&data, memory, rounds)?;
    }
    if wanted("small") {
        cases::small(&data, memory, rounds);
    }
    if wanted("shards") {
        cases::shards(&data, memory, rounds);
    }
    if wanted("cold") {
        cases::cold(&data, memory, rounds.min(5));
    }
    Ok(())
}
