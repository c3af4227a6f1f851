//! Fetch of one range of a file. It resumes after an incomplete answer, and copies bytes to their
//! destinations when they arrive.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_rs_core::store::FetchRange;
use dcp_rs_core::{Error, Result, StorageFault};
use futures_util::StreamExt as _;
use object_store::{GetOptions, GetRange};
use tokio::time::timeout;

use crate::answers::Failure;
use crate::retry::RetryState;
use crate::session::Shared;
use crate::{Seen, see};

/// A file to fetch ranges of.
pub struct File {
    pub path: PathBuf,
    pub name: object_store::path::Path,
    pub size: u64,
}

/// Fetches a range.
pub async fn fetch(shared: Arc<Shared>, file: Arc<File>, mut range: FetchRange) -> Result<()> {
    let _permit = shared.permits.acquire().await.map_err(|_| Error::Interrupted)?;
    let mut retry = shared.retry();
    let mut at = range.start;
    loop {
        let failure = match attempt(&shared, &file, &mut range, &mut at, &mut retry).await {
            Ok(()) => return Ok(()),
            Err(failure) => failure,
        };
        if !retry.wait_to_retry(&failure).await {
            return Err(explain(&shared, &file, failure, &retry));
        }
    }
}

/// Returns the first `most` bytes of a file, or all of a shorter one.
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
            return Err(shared.error(failure, "read", path, retry.attempts()));
        }
    }
}

/// The start of a file so far.
#[derive(Default)]
struct Begun {
    /// Version of the file in the first answer.
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
            // An empty file has no range, so request it whole.
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

/// Reports a missing file like one on disk, and any other failure as an error of the store.
fn explain(shared: &Shared, file: &File, failure: Failure, retry: &RetryState) -> Error {
    match failure.kind {
        StorageFault::NotFound => Error::corrupt_file(&file.path, "the file is missing"),
        _ => shared.error(failure, "read", &file.path, retry.attempts()),
    }
}

/// Delivers bytes of a range from `at` on, and advances `at`.
async fn attempt(
    shared: &Shared,
    file: &File,
    range: &mut FetchRange,
    at: &mut u64,
    retry: &mut RetryState,
) -> std::result::Result<(), Failure> {
    if *at == range.end {
        return Ok(());
    }
    let options = GetOptions {
        range: Some(GetRange::Bounded(*at..range.end)),
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
        if bytes.len() as u64 > range.end - *at {
            return Err(Failure::passing("the server sent more than it was asked for"));
        }
        range.deliver(*at, &bytes);
        *at += bytes.len() as u64;
        if !retry.progressed(bytes.len() as u64) {
            return Err(too_slow());
        }
    }
    if *at < range.end {
        return Err(cut_short(range.end - *at));
    }
    Ok(())
}
