//! The C exchange API of `dlpack.h`, version 1: torch (2.10 and newer) describes a tensor in one
//! call, without a Python object for each answer.
//!
//! The structures are those of the header, field by field. Only one function of the table is
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

/// Code, bits, and lanes (two bytes).
pub type ElementType = [u8; 4];

/// Returns whether only one of torch's dtypes has this element type. Integers of a few bits share
/// the element type of 8-bit integers. torch has two complex types of 32 bits, and so far refuses
/// to describe one of them.
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
    /// Type and number of the device.
    device: [i32; 2],
    ndim: i32,
    dtype: ElementType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLPackDLTensorFromPyObjectNoSync`. Returns 0, or -1 with an exception set.
type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// The function cannot describe a tensor, such as a sparse or meta tensor. Its exception is
/// discarded.
pub struct Refused;

/// `DLPack` functions of a class of tensors.
pub struct Exchange {
    describe: Describe,
}

impl Exchange {
    /// Returns the functions of `class`, if it has those of this version.
    pub fn of(class: &Bound<'_, PyAny>) -> Option<Self> {
        let found = class.getattr(intern!(class.py(), "__dlpack_c_exchange_api__")).ok()?;
        let table =
            found.cast::<PyCapsule>().ok()?.pointer_checked(Some(c"dlpack_exchange_api")).ok()?;
        // SAFETY: a capsule of this name points to a table that lives as long as the process. All
        // tables of version 1 begin with these fields.
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
        // SAFETY: the tensor is of the class, and the function writes to `found` only.
        if unsafe { (self.describe)(tensor.as_ptr().cast(), found.as_mut_ptr()) } != 0 {
            drop(PyErr::take(tensor.py()));
            return Err(Refused);
        }
        // SAFETY: the function has filled it, and zeros would be valid as well.
        let found = unsafe { found.assume_init() };
        // SAFETY: nothing else runs before the memory it points to is copied.
        Ok((found.device[0] == CPU).then(|| unsafe { found.layout() }).flatten())
    }
}

impl DlTensor {
    /// # Safety
    /// The tensor that this describes is alive.
    unsafe fn layout(&self) -> Option<(ElementType, Layout)> {
        let ndim = usize::try_from(self.ndim).ok()?;
        // SAFETY: the tensor has `ndim` sizes and strides.
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

/// Copies sizes or strides; returns `None` if `first` is null or if one is negative.
///
/// # Safety
/// If `first` is not null, it points to `count` numbers.
unsafe fn dims(first: *const i64, count: usize) -> Option<Dims> {
    if count == 0 {
        return Some(Dims::new());
    }
    if first.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees it.
    let all = unsafe { std::slice::from_raw_parts(first, count) };
    all.iter().map(|&size| u64::try_from(size).ok()).collect()
}
