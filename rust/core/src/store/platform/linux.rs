//! Linux: residency in the page cache, kinds of file systems, direct I/O, huge pages, write-back.
#![allow(unsafe_code)] // system calls without a safe wrapper

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd as _;
use std::sync::OnceLock;

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::process::{Resource, getrlimit};

/// Flag of `open` for direct I/O.
pub const DIRECT: Option<i32> = Some(libc::O_DIRECT);

/// Writes the bytes `[start, start + len)` of a file to the disk, so that a later sync has less to
/// do. They are not yet durable. Returns `None` if the file system does not support it.
pub fn write_back(file: &File, start: u64, len: u64) -> io::Result<Option<()>> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let (Ok(start), Ok(len)) = (libc::off64_t::try_from(start), libc::off64_t::try_from(len))
    else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // SAFETY: the descriptor is open, and no memory is passed.
    if unsafe { libc::sync_file_range(file.as_raw_fd(), start, len, all) } == 0 {
        return Ok(Some(()));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::ENOSYS | libc::ESPIPE | libc::EOPNOTSUPP) => Ok(None),
        _ => Err(error),
    }
}

/// Pages to sample if the kernel only answers for one page at a time.
const SAMPLES: u64 = 64;
/// Alignment of direct I/O if the file system does not report one.
const USUAL_BLOCK: u64 = 4096;
/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Magic number of overlayfs in `statfs(2)`. The page cache of its files belongs to another file
/// system.
const OVERLAYFS: u32 = 0x794c_7630;

/// Returns the bytes of `[start, end)`, which is not empty, that are in the page cache, rounded to
/// pages; `None` if that is unknown.
///
/// Asks `cachestat` (Linux 6.5). If it is missing or forbidden, samples pages with reads that must
/// not wait. On an overlay, `cachestat` sees nothing and such reads are refused. There it samples
/// pages of a mapping, which belongs to the underlying file.
pub fn resident_bytes(file: &File, start: u64, end: u64) -> Option<u64> {
    let page = rustix::param::page_size() as u64;
    match cached_pages(file, start, end) {
        Some(0) if kind(file) == Some(OVERLAYFS) => sample_mapping(file, start, end, page),
        Some(pages) => Some(pages.saturating_mul(page)),
        None => sample(start, end, page, |at| answers_at_once(file, at)),
    }
}

/// Returns the number of system pages, whatever their size, that hold a part of `[start, end)` in
/// the page cache.
fn cached_pages(file: &File, start: u64, end: u64) -> Option<u64> {
    /// Number of the system call, the same on every architecture.
    const SYS_CACHESTAT: libc::c_long = 451;
    let range = [start, end - start];
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads two and writes five 64-bit integers (struct cachestat_range and
    // struct cachestat). Both arrays live across the call, and the descriptor is open.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0)
    };
    (result == 0).then_some(counts[0])
}

/// Estimates the resident bytes of `[start, end)` from some of its pages.
fn sample(
    start: u64,
    end: u64,
    page: u64,
    is_resident: impl Fn(u64) -> Option<bool>,
) -> Option<u64> {
    let pages = (end - start).div_ceil(page);
    let samples = pages.min(SAMPLES);
    let mut resident = 0;
    for i in 0..samples {
        // i < 64, so the product cannot overflow for any file.
        let at = start + (pages * i / samples) * page;
        resident += u64::from(is_resident(at.min(end - 1))?);
    }
    // If all samples are resident, this is exact.
    u64::try_from(u128::from(end - start) * u128::from(resident) / u128::from(samples)).ok()
}

/// Returns whether the byte at `at` can be read without waiting for a disk.
fn answers_at_once(file: &File, at: u64) -> Option<bool> {
    let mut byte = [0u8];
    match preadv2(file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT) {
        Ok(read) => Some(read == 1),
        Err(error) => (error == Errno::AGAIN).then_some(false),
    }
}

