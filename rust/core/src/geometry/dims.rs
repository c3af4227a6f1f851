//! Sizes, offsets and strides: how many elements, how many bytes, and whether they are one run.

/// Sizes, offsets or strides, one for each dimension.
pub type Dims = smallvec::SmallVec<[u64; 4]>;

/// The number of elements of a shape, unless it overflows.
pub fn element_count(sizes: &[u64]) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    sizes.iter().try_fold(1_u64, |n, &size| n.checked_mul(size))
}

/// The bytes that a strided rectangle spans, from its first element to just past its last, unless
/// that overflows.
pub fn strided_length(sizes: &[u64], strides: &[u64], itemsize: u64) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    let mut last = 0_u64;
    for (&size, &stride) in sizes.iter().zip(strides) {
        last = last.checked_add((size - 1).checked_mul(stride)?)?;
    }
    last.checked_add(1)?.checked_mul(itemsize)
}

/// Strides in elements of a contiguous rectangle.
pub fn row_major(sizes: &[u64]) -> Dims {
    let mut strides = Dims::from_elem(1, sizes.len());
    for d in (1..sizes.len()).rev() {
        strides[d - 1] = strides[d] * sizes[d];
    }
    strides
}

/// Returns whether elements in row-major order follow each other.
pub fn is_run(sizes: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1;
    sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == expected;
        expected *= size;
        fits
    })
}
