//! How a save begins: its files are laid out, what a parent holds is linked, the rest is created with its space reserved.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::{Progress, Save, reused};
use crate::format::Kind;
use crate::geometry::Dims;
use crate::store::disk::Disk;
use crate::store::{FolderLock, Mode, Remote};
use crate::write::copies::Copies;
use crate::write::files::DataFiles;
use crate::write::item::{SaveInfo, SaveItem};
use crate::write::layout::{Beside, FilePlan, HEADER_LIMIT, Layout, Place, plan_files, plan_files_within};
use crate::write::links::{Link, Links};
use crate::write::options::WriteOptions;
use crate::write::reuse::Reuse;
use crate::write::sink::{Digests, Sink, Sums};
use crate::write::to_files::ToFiles;
use crate::write::to_store::{ToStore, in_flight};
use crate::{Control, Error, Result};

/// The most bytes of items in a file of a store that holds several: the next save may have it copied, and stores copy 5 GiB in one go.
const MOST_COPIED: u64 = 4 << 30;

/// Files that a store is asked to copy at a time: each has the time that it takes beside the others.
const COPIES: usize = 8;

/// What there is of a save before its files are laid out.
struct Begun {
    folders: Vec<PathBuf>,
    files: DataFiles,
    reuse: Option<Arc<Reuse>>,
    links: Vec<Link>,
}

impl Begun {
    /// In `dir`, which is created. Of what a parent holds nothing is there yet.
    fn new(disk: &Disk, dir: &Path) -> Result<Self> {
        // Synced at the end only: a sync may wait for all that others changed on the disk.
        let mut folders = disk.create_folder(dir)?;
        folders.push(dir.to_owned());
        Ok(Self {
            folders,
            files: DataFiles::new(disk.clone()),
            reuse: None,
            links: Vec::new(),
        })
    }
}

impl Save {
    /// Lays out the files, creates them in `dir` (which is created too) and reserves their space.
    ///
    /// # Errors
    /// [`Error::Plan`] for items that cannot be saved, [`Error::Io`] where the disk refuses (it may be full). No
    /// file is left then.
    pub fn create(
        dir: &Path,
        items: Vec<SaveItem>,
        info: SaveInfo,
        options: &WriteOptions,
        control: &Control,
    ) -> Result<Self> {
        Self::create_on(Disk::default(), dir, items, info, options, control)
    }