/// Does the same as [`sample`], with `mincore`. For a file that this user neither owns nor may
/// write, `mincore` calls every page resident. The page cache is then merely tried first.
fn sample_mapping(file: &File, start: u64, end: u64, page: u64) -> Option<u64> {
    let first = start / page * page;
    let mut options = MmapOptions::new();
    options.offset(first).len(usize::try_from(end - first).ok()?);
    let map = options.map_raw_read_only(file).ok()?;
    sample(start, end, page, |at| {
        let within = usize::try_from((at - first) / page * page).ok()?;
        let mut answer = 0u8;
        // SAFETY: the address is the start of a page of the mapping, which lives across the call.
        // The answer for one page is one byte.
        let result = unsafe {
            libc::mincore(map.as_mut_ptr().wrapping_add(within).cast(), 1, &raw mut answer)
        };
        (result == 0).then_some(answer & 1 == 1)
    })
}

/// Drops the file's cached pages that are on the disk, so that the next read asks a file server.
pub fn drop_cached(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

/// Returns whether the file is on a network or user-space file system. Those can stall a page fault
/// for any time, or fail it with a signal, so by default they are not mapped.
#[must_use]
pub fn is_remote(file: &File) -> bool {
    /// Magic numbers of `statfs(2)` and the kernel's `magic.h`.
    const REMOTE: [u32; 14] = [
        0x0000_6969, // NFS
        0x0000_517b, // SMB
        0xff53_4d42, // CIFS
        0xfe53_4d42, // SMB2
        0x6573_5546, // FUSE, virtiofs
        0x0102_1997, // 9P
        0x5346_414f, // AFS
        0x6b41_4653, // kAFS
        0x7375_7245, // Coda
        0x00c3_6400, // Ceph
        0x0bd0_0bd0, // Lustre
        0x4750_4653, // GPFS
        0x1983_0326, // BeeGFS
        0x0131_11a8, // IBRIX
    ];
    kind(file).is_none_or(|kind| REMOTE.contains(&kind))
}

/// Returns the magic number of the file's file system, if it is known.
fn kind(file: &File) -> Option<u32> {
    let kind = rustix::fs::fstatfs(file).ok()?.f_type;
    // The width and sign of the field differ by architecture. The magic numbers have 32 bits.
    u32::try_from(i128::from(kind) & 0xffff_ffff).ok()
}

/// Returns the alignment of direct reads of this file; `None` if it does not support them.
#[must_use]
pub fn direct_align(file: &File) -> Option<u64> {
    // An empty path refers to the descriptor.
    let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(found) = found
        && found.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let align = found.stx_dio_offset_align.max(found.stx_dio_mem_align);
        return (align > 0).then(|| u64::from(align).next_power_of_two().max(512));
    }
    Some(USUAL_BLOCK)
}

/// Returns whether [`populate`] works here. Without it, a failing disk causes a signal at the first
/// access.
pub fn populates() -> bool {
    static POPULATES: OnceLock<bool> = OnceLock::new();
    let try_it =
        || MmapMut::map_anon(1).is_ok_and(|page| page.advise(Advice::PopulateRead).is_ok());
    *POPULATES.get_or_init(try_it)
}

/// Maps a whole file. Returns the mapping, the number of its bytes before the file, and the length
/// of the file.
pub fn map(file: &File) -> io::Result<(MmapRaw, usize, usize)> {
    let raw = MmapOptions::new().map_raw_read_only(file)?;
    let len = raw.len();
    // The kernel enters cache pages into the page table 2 MiB at a time, if file and mapping are
    // aligned alike. Most file systems align a mapping, but overlayfs does not.
    if len < HUGE_PAGE || raw.as_ptr().align_offset(HUGE_PAGE) == 0 || !has_huge_pages() {
        return Ok((raw, 0, len));
    }
    Ok(map_aligned(file, len).unwrap_or((raw, 0, len)))
}

