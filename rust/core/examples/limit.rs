//! The limit of this machine, measured on demand: what the benchmarks compare every reader and writer with.
//!
//! `limit FILE…` answers lines on stdin, words separated by tabs, with a line of JSON each:
//!
//! * `copy`: streaming stores from a populated mapping of the files, kept from the first call, on all cores;
//! * `direct`: `O_DIRECT` reads of the files, 16 in flight;
//! * `write PATH BYTES`: `O_DIRECT` writes to a new file, 4 in flight, and fsync.
//!
//! Destinations are touched before the first measurement. Figures are seconds.
#![allow(unsafe_code)] // Measures raw copies and mappings.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use dcp_rs_core::copy::copy_streaming;
use memmap2::{MmapMut, MmapOptions, MmapRaw};

const PIECE: usize = 2 << 20;
const PAGE: usize = 4096;
const READS_IN_FLIGHT: usize = 16;
const WRITES_IN_FLIGHT: usize = 4;

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Clone, Copy)]
struct Address(*mut u8);
// SAFETY: threads touch disjoint pieces of memory that outlives them.
unsafe impl Sync for Address {}
// SAFETY: as above.
unsafe impl Send for Address {}

impl Address {
    fn at(self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// `length` bytes at `offset` of a file, and their place in the destination: a multiple of the page.
struct Piece {
    file: usize,
    offset: usize,
    length: usize,
    place: usize,
}

struct Limit {
    paths: Vec<String>,
    pieces: Vec<Piece>,
    memory: MmapMut,
    kept: Vec<MmapRaw>,
}

impl Limit {
    fn new(paths: Vec<String>) -> Result<Self, Failure> {
        let (mut pieces, mut place) = (vec![], 0);
        for (file, path) in paths.iter().enumerate() {
            let size = usize::try_from(std::fs::metadata(path)?.len())?;
            for offset in (0..size).step_by(PIECE) {
                let length = PIECE.min(size - offset);
                pieces.push(Piece {
                    file,
                    offset,
                    length,
                    place,
                });
                place += length.next_multiple_of(PAGE);
            }
        }
        let mut memory = MmapMut::map_anon(place.max(PIECE))?;
        memory.fill(1);
        Ok(Self {
            paths,
            pieces,
            memory,
            kept: vec![],
        })
    }

    fn copy(&mut self) -> Result<f64, Failure> {
        if self.kept.is_empty() {
            for path in &self.paths {
                let map = MmapOptions::new().populate().map_raw_read_only(&File::open(path)?)?;
                self.kept.push(map);
            }
        }
        let memory = Address(self.memory.as_mut_ptr());
        let from: Vec<_> = self.kept.iter().map(|map| Address(map.as_mut_ptr())).collect();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        timed(cores, &self.pieces, |piece| {
            let (to, source) = (memory.at(piece.place), from[piece.file].at(piece.offset));
            // SAFETY: the piece lies within its mapping and within the destination, where no other does.
            unsafe { copy_streaming(to, source, piece.length) };
            Ok(())
        })
    }

    fn direct(&mut self) -> Result<f64, Failure> {
        let memory = Address(self.memory.as_mut_ptr());
        let open = |path| OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
        let start = Instant::now();
        let files: Vec<File> = self.paths.iter().map(open).collect::<Result<_, _>>()?;
        timed(READS_IN_FLIGHT, &self.pieces, |piece| {
            let room = piece.length.next_multiple_of(PAGE);
            // SAFETY: the piece lies within the destination, where no other does.
            let to = unsafe { std::slice::from_raw_parts_mut(memory.at(piece.place), room) };
            let mut done = 0;
            while done < piece.length {
                match files[piece.file].read_at(&mut to[done..], (piece.offset + done) as u64)? {
                    0 => return Err("a file ends early".into()),
                    n => done += n,
                }
            }
            Ok(())
        })?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn write(path: &str, bytes: usize) -> Result<f64, Failure> {
        let bytes = bytes.next_multiple_of(PAGE);
        let mut memory = MmapMut::map_anon(PIECE)?;
        memory.fill(7);
        let pieces: Vec<_> = (0..bytes)
            .step_by(PIECE)
            .map(|offset| Piece {
                file: 0,
                offset,
                length: PIECE.min(bytes - offset),
                place: 0,
            })
            .collect();
        let start = Instant::now();
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)?;
        timed(WRITES_IN_FLIGHT, &pieces, |piece| {
            Ok(file.write_all_at(&memory[..piece.length], piece.offset as u64)?)
        })?;
        file.sync_all()?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn answer(&mut self, line: &str) -> Result<f64, Failure> {
        let words: Vec<&str> = line.split('\t').collect();
        match words[..] {
            ["copy"] => self.copy(),
            ["direct"] => self.direct(),
            ["write", path, bytes] => Self::write(path, bytes.parse()?),
            _ => Err("one of: copy, direct, write PATH BYTES".into()),
        }
    }
}

/// Seconds until `each` was called for every piece, by some threads.
fn timed(
    threads: usize,
    pieces: &[Piece],
    each: impl Fn(&Piece) -> Result<(), Failure> + Sync,
) -> Result<f64, Failure> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), Failure> {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            each(piece)?;
        }
        Ok(())
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    Ok(start.elapsed().as_secs_f64())
}

fn main() -> Result<(), Failure> {
    let mut limit = Limit::new(std::env::args().skip(1).collect())?;
    let mut out = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        match limit.answer(&line?) {
            Ok(seconds) => writeln!(out, "{{\"seconds\": {seconds}}}")?,
            Err(error) => writeln!(out, "{{\"error\": {:?}}}", error.to_string())?,
        }
        out.flush()?;
    }
    Ok(())
}
