//! Copies and reads with nothing around them.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use dcp_rs_core::copy::{Stores, copy_strided};
use memmap2::{MmapMut, MmapOptions, MmapRaw};

use crate::Failure;

pub const PIECE: usize = 2 << 20;
pub const PAGE: usize = 4096;
pub const READS_IN_FLIGHT: usize = 16;

#[derive(Clone, Copy)]
pub struct Address(pub *mut u8);
// SAFETY: threads touch disjoint pieces of memory that outlives them.
unsafe impl Sync for Address {}
// SAFETY: as above.
unsafe impl Send for Address {}

impl Address {
    pub fn at(self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// `length` bytes at `offset` of a file, and their place in the destination: a multiple of the
/// page.
pub struct Piece {
    pub file: usize,
    pub offset: usize,
    pub length: usize,
    pub place: usize,
}

/// The files in pieces of `size` bytes, and how large a destination is to be.
pub fn pieces<P: AsRef<Path>>(paths: &[P], size: usize) -> Result<(Vec<Piece>, usize), Failure> {
    let (mut pieces, mut place) = (vec![], 0);
    for (file, path) in paths.iter().enumerate() {
        let end = usize::try_from(std::fs::metadata(path)?.len())?;
        for offset in (0..end).step_by(size) {
            let length = size.min(end - offset);
            pieces.push(Piece { file, offset, length, place });
            place += length.next_multiple_of(PAGE);
        }
    }
    Ok((pieces, place))
}

/// The same pieces, all read to the first few places: what a disk gives to a reader that does not
/// keep it.
pub fn again(mut pieces: Vec<Piece>, size: usize) -> Vec<Piece> {
    for (i, piece) in pieces.iter_mut().enumerate() {
        piece.place = i % READS_IN_FLIGHT * size;
    }
    pieces
}

/// Memory in huge pages where the system gives them, touched.
pub fn memory(room: usize) -> Result<MmapMut, Failure> {
    let mut memory = MmapMut::map_anon(room)?;
    let _ = memory.advise(memmap2::Advice::HugePage);
    memory.fill(1);
    Ok(memory)
}

pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Seconds until `each` was called for every piece, by some threads.
pub fn timed(
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
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    Ok(start.elapsed().as_secs_f64())
}

pub fn map<P: AsRef<Path>>(paths: &[P], populate: bool) -> Result<Vec<MmapRaw>, Failure> {
    let mut options = MmapOptions::new();
    if populate {
        options.populate();
    }
    let map = |path: &P| Ok(options.map_raw_read_only(&File::open(path)?)?);
    paths.iter().map(map).collect()
}

/// Copies pieces of mapped files, on all cores.
pub fn copy(maps: &[MmapRaw], pieces: &[Piece], memory: Address) -> Result<f64, Failure> {
    let from: Vec<_> = maps.iter().map(|map| Address(map.as_mut_ptr())).collect();
    timed(cores(), pieces, |piece| {
        let (to, source) = (memory.at(piece.place), from[piece.file].at(piece.offset));
        // SAFETY: the piece lies within its mapping and within the destination, where no other
        // does.
        unsafe { copy_strided(to, source, &[], piece.length as u64, Stores::Streaming) };
        Ok(())
    })
}

/// Reads pieces of files past the page cache.
pub fn direct<P: AsRef<Path>>(
    paths: &[P],
    pieces: &[Piece],
    memory: Address,
) -> Result<f64, Failure> {
    let open = |path| OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    let start = Instant::now();
    let files: Vec<File> = paths.iter().map(open).collect::<Result<_, _>>()?;
    timed(READS_IN_FLIGHT, pieces, |piece| {
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
