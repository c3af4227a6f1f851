//! Items for the tests of this folder.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;
use std::{fs, io};

use proptest::prelude::*;

use super::jobs::to_usize;
use super::layout::{LayoutConstraints, plan_files_within};
use super::{HEADER_LIMIT, Part, Save, SaveInfo, SaveItem, SaveLayout, WriteOptions};
use crate::format::{BLOCK_SIZE, INDEX_NAME, Index, Kind, Value, block_digest};
use crate::geometry::Dims;
use crate::store::disk::{Call, Disk, Hook};
use crate::store::{
    Body, Condition, Connection, FetchRange, Folder, LOCK_NAME, Remote, StoringConnection, Upload,
};
use crate::{Control, Dtype, Error, Result, StorageFault, checkpoint};

pub(crate) const INFO: SaveInfo =
    SaveInfo { save_id: [7; 16], generation: 7, token: 0xabc, rank: 3, world_size: 5 };

/// A tensor that is one chunk.
pub(crate) fn whole(name: &str, dtype: &str, shape: &[u64]) -> SaveItem {
    rows(name, dtype, shape, &vec![0; shape.len()], shape)
}

/// A chunk of a tensor.
pub(crate) fn rows(
    name: &str,
    dtype: &str,
    shape: &[u64],
    offsets: &[u64],
    sizes: &[u64],
) -> SaveItem {
    let dtype = Dtype::from_name(dtype).unwrap();
    let length = sizes.iter().product::<u64>() * dtype.size();
    SaveItem {
        kind: Kind::Tensor,
        dtype: Some(dtype),
        shape: Dims::from_slice(shape),
        offsets: Dims::from_slice(offsets),
        sizes: Dims::from_slice(sizes),
        ..SaveItem::bytes(name.into(), length)
    }
}

/// A non-tensor value.
pub(crate) fn value(name: &str, length: u64) -> SaveItem {
    let path = Value::Tuple(vec![Value::Str(name.into()), Value::Int(-1)]);
    SaveItem { path: Some(path), ..SaveItem::bytes(name.into(), length) }
}

/// The length is prime, so that the bytes fall differently into every block.
static NOISE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    (0..65_521_u64).map(|at| ((at * 2_654_435_761) >> 7).to_le_bytes()[0]).collect()
});

/// Bytes that differ from item to item and within one.
pub(crate) fn content(item: usize, length: u64) -> Vec<u8> {
    let (length, mut from) = (to_usize(length), item * 97 % NOISE.len());
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let to = NOISE.len().min(from + length - bytes.len());
        bytes.extend_from_slice(&NOISE[from..to]);
        from = 0;
    }
    bytes
}

/// Names that are likely to cause trouble.
pub(crate) fn odd_names() -> Vec<String> {
    [
        "",
        "__metadata__",
        "__metadata__~",
        "__metadata__~~",
        "__metadata__x",
        "\"",
        "\\",
        "\\\"",
        "\n\t\u{1}\u{7f}",
        "ключ.重み.🙂",
        "a/b",
    ]
    .map(String::from)
    .into_iter()
    .chain(["x".repeat(2000), "\"\\".repeat(1000)])
    .collect()
}

fn names() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[a-d]{1,2}",
        1 => ".{0,12}",
        1 => prop::sample::select(odd_names()),
    ]
}

fn paths() -> impl Strategy<Value = Option<Value>> {
    let part = prop_oneof![".{0,8}".prop_map(Value::Str), any::<i64>().prop_map(Value::Int)];
    prop::option::of(prop::collection::vec(part, 1..4).prop_map(Value::Tuple))
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::all().collect::<Vec<_>>())
}

/// The chunks of one tensor, by rows; or a value.
fn entry() -> impl Strategy<Value = Vec<SaveItem>> {
    let tensor =
        (names(), dtypes(), prop::collection::vec(0_u64..9, 0..4), 0_u8..12, paths(), 1_u64..4)
            .prop_map(|(name, dtype, shape, flags, path, chunks)| {
                let height = shape.first().copied().unwrap_or(1);
                let step = if shape.is_empty() { 1 } else { height.div_ceil(chunks).max(1) };
                let mut items = Vec::new();
                for begin in (0..height.max(1)).step_by(usize::try_from(step).unwrap()) {
                    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.clone());
                    if !shape.is_empty() {
                        offsets[0] = begin;
                        sizes[0] = step.min(height - begin);
                    }
                    let item = rows(&name, dtype.name(), &shape, &offsets, &sizes);
                    items.push(SaveItem { flags, path: path.clone(), ..item });
                }
                items
            });
    prop_oneof![
        5 => tensor,
        1 => (names(), 0_u64..9000, paths())
            .prop_map(|(name, length, path)| vec![SaveItem { path, ..value(&name, length) }]),
    ]
}

