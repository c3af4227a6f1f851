//! Fetch of one range of a file: it resumes where an answer was cut off, and copies bytes to their
//! destinations as they come.
#![allow(unsafe_code)] // runs are written by address

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_rs_core::store::{FetchRange, Run};
use dcp_rs_core::{Error, Result, StorageFault};
use futures_util::StreamExt as _;
use object_store::{GetOptions, GetRange};
use tokio::time::timeout;

use crate::answers::Failure;
use crate::retry::RetryState;
use crate::session::Shared;
use crate::{Seen, see};

/// A file of which parts are fetched.
pub struct File {
    pub path: PathBuf,
    pub name: object_store::path::Path,
    pub size: u64,
}

/// Fetches a part.
///
/// # Safety
/// As [`Connection::fetch`](dcp_rs_core::store::Connection::fetch) has it, for as long as the
/// future lives.
pub async unsafe fn fetch(shared: Arc<Shared>, file: Arc<File>, part: FetchRange) -> Result<()> {
    let _permit = shared.permits.acquire().await.map_err(|_| Error::Interrupted)?;
    let mut retry = shared.retry();
    let mut progress = Progress { at: part.start, first: 0 };
    loop {
        // SAFETY: the caller's promise.
        let attempt = unsafe { attempt(&shared, &file, &part, &mut progress, &mut retry).await };
        let failure = match attempt {
            Ok(()) => return Ok(()),
            Err(failure) => failure,
        };
        if !retry.wait_to_retry(&failure).await {
            return Err(explain(&shared, &file, failure, &retry));
        }
    }
}

/// The first `most` bytes of a file, or all of a shorter one.
pub async fn start(
    shared: &Shared,
    path: &Path,
    name: &object_store::path::Path,
    most: u64,
) -> Result<(Seen, Vec<u8>)> {
    let mut retry = shared.retry();
    let mut begun = Begun::default();
    loop {
        let failure = match begin(shared, name, most, &mut begun, &mut retry).await {
            Ok(seen) => return Ok((seen, begun.bytes)),
            Err(failure) => failure,
        };
        if !retry.wait_to_retry(&failure).await {
            return Err(failure.into_error("read", path, retry.attempts(), &shared.config.secrets));
        }
    }
}

/// The beginning of a file so far.
#[derive(Default)]
struct Begun {
    /// The version of the file in the first answer.
    seen: Option<Seen>,
    bytes: Vec<u8>,
}

async fn begin(
    shared: &Shared,
    name: &object_store::path::Path,
    most: u64,
    begun: &mut Begun,
    retry: &mut RetryState,
) -> std::result::Result<Seen, Failure> {
    let silent = || Failure::passing("no answer in time");
    let from = begun.bytes.len() as u64;
    if let Some(seen) = begun.seen.as_ref().filter(|seen| seen.size.min(most) == from) {
        return Ok(seen.clone());
    }
    let ranged = GetOptions { range: Some(GetRange::Bounded(from..most)), ..GetOptions::default() };
    let asked = timeout(retry.silence(), shared.client.objects.get_opts(name, ranged)).await;
    let answer = match asked.map_err(|_| silent())? {
        Ok(answer) => answer,
        Err(error) => {
            let failure = Failure::of(&error);
            if failure.status != Some(416) || from > 0 {
                return Err(failure);
            }
            // No range of an empty file can be had: it is asked for whole.
            let asked = timeout(
                retry.silence(),
                shared.client.objects.get_opts(name, GetOptions::default()),
            )
            .await;
            asked.map_err(|_| silent())?.map_err(|error| Failure::of(&error))?
        }
    };
    let now = Seen::of(answer.meta.clone());
    if begun.seen.get_or_insert_with(|| now.clone()) != &now {
        return Err(Failure::lasting(
            StorageFault::Precondition,
            "the object was replaced while it was read",
        ));
    }
    let end = now.size.min(most);
    let mut body = answer.into_stream();
    while let Some(bytes) = timeout(retry.silence(), body.next()).await.map_err(|_| silent())? {
        let bytes = bytes.map_err(|error| Failure::of(&error))?;
        if (begun.bytes.len() + bytes.len()) as u64 > end {
            return Err(Failure::passing("the server sent more than it was asked for"));
        }
        begun.bytes.extend_from_slice(&bytes);
        if !retry.progressed(bytes.len() as u64) {
            return Err(too_slow());
        }
    }
    match end - begun.bytes.len() as u64 {
        0 => Ok(now),
        left => Err(cut_short(left)),
    }
}

fn cut_short(left: u64) -> Failure {
    Failure::passing(format!("the answer was cut short, {left} bytes before its end"))
}

