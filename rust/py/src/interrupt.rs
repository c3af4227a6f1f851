//! Long work without the GIL, that Ctrl-C stops.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dcp_rs_core::{Control, Result};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use crate::error::IntoPy;

/// Interval at which signals are checked.
const PERIOD: Duration = Duration::from_millis(20);

/// [`run_with`] without progress.
pub fn run<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Control) -> Result<T> + Send,
) -> PyResult<T> {
    run_with(py, None, 0, work)
}

/// [`run`], where the caller has made the control.
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

/// Runs `work` on another thread while this one, without the GIL, watches for signals; on this
/// thread where the system gives no other, and then signals wait. A signal whose handler raises
/// cancels the work; its threads have ended when this returns. `progress` is called now and then
/// with the bytes done (and those done `before`), and at the end with all of them; what it raises
/// cancels the work too.
pub fn run_with<T: Send>(
    py: Python<'_>,
    progress: Option<&Py<PyAny>>,
    before: u64,
    work: impl FnOnce(&Control) -> Result<T> + Send,
) -> PyResult<T> {
    run_on(py, progress, before, || Ok(None::<()>), |_, control| work(control))
}

/// Nobody waits for work whose maker panicked.
struct CancelOnPanic<'a>(&'a Control);

impl Drop for CancelOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.cancel();
        }
    }
}

/// All that [`run_on`] has made by now, but at least one block of it; `None` at the end.
pub fn made_by_now<I>(blocks: &Receiver<Vec<I>>) -> Option<Vec<I>> {
    let mut all = blocks.recv().ok()?;
    all.extend(blocks.try_iter().flatten());
    Some(all)
}

/// [`run_with`] on what `make` makes, with the GIL, until it makes no more: the work begins with
/// the first of it. What `make` raises cancels the work, unless that has failed already: then its
/// error comes first (but not before a `KeyboardInterrupt`).
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
    mut make: impl FnMut() -> PyResult<Option<I>>,
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
    let (result, raised, raised_late) = std::thread::scope(|scope| {
        let (give, made) = channel();
        let (done, is_done) = channel();
        // Not handed to the thread but taken by it: it is still there where the system has no
        // thread to give.
        let work = Mutex::new(Some((work, made)));
        let run = move || {
            let (work, made) = work
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take()
                .expect("it is taken once");
            let result = work(made, control);
            // The receiver lives until the worker is joined.
            let _ = done.send(());
            result
        };
        let run = Arc::new(run);
        let spawned = std::thread::Builder::new().spawn_scoped(scope, {
            let run = Arc::clone(&run);
            move || run()
        });
        // The worker alone keeps `done`: if it panics, the waiting thread notices.
        let worker = match spawned {
            Ok(worker) => {
                drop(run);
                Ok(worker)
            }
            Err(_) => Err(run),
        };
        let (mut raised, mut raised_late) = (None, None);
        let unwinding = CancelOnPanic(control);
        loop {
            match make().map(|item| item.map(|item| give.send(item))) {
                Ok(Some(Ok(()))) => {}
                // There is no more, or nobody to take it: the work has failed.
                Ok(None | Some(Err(_))) => break,
                Err(error)
                    if error.is_instance_of::<PyException>(py) && is_done.try_recv().is_ok() =>
                {
                    raised_late = Some(error);
                    break;
                }
                Err(error) => {
                    control.cancel();
                    raised = Some(error);
                    break;
                }
            }
        }
        drop(unwinding);
        drop(give);
        let tell = &tell;
        let (result, raised) = py.detach(move || {
            let worker = match worker {
                Ok(worker) => worker,
                // On this thread, which then hears of no signals.
                Err(run) => return (run(), raised),
            };
            while raised.is_none() && is_done.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout)
            {
                // An interpreter that ends has no more signals: what is dropped last may still have
                // work to do.
                let watch = Python::try_attach(|py| {
                    py.check_signals()?;
                    log_notices(py, control)?;
                    tell(py)
                });
                if let Some(Err(error)) = watch {
                    control.cancel();
                    raised = Some(error);
                }
            }
            match worker.join() {
                Ok(result) => (result, raised),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        });
        (result, raised, raised_late)
    });
    if let Some(error) = raised {
        return Err(error);
    }
    let result = result.into_py(py)?;
    if let Some(error) = raised_late {
        return Err(error);
    }
    tell(py)?;
    Ok(result)
}
