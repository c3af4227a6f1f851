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
    use crate::{
        batch::Batch,
        clean::{FolderLock, clean, leftovers},
        commit::{commit_indexes, create_folder, discard, next_generation, publish},
        index::{FileMapping, Index},
        panics::panic,
        place::{Fingerprint, fingerprint, put_in_place, replace_index},
        remote::Store,
        reuse::Reuse,
        rows::{
            ChunkEntry, Damage, FileEntry, Fill, Leftover, Overlap, Part, PlacedValue, ReadStats,
            TensorEntry,
        },
        sample::{Sample, SharedSections, compare_samples},
        save_item::SaveItem,
        save_plan::{SavePlan, assign_saves},
        slabs::{Copy, SlabReader},
        sum::sum_regions,
        template::Template,
        verify::{
            available_cores, block_digest, check_no_rank_indexes, has_native_data, recover, refusal,
        },
        write::Save,
    };

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
