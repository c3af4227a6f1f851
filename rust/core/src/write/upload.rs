//! Uploads of unchanged local files, for checkpoints in foreign formats.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::jobs::to_usize;
use super::object::{Object, give_up, with_leftovers};
use super::options::WriteOptions;
use super::to_store::{in_flight, part_bytes};
use crate::store::{
    Body, Condition, Remote, StoringConnection, Upload, has, open_file, put_new, put_over,
    read_all, read_at,
};
use crate::{Control, Error, Result, StorageFault, parallel};

/// Uploads a file to `to`, atomically: until the new file is there, readers see the old one.
/// Without `overwrite`, no file may exist there when this begins or when it ends.
///
/// # Errors
/// - Those of the store. [`StorageFault::Precondition`] means that nothing changed, and
///   [`StorageFault::Unclear`] that the new file is there or may still appear. After any other
///   error it is not there.
/// - [`Error::Io`] for a file that cannot be read.
pub fn upload_file(
    remote: &Arc<dyn Remote>,
    from: &Path,
    to: &Path,
    overwrite: bool,
    options: &WriteOptions,
    control: &Control,
) -> Result<()> {
    let connection = &*remote.connect_to_store(0)?;
    let condition = if overwrite { Condition::Unguarded } else { Condition::New };
    let sending = Sending::new(&[(from.to_owned(), to.to_owned())], condition, options)?;
    if sending.files.iter().all(|file| file.answers.len() > 1) {
        let sent = sending.send(connection, options, control);
        return sent.map_err(|error| sending.give_up(remote, error, control));
    }
    let bytes = read_all(from).map_err(|error| Error::io("read", from, error))?;
    control.check()?;
    if overwrite {
        return put_over(to, &bytes, connection, control);
    }
    let keeps_conditions = connection.keeps_conditions(folder_of(to), control)?;
    put_new(to, &bytes, keeps_conditions, connection, control)
}

