//! Files of this machine, stored as they are: what others' formats are made of.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::object::{Object, give_up};
use super::options::WriteOptions;
use super::sink::to_usize;
use super::to_store::{in_flight, part_bytes};
use crate::store::{Condition, Remote, StoringConnection, Upload, open_file, read_all, read_at};
use crate::{Control, Error, Result, StorageFault, parallel};

/// Stores files under other names, `(from, to)`, in parts, many at a time; then `last`, that says what the others are, by one request which its
/// condition is for.
///
/// What fails leaves nothing. But with `replaces`, a file is what it was before until it is the new one; and where it is not known whether `last` is
/// there, all stays.
///
/// # Errors
/// Those of the store; [`Error::Io`] for a file that cannot be read.
pub fn upload(
    remote: &Arc<dyn Remote>,
    files: &[(PathBuf, PathBuf)],
    last: Option<(&Path, &Path, Condition)>,
    replaces: bool,
    options: &WriteOptions,
    control: &Control,
) -> Result<()> {
    let connection = remote.connect_to_store(0)?;
    let opened: Vec<(File, u64)> = files.iter().map(|(from, _)| open(from)).collect::<Result<_>>()?;
    let largest = opened.iter().map(|(_, size)| *size).max().unwrap_or(0);
    let part_bytes = part_bytes(largest, options.max_inflight_bytes);
    let sent = files.iter().zip(opened).map(|((from, to), (file, size))| Sent {
        file,
        from: from.clone(),
        size,
        object: Object::new(to.clone()),
        answers: std::iter::repeat_with(Mutex::default)
            .take(to_usize(size.div_ceil(part_bytes).max(1)))
            .collect(),
    });
    let sent: Vec<Sent> = sent.collect();
    let give_up = |error: &Error| {
        let objects = || sent.iter().map(|file| &file.object);
        let uploads: Vec<Upload> = objects().filter_map(Object::open_upload).collect();
        let stored: Vec<PathBuf> = objects().filter(|_| !replaces).filter_map(Object::may_be_at).collect();
        give_up(remote, &stored, &uploads, matches!(error, Error::Interrupted));
    };
    store(&*connection, &sent, part_bytes, options, control).inspect_err(give_up)?;
    let Some((from, to, condition)) = last else {
        return Ok(());
    };
    let bytes = read_all(from).map_err(|error| Error::io("read", from, error));
    let done = bytes.and_then(|bytes| connection.put(to, &[&bytes], condition, control));
    match done {
        Err(
            error @ Error::Storage {
                kind: StorageFault::Unclear,
                ..
            },
        ) => Err(error),
        done => done.inspect_err(give_up),
    }
}

/// A file on its way.
struct Sent {
    file: File,
    from: PathBuf,
    size: u64,
    object: Object,
    /// What the store answered for each part.
    answers: Vec<Mutex<String>>,
}

impl Sent {
    fn answer(&self, number: usize) -> MutexGuard<'_, String> {
        self.answers[number].lock().unwrap_or_else(PoisonError::into_inner)
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
        |(), i| large[i].object.begin(connection, control),
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
        *file.answer(number) = file.object.send(number, &[buffer], connection, control)?;
        Ok(())
    })?;
    parallel::for_each(
        files.len(),
        threads,
        || (),
        |(), i| {
            let file = &files[i];
            let answers = (0..file.answers.len()).map(|number| file.answer(number).clone());
            file.object.complete(answers, file.size, connection, control)
        },
    )
}
