//! Views of a checkpoint that show its quantized weights as numbers.

#![allow(unsafe_code)] // a small tensor is read to a buffer

use std::path::PathBuf;
use std::sync::Arc;

use super::gather::Gather;
use crate::format::{Index, Kind, Logical, Origin, derive};
use crate::quant::{Config, Target, detect};
use crate::read::{Destination, ReadOptions};
use crate::store::{MOST_JSON, Storage};
use crate::{Control, Error, Result};

/// Returns the checkpoint with its quantized weights as tensors of `target`; `None` if it has none.
/// Finds them by `config.json` and by names.
///
/// # Errors
/// [`Error::Quantization`] for an unknown format, and for parts that are missing or do not fit;
/// those of reads.
pub fn dequantize(
    index: &Arc<Index>,
    target: Target,
    allow_external: bool,
    options: &ReadOptions,
    control: &Control,
) -> Result<Option<Index>> {
    let config = config(index, control)?;
    let found = detect(index, config, target, &mut |tensor| {
        integers(index, tensor, allow_external, options, control)
    })?;
    if found.coded.is_empty() {
        return Ok(None);
    }
    let logical: Vec<Logical> = (found.coded.into_iter())
        .map(|(name, coded)| Logical { name, origin: Origin::Coded(coded) })
        .collect();
    derive(index, &found.hidden, &logical, found.aliases).map(Some)
}

/// Reads the quantization configuration of the folder.
fn config(index: &Index, control: &Control) -> Result<Option<Config>> {
    let path: PathBuf = index.folder().join("config.json");
    let Some(json) = Storage::new(index.remote(), 1, control)?.files().read(&path, MOST_JSON)?
    else {
        return Ok(None);
    };
    Config::parse(&json).map_err(|reason| Error::Quantization {
        path,
        tensor: String::new(),
        reason,
    })
}

/// Returns the elements of a small stored tensor of `int64` or `int32`.
fn integers(
    index: &Arc<Index>,
    tensor: u32,
    allow_external: bool,
    options: &ReadOptions,
    control: &Control,
) -> Result<Vec<i64>> {
    let view = index.tensor(tensor);
    let chunks = view.chunks;
    let dtype = view.dtype.map_or("bytes", crate::Dtype::name);
    let length = (chunks.clone().count() == 1).then(|| index.chunk(chunks.start).length);
    let (Kind::Tensor, "int64" | "int32", Some(length @ 1..=64)) = (view.kind, dtype, length)
    else {
        return Err(Error::Quantization {
            path: index.path().to_owned(),
            tensor: view.name.to_owned(),
            reason: format!("it is {dtype} {:?}, and no shape", view.shape.as_slice()),
        });
    };
    let mut bytes = [0_u8; 64];
    let mut gather = Gather::new(Arc::clone(index), allow_external);
    gather.add_bytes(chunks.start, 0, length, Destination(bytes.as_mut_ptr()))?;
    // SAFETY: the buffer has room for the bytes, and nothing else uses it.
    unsafe { gather.read(options, control)? };
    let bytes = &bytes[..usize::try_from(length).unwrap_or(0)];
    Ok(if dtype == "int64" {
        (bytes.chunks_exact(8))
            .map(|n| i64::from_le_bytes([n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]]))
            .collect()
    } else {
        (bytes.chunks_exact(4))
            .map(|n| i64::from(i32::from_le_bytes([n[0], n[1], n[2], n[3]])))
            .collect()
    })
}