/// Uploads files `(from, to)` in parts, many at a time. Then uploads `last`, which makes the others
/// visible, with one request; it must not exist before. Throughout, the file `claim` must hold the
/// bytes that the caller stored there: it keeps other jobs out.
///
/// # Errors
/// Those of the store, and [`Error::Io`] for a file that cannot be read. A failed upload leaves
/// nothing, with two exceptions:
///
/// - [`StorageFault::Unclear`]: `last` may be there, so all files stay.
/// - [`StorageFault::Precondition`], if the claim belongs to another job by then: the files may be
///   its files, so all stay.
pub fn upload_folder(
    remote: &Arc<dyn Remote>,
    files: &[(PathBuf, PathBuf)],
    last: Option<(&Path, &Path)>,
    claim: (&Path, &[u8]),
    options: &WriteOptions,
    control: &Control,
) -> Result<()> {
    let connection = &*remote.connect_to_store(0)?;
    let is_ours = || has(claim.0, claim.1, connection, control).map(|found| found == Some(true));
    if !is_ours()? {
        return Err(claimed(claim.0));
    }
    let sending = Sending::new(files, Condition::Always, options)?;
    let give_up = |error: Error| sending.give_up(remote, error, control);
    sending.send(connection, options, control).map_err(give_up)?;
    if !is_ours().map_err(give_up)? {
        return Err(claimed(claim.0));
    }
    let Some((from, to)) = last else {
        return Ok(());
    };
    let prepared = || {
        let bytes = read_all(from).map_err(|error| Error::io("read", from, error))?;
        let keeps_conditions = connection.keeps_conditions(folder_of(to), control)?;
        control.check()?;
        Ok((bytes, keeps_conditions))
    };
    let (bytes, keeps_conditions) = prepared().map_err(give_up)?;
    match put_new(to, &bytes, keeps_conditions, connection, control) {
        Err(error) if error.storage_fault() == Some(StorageFault::Unclear) => Err(error),
        done => done.map_err(give_up),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

fn claimed(claim: &Path) -> Error {
    let reason = "the folder no longer belongs to this conversion: another one may be at work \
        there, or it was removed";
    Error::storage(StorageFault::Precondition, "write", claim, reason)
}

/// Files that are being uploaded.
struct Sending {
    files: Vec<Sent>,
    part_bytes: u64,
}

impl Sending {
    fn new(
        files: &[(PathBuf, PathBuf)],
        condition: Condition,
        options: &WriteOptions,
    ) -> Result<Self> {
        let opened: Vec<(File, u64)> =
            files.iter().map(|(from, _)| open(from)).collect::<Result<_>>()?;
        let largest = opened.iter().map(|(_, size)| *size).max().unwrap_or(0);
        let part_bytes = part_bytes(largest, options.max_inflight_bytes);
        let sent = files.iter().zip(opened).map(|((from, to), (file, size))| Sent {
            file,
            from: from.clone(),
            size,
            object: Object::new(to.clone(), condition),
            answers: std::iter::repeat_with(Mutex::default)
                .take(to_usize(size.div_ceil(part_bytes).max(1)))
                .collect(),
        });
        Ok(Self { files: sent.collect(), part_bytes })
    }

    fn send(
        &self,
        connection: &dyn StoringConnection,
        options: &WriteOptions,
        control: &Control,
    ) -> Result<()> {
        store(connection, &self.files, self.part_bytes, options, control)
    }

    /// Removes stored files and begun uploads. The error names what could not be removed.
    fn give_up(&self, remote: &Arc<dyn Remote>, error: Error, control: &Control) -> Error {
        let objects = || self.files.iter().map(|file| &file.object);
        let uploads: Vec<Upload> = objects().filter_map(Object::open_upload).collect();
        let stored: Vec<PathBuf> = objects().filter_map(Object::may_be_at).collect();
        let interrupted = matches!(error, Error::Interrupted) || control.check().is_err();
        let left = give_up(remote, &stored, &uploads, interrupted);
        with_leftovers(error, &left)
    }
}

/// A file that is being uploaded.
struct Sent {
    file: File,
    from: PathBuf,
    size: u64,
    object: Object,
    /// The store's answer for each part.
    answers: Vec<Mutex<String>>,
}

impl Sent {
    fn answer(&self, number: usize) -> MutexGuard<'_, String> {
        parallel::lock(&self.answers[number])
    }
}

fn open(path: &Path) -> Result<(File, u64)> {
    let opened = open_file(path).and_then(|file| file.metadata().map(|about| (file, about.len())));
    opened.map_err(|error| Error::io("open", path, error))
}

fn store(
    connection: &dyn StoringConnection,
    files: &[Sent],
    part_bytes: u64,
    options: &WriteOptions,
    control: &Control,
) -> Result<()> {
    let threads = in_flight(options).min(to_usize(options.max_inflight_bytes / part_bytes).max(1));
    let large: Vec<&Sent> = files.iter().filter(|file| file.answers.len() > 1).collect();
    parallel::for_each(large.len(), threads, |i| large[i].object.begin(connection, control))?;
    let parts: Vec<(&Sent, usize)> = files
        .iter()
        .flat_map(|file| (0..file.answers.len()).map(move |number| (file, number)))
        .collect();
    parallel::for_each_with(parts.len(), threads, Vec::new, |buffer: &mut Vec<u8>, i| {
        control.check()?;
        let (file, number) = parts[i];
        let start = number as u64 * part_bytes;
        buffer.resize(to_usize(part_bytes.min(file.size - start)), 0);
        read_at(&file.file, buffer, start).map_err(|error| Error::io("read", &file.from, error))?;
        let body = Body::new(std::mem::take(buffer));
        *file.answer(number) = file.object.send(number, &body, connection, control)?;
        *buffer = Body::try_unwrap(body).unwrap_or_default();
        Ok(())
    })?;
    parallel::for_each(files.len(), threads, |i| {
        let file = &files[i];
        let answers = (0..file.answers.len()).map(|number| file.answer(number).clone());
        file.object.complete(answers, file.size, connection, control)
    })
}
