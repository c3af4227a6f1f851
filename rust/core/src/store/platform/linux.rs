//! Linux: what is in the page cache, what a file lies on, direct I/O, huge pages, write-back.
#![allow(unsafe_code)] // system calls without a safe wrapper

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd as _;
use std::sync::OnceLock;

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::process::{Resource, getrlimit};

/// The flag of `open` for reads and writes past the page cache.
pub const DIRECT: Option<i32> = Some(libc::O_DIRECT);

/// Puts the bytes `[start, start + len)` of a file on the disk, without the promise that they are
/// found there after a loss of power: a sync that follows has less to wait for. `None` where the
/// file system does not do that.
pub fn write_back(file: &File, start: u64, len: u64) -> io::Result<Option<()>> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let (Ok(start), Ok(len)) = (libc::off64_t::try_from(start), libc::off64_t::try_from(len))
    else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // SAFETY: the descriptor is open, and no memory is handed over.
    if unsafe { libc::sync_file_range(file.as_raw_fd(), start, len, all) } == 0 {
        return Ok(Some(()));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::ENOSYS | libc::ESPIPE | libc::EOPNOTSUPP) => Ok(None),
        _ => Err(error),
    }
}

/// Pages looked at where the kernel only answers for one at a time.
const SAMPLES: u64 = 64;
/// Alignment of direct I/O if the file system does not state one.
const USUAL_BLOCK: u64 = 4096;
/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Magic number of overlayfs in `statfs(2)`. Its files are in the page cache of another file
/// system.
const OVERLAYFS: u32 = 0x794c_7630;

/// Bytes of `[start, end)`, which is not empty, that are in the page cache, to the page. `None`
/// where that cannot be known.
///
/// Asks `cachestat` (Linux 6.5). Where that is missing or forbidden, samples pages with reads that
/// must not wait. On an overlay the one sees nothing and the other is refused: there pages of a
/// mapping are sampled, which is the real file's.
pub fn resident_bytes(file: &File, start: u64, end: u64) -> Option<u64> {
    let page = rustix::param::page_size() as u64;
    match cached_pages(file, start, end) {
        Some(0) if kind(file) == Some(OVERLAYFS) => sample_mapping(file, start, end, page),
        Some(pages) => Some(pages.saturating_mul(page)),
        None => sample(start, end, page, |at| answers_at_once(file, at)),
    }
}

/// Pages of the system, whatever their size, that have a part of `[start, end)` in the page cache.
fn cached_pages(file: &File, start: u64, end: u64) -> Option<u64> {
    /// The same number on every architecture.
    const SYS_CACHESTAT: libc::c_long = 451;
    let range = [start, end - start];
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads two and writes five 64-bit integers (struct cachestat_range and
    // struct cachestat), and both arrays live across the call; the descriptor is open.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0)
    };
    (result == 0).then_some(counts[0])
}

/// Bytes of `[start, end)` that are resident, to judge by some of its pages.
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
        // i < 64, so the product is far from overflow for any file.
        let at = start + (pages * i / samples) * page;
        resident += u64::from(is_resident(at.min(end - 1))?);
    }
    // All of them is all of it, to the byte.
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

/// [`sample`] by `mincore`. It calls every page of a file resident that is another user's, and not
/// to be written by this one: a guess that makes the page cache be asked first.
fn sample_mapping(file: &File, start: u64, end: u64, page: u64) -> Option<u64> {
    let first = start / page * page;
    let mut options = MmapOptions::new();
    options.offset(first).len(usize::try_from(end - first).ok()?);
    let map = options.map_raw_read_only(file).ok()?;
    sample(start, end, page, |at| {
        let within = usize::try_from((at - first) / page * page).ok()?;
        let mut answer = 0u8;
        // SAFETY: the address is the first of a page of the mapping, which lives across the call;
        // one page has one byte of an answer.
        let result = unsafe {
            libc::mincore(map.as_mut_ptr().wrapping_add(within).cast(), 1, &raw mut answer)
        };
        (result == 0).then_some(answer & 1 == 1)
    })
}

/// Returns whether the file lies on a network or user-space file system. Those can stall a page
/// fault for any time or fail it with a signal, so by default they are not mapped.
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

