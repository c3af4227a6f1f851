//! Execution of a [`Strided`] copy.
#![allow(unsafe_code)] // Copies between raw memory of any origin

use smallvec::SmallVec;

use super::stream::{copy_four_unfenced, copy_unfenced, fence};
use super::{Loop, Stores};

/// Shorter runs are copied through the cache, because a streaming store only helps with whole
/// lines.
const STREAM_RUN: usize = 1024;
/// Runs of up to this length are copied four at a time, if their destinations are at whole cache
/// lines.
const FOUR_RUNS: usize = 16 << 10;
/// Side of the square of elements that a transpose processes together. Source and destination of it
/// stay in the first-level cache, also if lines that are powers of two apart share few of its sets.
const TILE: usize = 16;

/// Copies `run` bytes for every step of `loops`, which may be in any order. The copy is visible to
/// other threads when it returns.
///
/// # Safety
/// All bytes that the loops reach are valid for reads from `src` and for writes from `dst`, and the
/// two do not overlap. Every offset fits in `isize`, as a [`Strided`](super::Strided) has checked.
pub unsafe fn copy_strided(dst: *mut u8, src: *const u8, loops: &[Loop], run: u64, stores: Stores) {
    // SAFETY: the caller guarantees it.
    unsafe { copy_strided_unfenced(dst, src, loops, run, stores) };
    if stores == Stores::Streaming {
        fence();
    }
}

/// Does the same as [`copy_strided`]. Other threads may read the copy only after a [`fence`], which
/// can serve many copies.
///
/// # Safety
/// That of [`copy_strided`].
pub unsafe fn copy_strided_unfenced(
    dst: *mut u8,
    src: *const u8,
    loops: &[Loop],
    run: u64,
    stores: Stores,
) {
    let Ok(run) = usize::try_from(run) else {
        return;
    };
    let stream = stores == Stores::Streaming;
    if run == 0 {
        return;
    }
    if loops.is_empty() {
        // SAFETY: the caller guarantees it.
        unsafe { one(dst, src, run, stream && run >= STREAM_RUN) };
    } else {
        // Walk in the order of the destination: writes cost more than reads.
        let mut order: SmallVec<[Step; 4]> = loops.iter().map(Step::from).collect();
        order.sort_by_key(|l| std::cmp::Reverse((l.dst, l.src)));
        if matches!(run, 1 | 2 | 4 | 8 | 16) && order.len() > 1 {
            // If the fastest loops of source and destination differ, put them next to each other
            // for tiling.
            let fastest = (0..order.len()).min_by_key(|&i| order[i].src).unwrap_or(0);
            let last = order.len() - 1;
            if fastest < last {
                order[fastest..last].rotate_left(1);
            }
        }
        // SAFETY: the caller guarantees it, and only the order of the loops has changed.
        unsafe { nest(dst, src, &order, run, stream) };
    }
}

/// Copies one run. See [`copy_strided_unfenced`].
///
/// # Safety
/// That of [`copy_strided`], for one run.
pub unsafe fn copy_run_unfenced(dst: *mut u8, src: *const u8, run: usize, stores: Stores) {
    // SAFETY: the caller guarantees it.
    unsafe {
        one(dst, src, run, stores == Stores::Streaming && run >= STREAM_RUN);
    };
}

/// A [`Loop`] in units of memory.
#[derive(Clone, Copy)]
struct Step {
    n: usize,
    src: usize,
    dst: usize,
}

impl From<&Loop> for Step {
    fn from(l: &Loop) -> Self {
        // The steps of a loop in memory fit in a `usize`. Saturation keeps this infallible.
        let fit = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
        Self { n: fit(l.n), src: fit(l.src), dst: fit(l.dst) }
    }
}

/// # Safety
/// That of [`copy_strided`], for one run.
#[inline]
unsafe fn one(dst: *mut u8, src: *const u8, run: usize, stream: bool) {
    // SAFETY: the caller guarantees it.
    unsafe {
        if stream {
            copy_unfenced(dst, src, run);
        } else {
            std::ptr::copy_nonoverlapping(src, dst, run);
        }
    }
}

