//! Copies that write around the cache (non-temporal stores).
#![allow(unsafe_code)] // Vector intrinsics on raw memory: this is one of the few places that need it.

/// Streaming stores write whole lines without reading them first. Four places of the copy advance together: that keeps
/// more DRAM pages and line buffers busy than one sequential walk, and is a third faster where it was measured.
#[cfg(target_arch = "x86_64")]
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
            /// # Safety
            /// The CPU has the feature; `dst` is aligned to [`LINE`]; `len` is a multiple of it; both are valid for
            /// `len` bytes and do not overlap.
            #[target_feature(enable = $feature)]
            #[expect(clippy::cast_ptr_alignment, reason = "the caller vouches for the alignment")]
            pub unsafe fn $name(mut dst: *mut u8, mut src: *const u8, mut len: usize) {
                const WIDTH: usize = size_of::<$vector>();
                // SAFETY: every access is at an offset below `len`, by the loop bounds; the loads are unaligned ones
                // and the stores are aligned because `dst` is and all offsets are multiples of LINE or WIDTH.
                unsafe {
                    while len >= 4 * LINE {
                        let step = (len / 4 / LINE * LINE).min(STEP);
                        let mut at = 0;
                        while at < step {
                            for place in 0..4 {
                                let offset = place * step + at;
                                for i in 0..LINE / WIDTH {
                                    let line = $load(src.add(offset + i * WIDTH).cast());
                                    $store(dst.add(offset + i * WIDTH).cast::<$vector>(), line);
                                }
                            }
                            at += LINE;
                        }
                        (dst, src, len) = (dst.add(4 * step), src.add(4 * step), len - 4 * step);
                    }
                    for i in 0..len / WIDTH {
                        $store(
                            dst.add(i * WIDTH).cast::<$vector>(),
                            $load(src.add(i * WIDTH).cast()),
                        );
                    }
                }
            }
        };
    }

    kernel!(avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512);
    kernel!(avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
    kernel!(sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);

    /// Makes the streaming stores of this thread visible before whatever it stores next.
    pub fn fence() {
        // SAFETY: SSE is part of every x86-64 CPU.
        unsafe { _mm_sfence() }
    }
}

/// The kernel that this machine uses, for reports.
#[must_use]
pub fn streaming_kernel() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            "avx512"
        } else if is_x86_feature_detected!("avx2") {
            "avx2"
        } else {
            "sse2"
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    "memcpy"
}

/// Copies with streaming stores where the CPU has them. Call [`fence`] before another thread may look.
///
/// # Safety
/// `dst` is valid for writes and `src` for reads of `len` bytes, and they do not overlap.
pub unsafe fn copy_unfenced(dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let head = dst.align_offset(x86::LINE).min(len);
        let body = (len - head) / x86::LINE * x86::LINE;
        // SAFETY: head + body <= len, so all three parts lie within what the caller vouches for; the body begins at an
        // aligned destination and has whole lines; each kernel runs only where its feature was detected.
        unsafe {
            std::ptr::copy_nonoverlapping(src, dst, head);
            let (to, from) = (dst.add(head), src.add(head));
            if is_x86_feature_detected!("avx512f") {
                x86::avx512(to, from, body);
            } else if is_x86_feature_detected!("avx2") {
                x86::avx2(to, from, body);
            } else {
                x86::sse2(to, from, body);
            }
            std::ptr::copy_nonoverlapping(from.add(body), to.add(body), len - head - body);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as the caller vouches.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, len);
    }
}

/// Orders this thread's streaming stores before its next stores.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
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

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_kernel_copies() {
        type Kernel = unsafe fn(*mut u8, *const u8, usize);
        let mut kernels: Vec<(&str, Kernel)> = vec![("sse2", x86::sse2)];
        if is_x86_feature_detected!("avx2") {
            kernels.push(("avx2", x86::avx2));
        }
        if is_x86_feature_detected!("avx512f") {
            kernels.push(("avx512", x86::avx512));
        }
        let src: Vec<u8> = (0..600_000u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        for (name, kernel) in kernels {
            for lines in [0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 1023, 4096, 4097, 9000] {
                let len = lines * x86::LINE;
                let mut dst = vec![0u8; len + 2 * x86::LINE];
                let skip = dst.as_ptr().align_offset(x86::LINE);
                // SAFETY: `dst` has a line to spare beyond the aligned `len` bytes; `src` is longer than any `len` + 3.
                unsafe { kernel(dst.as_mut_ptr().add(skip), src.as_ptr().add(3), len) };
                fence();
                assert!(dst[skip..skip + len] == src[3..3 + len], "{name} {len}");
                assert!(
                    dst[skip + len..].iter().all(|&b| b == 0),
                    "{name} {len} wrote past the end"
                );
            }
        }
    }

    #[test]
    fn any_alignment_and_length() {
        let src: Vec<u8> = (0..5000u32).map(|i| (i % 251) as u8).collect();
        for start in [0, 1, 31, 63, 64] {
            for len in [0, 1, 63, 64, 65, 127, 128, 300, 1000, 4500] {
                let mut dst = vec![0u8; 5000];
                // SAFETY: start + len < 5000 for both.
                unsafe { copy_streaming(dst.as_mut_ptr().add(start), src.as_ptr().add(7), len) };
                assert!(dst[start..start + len] == src[7..7 + len], "{start} {len}");
                assert!(dst[..start].iter().chain(&dst[start + len..]).all(|&b| b == 0));
            }
        }
    }
}
