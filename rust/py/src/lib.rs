//! `dcp_rs._core`: the boundary between dcp-rs-core and Python. Translates, validates, releases the GIL; decides nothing.

mod convert;
mod error;
mod index;
mod interrupt;
mod read;
mod slabs;
mod write;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::index::{FileMapping, Index};
    #[pymodule_export]
    use crate::slabs::SlabReader;
    #[pymodule_export]
    use crate::write::{Save, commit, discard, merge_indexes, next_generation, publish};

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
