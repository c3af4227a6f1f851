//! Start of a save: it lays out the files, links those of the parent, and creates the others with
//! their space reserved.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::{Progress, Save, reused};
use crate::store::disk::Disk;
use crate::store::{FolderLock, Mode, Remote};
use crate::write::copies::Copies;
use crate::write::files::DataFiles;
use crate::write::item::{SaveInfo, SaveItem};
use crate::write::layout::{
    FilePlan, HEADER_LIMIT, LayoutConstraints, Place, SaveLayout, plan_files_within,
};
use crate::write::links::{Link, Links};
use crate::write::options::WriteOptions;
use crate::write::reuse::Reuse;
use crate::write::sink::{Digests, Sink, Sums};
use crate::write::to_files::ToFiles;
use crate::write::to_store::{ToStore, in_flight};
use crate::{Control, Error, Result};

/// Limit on the bytes of items in a file on a store that has several items. The next save may copy
/// the file, and stores copy at most 5 GiB at once.
const MOST_COPIED: u64 = 4 << 30;

/// Concurrent copies on a store. Each has its own time limit.
const COPIES: usize = 8;

impl Save {
    /// Lays out the files, creates them in `dir`, which is created too, and reserves their space.
    /// Links files of which `reuse` found enough in a parent: their items [are not
    /// written](Self::is_reused). Also returns the reasons why other files of the parent could not
    /// be linked.
    ///
    /// # Errors
    /// [`Error::Plan`] for items that cannot be saved; [`Error::Io`], for example if the disk is
    /// full. After an error no file is left.
    pub fn create(
        dir: &Path,
        items: Vec<SaveItem>,
        info: SaveInfo,
        options: &WriteOptions,
        reuse: Option<Arc<Reuse>>,
        control: &Control,
    ) -> Result<(Self, Vec<Error>)> {
        Self::create_on(&Disk::default(), dir, items, info, options, reuse, control)
    }

    pub(in crate::write) fn create_on(
        disk: &Disk,
        dir: &Path,
        items: Vec<SaveItem>,
        info: SaveInfo,
        options: &WriteOptions,
        reuse: Option<Arc<Reuse>>,
        control: &Control,
    ) -> Result<(Self, Vec<Error>)> {
        let (folders, mut files) = begin(disk, dir)?;
        let (mut links, mut _lock) = (Links::default(), None);
        if let Some(reuse) = &reuse {
            // Under the lock, `clean` cannot take the links for leftovers before the first file is
            // claimed.
            _lock = Some(FolderLock::take_on(disk, dir, Mode::Shared, control)?);
            links = Links::make(&mut files, dir, &info, reuse, control)?;
        }
        let constraints = constraints(&links.files, links.note, reuse.as_deref(), items.len())?;
        let layout = Arc::new(plan_files_within(&items, &info, &constraints, HEADER_LIMIT)?);
        let sink = to_files(disk, dir, folders, files, &layout, options, true, control)?;
        let save = Self::to(Box::new(sink), items, layout, info, reuse, links.files);
        save.skip(&constraints.reused);
        Ok((save, links.problems))
    }

    /// Does the same as [`create`](Self::create) on a store. `dir` is a URL. `turns` has a number
    /// for each item: items with a lower number are written first. It is empty if all items are
    /// written at once, or in order.
    ///
    /// Makes the store copy files of which `reuse` found enough in a parent on that store: their
    /// items [are not written](Self::is_reused). Also returns the reasons why other files of the
    /// parent could not be copied.
    ///
    /// # Errors
    /// [`Error::Plan`] for items that cannot be saved; [`Error::Storage`]. After an error nothing
    /// is left.
    #[expect(clippy::too_many_arguments, reason = "as `create`, and what only a store asks")]
    pub fn create_remote(
        remote: Arc<dyn Remote>,
        dir: &Path,
        items: Vec<SaveItem>,
        turns: Vec<u32>,
        info: SaveInfo,
        options: &WriteOptions,
        reuse: Option<Arc<Reuse>>,
        control: &Control,
    ) -> Result<(Self, Vec<Error>)> {
        let copies = Copies::new(remote, in_flight(options).min(COPIES));
        let (Links { files: links, note, problems }, info) = match &reuse {
            Some(reuse) => copies.make(dir, info, reuse, control)?,
            None => (Links::default(), info),
        };
        let constraints = LayoutConstraints {
            turns,
            most_bytes: Some(MOST_COPIED),
            ..constraints(&links, note, reuse.as_deref(), items.len())?
        };
        let layout = Arc::new(plan_files_within(&items, &info, &constraints, HEADER_LIMIT)?);
        let sink = ToStore::begin(
            copies,
            dir,
            Arc::clone(&layout),
            &items,
            &constraints.reused,
            options,
            control,
        )?;
        let save = Self::to(Box::new(sink), items, layout, info, reuse, links);
        save.skip(&constraints.reused);
        Ok((save, problems))
    }