prop_compose! {
    /// Items of a rank: consistent, in any order.
    pub(crate) fn saves(most: usize)(entries in prop::collection::vec(entry(), 0..most))(
        items in Just({
            let mut names = std::collections::HashSet::new();
            entries.into_iter().filter(|chunks| names.insert(chunks[0].name.clone())).flatten().collect::<Vec<_>>()
        }).prop_shuffle()
    ) -> Vec<SaveItem> {
        items
    }
}

/// Returns all bytes of all items, for one call.
pub(crate) fn parts(contents: &[Vec<u8>]) -> Vec<Part<'_>> {
    (0..).zip(contents).map(|(item, data)| Part { item, at: 0, data }).collect()
}

pub(crate) fn contents(items: &[SaveItem]) -> Vec<Vec<u8>> {
    items.iter().enumerate().map(|(number, item)| content(number, item.length)).collect()
}

/// A save that reuses nothing.
pub(crate) fn create(
    dir: &Path,
    items: Vec<SaveItem>,
    info: SaveInfo,
    options: &WriteOptions,
) -> Result<Save> {
    create_on(&Disk::default(), dir, items, info, options)
}

pub(crate) fn create_on(
    disk: &Disk,
    dir: &Path,
    items: Vec<SaveItem>,
    info: SaveInfo,
    options: &WriteOptions,
) -> Result<Save> {
    Ok(Save::create_on(disk, dir, items, info, options, None, &Control::new())?.0)
}

/// Returns a layout without links.
pub(crate) fn plan_files(items: &[SaveItem], info: &SaveInfo) -> Result<SaveLayout> {
    plan_files_within(items, info, &LayoutConstraints::default(), HEADER_LIMIT)
}

/// Commits the index of a save by one rank.
pub(crate) fn commit(dir: &Path, index: Vec<u8>) -> Result<checkpoint::Committed> {
    let index = Index::from_bytes(index, &dir.join(INDEX_NAME))?;
    checkpoint::commit_index(dir, None, &index, true, true, &Control::new())
}

/// Saves everything, and returns the index.
pub(crate) fn save(
    dir: &Path,
    items: &[SaveItem],
    info: SaveInfo,
    options: &WriteOptions,
) -> Index {
    let save = create(dir, items.to_vec(), info, options).unwrap();
    save.write(&parts(&contents(items)), &Control::new()).unwrap();
    index_in(dir, save.finish(&Control::new()).unwrap())
}

/// The index of a save into a folder, of its bytes.
pub(crate) fn index_in(dir: &Path, bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Index {
    Index::from_bytes(bytes, &dir.join(INDEX_NAME)).unwrap()
}

/// Checks every byte, digest and length in an index of these items.
pub(crate) fn assert_saved(index: &Index, items: &[SaveItem]) {
    let files: Vec<_> = (0..index.file_count())
        .map(|number| {
            let (bytes, file) = (fs::read(index.file_path(number)).unwrap(), index.file(number));
            assert_eq!(bytes.len() as u64, file.size);
            assert_eq!(
                file.head_digest,
                Some(block_digest(&bytes[..usize::try_from(file.data_start).unwrap()]))
            );
            safetensors::SafeTensors::deserialize(&bytes).unwrap();
            bytes
        })
        .collect();
    for (number, item) in items.iter().enumerate() {
        let tensor = index.tensor(index.find(&item.name).unwrap());
        assert_eq!(
            (tensor.kind, tensor.dtype, &tensor.shape),
            (item.kind, item.dtype, &item.shape)
        );
        let chunk = tensor
            .chunks
            .map(|c| index.chunk(c))
            .find(|c| (&c.offsets, &c.sizes) == (&item.offsets, &item.sizes));
        let chunk = chunk.unwrap();
        let begin = usize::try_from(chunk.offset).unwrap();
        let bytes =
            &files[chunk.file as usize][begin..begin + usize::try_from(chunk.length).unwrap()];
        assert!(bytes == content(number, item.length), "item {number}, {:?}", item.name);
        let digests: Vec<_> = chunk.digests.unwrap().map(|d| index.digest(d)).collect();
        let block_size = usize::try_from(BLOCK_SIZE).unwrap();
        assert_eq!(digests, bytes.chunks(block_size).map(block_digest).collect::<Vec<_>>());
    }
}

/// Returns all names except that of the lock.
pub(crate) fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != LOCK_NAME)
        .collect();
    names.sort();
    names
}

