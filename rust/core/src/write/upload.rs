//! Files of this machine, stored as they are: what others' formats are made of.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::options::WriteOptions;
use super::sink::to_usize;
use super::to_store::{give_up, in_flight, part_bytes};
use crate::store::{Condition, Remote, StoringConnection, Upload, open_file, read_all, read_at};
use crate::{Control, Error, Result, StorageFault, parallel};

/// Stores files under other names, `(from, to)`, in parts, many at a time; then `last`, that says what the others are, by one request which its
/// condition is for. What fails is removed, unless it is not known whether `last` is there.
///
/// # Errors
/// Those of the store; [`Error::Io`] for a file that cannot be read.
pub fn upload(
    remote: &Arc<dyn Remote>,
    files: &[(PathBuf, PathBuf)],
    last: Option<(&Path, &Path, Condition)>,
    options: &WriteOptions,
    control: &Control,
) -> Result<()> {
    let connection = remote.connect_to_store(0)?;
    let opened: Vec<(File, u64)> = files.iter().map(|(from, _)| open(from)).collect::<Result<_>>()?;
    let largest = opened.iter().map(|(_, size)| *size).max().unwrap_or(0);
    let part_bytes = part_bytes(largest, options.max_inflight_bytes);
    let sent: Vec<Sent> = files
        .iter()
        .zip(opened)
        .map(|((from, to), (file, size))| Sent {
            file,
            from: from.clone(),
            to: to.clone(),
            size,
            upload: OnceLock::new(),
            answers: std::iter::repeat_with(Mutex::default)
                .take(to_usize(size.div_ceil(part_bytes).max(1)))
                .collect(),
            stored: AtomicBool::new(false),
            complete: AtomicBool::new(false),
        })
        .collect();
    let result = store(&*connection, &sent, part_bytes, options, control).and_then(|()| match last {
        None => Ok(()),
        Some((from, to, condition)) => {
            let bytes = read_all(from).map_err(|error| Error::io("read", from, error))?;
            connection.put(to, &[&bytes], condition, control)
        }
    });
    let unclear = |error: &Error| {
        matches!(
            error,
            Error::Storage {
                kind: StorageFault::Unclear,
                ..
            }
        )
    };
    if let Err(error) = &result
        && !unclear(error)
    {
        drop(connection);
        let of = |which: &dyn Fn(&&Sent) -> bool| sent.iter().filter(which).collect::<Vec<_>>();
        let uploads: Vec<Upload> = of(&|one| !one.complete.load(Ordering::Relaxed))
            .iter()
            .filter_map(|one| one.upload.get().cloned())
            .collect();
        let stored: Vec<PathBuf> = of(&|one| one.stored.load(Ordering::Relaxed))
            .iter()
            .map(|one| one.to.clone())
            .collect();
        give_up(remote, &stored, &uploads, matches!(error, Error::Interrupted));
    }
    result
}

/// A file on its way.
struct Sent {
    file: File,
    from: PathBuf,
    to: PathBuf,
    size: u64,
    /// Of one that has several parts.
    upload: OnceLock<Upload>,
    /// What the store answered for each part.
    answers: Vec<Mutex<String>>,
    /// It may be there.
    stored: AtomicBool,
    /// It is.
    complete: AtomicBool,
}

impl Sent {
    fn send(&self, number: usize, bytes: &[u8], connection: &dyn StoringConnection, control: &Control) -> Result<()> {
        if let Some(upload) = self.upload.get() {
            let answer = connection.put_part(upload, number, &[bytes], control)?;
            *self.answers[number].lock().unwrap_or_else(PoisonError::into_inner) = answer;
            return Ok(());
        }
        self.stored.store(true, Ordering::Relaxed);
        connection.put(&self.to, &[bytes], Condition::Always, control)
    }

    fn complete(&self, connection: &dyn StoringConnection, control: &Control) -> Result<()> {
        if let Some(upload) = self.upload.get() {
            let answer = |answer: &Mutex<String>| answer.lock().unwrap_or_else(PoisonError::into_inner).clone();
            self.stored.store(true, Ordering::Relaxed);
            connection.complete(upload, self.answers.iter().map(answer).collect(), self.size, control)?;
        }
        self.complete.store(true, Ordering::Relaxed);
        Ok(())
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
    parallel::for_each(
        large.len(),
        threads,
        || (),
        |(), i| {
            // Each is begun once.
            let _ = large[i].upload.set(connection.begin(&large[i].to, control)?);
            Ok(())
        },
    )?;
    let parts: Vec<(&Sent, usize)> = files
        .iter()
        .flat_map(|file| (0..file.answers.len()).map(move |number| (file, number)))
        .collect();
    parallel::for_each(parts.len(), threads, Vec::new, |buffer: &mut Vec<u8>, i| {
        control.check()?;
        let (file, number) = parts[i];
        let start = number as u64 * part_bytes;
        buffer.resize(to_usize(part_bytes.min(file.size - start)), 0);
        read_at(&file.file, buffer, start).map_err(|error| Error::io("read", &file.from, error))?;
        file.send(number, buffer, connection, control)
    })?;
    parallel::for_each(
        files.len(),
        threads,
        || (),
        |(), i| files[i].complete(connection, control),
    )
}