/// # Safety
/// That of [`copy_strided`].
unsafe fn nest(dst: *mut u8, src: *const u8, loops: &[Step], run: usize, stream: bool) {
    // SAFETY: every pointer is at a sum of fewer than `n` steps of each loop, which the caller
    // guarantees. Elements of 2, 4, 8 and 16 bytes are moved as unaligned integers.
    unsafe {
        match (loops, run) {
            ([inner], 1) => row::<u8>(dst, src, *inner),
            ([inner], 2) => row::<u16>(dst, src, *inner),
            ([inner], 4) => row::<u32>(dst, src, *inner),
            ([inner], 8) => row::<u64>(dst, src, *inner),
            ([inner], 16) => row::<u128>(dst, src, *inner),
            ([a, b], 1) => tiles::<u8>(dst, src, *a, *b),
            ([a, b], 2) => tiles::<u16>(dst, src, *a, *b),
            ([a, b], 4) => tiles::<u32>(dst, src, *a, *b),
            ([a, b], 8) => tiles::<u64>(dst, src, *a, *b),
            ([a, b], 16) => tiles::<u128>(dst, src, *a, *b),
            ([inner], _) => rows(dst, src, *inner, run, stream),
            ([outer, rest @ ..], _) => {
                for i in 0..outer.n {
                    nest(dst.add(i * outer.dst), src.add(i * outer.src), rest, run, stream);
                }
            }
            ([], _) => one(dst, src, run, stream && run >= STREAM_RUN),
        }
    }
}

/// # Safety
/// That of [`copy_strided`], for one loop around a run.
unsafe fn rows(dst: *mut u8, src: *const u8, inner: Step, run: usize, stream: bool) {
    let mut i = 0;
    while i < inner.n {
        // SAFETY: `i` is a step of the loop, and so are the three after it if four are left.
        unsafe {
            let (to, from) = (dst.add(i * inner.dst), src.add(i * inner.src));
            let four = stream && run <= FOUR_RUNS && inner.n - i >= 4;
            if four && copy_four_unfenced(to, inner.dst, from, inner.src, run) {
                i += 4;
            } else {
                one(to, from, run, stream && run >= STREAM_RUN);
                i += 1;
            }
        }
    }
}

/// # Safety
/// That of [`copy_strided`], for a run of one `T`.
#[inline]
unsafe fn row<T: Copy>(dst: *mut u8, src: *const u8, inner: Step) {
    for i in 0..inner.n {
        // SAFETY: the caller guarantees it. The accesses need no alignment.
        unsafe {
            let item = src.add(i * inner.src).cast::<T>().read_unaligned();
            dst.add(i * inner.dst).cast::<T>().write_unaligned(item);
        }
    }
}

