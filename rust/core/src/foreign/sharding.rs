//! `DCP_SHARDING_INFO`: the offsets of a safetensors file's chunks in their tensors, as torch's
//! writers store them.

use std::collections::HashMap;

use serde::Deserialize;

use super::fault::{Fault, FaultResult};
use crate::format::safetensors::{Header, HeaderTensor};
use crate::geometry::Dims;

const KEY: &str = "DCP_SHARDING_INFO";

/// The offsets of chunks in a header.
pub(super) struct Sharding(Option<HashMap<String, Saved>>);

#[derive(Deserialize)]
struct Saved {
    saved_offsets: Vec<u64>,
}

impl Sharding {
    /// Reads the offsets in `header`. Without them, all tensors are whole.
    pub(super) fn of(header: &Header) -> FaultResult<Self> {
        match header.metadata.get(KEY) {
            None => Ok(Self(None)),
            // torch's reader treats an empty text as missing.
            Some(text) if text.is_empty() => Ok(Self(None)),
            Some(text) => match serde_json::from_str(text) {
                Ok(saved) => Ok(Self(Some(saved))),
                Err(e) => Err(Fault::corrupt(8, format!("{KEY}: {e}"))),
            },
        }
    }

    /// Returns whether the file holds chunks rather than whole tensors.
    pub(super) fn is_noted(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the offsets of the chunk `tensor` in its tensor.
    pub(super) fn offsets(&self, tensor: &HeaderTensor) -> FaultResult<Dims> {
        let Some(saved) = &self.0 else {
            return Ok(Dims::from_elem(0, tensor.shape.len()));
        };
        match saved.get(&tensor.name) {
            Some(Saved { saved_offsets }) if saved_offsets.len() == tensor.shape.len() => {
                Ok(Dims::from_slice(saved_offsets))
            }
            Some(Saved { saved_offsets }) => Err(Fault::corrupt(
                8,
                format!(
                    "{KEY}: tensor {:?} has shape {:?} and offsets {saved_offsets:?}",
                    tensor.name, tensor.shape
                ),
            )),
            None => Err(Fault::corrupt(
                8,
                format!("{KEY}: nothing is noted for tensor {:?}", tensor.name),
            )),
        }
    }
}