    /// Counts the `reused` items as written.
    fn skip(&self, reused: &[bool]) {
        let mut progress = self.progress();
        for (number, _) in reused.iter().enumerate().filter(|(_, reused)| **reused) {
            progress.written[number] = self.items[number].length;
        }
    }

    /// Creates files in the caller's own layout: a header for each, and a place for each value.
    /// They need not have this crate's format, so ignore the result of [`finish`](Self::finish).
    /// `sums` selects the checksums for [`crc32s`](Self::crc32s).
    ///
    /// # Errors
    /// [`Error::Plan`] for a place outside of its file; [`Error::Io`].
    pub fn create_files(
        dir: &Path,
        files: Vec<FilePlan>,
        values: Vec<(String, Place, u64)>,
        sums: Sums,
        options: &WriteOptions,
        control: &Control,
    ) -> Result<Self> {
        let (layout, items) = laid_out(files, values)?;
        let (layout, disk) = (Arc::new(layout), Disk::default());
        let (folders, files) = begin(&disk, dir)?;
        let sink = to_files(&disk, dir, folders, files, &layout, options, false, control)?;
        let save = Self::to(Box::new(sink), items, layout, OF_NOBODY, None, Vec::new());
        Ok(Self { digests: Digests::of(&save.items, sums), ..save })
    }

    /// Makes a save of which nothing is written yet.
    fn to(
        sink: Box<dyn Sink>,
        items: Vec<SaveItem>,
        layout: Arc<SaveLayout>,
        info: SaveInfo,
        reuse: Option<Arc<Reuse>>,
        links: Vec<Link>,
    ) -> Self {
        Self {
            sink,
            info,
            layout,
            reuse,
            links,
            digests: Digests::of(&items, Sums::Digests),
            progress: Mutex::new(Progress { written: vec![0; items.len()], failed: false }),
            items,
        }
    }
}

/// Creates `dir`. Returns the folders to sync, and an empty set of files. The folders are synced
/// only at the end, because a sync may wait for all other changes on the disk.
fn begin(disk: &Disk, dir: &Path) -> Result<(Vec<PathBuf>, DataFiles)> {
    let mut folders = disk.create_folder(dir)?;
    folders.push(dir.to_owned());
    Ok((folders, DataFiles::new(disk.clone())))
}

/// Creates the files of a layout. `claimed` protects them from `clean`, which may otherwise take
/// them for those of a killed save.
#[expect(clippy::too_many_arguments, reason = "what the two ways to create files have in common")]
fn to_files(
    disk: &Disk,
    dir: &Path,
    folders: Vec<PathBuf>,
    files: DataFiles,
    layout: &Arc<SaveLayout>,
    options: &WriteOptions,
    claimed: bool,
    control: &Control,
) -> Result<ToFiles> {
    let largest = layout.files.iter().map(|file| file.size).max().unwrap_or(0);
    let how = options.resolve(layout.files.len(), largest);
    Ok(ToFiles {
        files: files.create(dir, &layout.files, how.direct, claimed, control)?,
        disk: disk.clone(),
        folders,
        layout: Arc::clone(layout),
        how,
        staging: Mutex::default(),
    })
}

/// Returns the constraints on the layout of a save of this many items.
fn constraints(
    links: &[Link],
    note: Vec<u8>,
    reuse: Option<&Reuse>,
    items: usize,
) -> Result<LayoutConstraints> {
    Ok(LayoutConstraints {
        reused: reused(links, items),
        stays: reuse.map(Reuse::stays).unwrap_or_default(),
        links: u32::try_from(links.len())
            .map_err(|_| Error::Plan("too many files to link".into()))?,
        note,
        ..LayoutConstraints::default()
    })
}

/// For files in the caller's own layout, which belong to no save.
const OF_NOBODY: SaveInfo =
    SaveInfo { save_id: [0; 16], generation: 0, token: 0, rank: 0, world_size: 1 };

/// Converts the caller's files to a layout, and the values to items.
fn laid_out(
    files: Vec<FilePlan>,
    values: Vec<(String, Place, u64)>,
) -> Result<(SaveLayout, Vec<SaveItem>)> {
    let mut layout = SaveLayout { files, places: Vec::with_capacity(values.len()) };
    let mut items = Vec::with_capacity(values.len());
    for (name, place, length) in values {
        let fits = layout.files.get(place.file as usize).is_some_and(|file| {
            let end = place.offset.checked_add(length);
            place.offset >= file.header.len() as u64 && end.is_some_and(|end| end <= file.size)
        });
        if !fits {
            return Err(Error::tensor_plan(None, &name, "it does not lie in its file"));
        }
        layout.places.push(place);
        items.push(SaveItem::bytes(name, length));
    }
    Ok((layout, items))
}
