//! The C exchange API of `dlpack.h`, version 1: what torch (2.10 and newer) says of a tensor in one
//! call, without a Python object for every answer.
//!
//! The structures are those of the header, field by field; of the table only the one function is
//! called.

#![allow(unsafe_code)] // a table of C functions

use std::ffi::{c_int, c_void};

use dcp_rs_core::geometry::{Dims, is_run, row_major};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::plain::Layout;

const MAJOR: u32 = 1;
/// `kDLCPU`.
const CPU: i32 = 1;

/// Code, bits and lanes.
pub type ElementType = [u8; 4];

/// Returns whether only one of torch's dtypes has this element type. Integers of a few bits share
/// it with those of 8 bits, and one of two complex types of 32 bits is refused so far.
pub const fn is_one_dtype([code, bits, ..]: ElementType) -> bool {
    const INT: u8 = 0;
    const UINT: u8 = 1;
    const COMPLEX: u8 = 5;
    !matches!((code, bits), (INT | UINT, 8) | (COMPLEX, 32))
}

#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    share: *const c_void,
    take: *const c_void,
    describe: Option<Describe>,
    stream: *const c_void,
}

#[repr(C)]
struct DlTensor {
    data: *const c_void,
    /// Its kind, and its number.
    device: [i32; 2],
    ndim: i32,
    dtype: ElementType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLPackDLTensorFromPyObjectNoSync`: 0, or -1 with an exception.
type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// It has nothing to say of a tensor, as of a sparse one, or of one on the meta device, and has
/// raised.
pub struct Refused;

/// `DLPack` functions of a class of tensors.
pub struct Exchange {
    describe: Describe,
}

impl Exchange {
    /// Returns those of `class`, if it has some of this version.
    pub fn of(class: &Bound<'_, PyAny>) -> Option<Self> {
        let found = class.getattr(intern!(class.py(), "__dlpack_c_exchange_api__")).ok()?;
        let table =
            found.cast::<PyCapsule>().ok()?.pointer_checked(Some(c"dlpack_exchange_api")).ok()?;
        // SAFETY: a capsule of this name points to a table that stays for as long as the process
        // does; all of version 1 begin with these fields.
        let table = unsafe { table.cast::<Table>().as_ref() };
        (table.major == MAJOR).then_some(Self { describe: table.describe? })
    }

    /// Returns the element type and layout of a tensor of the class; `None` if it is not in host
    /// memory.
    pub fn layout(
        &self,
        tensor: &Bound<'_, PyAny>,
    ) -> Result<Option<(ElementType, Layout)>, Refused> {
        let mut found = std::mem::MaybeUninit::<DlTensor>::zeroed();
        // SAFETY: the tensor is of the class, and `found` is all that is written to.
        if unsafe { (self.describe)(tensor.as_ptr().cast(), found.as_mut_ptr()) } != 0 {
            drop(PyErr::take(tensor.py()));
            return Err(Refused);
        }
        // SAFETY: it has been filled, and zeros would be valid as well.
        let found = unsafe { found.assume_init() };
        // SAFETY: nothing runs before what it points to is copied.
        Ok((found.device[0] == CPU).then(|| unsafe { found.layout() }).flatten())
    }
}

impl DlTensor {
    /// # Safety
    /// The tensor that it describes is there.
    unsafe fn layout(&self) -> Option<(ElementType, Layout)> {
        let ndim = usize::try_from(self.ndim).ok()?;
        // SAFETY: `ndim` sizes and strides, which are the tensor's own.
        let (shape, strides) = unsafe { (dims(self.shape, ndim)?, dims(self.strides, ndim)?) };
        let is_contiguous = shape.contains(&0) || is_run(&shape, &strides);
        let layout = Layout {
            strides: if is_contiguous { row_major(&shape) } else { strides },
            shape,
            address: self.data.addr() + usize::try_from(self.byte_offset).ok()?,
        };
        Some((self.dtype, layout))
    }
}

/// Sizes or strides; `None` if there are none, or one is negative.
///
/// # Safety
/// There are `count` of them at `first`, if it is not null.
unsafe fn dims(first: *const i64, count: usize) -> Option<Dims> {
    if count == 0 {
        return Some(Dims::new());
    }
    if first.is_null() {
        return None;
    }
    // SAFETY: as above.
    let all = unsafe { std::slice::from_raw_parts(first, count) };
    all.iter().map(|&size| u64::try_from(size).ok()).collect()
}