/// Records the calls except those for locks, and can make one fail.
#[derive(Default)]
pub(crate) struct Recorder {
    pub calls: Mutex<Vec<(Call, String)>>,
    /// The number of the call that fails, and its error.
    pub fault: Option<(usize, i32)>,
    /// Limit on the bytes of a write, if there is one.
    pub most: Option<usize>,
    /// True if every direct write fails.
    pub refuse_direct: bool,
}

impl Hook for Recorder {
    fn before(&self, call: Call, path: &Path) -> io::Result<usize> {
        if matches!(call, Call::OpenLock | Call::Lock(_)) {
            return Ok(usize::MAX);
        }
        let mut calls = self.calls.lock().unwrap();
        let number = calls.len();
        calls.push((call, path.file_name().unwrap().to_str().unwrap().to_owned()));
        if let Some((_, errno)) = self.fault.filter(|(at, _)| *at == number) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        if self.refuse_direct && matches!(call, Call::Write { direct: true, .. }) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(self.most.unwrap_or(usize::MAX))
    }
}

/// Replaces the copy. It gets the source, the target, and the number of copies before.
pub(crate) type Copier = dyn Fn(&Objects, &Path, &Path, usize) -> Result<()> + Send + Sync;

/// A store in memory. Tests choose what fails.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryStore(pub Arc<Objects>);

#[derive(Default)]
pub(crate) struct Objects {
    pub files: Mutex<HashMap<PathBuf, Vec<u8>>>,
    pub uploads: Mutex<HashMap<String, HashMap<usize, Vec<u8>>>>,
    /// The number of the part that is refused.
    pub refused: Option<usize>,
    /// The number of the part whose upload panics.
    pub panics: Option<usize>,
    /// True if nothing can be removed.
    pub stuck: bool,
    /// Targets of copies. A late copy may appear there.
    pub copies: Mutex<Vec<PathBuf>>,
    pub copier: Mutex<Option<Box<Copier>>>,
    /// Largest file that can be copied, in bytes.
    pub most_copied: Mutex<Option<u64>>,
    /// Connections that fail before one succeeds.
    pub unreachable: AtomicUsize,
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Objects")
    }
}

impl Objects {
    pub fn copy(&self, from: &Path, to: &Path) {
        let mut files = self.files.lock().unwrap();
        let bytes = files[from].clone();
        files.insert(to.to_owned(), bytes);
    }
}

pub(crate) fn refused(action: &'static str, path: &Path) -> Error {
    Error::storage(StorageFault::Denied, action, path, "no")
}

impl MemoryStore {
    /// Returns whether nothing is stored, not even a part.
    pub fn is_empty(&self) -> bool {
        self.0.files.lock().unwrap().is_empty() && self.0.uploads.lock().unwrap().is_empty()
    }

    fn connected(&self) -> Result<Arc<Self>> {
        let left = &self.0.unreachable;
        match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
            Ok(_) => {
                let error = io::ErrorKind::WouldBlock.into();
                Err(Error::io("start threads for", Path::new("s3://bucket"), error))
            }
            Err(_) => Ok(Arc::new(self.clone())),
        }
    }
}

impl Remote for MemoryStore {
    fn connect(&self, _: usize) -> Result<Arc<dyn Connection>> {
        Ok(self.connected()?)
    }

    fn connect_to_store(&self, _: usize) -> Result<Arc<dyn StoringConnection>> {
        Ok(self.connected()?)
    }
}

impl Connection for MemoryStore {
    fn look(&self, path: &Path, _: &Control) -> Result<Option<u64>> {
        Ok(self.0.files.lock().unwrap().get(path).map(|bytes| bytes.len() as u64))
    }

    fn list(&self, _: &Path, _: &Control) -> Result<Option<Folder>> {
        Ok(None)
    }

    fn start(
        &self,
        path: &Path,
        most: u64,
        _: bool,
        _: &Control,
    ) -> Result<Option<(Vec<u8>, u64)>> {
        let files = self.0.files.lock().unwrap();
        let start = |bytes: &Vec<u8>| bytes[..to_usize(most).min(bytes.len())].to_vec();
        Ok(files.get(path).map(|bytes| (start(bytes), bytes.len() as u64)))
    }

