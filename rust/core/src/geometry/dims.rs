//! Sizes, offsets and strides: numbers of elements and bytes, and contiguity.

/// Sizes, offsets or strides, one for each dimension.
pub type Dims = smallvec::SmallVec<[u64; 4]>;

/// Returns the number of elements of a shape; `None` if it overflows.
pub fn element_count(sizes: &[u64]) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    sizes.iter().try_fold(1_u64, |n, &size| n.checked_mul(size))
}

/// Returns the bytes of a strided rectangle from its first element to just past its last; `None` if
/// they overflow.
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

/// Returns the strides of a contiguous rectangle in elements.
pub fn row_major(sizes: &[u64]) -> Dims {
    let mut strides = Dims::from_elem(1, sizes.len());
    for d in (1..sizes.len()).rev() {
        strides[d - 1] = strides[d] * sizes[d];
    }
    strides
}

/// Returns whether elements in row-major order are consecutive.
pub fn is_run(sizes: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1;
    sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == expected;
        expected *= size;
        fits
    })
}
