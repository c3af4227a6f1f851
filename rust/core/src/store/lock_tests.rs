//! Locks: owners, waiters, and time limits.
#![allow(unsafe_code)] // forks

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::store::disk::{Call, Hook};

fn exclusive(folder: &Path) -> FolderLock {
    FolderLock::take(folder, Mode::Exclusive, &Control::new()).unwrap()
}

/// Takes the lock on another thread, which reports when it has it, and keeps it until the end.
fn taker(disk: Disk, folder: &Path, mode: Mode) -> Receiver<Result<FolderLock>> {
    let folder = folder.to_owned();
    let (done, is_done) = channel();
    thread::spawn(move || {
        // The receiver may be gone.
        let _ = done.send(FolderLock::take_on(&disk, &folder, mode, &Control::new()));
    });
    is_done
}

/// Fails the first requests for a lock, and counts all of them.
#[derive(Default)]
struct Refusing {
    with: i32,
    times: usize,
    requests: AtomicUsize,
}

impl Hook for Refusing {
    fn before(&self, call: Call, _: &Path) -> io::Result<usize> {
        if matches!(call, Call::Lock(_))
            && self.requests.fetch_add(1, Ordering::SeqCst) < self.times
        {
            return Err(io::Error::from_raw_os_error(self.with));
        }
        Ok(usize::MAX)
    }
}

fn refusing(with: i32, times: usize) -> (Disk, Arc<Refusing>) {
    let hook = Arc::new(Refusing { with, times, ..Refusing::default() });
    (Disk::hooked(hook.clone()), hook)
}

#[test]
fn one_has_it_or_several_share_it() {
    let dir = tempfile::tempdir().unwrap();
    let first = exclusive(dir.path());
    let second = taker(Disk::default(), dir.path(), Mode::Exclusive);
    thread::sleep(SLICES[1]);
    assert!(second.try_recv().is_err());
    drop(first);
    let second = second.recv().unwrap().unwrap();
    let third = taker(Disk::default(), dir.path(), Mode::Shared);
    thread::sleep(SLICES[1]);
    assert!(third.try_recv().is_err());
    drop(second);
    let third = third.recv().unwrap().unwrap();
    assert!(third.is_certain() || is_remote(&File::open(dir.path()).unwrap()));
    // Shared locks coexist, and an exclusive one waits for both.
    let fourth = FolderLock::take(dir.path(), Mode::Shared, &Control::new()).unwrap();
    let last = taker(Disk::default(), dir.path(), Mode::Exclusive);
    drop(third);
    thread::sleep(SLICES[1]);
    assert!(last.try_recv().is_err());
    drop(fourth);
    last.recv().unwrap().unwrap();
}

#[test]
fn a_signal_does_not_make_it_ours() {
    let dir = tempfile::tempdir().unwrap();
    let held = exclusive(dir.path());
    let (disk, hook) = refusing(libc::EINTR, 20);
    let other = taker(disk, dir.path(), Mode::Exclusive);
    while hook.requests.load(Ordering::SeqCst) < 25 {
        assert!(other.try_recv().is_err(), "it went on while another had the lock");
        thread::yield_now();
    }
    drop(held);
    other.recv().unwrap().unwrap();
}

#[test]
fn only_some_errors_mean_that_there_are_no_locks() {
    let dir = tempfile::tempdir().unwrap();
    for (errno, none) in [
        (libc::ENOTSUP, true),
        (libc::EOPNOTSUPP, true),
        (libc::ENOLCK, true),
        (libc::ENOSYS, true),
        (libc::EBADF, true),
        (libc::EIO, false),
        (libc::ESTALE, false),
        (libc::EINVAL, false),
    ] {
        let (disk, _) = refusing(errno, usize::MAX);
        let taken = FolderLock::take_on(&disk, dir.path(), Mode::Exclusive, &Control::new());
        match taken {
            Ok(lock) => assert!(none && !lock.is_certain(), "{errno}"),
            Err(Error::Io { action, path, source }) => {
                assert!(!none && source.raw_os_error() == Some(errno), "{errno}: {source}");
                assert_eq!((action, path), ("lock", dir.path().join(LOCK_NAME)));
            }
            Err(other) => panic!("{errno}: {other}"),
        }
    }
}

#[test]
fn waiting_ends_when_it_is_told_to_or_has_lasted_long() {
    let dir = tempfile::tempdir().unwrap();
    let _held = exclusive(dir.path());
    let control = Control::new();
    control.cancel();
    let taken = FolderLock::take(dir.path(), Mode::Exclusive, &control);
    assert!(matches!(taken, Err(Error::Interrupted)));
    let patience = Duration::from_millis(5);
    let taken = FolderLock::take_within(
        &Disk::default(),
        dir.path(),
        Mode::Shared,
        &Control::new(),
        patience,
    );
    assert!(matches!(&taken, Err(Error::Busy { path, .. }) if *path == dir.path().join(LOCK_NAME)));
}

