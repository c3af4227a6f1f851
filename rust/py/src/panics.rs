//! Panics are defects of this package. Python gets them as `InternalError`, which it can catch and
//! pickle. It can do neither with the exception that `PyO3` would raise.

use std::any::Any;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::Mutex;

use pyo3::prelude::*;

use crate::error::InternalError;

pub use dcp_rs_py_macros::guarded;

/// Message and place of the last panic. The thread that catches it may not be the one that
/// panicked.
static LAST: Mutex<Option<(String, String)>> = Mutex::new(None);

/// Runs `work` and turns a panic into an `InternalError`.
pub fn catch<T>(work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = text(&*panic);
        let last = LAST.try_lock().ok().and_then(|mut last| last.take());
        let place = last.filter(|(text, _)| *text == said).map(|(_, place)| place);
        Err(internal_error(&said, place.as_deref()))
    })
}

/// Returns the exception for a defect.
pub fn internal_error(what: &str, place: Option<&str>) -> PyErr {
    let version = env!("CARGO_PKG_VERSION");
    let place = place.map_or_else(String::new, |place| format!(" (at {place})"));
    InternalError::new_err(format!(
        "this is a bug in dcp-rs {version}; please report it with this message: {what}{place}"
    ))
}

/// Installs a hook that remembers the places of panics.
pub fn remember_places() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
        if let (Ok(mut last), Some(location)) = (LAST.try_lock(), info.location()) {
            *last = Some((text(info.payload()), location.to_string()));
        }
        print(info);
    }));
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message")
        .to_owned()
}

/// Panics, on this thread or on one that it waits for, so that tests can check the outcome.
#[guarded]
#[pyfunction]
#[pyo3(name = "_panic")]
pub fn panic(py: Python<'_>, message: String, on_thread: bool) -> PyResult<()> {
    if on_thread { crate::interrupt::run(py, |_| panic!("{message}")) } else { panic!("{message}") }
}