fn too_slow() -> Failure {
    Failure::passing("the store sends too slowly")
}

/// Reports a missing file, or one of another length, as it is reported for files on disk.
fn explain(shared: &Shared, file: &File, failure: Failure, retry: &RetryState) -> Error {
    match failure.kind {
        StorageFault::NotFound => Error::corrupt_file(&file.path, "the file is missing"),
        _ => failure.into_error("read", &file.path, retry.attempts(), &shared.config.secrets),
    }
}

/// Progress of a range.
struct Progress {
    /// The next byte.
    at: u64,
    /// The first run that may want it.
    first: usize,
}

async unsafe fn attempt(
    shared: &Shared,
    file: &File,
    part: &FetchRange,
    progress: &mut Progress,
    retry: &mut RetryState,
) -> std::result::Result<(), Failure> {
    if progress.at == part.end {
        return Ok(());
    }
    let options = GetOptions {
        range: Some(GetRange::Bounded(progress.at..part.end)),
        if_match: shared.tag(&file.path),
        ..GetOptions::default()
    };
    let silent = || Failure::passing("no answer in time");
    let asked = timeout(retry.silence(), shared.client.objects.get_opts(&file.name, options)).await;
    let answer = asked.map_err(|_| silent())?.map_err(|error| Failure::of(&error))?;
    let now = Seen::of(answer.meta.clone());
    if now.size != file.size {
        return Err(Failure::lasting(
            StorageFault::Precondition,
            format!("the file is {} bytes long, expected {}", now.size, file.size),
        ));
    }
    see(&shared.seen, &file.path, now)
        .map_err(|reason| Failure::lasting(StorageFault::Precondition, reason))?;
    let mut body = answer.into_stream();
    loop {
        let next = timeout(retry.silence(), body.next()).await.map_err(|_| silent())?;
        let Some(bytes) = next else { break };
        let bytes = bytes.map_err(|error| Failure::of(&error))?;
        if bytes.len() as u64 > part.end - progress.at {
            return Err(Failure::passing("the server sent more than it was asked for"));
        }
        // SAFETY: the caller's promise.
        unsafe { scatter(&part.runs, progress, &bytes) };
        if !retry.progressed(bytes.len() as u64) {
            return Err(too_slow());
        }
    }
    if progress.at < part.end {
        return Err(cut_short(part.end - progress.at));
    }
    Ok(())
}

/// Copies the next bytes to their destinations.
///
/// # Safety
/// The memory of every run is valid for writes.
unsafe fn scatter(runs: &[Run], progress: &mut Progress, bytes: &[u8]) {
    let (from, to) = (progress.at, progress.at + bytes.len() as u64);
    progress.at = to;
    while runs.get(progress.first).is_some_and(|run| run.at + run.len <= from) {
        progress.first += 1;
    }
    for run in runs[progress.first..].iter().take_while(|run| run.at < to) {
        let (begin, end) = (run.at.max(from), (run.at + run.len).min(to));
        // A longer run may lie before this one, that ended.
        if begin >= end {
            continue;
        }
        let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let source = &bytes[index(begin - from)..index(end - from)];
        // SAFETY: bytes `begin..end` are of the run, whose memory is valid for writes as the caller
        // says; `source` is memory of the client.
        unsafe {
            let to = run.to.0.wrapping_add(index(begin - run.at));
            std::ptr::copy_nonoverlapping(source.as_ptr(), to, source.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use dcp_rs_core::store::Destination;

    use super::*;

    #[test]
    fn pieces_of_any_size_go_where_they_are_wanted() {
        let file: Vec<u8> = (0..=255).collect();
        // (at, len): with gaps, and two that want the same bytes, one within the other.
        let wanted = [(3_u64, 10_u64), (13, 1), (20, 60), (25, 5), (70, 20), (200, 56)];
        for step in [1, 2, 7, 64, 256] {
            let mut buffers: Vec<Vec<u8>> =
                wanted.iter().map(|&(_, len)| vec![0; usize::try_from(len).unwrap()]).collect();
            let runs: Vec<Run> = buffers
                .iter_mut()
                .zip(wanted)
                .map(|(buffer, (at, len))| Run { at, len, to: Destination(buffer.as_mut_ptr()) })
                .collect();
            let mut progress = Progress { at: 0, first: 0 };
            for bytes in file.chunks(step) {
                // SAFETY: each run has a buffer of its length.
                unsafe { scatter(&runs, &mut progress, bytes) };
            }
            for (buffer, (at, len)) in buffers.iter().zip(wanted) {
                let at = usize::try_from(at).unwrap();
                assert_eq!(buffer[..], file[at..at + usize::try_from(len).unwrap()], "step {step}");
            }
        }
    }
}