/// # Safety
/// That of [`copy_strided`], for two loops around a run of one `T`.
unsafe fn tiles<T: Copy>(dst: *mut u8, src: *const u8, a: Step, b: Step) {
    for i in (0..a.n).step_by(TILE) {
        for j in (0..b.n).step_by(TILE) {
            let columns = Step { n: TILE.min(b.n - j), ..b };
            for i in i..a.n.min(i + TILE) {
                // SAFETY: the caller guarantees it: `i` and the columns from `j` are steps of the
                // two loops.
                unsafe {
                    row::<T>(
                        dst.add(i * a.dst + j * b.dst),
                        src.add(i * a.src + j * b.src),
                        columns,
                    );
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Strided;
    use super::*;
    use proptest::prelude::*;

    /// Copies byte by byte, in the order of the shape.
    fn reference(dst: &mut [u8], src: &[u8], itemsize: usize, dims: &[(usize, usize, usize)]) {
        match dims {
            [] => dst[..itemsize].copy_from_slice(&src[..itemsize]),
            [(n, s, d), rest @ ..] => {
                for i in 0..*n {
                    reference(&mut dst[i * d..], &src[i * s..], itemsize, rest);
                }
            }
        }
    }

    /// Returns destination strides that never overlap: dense in a random order of the dimensions,
    /// with padding.
    fn dense(itemsize: usize, shape: &[usize], order: &[usize], pad: usize) -> Vec<usize> {
        let mut strides = vec![0; shape.len()];
        let mut size = itemsize;
        for &d in order {
            strides[d] = size;
            size = size * shape[d] + pad;
        }
        strides
    }

    fn check(
        itemsize: usize,
        shape: &[usize],
        src_strides: &[usize],
        dst_strides: &[usize],
        stores: Stores,
    ) {
        let wide = |x: &[usize]| x.iter().map(|&v| v as u64).collect::<Vec<_>>();
        let copy =
            Strided::new(itemsize as u64, &wide(shape), &wide(src_strides), &wide(dst_strides))
                .unwrap();
        let size = |x: u64| usize::try_from(x).unwrap();
        let src: Vec<u8> =
            (0..size(copy.src_extent())).map(|i| (i * 7 + i / 251).to_le_bytes()[0]).collect();
        let mut want = vec![0u8; size(copy.dst_extent())];
        let mut got = want.clone();
        let dims: Vec<_> =
            (0..shape.len()).map(|d| (shape[d], src_strides[d], dst_strides[d])).collect();
        if !shape.contains(&0) {
            reference(&mut want, &src, itemsize, &dims);
        }
        // SAFETY: both buffers have the extents of the copy.
        unsafe {
            copy_strided(got.as_mut_ptr(), src.as_ptr(), &copy.loops, copy.run, stores);
        };
        assert!(got == want, "{itemsize} {shape:?} {src_strides:?} {dst_strides:?} {stores:?}");
    }

    #[test]
    fn copies_shapes_of_every_kind() {
        for stores in [Stores::Cached, Stores::Streaming] {
            check(4, &[], &[], &[], stores);
            check(4, &[0, 3], &[12, 4], &[12, 4], stores);
            check(2, &[100_000], &[2], &[2], stores);
            check(2, &[50, 1024], &[8192, 2], &[2048, 2], stores); // columns
            check(2, &[50, 1024], &[2048, 2], &[8192, 2], stores); // into columns
            check(2, &[51, 65], &[8191, 2], &[192, 2], stores); // lines and a little more
            for itemsize in [1, 2, 3, 4, 8, 16] {
                check(
                    itemsize,
                    &[70, 45],
                    &[itemsize, 70 * itemsize],
                    &[45 * itemsize, itemsize],
                    stores,
                );
                check(
                    itemsize,
                    &[5, 33, 40],
                    &[itemsize, 5 * itemsize, 165 * itemsize],
                    &[1320 * itemsize, 40 * itemsize, itemsize],
                    stores,
                );
                check(itemsize, &[9, 7], &[0, itemsize], &[7 * itemsize, itemsize], stores);
            }
        }
    }

    proptest! {
        #[test]
        fn equals_the_plain_loop(
            itemsize in prop::sample::select(vec![1usize, 2, 3, 4, 8, 16]),
            shape in prop::collection::vec(0usize..40, 0..4),
            src_order in Just(()).prop_perturb(|(), mut rng| rng.random::<u64>()),
            dst_order in Just(()).prop_perturb(|(), mut rng| rng.random::<u64>()),
            src_pad in 0usize..5,
            dst_pad in 0usize..5,
            streaming: bool,
        ) {
            let order = |seed: u64| {
                let mut order: Vec<usize> = (0..shape.len()).collect();
                order.sort_by_key(|&d| {
                    let seed = seed.rotate_left(17 * u32::try_from(d).unwrap());
                    seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)
                });
                order
            };
            let src = dense(itemsize, &shape, &order(src_order), src_pad);
            let dst = dense(itemsize, &shape, &order(dst_order), dst_pad);
            let stores = if streaming { Stores::Streaming } else { Stores::Cached };
            check(itemsize, &shape, &src, &dst, stores);
        }
    }
}
