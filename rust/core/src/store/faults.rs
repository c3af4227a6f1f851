//! A disk that fails on demand, for tests of programs that save: one of the calls that change a
//! folder is refused.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::disk::Call;

/// True if a fault is armed. Otherwise a call only costs this check.
static ARMED: AtomicBool = AtomicBool::new(false);
static FAULT: Mutex<Option<Fault>> = Mutex::new(None);

struct Fault {
    folder: PathBuf,
    at: u64,
    errno: i32,
    seen: u64,
    failed: Option<&'static str>,
}

/// Outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faulted {
    /// Number of calls for the folder.
    pub seen: u64,
    /// The call that failed, if one did.
    pub failed: Option<&'static str>,
}

/// Arms a fault in this process: the change number `at` (from 0) below `folder` fails with `errno`.
pub fn arm(folder: &Path, at: u64, errno: i32) -> io::Result<()> {
    let fault = Fault { folder: std::path::absolute(folder)?, at, errno, seen: 0, failed: None };
    *FAULT.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault);
    ARMED.store(true, Ordering::Release);
    Ok(())
}

/// Disarms the fault. Returns `None` if none was armed.
pub fn disarm() -> Option<Faulted> {
    ARMED.store(false, Ordering::Release);
    let fault = FAULT.lock().unwrap_or_else(PoisonError::into_inner).take()?;
    Some(Faulted { seen: fault.seen, failed: fault.failed })
}

/// Refuses the call if it is the armed one.
pub(super) fn before(call: Call, path: &Path) -> io::Result<()> {
    if !ARMED.load(Ordering::Acquire) {
        return Ok(());
    }
    let mut fault = FAULT.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(fault) = fault.as_mut() else {
        return Ok(());
    };
    if !std::path::absolute(path)?.starts_with(&fault.folder) {
        return Ok(());
    }
    fault.seen += 1;
    if fault.seen != fault.at.saturating_add(1) {
        return Ok(());
    }
    fault.failed = Some(name(call));
    Err(io::Error::from_raw_os_error(fault.errno))
}

fn name(call: Call) -> &'static str {
    match call {
        Call::CreateFolder => "create folder",
        Call::Create => "create",
        Call::Allocate => "allocate",
        Call::OpenDirect | Call::Open => "open",
        Call::Write { .. } => "write",
        Call::WriteBack | Call::Sync => "sync",
        Call::Rename | Call::RenameApart => "rename",
        Call::Link => "link",
        Call::SyncFolder => "sync folder",
        Call::Remove | Call::RemoveTree => "remove",
        Call::OpenLock | Call::Lock(_) => "lock",
    }
}
