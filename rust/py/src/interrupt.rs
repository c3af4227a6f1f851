//! Long work without the GIL. Ctrl-C stops it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dcp_rs_core::lock;
use dcp_rs_core::{Control, Result};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use crate::error::IntoPy;

/// Interval at which signals are checked.
const PERIOD: Duration = Duration::from_millis(20);

/// Calls [`run_with`] without progress.
pub fn run<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Control) -> Result<T> + Send,
) -> PyResult<T> {
    run_with(py, None, 0, work)
}

/// Like [`run`], for work without notices. Only the main thread has signals to watch for: on another
/// one the work runs in place, as two more changes of threads take long where cores are busy.
pub fn run_here<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Control) -> Result<T> + Send,
) -> PyResult<T> {
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?;
    if threading.call_method0("current_thread")?.is(&main) {
        return run(py, work);
    }
    py.detach(|| work(&Control::new())).into_py(py)
}

/// Like [`run`], with the caller's control.
pub fn run_under<T: Send>(
    py: Python<'_>,
    control: &Control,
    work: impl FnOnce(&Control) -> Result<T> + Send,
) -> PyResult<T> {
    run_all(py, control, None, 0, || Ok(None::<()>), |_, control| work(control))
}

/// Logs the notices of a call.
fn log_notices(py: Python<'_>, control: &Control) -> PyResult<()> {
    for notice in control.take_notices() {
        let log = py.import("logging")?.call_method1("getLogger", ("dcp_rs",))?;
        log.call_method1("warning", ("%s", notice))?;
    }
    Ok(())
}

/// Runs `work` on another thread while this one, without the GIL, watches for signals.
///
/// A signal whose handler raises cancels the work. The threads of the work have ended when this
/// returns. If the system has no thread to spare, the work runs on this one, and signals wait.
///
/// Calls `progress` from time to time with the bytes done, including those done `before`, and at
/// the end with all of them. An exception from it cancels the work too.
pub fn run_with<T: Send>(
    py: Python<'_>,
    progress: Option<&Py<PyAny>>,
    before: u64,
    work: impl FnOnce(&Control) -> Result<T> + Send,
) -> PyResult<T> {
    run_on(py, progress, before, || Ok(None::<()>), |_, control| work(control))
}

/// Cancels the work if `make` panics, since no one waits for its result.
struct CancelOnPanic<'a>(&'a Control);

impl Drop for CancelOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.cancel();
        }
    }
}

/// Returns everything that [`run_on`] has made so far, and waits for at least one block; `None` at
/// the end.
pub fn made_by_now<I>(blocks: &Receiver<Vec<I>>) -> Option<Vec<I>> {
    let mut all = blocks.recv().ok()?;
    all.extend(blocks.try_iter().flatten());
    Some(all)
}

/// Runs `work` like [`run_with`], on the items that `make` returns. `make` runs with the GIL until
/// it returns `None`, and the work begins with the first item.
///
/// An exception from `make` cancels the work. If the work has failed already, its error takes
/// precedence, but not over a `KeyboardInterrupt`.
pub fn run_on<I: Send, T: Send>(
    py: Python<'_>,
    progress: Option<&Py<PyAny>>,
    before: u64,
    make: impl FnMut() -> PyResult<Option<I>>,
    work: impl FnOnce(Receiver<I>, &Control) -> Result<T> + Send,
) -> PyResult<T> {
    run_all(py, &Control::new(), progress, before, make, work)
}

fn run_all<I: Send, T: Send>(
    py: Python<'_>,
    control: &Control,
    progress: Option<&Py<PyAny>>,
    before: u64,
    make: impl FnMut() -> PyResult<Option<I>>,
    work: impl FnOnce(Receiver<I>, &Control) -> Result<T> + Send,
) -> PyResult<T> {
    let told = AtomicU64::new(0);
    let tell = |py: Python<'_>| -> PyResult<()> {
        let done = control.done();
        match progress {
            Some(progress) if told.swap(done, Ordering::Relaxed) != done => {
                progress.call1(py, (before + done,)).map(drop)
            }
            _ => Ok(()),
        }
    };
    let (result, fed, raised) = std::thread::scope(|scope| {
        let (give, made) = channel();
        let (done, is_done) = channel();
        let run = callable_once(move || {
            let result = work(made, control);
            // The receiver lives until the worker is joined.
            let _ = done.send(());
            result
        });
        let worker = std::thread::Builder::new().spawn_scoped(scope, {
            let run = Arc::clone(&run);
            move || run()
        });
        let fed = feed(py, control, make, give, &is_done);
        let (is_fed, tell) = (fed.is_ok(), &tell);
        let (result, raised) = py.detach(move || match worker {
            Ok(worker) => {
                let raised = if is_fed { watch(control, &is_done, tell) } else { None };
                let result = worker.join();
                (result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)), raised)
            }
            // The system has no thread to spare. This one does the work, and signals wait.
            Err(_) => (run(), None),
        });
        (result, fed, raised)
    });
    let late = fed?;
    if let Some(error) = raised {
        return Err(error);
    }
    let result = result.into_py(py)?;
    if let Some(error) = late {
        return Err(error);
    }
    tell(py)?;
    Ok(result)
}

/// Returns a function that does `work` where it is called first: on a new thread or, if there is
/// none, here.
fn callable_once<T>(work: impl FnOnce() -> T + Send) -> Arc<impl Fn() -> T + Send + Sync> {
    let work = Mutex::new(Some(work));
    Arc::new(move || {
        let work = lock(&work).take();
        work.expect("it is called once")()
    })
}

/// Gives the worker all items of `make`, or as many as it takes.
///
/// An exception of `make` cancels the work, and is the error. If the work has ended by then, it is
/// the result instead, since an error of the work takes precedence.
fn feed<I>(
    py: Python<'_>,
    control: &Control,
    mut make: impl FnMut() -> PyResult<Option<I>>,
    give: Sender<I>,
    is_done: &Receiver<()>,
) -> PyResult<Option<PyErr>> {
    let _unwinding = CancelOnPanic(control);
    loop {
        match make() {
            Ok(Some(item)) => {
                if give.send(item).is_err() {
                    return Ok(None); // the work has failed
                }
            }
            Ok(None) => return Ok(None),
            Err(error) if error.is_instance_of::<PyException>(py) && is_done.try_recv().is_ok() => {
                return Ok(Some(error));
            }
            Err(error) => {
                control.cancel();
                return Err(error);
            }
        }
    }
}

/// Waits until the worker ends, even by a panic, and watches for signals. A signal whose handler
/// raises cancels the work.
fn watch(
    control: &Control,
    is_done: &Receiver<()>,
    tell: impl Fn(Python<'_>) -> PyResult<()>,
) -> Option<PyErr> {
    while is_done.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
        // At exit the interpreter delivers no more signals, but an object that is dropped last may
        // still have work to do.
        let seen = Python::try_attach(|py| {
            py.check_signals()?;
            log_notices(py, control)?;
            tell(py)
        });
        if let Some(Err(error)) = seen {
            control.cancel();
            return Some(error);
        }
    }
    None
}