/// The magic number of the file system that the file lies on, if that can be asked.
fn kind(file: &File) -> Option<u32> {
    let kind = rustix::fs::fstatfs(file).ok()?.f_type;
    // The field's width and sign differ by architecture; the magic numbers have 32 bits.
    u32::try_from(i128::from(kind) & 0xffff_ffff).ok()
}

/// Returns the alignment of direct reads of this file, or `None` if it takes none.
#[must_use]
pub fn direct_align(file: &File) -> Option<u64> {
    // With an empty path it is about the descriptor.
    let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(found) = found
        && found.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let align = found.stx_dio_offset_align.max(found.stx_dio_mem_align);
        return (align > 0).then(|| u64::from(align).next_power_of_two().max(512));
    }
    Some(USUAL_BLOCK)
}

/// Returns whether [`populate`] works here. Without it, a failing disk is a signal at the first
/// access.
pub fn populates() -> bool {
    static POPULATES: OnceLock<bool> = OnceLock::new();
    let try_it =
        || MmapMut::map_anon(1).is_ok_and(|page| page.advise(Advice::PopulateRead).is_ok());
    *POPULATES.get_or_init(try_it)
}

/// Maps a whole file: the mapping, how many bytes of it come before the file, and how many bytes
/// the file has.
pub fn map(file: &File) -> io::Result<(MmapRaw, usize, usize)> {
    let raw = MmapOptions::new().map_raw_read_only(file)?;
    let len = raw.len();
    // Pages of the cache are entered into the page table 2 MiB at a time where both lie alike. Most
    // file systems see to that, overlayfs does not.
    if len < HUGE_PAGE || raw.as_ptr().align_offset(HUGE_PAGE) == 0 || !has_huge_pages() {
        return Ok((raw, 0, len));
    }
    Ok(map_aligned(file, len).unwrap_or((raw, 0, len)))
}

/// [`map`], at a multiple of a huge page.
pub fn map_aligned(file: &File, len: usize) -> io::Result<(MmapRaw, usize, usize)> {
    let room = MmapOptions::new().len(len + HUGE_PAGE).no_reserve_swap().map_anon()?;
    let room = MmapRaw::from(room);
    let skip = room.as_ptr().align_offset(HUGE_PAGE);
    let at = room.as_mut_ptr().wrapping_add(skip).cast();
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: what is replaced is memory of `room` that nobody uses, and goes with it.
    let mapped = unsafe { libc::mmap(at, len, libc::PROT_READ, flags, file.as_raw_fd(), 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok((room, skip, len))
}

/// Brings a part of a mapping into memory and into the page table, or says what is wrong with it.
pub fn populate(map: &MmapRaw, start: usize, len: usize) -> io::Result<()> {
    let result = map.advise_range(Advice::PopulateRead, start, len);
    match result.as_ref().map_err(io::Error::raw_os_error) {
        // Before Linux 5.14.
        Err(Some(libc::EINVAL | libc::ENOSYS)) => Ok(()),
        _ => result,
    }
}

/// Asks for a part of a mapping to be read into the page cache. A wish.
pub fn read_ahead(map: &MmapRaw, start: usize, len: usize) {
    let _ = map.advise_range(Advice::WillNeed, start, len);
}

/// Asks for a part of memory to lie in huge pages. A wish: where it is refused the pages are small.
pub fn ask_for_huge_pages(memory: &MmapMut, start: usize, len: usize) {
    let _ = memory.advise_range(Advice::HugePage, start, len);
}

/// Bytes that this process may map yet, where `RLIMIT_AS` bounds them; 0 where that cannot be
/// known.
pub fn spare_address_space() -> Option<u64> {
    let limit = getrlimit(Resource::As).current?;
    let taken = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|pages| pages.split_whitespace().next()?.parse::<u64>().ok())
        .map(|pages| pages.saturating_mul(rustix::param::page_size() as u64));
    Some(taken.map_or(0, |taken| limit.saturating_sub(taken)))
}

/// Returns whether the system has huge pages of 2 MiB on request.
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
                // SAFETY: so many bytes are mapped from there, and nobody else has the file.
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
            // Nothing to check where the kernel does not say.
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
