//! Files that torch writes without the bytes of tensors, as a stream that Python writes to.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dcp_rs_core::foreign::{self, Filled};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::sync::MutexExt as _;

use crate::error::IntoPy as _;
use crate::panics::guarded;

/// A stream that keeps what is written to it. A range of addresses stands for bytes that come from
/// elsewhere: of a write from it, the stream keeps only the position.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Template {
    inner: Mutex<Inner>,
    address: usize,
    nbytes: usize,
}

pub struct Inner {
    pub file: foreign::Template,
    holes: Vec<Hole>,
}

/// A gap: bytes of the file that come from elsewhere, and the place of their stand-in in the range
/// of addresses.
#[derive(Clone, Copy)]
struct Hole {
    at: u64,
    place: u64,
    len: u64,
}

#[guarded]
#[pymethods]
impl Template {
    /// Makes a stream. The `nbytes` from `address` on stand for the bytes of tensors, and are never
    /// read.
    #[new]
    fn new(address: usize, nbytes: usize) -> Self {
        Self {
            inner: Mutex::new(Inner { file: foreign::Template::default(), holes: Vec::new() }),
            address,
            nbytes,
        }
    }

    fn write(&self, py: Python<'_>, data: PyBuffer<u8>) -> PyResult<usize> {
        let len = data.len_bytes();
        let place = data.buf_ptr().addr().wrapping_sub(self.address);
        if len > 0 && place < self.nbytes {
            self.lock(py).skip(place as u64, len as u64);
        } else {
            let bytes = data.to_vec(py)?;
            self.lock(py).file.append(&bytes);
        }
        Ok(len)
    }

    fn tell(&self, py: Python<'_>) -> u64 {
        self.lock(py).file.size()
    }

    /// Does nothing, since everything is in memory.
    fn flush(&self) {}

    /// Does nothing, since everything is in memory.
    fn close(&self) {}

    /// Returns (first byte in the file, distance from `address`, length) of the gaps.
    fn holes(&self, py: Python<'_>) -> Vec<(u64, u64, u64)> {
        let inner = self.lock(py);
        inner.holes.iter().map(|hole| (hole.at, hole.place, hole.len)).collect()
    }

    /// Returns (first byte in the file, length) of the bytes that it keeps.
    fn pieces(&self, py: Python<'_>) -> Vec<(u64, u64)> {
        let inner = self.lock(py);
        inner.file.pieces().map(|(at, bytes)| (at, bytes.len() as u64)).collect()
    }

    /// Enters the CRC-32 of all records of the zip archives (first byte, length). Those of `filled`
    /// (first byte, length, CRC-32), in order, are known.
    fn seal(
        &self,
        py: Python<'_>,
        path: PathBuf,
        archives: Vec<(u64, u64)>,
        filled: Vec<(u64, u64, u32)>,
        threads: usize,
    ) -> PyResult<()> {
        let filled = filled.into_iter().map(|(at, len, crc)| Filled { at, len, crc });
        let filled: Vec<Filled> = filled.collect();
        let mut inner = self.lock(py);
        let file = &mut inner.file;
        py.detach(|| file.seal(&path, &archives, &filled, threads)).into_py(py)
    }
}

impl Template {
    pub fn lock(&self, py: Python<'_>) -> MutexGuard<'_, Inner> {
        self.inner.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Adds a gap, or extends the last one: stand-in memory may come in several writes.
    fn skip(&mut self, place: u64, len: u64) {
        let at = self.file.size();
        match self.holes.last_mut() {
            Some(last) if last.at + last.len == at && last.place + last.len == place => {
                last.len += len;
            }
            _ => self.holes.push(Hole { at, place, len }),
        }
        self.file.skip(len);
    }
}