/// Does the same as [`map`], at a multiple of a huge page.
pub fn map_aligned(file: &File, len: usize) -> io::Result<(MmapRaw, usize, usize)> {
    let room = MmapOptions::new().len(len + HUGE_PAGE).no_reserve_swap().map_anon()?;
    let room = MmapRaw::from(room);
    let skip = room.as_ptr().align_offset(HUGE_PAGE);
    let at = room.as_mut_ptr().wrapping_add(skip).cast();
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: this replaces memory of `room`, which nothing uses and which is unmapped with it.
    let mapped = unsafe { libc::mmap(at, len, libc::PROT_READ, flags, file.as_raw_fd(), 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok((room, skip, len))
}

/// Loads a part of a mapping into memory and into the page table, or returns the error.
pub fn populate(map: &MmapRaw, start: usize, len: usize) -> io::Result<()> {
    let result = map.advise_range(Advice::PopulateRead, start, len);
    match result.as_ref().map_err(io::Error::raw_os_error) {
        // Before Linux 5.14.
        Err(Some(libc::EINVAL | libc::ENOSYS)) => Ok(()),
        _ => result,
    }
}

/// Asks the system to read a part of a mapping into the page cache. It may ignore this.
pub fn read_ahead(map: &MmapRaw, start: usize, len: usize) {
    let _ = map.advise_range(Advice::WillNeed, start, len);
}

/// Asks the system to use huge pages for a part of memory. It may use small pages.
pub fn ask_for_huge_pages(memory: &MmapMut, start: usize, len: usize) {
    let _ = memory.advise_range(Advice::HugePage, start, len);
}

/// Returns the bytes of address space that this process can still map; `None` if `RLIMIT_AS` sets
/// no limit, 0 if the used part is unknown.
pub fn spare_address_space() -> Option<u64> {
    let limit = getrlimit(Resource::As).current?;
    let taken = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|pages| pages.split_whitespace().next()?.parse::<u64>().ok())
        .map(|pages| pages.saturating_mul(rustix::param::page_size() as u64));
    Some(taken.map_or(0, |taken| limit.saturating_sub(taken)))
}

/// Returns whether the system may have huge pages of 2 MiB: they go with pages of 4 KiB.
pub fn has_huge_pages() -> bool {
    rustix::param::page_size() == 4096
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn wherever_it_is_mapped_it_is_the_file() {
        for len in [1, 4097, HUGE_PAGE - 1, HUGE_PAGE, 5 * HUGE_PAGE / 2 + 3] {
            let mut file = tempfile::tempfile().unwrap();
            let bytes: Vec<u8> = (0..len).map(|i| (i % 251).to_le_bytes()[0]).collect();
            file.write_all(&bytes).unwrap();
            for (raw, skip, mapped) in [map(&file).unwrap(), map_aligned(&file, len).unwrap()] {
                assert_eq!(mapped, len);
                populate(&raw, skip, len).unwrap();
                // SAFETY: `len` bytes are mapped at this address, and nothing else uses the file.
                let got = unsafe { std::slice::from_raw_parts(raw.as_ptr().add(skip), len) };
                assert!(got == bytes);
            }
        }
    }

    #[test]
    fn all_ways_to_ask_see_a_file_that_was_just_written() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        let page = rustix::param::page_size() as u64;
        let counted = cached_pages(&file, 0, 1 << 20).map(|pages| pages * page);
        let asked = sample(0, 1 << 20, page, |at| answers_at_once(&file, at));
        for got in [counted, asked, sample_mapping(&file, 5, 1 << 20, page)] {
            // Nothing to check if the kernel does not tell.
            assert!(got.is_none_or(|bytes| bytes > 1 << 19), "{got:?}");
        }
    }

    #[test]
    fn samples_are_spread_over_the_range_whatever_the_size_of_pages() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            let half = sample(5, 3 << 20, page, |at| Some(at < 3 << 19)).unwrap();
            assert!(half.abs_diff(3 << 19) <= 3 << 17, "{page}: {half}");
            assert_eq!(sample(5, 3 << 20, page, |_| None), None);
        }
        assert_eq!(sample(7, 8, 4096, |at| Some(at == 7)), Some(1));
        assert_eq!(sample(5, (3 << 20) + 1, 4096, |_| Some(true)), Some((3 << 20) - 4));
    }
}
