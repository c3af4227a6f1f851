//! Copies that write around the cache (non-temporal stores).
//!
//! They need x86-64 with AVX2; other CPUs use `memcpy`. On aarch64 stores are plain. Its cores
//! detect writes of consecutive whole lines, and then no longer read the lines first. Its
//! non-temporal stores are only a hint, which has not been measured for this crate.
#![allow(unsafe_code)] // Vector intrinsics on raw memory

/// Streaming stores write whole lines without reading them first. Four positions of the copy
/// advance together. That keeps more DRAM pages and line buffers busy than one sequential walk.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use std::arch::x86_64::{
        __m256i, _mm_sfence, _mm256_loadu_si256, _mm256_setzero_si256, _mm256_stream_si256,
    };

    use super::super::walk::{Walk, even_step, walk};

    /// Bytes of a cache line, and of one step of the kernel.
    pub const LINE: usize = 64;
    /// Largest distance between the four positions.
    const STEP: usize = 64 << 10;

    /// Returns whether the CPU has the instructions.
    pub fn is_there() -> bool {
        is_x86_feature_detected!("avx2")
    }

    /// Copies a line at each of `PLACES` positions. All loads come before the stores, so that none
    /// of them waits for a store of the same line.
    ///
    /// # Safety
    /// That of [`places`], for one line.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn lines<const PLACES: usize>(
        dst: *mut u8,
        dst_step: usize,
        src: *const u8,
        src_step: usize,
    ) {
        const WIDTH: usize = size_of::<__m256i>();
        const VECTORS: usize = LINE / WIDTH;
        let mut loaded = [[_mm256_setzero_si256(); VECTORS]; PLACES];
        for (place, line) in loaded.iter_mut().enumerate() {
            for (i, vector) in line.iter_mut().enumerate() {
                // SAFETY: the caller guarantees the line. The load is unaligned.
                *vector =
                    unsafe { _mm256_loadu_si256(src.add(place * src_step + i * WIDTH).cast()) };
            }
        }
        for (place, line) in loaded.into_iter().enumerate() {
            for (i, vector) in line.into_iter().enumerate() {
                // SAFETY: the caller guarantees the line. The store is aligned, because all terms
                // of its address are.
                unsafe {
                    _mm256_stream_si256(dst.add(place * dst_step + i * WIDTH).cast(), vector);
                }
            }
        }
    }

    /// Copies `len` bytes at each of `PLACES` positions, which are `dst_step` and `src_step` bytes
    /// apart.
    ///
    /// # Safety
    /// The CPU [has the instructions](is_there). `dst`, `dst_step` and `len` are multiples of
    /// [`LINE`]. All positions are valid for `len` bytes, and sources and destinations do not
    /// overlap.
    #[target_feature(enable = "avx2")]
    pub unsafe fn places<const PLACES: usize>(
        dst: *mut u8,
        dst_step: usize,
        src: *const u8,
        src_step: usize,
        len: usize,
    ) {
        // SAFETY: `at` is below `len`, which is a whole number of lines, and the caller guarantees
        // the positions.
        let line = |at: usize| unsafe {
            lines::<PLACES>(dst.add(at), dst_step, src.add(at), src_step);
        };
        match walk::<PLACES>(dst.addr(), dst_step, src.addr(), src_step, len) {
            Walk::Up => (0..len).step_by(LINE).for_each(line),
            Walk::Down => (0..len / LINE).rev().for_each(|i| line(i * LINE)),
        }
    }

    /// Copies a run of whole lines, at four positions at a time.
    ///
    /// # Safety
    /// The CPU [has the instructions](is_there). `dst` and `len` are multiples of [`LINE`]. Both
    /// sides are valid for `len` bytes and do not overlap.
    pub unsafe fn run(mut dst: *mut u8, mut src: *const u8, mut len: usize) {
        // SAFETY: four steps are at most `len`, and a step is a whole number of lines.
        unsafe {
            while len >= 4 * LINE {
                let step = even_step(len / 4, LINE).min(STEP);
                places::<4>(dst, step, src, step, step);
                (dst, src, len) = (dst.add(4 * step), src.add(4 * step), len - 4 * step);
            }
            places::<1>(dst, 0, src, 0, len);
        }
    }

    /// Makes the streaming stores of this thread visible before its next stores.
    pub fn fence() {
        // SAFETY: SSE is part of every x86-64 CPU.
        unsafe { _mm_sfence() }
    }
}

