//! Views of a checkpoint that show its quantized weights as numbers.

#![allow(unsafe_code)] // small tensors are read to a buffer

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde_json::Value;

use super::gather::Gather;
use crate::foreign::safetensors;
use crate::format::{Index, Logical, Origin, SourceKind, derive};
use crate::quant::{About, Config, Target, detect, small_parts};
use crate::read::{Destination, ReadOptions};
use crate::store::{Files, MOST_JSON, Storage};
use crate::{Control, Error, Result, json};

/// Returns the checkpoint with its quantized weights as tensors of `target`; `None` if it has none.
/// Finds them by the configuration and by names.
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
    let storage = Storage::new(index.remote(), 1, control)?;
    let config = config(index, storage.files())?;
    // ComfyUI writes single files. The files of a model with a configuration can be many.
    let layers = if config.is_none() || index.file_count() == 1 {
        layers(index, storage.files())?
    } else {
        BTreeMap::new()
    };
    let small = read_small(index, small_parts(index), allow_external, options, control)?;
    let found = detect(index, About { config, small, layers }, target)?;
    if found.coded.is_empty() {
        return Ok(None);
    }
    let logical: Vec<Logical> = (found.coded.into_iter())
        .map(|(name, coded)| Logical { name, origin: Origin::Coded(coded) })
        .collect();
    derive(index, &found.hidden, &logical, found.aliases).map(Some)
}

/// Reads the quantization configuration of the folder.
fn config(index: &Index, files: Files<'_>) -> Result<Option<Config>> {
    for name in Config::FILES {
        let path = index.folder().join(name);
        let Some(text) = files.read(&path, MOST_JSON)? else { continue };
        let config = Config::parse(&text).map_err(|reason| Error::Quantization {
            path,
            tensor: String::new(),
            reason,
        })?;
        if config.is_some() {
            return Ok(config);
        }
    }
    Ok(None)
}

/// Reads `ComfyUI`'s descriptions of layers in the headers of safetensors files.
fn layers(index: &Index, files: Files<'_>) -> Result<BTreeMap<String, Value>> {
    let mut layers = BTreeMap::new();
    if index.source() != SourceKind::Safetensors {
        return Ok(layers);
    }
    for file in 0..index.file_count() {
        let path = index.folder().join(index.file(file).name);
        let (_, header) = safetensors::read_header(files, &path)?;
        let Some(text) = header.metadata.get("_quantization_metadata") else { continue };
        let bad = |reason: String| Error::Quantization {
            path: path.clone(),
            tensor: String::new(),
            reason: format!("_quantization_metadata {reason}"),
        };
        let about = json::parse(text.as_bytes()).map_err(|e| bad(format!("is no JSON: {e}")))?;
        let of_layers = about["layers"].as_object().ok_or_else(|| bad("has no layers".into()))?;
        layers.extend(of_layers.iter().map(|(layer, about)| (layer.clone(), about.clone())));
    }
    Ok(layers)
}

/// Most bytes of a small tensor.
const SMALL: u64 = 4096;

/// Reads small stored tensors in one batch.
fn read_small(
    index: &Arc<Index>,
    tensors: Vec<u32>,
    allow_external: bool,
    options: &ReadOptions,
    control: &Control,
) -> Result<HashMap<u32, Vec<u8>>> {
    let mut gather = Gather::new(Arc::clone(index), allow_external);
    let mut small = HashMap::with_capacity(tensors.len());
    for tensor in tensors {
        let view = index.tensor(tensor);
        let chunks = view.chunks.clone();
        let length = (chunks.clone().count() == 1).then(|| index.chunk(chunks.start).length);
        let Some(length @ 1..=SMALL) = length else {
            return Err(Error::Quantization {
                path: index.path().to_owned(),
                tensor: view.name.to_owned(),
                reason: format!(
                    "it has the shape {:?}, but must describe a weight in 1 to {SMALL} bytes; load \
                     the stored codes instead (without dequantize=)",
                    view.shape.as_slice()
                ),
            });
        };
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        gather.add_bytes(chunks.start, 0, length, Destination(bytes.as_mut_ptr()))?;
        small.insert(tensor, bytes);
    }
    // SAFETY: each buffer has room for its bytes, stays where it is in the map, and nothing else
    // uses it.
    unsafe { gather.read(options, control)? };
    Ok(small)
}