    fn fetch(&self, _: &Path, _: u64, _: Vec<FetchRange>, _: &Control) -> Result<()> {
        Err(Error::Interrupted)
    }
}

impl StoringConnection for MemoryStore {
    fn put(&self, path: &Path, body: &Body, _: Condition, _: &Control) -> Result<()> {
        let before = self.0.files.lock().unwrap().insert(path.to_owned(), body.to_vec());
        assert!(before.is_none(), "{} was there", path.display());
        let copies = self.0.copies.lock().unwrap();
        assert!(!copies.contains(&path.to_owned()), "{} may yet be a copy", path.display());
        Ok(())
    }

    fn begin(&self, path: &Path, condition: Condition, _: &Control) -> Result<Upload> {
        let id = path.file_name().unwrap().to_str().unwrap().to_owned();
        self.0.uploads.lock().unwrap().insert(id.clone(), HashMap::new());
        Ok(Upload { path: path.to_owned(), id, condition })
    }

    fn put_part(&self, upload: &Upload, number: usize, body: &Body, _: &Control) -> Result<String> {
        if self.0.refused == Some(number) {
            return Err(refused("write", &upload.path));
        }
        if self.0.panics == Some(number) {
            // By then other threads wait for its memory.
            std::thread::sleep(Duration::from_millis(100));
            panic!("as a defect would");
        }
        let mut uploads = self.0.uploads.lock().unwrap();
        let before = uploads.get_mut(&upload.id).unwrap().insert(number, body.to_vec());
        assert!(before.is_none(), "part {number} was sent before");
        Ok(number.to_string())
    }

    fn complete(&self, upload: &Upload, parts: Vec<String>, size: u64, _: &Control) -> Result<()> {
        let mut there = self.0.uploads.lock().unwrap().remove(&upload.id).unwrap();
        assert_eq!(parts, (0..there.len()).map(|number| number.to_string()).collect::<Vec<_>>());
        let all: Vec<Vec<u8>> = (0..parts.len()).map(|n| there.remove(&n).unwrap()).collect();
        let (_, but_last) = all.split_last().unwrap();
        for part in but_last {
            assert!(part.len() == all[0].len() && part.len() as u64 >= super::to_store::LEAST_PART);
        }
        let bytes = all.concat();
        assert_eq!(bytes.len() as u64, size);
        self.0.files.lock().unwrap().insert(upload.path.clone(), bytes);
        Ok(())
    }

    fn check_copied(&self, from: &Path, size: u64) -> Result<()> {
        if self.0.most_copied.lock().unwrap().is_some_and(|most| size > most) {
            return Err(Error::Unsupported(format!("{} is too large", from.display())));
        }
        Ok(())
    }

    fn copy(&self, from: &Path, to: &Path, size: u64, control: &Control) -> Result<()> {
        control.check()?;
        let before = {
            let mut copies = self.0.copies.lock().unwrap();
            assert!(!copies.contains(&to.to_owned()), "{} is used twice", to.display());
            copies.push(to.to_owned());
            copies.len() - 1
        };
        assert_eq!(self.0.files.lock().unwrap()[from].len() as u64, size);
        match &*self.0.copier.lock().unwrap() {
            Some(copier) => copier(&self.0, from, to, before)?,
            None => self.0.copy(from, to),
        }
        Ok(())
    }

    fn remove(
        &self,
        files: &[PathBuf],
        uploads: &[Upload],
        _: Duration,
        _: &Control,
    ) -> Vec<Error> {
        if self.0.stuck {
            let left = files.iter().chain(uploads.iter().map(|upload| &upload.path));
            return left.map(|path| refused("remove", path)).collect();
        }
        self.0.files.lock().unwrap().retain(|path, _| !files.contains(path));
        let mut open = self.0.uploads.lock().unwrap();
        open.retain(|id, _| uploads.iter().all(|upload| upload.id != *id));
        Vec::new()
    }

    fn remove_seen(&self, path: &Path, control: &Control) -> Result<()> {
        let left = self.remove(&[path.to_owned()], &[], Duration::ZERO, control);
        left.into_iter().next().map_or(Ok(()), Err)
    }

    fn keeps_conditions(&self, _: &Path, _: &Control) -> Result<bool> {
        Ok(true)
    }
}