/// Copies with streaming stores if the CPU has them. Call [`fence`] before another thread may read
/// the copy.
///
/// # Safety
/// `dst` is valid for writes and `src` for reads of `len` bytes, and they do not overlap.
pub unsafe fn copy_unfenced(dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if x86::is_there() {
        let head = dst.align_offset(x86::LINE).min(len);
        let body = (len - head) / x86::LINE * x86::LINE;
        // SAFETY: the CPU has the instructions. head + body <= len, so the caller guarantees all
        // three parts. The body begins at an aligned destination and has whole lines.
        unsafe {
            std::ptr::copy_nonoverlapping(src, dst, head);
            let (to, from) = (dst.add(head), src.add(head));
            x86::run(to, from, body);
            std::ptr::copy_nonoverlapping(from.add(body), to.add(body), len - head - body);
        }
        return;
    }
    // SAFETY: the caller guarantees it.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, len);
    }
}

/// Copies four runs that are `dst_step` and `src_step` bytes apart, like [`copy_unfenced`]. Returns
/// false and does nothing if their destinations are not at whole lines.
///
/// # Safety
/// All four runs are valid for `len` bytes, and sources and destinations do not overlap.
pub unsafe fn copy_four_unfenced(
    dst: *mut u8,
    dst_step: usize,
    src: *const u8,
    src_step: usize,
    len: usize,
) -> bool {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if x86::is_there() && dst.align_offset(x86::LINE) == 0 && dst_step.is_multiple_of(x86::LINE) {
        let body = len / x86::LINE * x86::LINE;
        // SAFETY: the CPU has the instructions. Destinations begin at lines, and `body` has whole
        // lines. The rest of each run is copied after it.
        unsafe {
            x86::places::<4>(dst, dst_step, src, src_step, body);
            if body < len {
                for i in 0..4 {
                    let (to, from) = (dst.add(i * dst_step + body), src.add(i * src_step + body));
                    std::ptr::copy_nonoverlapping(from, to, len - body);
                }
            }
        }
        return true;
    }
    let _ = (dst, dst_step, src, src_step, len);
    false
}

/// Orders this thread's streaming stores before its next stores.
pub fn fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    x86::fence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[test]
    fn four_places_at_a_time() {
        if !x86::is_there() {
            return;
        }
        let src: Vec<u8> =
            (0..100_000u32).map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
        for (len, dst_step, src_step) in
            [(0, 64, 5), (64, 64, 64), (128, 192, 131), (4096, 8192, 20_001)]
        {
            let mut dst = vec![0u8; 4 * dst_step + len + x86::LINE];
            let skip = dst.as_ptr().align_offset(x86::LINE);
            // SAFETY: the CPU has the instructions. `dst` has a spare line after the last position.
            // `src` is longer than 3 * 20,001 + 4099.
            unsafe {
                x86::places::<4>(
                    dst.as_mut_ptr().add(skip),
                    dst_step,
                    src.as_ptr().add(3),
                    src_step,
                    len,
                );
            };
            fence();
            for place in 0..4 {
                let (to, from) = (skip + place * dst_step, 3 + place * src_step);
                assert!(dst[to..to + len] == src[from..from + len], "{len} {place}");
                let gap = if place < 3 { to + len..to + dst_step } else { to + len..dst.len() };
                assert!(dst[gap].iter().all(|&b| b == 0), "{len} wrote past the end");
            }
        }
    }

    #[test]
    fn any_alignment_and_length() {
        let room: u32 = if cfg!(miri) { 1_200 } else { 500_000 };
        let src: Vec<u8> = (0..room).map(|i| (i % 251).to_le_bytes()[0]).collect();
        for start in [0, 1, 31, 63, 64] {
            let lengths = [0, 1, 63, 64, 65, 127, 128, 300, 1000, 4500, 400_000];
            for len in lengths.into_iter().filter(|len| len + 100 < src.len()) {
                let mut dst = vec![0u8; src.len()];
                // SAFETY: start + len is less than the length of both.
                unsafe { copy_unfenced(dst.as_mut_ptr().add(start), src.as_ptr().add(7), len) };
                fence();
                assert!(dst[start..start + len] == src[7..7 + len], "{start} {len}");
                assert!(dst[..start].iter().chain(&dst[start + len..]).all(|&b| b == 0));
            }
        }
    }
}
