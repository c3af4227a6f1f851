//! What the kernel knows of a file: how much of it is in the page cache, what it lies on, and what direct I/O asks for.
#![allow(unsafe_code)] // System calls without a safe wrapper: cachestat, fstatfs, statx, preadv2.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const PAGE: u64 = 4096;
/// Pages looked at where the kernel only answers for one at a time.
const SAMPLES: u64 = 64;

/// Bytes of `[start, end)` that are in the page cache, to the page. `None` where that cannot be known.
///
/// Asks `cachestat` (Linux 6.5). Where that is missing or forbidden, samples pages with reads that must not wait.
/// `mincore` would not do: it calls every page of another user's file resident.
#[must_use]
pub fn resident_bytes(file: &File, start: u64, end: u64) -> Option<u64> {
    if start >= end {
        return Some(0);
    }
    cachestat(file, start, end)
        .or_else(|| sample(file, start, end))
        .map(|bytes| bytes.min(end - start))
}

#[cfg(target_os = "linux")]
fn cachestat(file: &File, start: u64, end: u64) -> Option<u64> {
    /// The same number on every architecture.
    const SYS_CACHESTAT: libc::c_long = 451;
    let range = [start, end - start];
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads two and writes five 64-bit integers (struct cachestat_range and struct cachestat), and
    // both arrays live across the call; the descriptor is open.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0) };
    (result == 0).then(|| counts[0].saturating_mul(PAGE))
}

#[cfg(target_os = "linux")]
fn sample(file: &File, start: u64, end: u64) -> Option<u64> {
    let pages = (end - start).div_ceil(PAGE);
    let samples = pages.min(SAMPLES);
    let mut resident = 0;
    for i in 0..samples {
        // i < 64, so the product is far from overflow for any file.
        let at = start + (pages * i / samples) * PAGE;
        let mut byte = 0u8;
        let iov = libc::iovec {
            iov_base: (&raw mut byte).cast(),
            iov_len: 1,
        };
        let offset = libc::off_t::try_from(at.min(end - 1)).ok()?;
        // SAFETY: the one iovec names one writable byte that lives across the call; the descriptor is open.
        let n = unsafe { libc::preadv2(file.as_raw_fd(), &raw const iov, 1, offset, libc::RWF_NOWAIT) };
        if n == 1 {
            resident += 1;
        } else if n < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN) {
            return None;
        }
    }
    Some((end - start) / samples * resident)
}

#[cfg(not(target_os = "linux"))]
fn cachestat(_: &File, _: u64, _: u64) -> Option<u64> {
    None
}

#[cfg(not(target_os = "linux"))]
fn sample(_: &File, _: u64, _: u64) -> Option<u64> {
    None
}

/// Whether the file lies on a network or user-space file system: those can stall a page fault for as long as they
/// like or fail it with a signal, so they are never mapped unasked.
#[must_use]
pub fn is_remote(file: &File) -> bool {
    #[cfg(target_os = "linux")]
    {
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
        let mut stat = std::mem::MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: the kernel writes one `struct statfs`; the descriptor is open.
        if unsafe { libc::fstatfs(file.as_raw_fd(), stat.as_mut_ptr()) } != 0 {
            return true;
        }
        // SAFETY: the call succeeded, so the structure was filled.
        let kind = unsafe { stat.assume_init() }.f_type;
        // The field's width differs by architecture; the magic numbers have 32 bits.
        REMOTE
            .iter()
            .any(|&magic| i128::from(kind) & 0xffff_ffff == i128::from(magic))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

/// What offsets and lengths of direct reads of this file must be multiples of, or `None` where it takes none.
#[must_use]
pub fn direct_align(file: &File) -> Option<u64> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let mut stat = std::mem::MaybeUninit::<libc::statx>::zeroed();
        // SAFETY: an empty path with AT_EMPTY_PATH names the open descriptor; the kernel writes one `struct statx`.
        let result = unsafe {
            libc::statx(
                file.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                libc::STATX_DIOALIGN,
                stat.as_mut_ptr(),
            )
        };
        if result == 0 {
            // SAFETY: zeroed before, and filled by the call: every bit pattern is valid.
            let stat = unsafe { stat.assume_init() };
            if stat.stx_mask & libc::STATX_DIOALIGN != 0 {
                let align = stat.stx_dio_offset_align.max(stat.stx_dio_mem_align);
                return (align > 0).then(|| u64::from(align).next_power_of_two().max(512));
            }
        }
    }
    let _ = file;
    cfg!(target_os = "linux").then_some(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_just_written_is_resident() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        for got in [resident_bytes(&file, 0, 1 << 20), sample(&file, 0, 1 << 20)] {
            // Nothing to check where the kernel does not say.
            assert!(got.is_none_or(|bytes| bytes > 1 << 19), "{got:?}");
        }
        assert_eq!(resident_bytes(&file, 5, 5), Some(0));
        assert!(direct_align(&file).is_none_or(u64::is_power_of_two));
        let _ = is_remote(&file);
    }
}
