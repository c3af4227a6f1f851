//! Copies that write around the cache (non-temporal stores).
//!
//! On x86-64. On aarch64 they are plain ones: its cores notice by themselves that whole lines are written one after the other, and stop reading
//! them first; its non-temporal stores are a hint on top of that, which nobody has measured for this crate.
#![allow(unsafe_code)] // Vector intrinsics on raw memory: this is one of the few places that need it.

/// Streaming stores write whole lines without reading them first. Four places of the copy advance together: that keeps
/// more DRAM pages and line buffers busy than one sequential walk, and is a third faster where it was measured.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256,
        _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
    };

    /// Bytes of a cache line, and what a step of every kernel moves.
    pub const LINE: usize = 64;
    /// How far apart the four places are at most.
    const STEP: usize = 64 << 10;

    macro_rules! kernel {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            /// Copies `len` bytes at each of `PLACES` places, `dst_step` and `src_step` bytes apart.
            ///
            /// # Safety
            /// The CPU has the feature; `dst`, `dst_step` and `len` are multiples of [`LINE`]; all places are valid for `len`
            /// bytes, and sources and destinations do not overlap.
            #[target_feature(enable = $feature)]
            #[expect(clippy::cast_ptr_alignment, reason = "the caller vouches for the alignment")]
            pub unsafe fn $name<const PLACES: usize>(
                dst: *mut u8,
                dst_step: usize,
                src: *const u8,
                src_step: usize,
                len: usize,
            ) {
                const WIDTH: usize = size_of::<$vector>();
                for at in (0..len).step_by(LINE) {
                    for place in 0..PLACES {
                        for i in 0..LINE / WIDTH {
                            let at = at + i * WIDTH;
                            // SAFETY: `at` is below `len`, a whole number of lines, and the place is the caller's. The
                            // load is an unaligned one; the store is aligned because all that adds up to it is.
                            unsafe {
                                let vector = $load(src.add(place * src_step + at).cast());
                                $store(dst.add(place * dst_step + at).cast::<$vector>(), vector);
                            }
                        }
                    }
                }
            }
        };
    }

    kernel!(avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512);
    kernel!(avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
    kernel!(sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);

    /// The best kernel that the CPU has.
    ///
    /// # Safety
    /// As the kernels, but for the feature.
    pub unsafe fn places<const PLACES: usize>(
        dst: *mut u8,
        dst_step: usize,
        src: *const u8,
        src_step: usize,
        len: usize,
    ) {
        // SAFETY: as the caller vouches; each kernel runs only where its feature was detected.
        unsafe {
            if is_x86_feature_detected!("avx512f") {
                avx512::<PLACES>(dst, dst_step, src, src_step, len);
            } else if is_x86_feature_detected!("avx2") {
                avx2::<PLACES>(dst, dst_step, src, src_step, len);
            } else {
                sse2::<PLACES>(dst, dst_step, src, src_step, len);
            }
        }
    }

    /// Copies a run of whole lines, from four places of it at a time.
    ///
    /// # Safety
    /// `dst` and `len` are multiples of [`LINE`]; both sides are valid for `len` bytes and do not overlap.
    pub unsafe fn run(mut dst: *mut u8, mut src: *const u8, mut len: usize) {
        // SAFETY: four steps are at most `len`, and a step is a whole number of lines.
        unsafe {
            while len >= 4 * LINE {
                let step = (len / 4 / LINE * LINE).min(STEP);
                places::<4>(dst, step, src, step, step);
                (dst, src, len) = (dst.add(4 * step), src.add(4 * step), len - 4 * step);
            }
            places::<1>(dst, 0, src, 0, len);
        }
    }

    /// Makes the streaming stores of this thread visible before whatever it stores next.
    pub fn fence() {
        // SAFETY: SSE is part of every x86-64 CPU.
        unsafe { _mm_sfence() }
    }
}

