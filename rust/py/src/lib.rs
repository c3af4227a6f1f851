//! `dcp_rs._core`: the boundary between dcp-rs-core and Python. Translates, validates, releases the GIL; decides nothing.

mod convert;
mod error;
mod index;
mod interrupt;
mod read;
mod save_plan;
mod tensors;
mod write;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::index::{FileMapping, Index};
    #[pymodule_export]
    use crate::save_plan::{SavePlan, assign_saves};
    #[pymodule_export]
    use crate::tensors::Torch;
    #[pymodule_export]
    use crate::write::{Save, commit_indexes, discard, next_generation};

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
