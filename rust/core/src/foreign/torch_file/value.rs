//! A value in a file of `torch.save`, as a file of `torch.save` of its own.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use super::archive::TorchFile;
use crate::checkpoint::file_ref;
use crate::foreign::fault::{Fault, FaultResult};
use crate::foreign::pickle::Item;
use crate::foreign::tensor_pickle;
use crate::format::Index;
use crate::parallel::lock;
use crate::store::{FileRef, Files, Opened, Storage};
use crate::{Control, Error, Result};

/// Reads values, and caches the pickles of their files.
#[derive(Default)]
pub struct ValueReader {
    files: Mutex<HashMap<u32, Arc<Known>>>,
}

/// A file, and the item at each place of its pickle that is an entry.
struct Known {
    file: TorchFile,
    items: HashMap<u64, Item>,
}

impl ValueReader {
    /// Returns the value of `chunk`, in the form that `torch.save` writes and DCP's planners load.
    ///
    /// # Errors
    /// [`Error::CorruptData`] if the file is not the one that was indexed; [`Error::Unsupported`]
    /// if the value cannot be written by itself.
    pub fn read(
        &self,
        index: &Index,
        chunk: u64,
        allow_external: bool,
        control: &Control,
    ) -> Result<Vec<u8>> {
        let view = index.chunk(chunk);
        let name = index.name(view.tensor);
        let opened = file_ref(index, view.file, allow_external)?;
        if opened.remote.is_none() {
            // Fails if the file has changed, or is a link that may not be followed.
            opened.open(false)?;
        }
        let there = There { file: &opened, control };
        let known = self.known(view.file, &there)?;
        let item = known.items.get(&view.offset).ok_or_else(|| {
            let reason = "no value begins here: the file is another one than was indexed";
            Error::corrupt_data(&opened.path, name, view.offset, reason)
        })?;
        archive_of(&known.file, &there, *item).map_err(|fault| known.file.name_fault(fault, name))
    }

    fn known(&self, number: u32, there: &There<'_>) -> Result<Arc<Known>> {
        let mut files = lock(&self.files);
        if let Some(known) = files.get(&number) {
            return Ok(Arc::clone(known));
        }
        let file = TorchFile::open(there.storage()?.files(), &there.file.path, 0)?;
        let items = file
            .tree()?
            .leaves
            .iter()
            .map(|leaf| (file.parts.pickle_at + u64::from(leaf.place.at), leaf.item))
            .collect();
        let known = Arc::new(Known { file, items });
        files.insert(number, Arc::clone(&known));
        Ok(known)
    }
}

/// A file, on a disk or a store. A store gets no request before something is read.
struct There<'a> {
    file: &'a FileRef,
    control: &'a Control,
}

impl There<'_> {
    fn storage(&self) -> Result<Storage<'_>> {
        Storage::new(self.file.remote.as_ref(), 1, self.control)
    }

    /// Reads these ranges of the file (first byte, length).
    fn read(&self, ranges: &[(u64, u64)]) -> Result<Vec<Vec<u8>>> {
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let storage = self.storage()?;
        let file = match storage.files() {
            Files::Local => Opened::File(self.file.open(false)?),
            files @ Files::Remote(..) => files.open(&self.file.path)?,
        };
        file.fetch_all(&self.file.path, self.file.size, ranges)
    }
}

/// Returns an archive of the item and its storages.
fn archive_of(torch: &TorchFile, there: &There<'_>, item: Item) -> FaultResult<Vec<u8>> {
    let pickle = &torch.parts.pickle;
    let (bytes, persistent) = pickle.write(item)?;
    let mut archive = Writer::default();
    archive.record("data.pkl", &bytes)?;
    archive.record("byteorder", b"little")?;
    let mut seen = HashSet::new();
    let (mut keys, mut ranges) = (Vec::new(), Vec::new());
    for id in persistent {
        let Some(key) = tensor_pickle::storage_key(pickle, id).filter(|&key| seen.insert(key))
        else {
            continue; // torch has the better message for this
        };
        let record = torch.parts.storage(key)?;
        keys.push(key);
        ranges.push((record.at, record.size));
    }
    let storages = there.read(&ranges).map_err(Fault::Read)?;
    for (key, storage) in keys.iter().zip(storages) {
        archive.record(&format!("data/{key}"), &storage)?;
    }
    archive.record("version", b"3\n")?;
    archive.finish()
}

fn too_large() -> Fault {
    Fault::Unsupported("a value of over 4 GiB".into())
}

/// Writes a zip archive of stored records, without the zip64 parts of archives over 4 GiB.
#[derive(Default)]
struct Writer {
    out: Vec<u8>,
    directory: Vec<u8>,
    count: u16,
}

impl Writer {
    fn record(&mut self, name: &str, bytes: &[u8]) -> FaultResult<()> {
        let name = format!("archive/{name}");
        let at = u32::try_from(self.out.len()).map_err(|_| too_large())?;
        let len = u32::try_from(bytes.len()).map_err(|_| too_large())?;
        // Version, flags, method, time, date; CRC-32, both sizes; lengths of the name and of the
        // extra fields.
        let mut common = [0_u8; 26];
        common[10..14].copy_from_slice(&crc32fast::hash(bytes).to_le_bytes());
        common[14..18].copy_from_slice(&len.to_le_bytes());
        common[18..22].copy_from_slice(&len.to_le_bytes());
        let name_len = u16::try_from(name.len()).map_err(|_| too_large())?;
        common[22..24].copy_from_slice(&name_len.to_le_bytes());
        self.out.extend(b"PK\x03\x04");
        self.out.extend(common);
        self.out.extend(name.as_bytes());
        self.out.extend(bytes);
        // Version made by; comment, disk, attributes; offset of the record.
        self.directory.extend(b"PK\x01\x02\0\0");
        self.directory.extend(common);
        self.directory.extend([0; 10]);
        self.directory.extend(at.to_le_bytes());
        self.directory.extend(name.as_bytes());
        self.count = self.count.checked_add(1).ok_or_else(too_large)?;
        Ok(())
    }

    fn finish(mut self) -> FaultResult<Vec<u8>> {
        let at = u32::try_from(self.out.len()).map_err(|_| too_large())?;
        let len = u32::try_from(self.directory.len()).map_err(|_| too_large())?;
        self.out.append(&mut self.directory);
        self.out.extend(b"PK\x05\x06\0\0\0\0");
        self.out.extend(self.count.to_le_bytes());
        self.out.extend(self.count.to_le_bytes());
        self.out.extend(len.to_le_bytes());
        self.out.extend(at.to_le_bytes());
        self.out.extend([0, 0]);
        Ok(self.out)
    }
}