/// The kernel that this machine uses, for reports.
#[must_use]
pub fn streaming_kernel() -> &'static str {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        if is_x86_feature_detected!("avx512f") {
            "avx512"
        } else if is_x86_feature_detected!("avx2") {
            "avx2"
        } else {
            "sse2"
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    "memcpy"
}

/// Copies with streaming stores where the CPU has them. Call [`fence`] before another thread may look.
///
/// # Safety
/// `dst` is valid for writes and `src` for reads of `len` bytes, and they do not overlap.
pub unsafe fn copy_unfenced(dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let head = dst.align_offset(x86::LINE).min(len);
        let body = (len - head) / x86::LINE * x86::LINE;
        // SAFETY: head + body <= len, so all three parts lie within what the caller vouches for; the body begins at an
        // aligned destination and has whole lines.
        unsafe {
            std::ptr::copy_nonoverlapping(src, dst, head);
            let (to, from) = (dst.add(head), src.add(head));
            x86::run(to, from, body);
            std::ptr::copy_nonoverlapping(from.add(body), to.add(body), len - head - body);
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: as the caller vouches.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, len);
    }
}

/// Copies four runs that are `dst_step` and `src_step` bytes apart, if their destinations lie at whole lines; false, with
/// nothing done, if they do not. As [`copy_unfenced`] else.
///
/// # Safety
/// All four runs are valid for `len` bytes, and sources and destinations do not overlap.
pub unsafe fn copy_four_unfenced(dst: *mut u8, dst_step: usize, src: *const u8, src_step: usize, len: usize) -> bool {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if dst.align_offset(x86::LINE) == 0 && dst_step.is_multiple_of(x86::LINE) {
        let body = len / x86::LINE * x86::LINE;
        // SAFETY: destinations begin at lines, `body` has whole lines; what is left of each run is copied after it.
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

/// Copies `len` bytes with streaming stores where the CPU has them; complete when it returns.
///
/// # Safety
/// `dst` is valid for writes and `src` for reads of `len` bytes, and they do not overlap.
pub unsafe fn copy_streaming(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: as the caller vouches.
    unsafe { copy_unfenced(dst, src, len) };
    fence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[test]
    fn every_kernel_copies_its_places() {
        type Kernel = unsafe fn(*mut u8, usize, *const u8, usize, usize);
        let mut kernels: Vec<(&str, Kernel)> = vec![("sse2", x86::sse2::<4>)];
        if is_x86_feature_detected!("avx2") {
            kernels.push(("avx2", x86::avx2::<4>));
        }
        if is_x86_feature_detected!("avx512f") {
            kernels.push(("avx512", x86::avx512::<4>));
        }
        let src: Vec<u8> = (0..100_000u32)
            .map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0])
            .collect();
        for (name, kernel) in kernels {
            for (len, dst_step, src_step) in [(0, 64, 5), (64, 64, 64), (128, 192, 131), (4096, 8192, 20_001)] {
                let mut dst = vec![0u8; 4 * dst_step + len + x86::LINE];
                let skip = dst.as_ptr().align_offset(x86::LINE);
                // SAFETY: `dst` has a line to spare beyond what the places reach; `src` is longer than 3 * 20,001 + 4099.
                unsafe { kernel(dst.as_mut_ptr().add(skip), dst_step, src.as_ptr().add(3), src_step, len) };
                fence();
                for place in 0..4 {
                    let (to, from) = (skip + place * dst_step, 3 + place * src_step);
                    assert!(dst[to..to + len] == src[from..from + len], "{name} {len} {place}");
                    let gap = if place < 3 {
                        to + len..to + dst_step
                    } else {
                        to + len..dst.len()
                    };
                    assert!(dst[gap].iter().all(|&b| b == 0), "{name} {len} wrote past the end");
                }
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
                unsafe { copy_streaming(dst.as_mut_ptr().add(start), src.as_ptr().add(7), len) };
                assert!(dst[start..start + len] == src[7..7 + len], "{start} {len}");
                assert!(dst[..start].iter().chain(&dst[start + len..]).all(|&b| b == 0));
            }
        }
    }
}