    /// [`create`](Self::create) that links what `reuse` found in a parent, as far as it is worth it: those items [are not
    /// written](Self::is_reused). Returns also why files of the parent could not be linked.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_reusing(
        dir: &Path,
        items: Vec<SaveItem>,
        info: SaveInfo,
        options: &WriteOptions,
        reuse: Arc<Reuse>,
        control: &Control,
    ) -> Result<(Self, Vec<Error>)> {
        Self::create_reusing_on(&Disk::default(), dir, items, info, options, reuse, control)
    }

    /// [`create`](Self::create) on a store; `dir` is a URL. `turns`, for each item: those of a lower one are written before those of a higher. Where
    /// it is empty, all come at a time, or in their order.
    ///
    /// Of what `reuse` found in a parent on that store, the store copies what is worth it: those items [are not written](Self::is_reused). Returns also why
    /// files of the parent could not be copied.
    ///
    /// # Errors
    /// [`Error::Plan`] for items that cannot be saved, [`Error::Storage`] where the store refuses. Nothing is left then.
    #[expect(clippy::too_many_arguments, reason = "as `create`, and what only a store asks")]
    pub fn create_remote(
        remote: Arc<dyn Remote>,
        dir: &Path,
        items: Vec<SaveItem>,
        turns: Vec<u32>,
        mut info: SaveInfo,
        options: &WriteOptions,
        reuse: Option<Arc<Reuse>>,
        control: &Control,
    ) -> Result<(Self, Vec<Error>)> {
        let copies = Copies::new(remote);
        let Links {
            files: links,
            note,
            problems,
        } = match &reuse {
            Some(reuse) => copies.make(dir, &mut info, reuse, in_flight(options).min(COPIES), control)?,
            None => Links::default(),
        };
        let beside = Beside {
            turns,
            most_bytes: Some(MOST_COPIED),
            ..beside(&links, note, reuse.as_deref(), items.len())?
        };
        let layout = Arc::new(plan_files_within(&items, &info, &beside, HEADER_LIMIT)?);
        let sink = ToStore::begin(
            copies,
            dir,
            Arc::clone(&layout),
            &items,
            &beside.reused,
            options,
            control,
        )?;
        let save = Self {
            reuse,
            links,
            ..Self::to(Box::new(sink), items, layout, info)
        };
        save.skip(&beside.reused);
        Ok((save, problems))
    }

    pub(in crate::write) fn create_reusing_on(
        disk: &Disk,
        dir: &Path,
        items: Vec<SaveItem>,
        info: SaveInfo,
        options: &WriteOptions,
        reuse: Arc<Reuse>,
        control: &Control,
    ) -> Result<(Self, Vec<Error>)> {
        let mut begun = Begun::new(disk, dir)?;
        // Nobody takes the links for what a killed save left before the first file is claimed.
        let _lock = FolderLock::take_on(disk, dir, Mode::Shared, control)?;
        let Links {
            files: links,
            note,
            problems,
        } = Links::make(&mut begun.files, dir, &info, &reuse, control)?;
        let beside = beside(&links, note, Some(&reuse), items.len())?;
        let layout = plan_files_within(&items, &info, &beside, HEADER_LIMIT)?;
        begun.links = links;
        begun.reuse = Some(reuse);
        let save = Self::create_laid_out(disk.clone(), dir, items, layout, info, options, begun, true, control)?;
        save.skip(&beside.reused);
        Ok((save, problems))
    }

    /// Takes items that are `reused` for written.
    fn skip(&self, reused: &[bool]) {
        let mut progress = self.progress();
        for (number, _) in reused.iter().enumerate().filter(|(_, reused)| **reused) {
            progress.written[number] = self.items[number].length;
        }
    }

    /// Creates files of the caller's own layout: a header each, and a place for each value. They need not be of this
    /// crate's format, so what [`finish`](Self::finish) returns is worth nothing; `sums` is what [`crc32s`](Self::crc32s) is told of.
    ///
    /// # Errors
    /// [`Error::Plan`] for a place that is not within its file, [`Error::Io`] where the disk refuses.
    pub fn create_files(
        dir: &Path,
        files: Vec<FilePlan>,
        values: Vec<(String, Place, u64)>,
        sums: Sums,
        options: &WriteOptions,
        control: &Control,
    ) -> Result<Self> {
        let (layout, items) = laid_out(files, values)?;
        let disk = Disk::default();
        let begun = Begun::new(&disk, dir)?;
        let save = Self::create_laid_out(disk, dir, items, layout, OF_NOBODY, options, begun, false, control)?;
        Ok(Self {
            digests: Digests::of(&save.items, sums),
            ..save
        })
    }

    pub(in crate::write) fn create_on(
        disk: Disk,
        dir: &Path,
        items: Vec<SaveItem>,
        info: SaveInfo,
        options: &WriteOptions,
        control: &Control,
    ) -> Result<Self> {
        let layout = plan_files(&items, &info)?;
        let begun = Begun::new(&disk, dir)?;
        Self::create_laid_out(disk, dir, items, layout, info, options, begun, true, control)
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "what the two ways to create a save have in common"
    )]
    fn create_laid_out(
        disk: Disk,
        dir: &Path,
        items: Vec<SaveItem>,
        layout: Layout,
        info: SaveInfo,
        options: &WriteOptions,
        begun: Begun,
        claimed: bool,
        control: &Control,
    ) -> Result<Self> {
        let how = options.resolve(
            layout.files.len(),
            layout.files.iter().map(|file| file.size).max().unwrap_or(0),
        );
        let files = begun.files.create(dir, &layout.files, how.direct, claimed, control)?;
        let layout = Arc::new(layout);
        let sink = ToFiles {
            disk,
            folders: begun.folders,
            layout: Arc::clone(&layout),
            how,
            files,
            staging: Mutex::default(),
        };
        Ok(Self {
            reuse: begun.reuse,
            links: begun.links,
            ..Self::to(Box::new(sink), items, layout, info)
        })
    }

    /// A save of which nothing is written yet.
    fn to(sink: Box<dyn Sink>, items: Vec<SaveItem>, layout: Arc<Layout>, info: SaveInfo) -> Self {
        Self {
            sink,
            info,
            layout,
            reuse: None,
            links: Vec::new(),
            digests: Digests::of(&items, Sums::Digests),
            progress: Mutex::new(Progress {
                written: vec![0; items.len()],
                failed: false,
            }),
            items,
        }
    }
}

/// What a save of so many items is laid out beside.
fn beside(links: &[Link], note: Vec<u8>, reuse: Option<&Reuse>, items: usize) -> Result<Beside> {
    Ok(Beside {
        reused: reused(links, items),
        stays: reuse.map(Reuse::stays).unwrap_or_default(),
        links: u32::try_from(links.len()).map_err(|_| Error::Plan("too many files to link".into()))?,
        note,
        ..Beside::default()
    })
}

/// Files of the caller's own layout are of no checkpoint of this crate.
const OF_NOBODY: SaveInfo = SaveInfo {
    save_id: [0; 16],
    generation: 0,
    token: 0,
    rank: 0,
    world_size: 1,
};

/// The layout of files that a caller made, and its values as items.
fn laid_out(files: Vec<FilePlan>, values: Vec<(String, Place, u64)>) -> Result<(Layout, Vec<SaveItem>)> {
    let mut layout = Layout {
        files,
        places: Vec::with_capacity(values.len()),
    };
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
        items.push(SaveItem {
            name,
            kind: Kind::Bytes,
            dtype: None,
            shape: Dims::new(),
            flags: 0,
            path: None,
            position: None,
            offsets: Dims::new(),
            sizes: Dims::new(),
            length,
        });
    }
    Ok((layout, items))
}