#[test]
fn a_long_wait_is_told_of_once_a_minute() {
    let dir = tempfile::tempdir().unwrap();
    let _held = exclusive(dir.path());
    let control = Control::with_notice(Duration::ZERO);
    let patience = Duration::from_millis(20);
    let taken =
        FolderLock::take_within(&Disk::default(), dir.path(), Mode::Shared, &control, patience);
    assert!(matches!(taken, Err(Error::Busy { .. })));
    let [notice] = &control.take_notices()[..] else { panic!("one notice") };
    assert!(notice.contains(LOCK_NAME), "{notice}");
}

#[test]
fn a_lock_whose_file_was_replaced_is_asked_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let old = exclusive(dir.path());
    let (disk, hook) = refusing(0, 0);
    let waiting = taker(disk, dir.path(), Mode::Exclusive);
    while hook.requests.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    std::fs::remove_file(dir.path().join(LOCK_NAME)).unwrap();
    let new = exclusive(dir.path());
    drop(old);
    let seen = hook.requests.load(Ordering::SeqCst);
    while hook.requests.load(Ordering::SeqCst) < seen + 3 {
        assert!(waiting.try_recv().is_err(), "two have the lock");
        thread::yield_now();
    }
    drop(new);
    waiting.recv().unwrap().unwrap();
}

#[test]
fn a_link_is_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = dir.path().join("elsewhere");
    std::os::unix::fs::symlink(&elsewhere, dir.path().join(LOCK_NAME)).unwrap();
    let taken = FolderLock::take(dir.path(), Mode::Exclusive, &Control::new());
    assert!(matches!(taken, Err(Error::Io { .. })));
    assert!(!elsewhere.exists());
}

/// A child of this process, which lives until this is dropped. It only waits.
struct Child {
    process: libc::pid_t,
    ours: UnixStream,
}

impl Child {
    fn fork() -> Self {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let (theirs_fd, ours_fd) = (theirs.as_raw_fd(), ours.as_raw_fd());
        // SAFETY: the child only makes system calls, on memory of its own stack.
        let process = unsafe { libc::fork() };
        if process == 0 {
            let mut byte = 1_u8;
            // SAFETY: as above. The descriptors were open at the fork, and the byte is alive.
            unsafe {
                libc::close(ours_fd);
                libc::write(theirs_fd, (&raw const byte).cast(), 1);
                libc::read(theirs_fd, (&raw mut byte).cast(), 1);
                libc::_exit(0);
            }
        }
        drop(theirs);
        // The handlers that run in the child after the fork are done.
        ours.read_exact(&mut [0]).unwrap();
        Self { process, ours }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The child may have ended.
        let _ = self.ours.write(&[0]);
        // SAFETY: the child is ours, and is waited for once.
        unsafe { libc::waitpid(self.process, std::ptr::null_mut(), 0) };
    }
}

#[test]
fn a_forked_child_has_no_part_in_a_lock() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(LOCK_NAME);
    let disk = Disk::default();
    let held = exclusive(dir.path());
    let child = Child::fork();
    // As at the end of a process: the file is closed, and the lock is not released explicitly.
    let FolderLock { lock: Some(lock), .. } = held else { panic!("no locks here") };
    let FileLock { file } = &lock;
    let descriptor = file.as_raw_fd();
    let elsewhere = File::open(dir.path()).unwrap();
    // SAFETY: the lock's descriptor stays valid. It is now another file's, and the lock closes it.
    unsafe { libc::dup2(elsewhere.as_raw_fd(), descriptor) };
    let file = disk.open_lock(&path, true).unwrap();
    assert_eq!(disk.try_lock(&file, &path, Mode::Exclusive).unwrap(), Locked::Yes);
    drop(lock);
    drop(child);
}

#[test]
fn a_child_that_was_being_forked_does_not_keep_a_lock_that_was_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(LOCK_NAME);
    let disk = Disk::default();
    // An unregistered copy of its file.
    let held = exclusive(dir.path());
    let copy = held.lock.as_ref().unwrap().file.try_clone().unwrap();
    drop(held);
    let file = disk.open_lock(&path, true).unwrap();
    assert_eq!(disk.try_lock(&file, &path, Mode::Exclusive).unwrap(), Locked::Yes);
    drop(copy);
}

#[test]
fn claims_are_seen_while_they_last() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    std::fs::write(&path, "data").unwrap();
    let disk = Disk::default();
    let claim = FileLock::claim(&disk, &path, &Control::new()).unwrap();
    assert!(claim.is_some());
    assert_eq!(FileLock::is_claimed(&path).unwrap(), Claimed::Yes);
    drop(claim);
    let remote = is_remote(&File::open(&path).unwrap());
    assert_eq!(
        FileLock::is_claimed(&path).unwrap(),
        if remote { Claimed::Unknown } else { Claimed::No }
    );
}
