//! Files of one process: a forked child closes its copies at once.
//!
//! A lock belongs to the open file, which a child of `fork` shares. If the child's copy stayed
//! open, the lock of a killed parent would last as long as the child, such as a data loader's
//! worker or a daemon.
#![allow(unsafe_code)] // code between fork and the child's first line, and its descriptors

use std::fs::File;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::AsRawFd as _;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

/// Marks a free slot.
const FREE: i32 = -1;
/// Descriptors that a forked child closes at once. Others are closed when it ends. A save has two.
static OPEN: [AtomicI32; 256] = [const { AtomicI32::new(FREE) }; 256];

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> libc::c_int;
}

/// Runs in the child, which has only this thread, so it must not lock anything or allocate memory.
extern "C" fn let_go() {
    for slot in &OPEN {
        let descriptor = slot.swap(FREE, Ordering::Relaxed);
        if descriptor != FREE {
            // SAFETY: this is the child's copy of a descriptor, and its `OwnFile` does nothing in
            // this process.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// A file that is open in this process, and not in children forked from it.
#[derive(Debug)]
pub(super) struct OwnFile {
    file: ManuallyDrop<File>,
    slot: Option<usize>,
    process: u32,
}

impl OwnFile {
    pub(super) fn new(file: File) -> Self {
        static HANDLER: Once = Once::new();
        // SAFETY: the function exists as long as the process, since Python extensions are not
        // unloaded. If it cannot be registered, a child keeps its copies.
        HANDLER.call_once(|| unsafe {
            pthread_atfork(None, None, Some(let_go));
        });
        let take = |slot: &AtomicI32| {
            slot.compare_exchange(FREE, file.as_raw_fd(), Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        Self {
            slot: OPEN.iter().position(take),
            file: ManuallyDrop::new(file),
            process: std::process::id(),
        }
    }

    /// Returns whether this process opened the file. In another process, the descriptor may be
    /// another file's.
    pub(super) fn is_own(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Deref for OwnFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if !self.is_own() {
            return;
        }
        if let Some(slot) = self.slot {
            OPEN[slot].store(FREE, Ordering::Relaxed);
        }
        // SAFETY: it is dropped only here, once.
        unsafe { ManuallyDrop::drop(&mut self.file) };
    }
}
