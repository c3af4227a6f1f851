//! `dcp_rs._core`: the boundary between dcp-rs-core and Python. It translates, validates and
//! releases the GIL. It decides nothing.

#![allow(clippy::needless_pass_by_value)] // PyO3 hands arguments over by value

mod batch;
mod clean;
mod commit;
mod convert;
mod dlpack;
mod error;
mod index;
mod interrupt;
mod panics;
mod place;
mod plain;
mod read;
mod remote;
mod reuse;
mod rows;
mod sample;
mod save_item;
mod save_plan;
mod slabs;
mod sum;
mod template;
mod verify;
mod write;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::batch::Batch;
    #[pymodule_export]
    use crate::clean::{FolderLock, clean, leftovers};
    #[pymodule_export]
    use crate::commit::{commit_indexes, create_folder, discard, next_generation, publish};
    #[pymodule_export]
    #[pymodule_export]
    use crate::index::{FileMapping, Index};
    #[pymodule_export]
    use crate::panics::panic;
    #[pymodule_export]
    use crate::place::{Fingerprint, fingerprint, put_in_place, replace_index};
    #[pymodule_export]
    use crate::remote::Store;
    #[pymodule_export]
    use crate::reuse::Reuse;
    #[pymodule_export]
    use crate::rows::{
        ChunkEntry, Damage, FileEntry, Fill, Leftover, Overlap, Part, PlacedValue, ReadStats,
        TensorEntry,
    };
    #[pymodule_export]
    use crate::sample::{Sample, SharedSections, compare_samples};
    #[pymodule_export]
    use crate::save_item::SaveItem;
    #[pymodule_export]
    use crate::save_plan::{SavePlan, assign_saves};
    #[pymodule_export]
    use crate::slabs::{Copy, SlabReader};
    #[pymodule_export]
    use crate::sum::sum_regions;
    #[pymodule_export]
    use crate::template::Template;
    #[pymodule_export]
    use crate::verify::{
        available_cores, block_digest, check_no_rank_indexes, has_native_data, recover, refusal,
    };
    #[pymodule_export]
    use crate::write::Save;

    #[pymodule_init]
    #[expect(clippy::unnecessary_wraps, reason = "what PyO3 calls")]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::panics::remember_places();
        Ok(())
    }

    #[pymodule_export]
    const LOCK_NAME: &str = dcp_rs_core::store::LOCK_NAME;

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
