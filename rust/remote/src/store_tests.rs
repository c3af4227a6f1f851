//! An attempt completes an upload, but its answer is lost. Each store reports that in its own way.

use dcp_rs_core::store::Remote as _;
use dcp_rs_core::{Control, Error, StorageFault};

use super::*;
use crate::Store;
use crate::testing::{Reply, options, serve};

const SIZE: usize = 12 << 20;

/// Completes an upload on a store with these answers to the n-th attempt, and to the n-th look at
/// the object. Also returns how many of both there were.
fn completed(
    scheme: &str,
    attempts: impl Fn(usize) -> Reply + Send + Sync + 'static,
    looks: impl Fn(usize) -> Reply + Send + Sync + 'static,
) -> (Result<()>, usize, usize) {
    let (url, asked) = serve(move |question, before| match question.split_once(' ').unwrap().0 {
        "HEAD" => looks(before),
        _ => attempts(before),
    });
    let root = format!("{scheme}://bucket");
    let store = Store::new(&root, options(scheme, &url, &[("max_retries", "3")])).unwrap();
    let connection = store.connect_to_store(1).unwrap();
    let upload = Upload {
        path: format!("{root}/file").into(),
        id: "1".into(),
        condition: Condition::Always,
    };
    let parts = (1..=2).map(|number| format!("{number}")).collect();
    let done = connection.complete(&upload, parts, SIZE as u64, &Control::new());
    let asked = asked.lock().unwrap();
    let looked = asked.iter().filter(|question| question.starts_with("HEAD")).count();
    (done, asked.len() - looked, looked)
}

/// The first attempt gets no answer, and its object appears a moment later. The second finds no
/// upload.
fn second(status: u16, code: &'static str) -> impl Fn(usize) -> Reply + Send + Sync {
    move |before| match before {
        0 => Reply::of(503, "ServerBusy"),
        _ => Reply::of(status, code),
    }
}

fn late(before: usize) -> Reply {
    match before {
        0 => Reply::of(404, ""),
        // Looks are retried.
        1 | 2 => Reply::of(503, "SlowDown"),
        _ => Reply::head(SIZE),
    }
}

#[test]
fn a_lost_completion_is_found() {
    for (scheme, status, code) in
        [("s3", 404, "NoSuchUpload"), ("gs", 404, "NoSuchUpload"), ("az", 400, "InvalidBlockList")]
    {
        let (done, attempts, looks) = completed(scheme, second(status, code), late);
        assert!(done.is_ok(), "{scheme}: {done:?}");
        assert_eq!((attempts, looks), (2, 4), "{scheme}");
    }
}

#[test]
fn another_length_is_not_what_was_stored() {
    for scheme in ["s3", "gs", "az"] {
        let (done, ..) = completed(scheme, second(404, "NoSuchUpload"), |_| Reply::head(SIZE - 1));
        let Err(Error::Storage { kind, reason, .. }) = done else { panic!("{scheme}: {done:?}") };
        assert_eq!(kind, StorageFault::NotFound, "{scheme}");
        assert!(reason.contains("no such upload"), "{reason}");
    }
}

#[test]
fn what_is_refused_is_not_looked_at() {
    let (done, attempts, looks) =
        completed("s3", |_| Reply::of(403, "AccessDenied"), |_| Reply::head(SIZE));
    assert!(matches!(done, Err(Error::Storage { kind: StorageFault::Denied, .. })));
    assert_eq!((attempts, looks), (1, 0));
}

/// Completes an upload that may replace another object of the same length. The store has these
/// answers to the n-th attempt, and to the n-th look at the object. The first look is at the
/// beginning. Also returns the number of attempts.
fn replaced(
    condition: Condition,
    attempts: impl Fn(usize) -> Reply + Send + Sync + 'static,
    looks: impl Fn(usize) -> Reply + Send + Sync + 'static,
) -> (Result<()>, usize) {
    let (url, asked) = serve(move |question, before| match question {
        _ if question.starts_with("HEAD") => looks(before),
        _ if question.contains("?uploads") => Reply::ok("<X><UploadId>1</UploadId></X>"),
        _ => attempts(before),
    });
    let store = Store::new("s3://bucket", options("s3", &url, &[("max_retries", "3")])).unwrap();
    let connection = store.connect_to_store(1).unwrap();
    let control = Control::new();
    let done = connection
        .begin("s3://bucket/file".as_ref(), condition, &control)
        .and_then(|upload| connection.complete(&upload, tags(), SIZE as u64, &control));
    let asked = asked.lock().unwrap();
    let is_attempt =
        |question: &&String| question.starts_with("POST") && question.contains("uploadId");
    (done, asked.iter().filter(is_attempt).count())
}

/// The tags of the parts `a` and `b`. The object of both has the tag `OF_BOTH`.
fn tags() -> Vec<String> {
    ["0cc175b9c0f1b6a831c399e269772661", "92eb5ffee6ae2fec3ad71c777531578f"]
        .map(|tag| format!("\"{tag}\""))
        .into()
}

const OF_BOTH: &str = "\"96e024ba2074fe77e8e965ba43a704be-2\"";

fn fault(done: &Result<()>) -> Option<StorageFault> {
    match done {
        Ok(()) => None,
        Err(Error::Storage { kind, .. }) => Some(*kind),
        Err(error) => panic!("{error}"),
    }
}

fn completed_as(status: u16, code: &'static str) -> impl Fn(usize) -> Reply {
    move |_| Reply::of(status, code)
}

const DONE: &str = "<X><ETag>t</ETag></X>";

#[test]
fn what_was_there_before_is_not_what_was_stored() {
    let old = |_| Reply::head(SIZE);
    for (status, code, kind) in [
        (500, "InternalError", StorageFault::Unclear),
        (503, "SlowDown", StorageFault::Unclear),
        (200, "InternalError", StorageFault::Unclear),
        (404, "NoSuchUpload", StorageFault::NotFound),
        (403, "AccessDenied", StorageFault::Denied),
    ] {
        let (done, attempts) = replaced(Condition::Unguarded, completed_as(status, code), old);
        assert_eq!(fault(&done), Some(kind), "{code}");
        let is_final = matches!(status, 403 | 404);
        assert_eq!(attempts, if is_final { 1 } else { 4 }, "{code}");
    }
    // An attempt that was not carried out is retried, and then succeeds.
    let once = |before| match before {
        0 => Reply::of(503, "SlowDown"),
        _ => Reply::ok(DONE),
    };
    let (done, attempts) = replaced(Condition::Unguarded, once, old);
    assert_eq!((fault(&done), attempts), (None, 2));
}

#[test]
fn what_replaced_it_is_found() {
    let lost = |before| match before {
        0 => Reply::of(500, "InternalError"),
        _ => Reply::of(404, "NoSuchUpload"),
    };
    let then = |tag: &'static str, length| {
        move |before| match before {
            0 => Reply::head(SIZE),
            _ => Reply::head(length).tagged(tag),
        }
    };
    for tag in [OF_BOTH, "\"of another kind\""] {
        let (done, attempts) = replaced(Condition::Unguarded, lost, then(tag, SIZE));
        assert_eq!((fault(&done), attempts), (None, 1), "{tag}");
    }
    let (done, _) = replaced(Condition::Unguarded, lost, then("\"x\"", SIZE + 1));
    assert_eq!(fault(&done), Some(StorageFault::Unclear));
    // If the upload did not exist any more, another attempt has completed it.
    let (done, _) =
        replaced(Condition::Unguarded, completed_as(404, "NoSuchUpload"), then("\"x\"", SIZE));
    assert_eq!(fault(&done), Some(StorageFault::NotFound));
}

#[test]
fn a_new_one_is_known_by_its_parts() {
    let lost = |before| match before {
        0 => Reply::of(500, "InternalError"),
        _ => Reply::of(412, "PreconditionFailed"),
    };
    // No object at the beginning, none before the first attempt, then this one.
    let then = |tag: &'static str| {
        move |before| match before {
            0 | 1 => Reply::of(404, ""),
            _ => Reply::head(SIZE).tagged(tag),
        }
    };
    let (done, attempts) = replaced(Condition::New, lost, then(OF_BOTH));
    assert_eq!((fault(&done), attempts), (None, 1));
    let (done, attempts) = replaced(Condition::New, lost, then("\"theirs\""));
    assert_eq!((fault(&done), attempts), (Some(StorageFault::Unclear), 2));
    let refused = completed_as(412, "PreconditionFailed");
    let (done, attempts) = replaced(Condition::New, refused, then("\"theirs\""));
    assert_eq!((fault(&done), attempts), (Some(StorageFault::Precondition), 1));
    // The object appeared after the start, or existed before.
    let late = |before| match before {
        0 => Reply::of(404, ""),
        _ => Reply::head(SIZE),
    };
    let (done, attempts) = replaced(Condition::New, |_| Reply::ok(DONE), late);
    assert_eq!((fault(&done), attempts), (Some(StorageFault::Precondition), 0));
    let (done, attempts) = replaced(Condition::New, |_| Reply::ok(DONE), |_| Reply::head(SIZE));
    assert_eq!((fault(&done), attempts), (Some(StorageFault::Precondition), 0));
}

#[test]
fn a_store_that_knows_no_such_condition_completes_it_all_the_same() {
    for (status, code) in [(501, "NotImplemented"), (400, "InvalidRequest")] {
        let first = move |before| match before {
            0 => Reply::of(status, code),
            _ => Reply::ok(DONE),
        };
        let (done, attempts) = replaced(Condition::New, first, |_| Reply::of(404, ""));
        assert_eq!((fault(&done), attempts), (None, 2), "{code}");
    }
}

#[test]
fn many_parts_take_longer() {
    let limits = crate::config::Limits::default();
    let retry = RetryState::new(limits, Arc::default());
    assert!(retry.answer(JOINING * 10_000) > limits.silence * 10);
}

/// Copies an object of this length on a store with these answers to the n-th attempt, and to the
/// n-th look at the copy. Also returns how many of both there were.
fn copied(
    scheme: &str,
    size: u64,
    attempts: impl Fn(usize) -> Reply + Send + Sync + 'static,
    looks: impl Fn(usize) -> Reply + Send + Sync + 'static,
) -> (Result<()>, usize, usize) {
    let (url, asked) = serve(move |question, before| match question.split_once(' ').unwrap().0 {
        "HEAD" if question.contains("/to") => looks(before),
        "HEAD" => Reply::head(usize::try_from(size).unwrap()),
        _ => attempts(before),
    });
    let root = format!("{scheme}://bucket");
    let store = Store::new(&root, options(scheme, &url, &[("max_retries", "3")])).unwrap();
    let connection = store.connect_to_store(1).unwrap();
    let at = |name: &str| format!("{root}/{name}");
    let done = connection.copy(at("from").as_ref(), at("to").as_ref(), size, &Control::new());
    let asked = asked.lock().unwrap();
    let of = |method: &str, name: &str| {
        let is_it = |question: &&String| question.starts_with(method) && question.contains(name);
        asked.iter().filter(is_it).count()
    };
    (done, of("PUT", "/to"), of("HEAD", "/to"))
}

#[test]
fn a_lost_copy_is_found_or_made_again() {
    let copied_at = |before| {
        if before == 0 { Reply::of(500, "InternalError") } else { Reply::ok("") }
    };
    for scheme in ["s3", "gs", "az"] {
        let (done, attempts, looks) = copied(scheme, 77, copied_at, |_| Reply::head(77));
        assert!(done.is_ok(), "{scheme}: {done:?}");
        assert_eq!((attempts, looks), (1, 1), "{scheme}");
        let gone = |before| {
            if before == 0 { Reply::of(404, "") } else { Reply::head(77) }
        };
        let (done, attempts, looks) = copied(scheme, 77, copied_at, gone);
        assert!(done.is_ok(), "{scheme}: {done:?}");
        // Azure may only have begun the copy.
        assert_eq!((attempts, looks), (2, if scheme == "az" { 2 } else { 1 }), "{scheme}");
    }
}

#[test]
fn a_copy_that_only_began_is_waited_for() {
    let looks = |before| Reply::head(if before < 2 { 0 } else { 77 });
    let (done, attempts, looks) = copied("az", 77, |_| Reply::ok(""), looks);
    assert!(done.is_ok(), "{done:?}");
    assert_eq!((attempts, looks), (3, 3));
    let (done, attempts, _) = copied("az", 77, |_| Reply::ok(""), |_| Reply::head(0));
    assert!(matches!(done, Err(Error::Storage { .. })), "{done:?}");
    assert_eq!(attempts, 4);
}

#[test]
fn what_is_not_copied_is_refused_at_once() {
    let refused = |_| Reply::of(403, "AccessDenied");
    for scheme in ["s3", "gs", "az"] {
        let (done, attempts, looks) = copied(scheme, 77, refused, |_| Reply::head(77));
        let Err(Error::Storage { kind, action, .. }) = done else { panic!("{scheme}: {done:?}") };
        assert_eq!((kind, action, attempts, looks), (StorageFault::Denied, "copy", 1, 0));
    }
    // S3 copies no more bytes at once.
    let (done, attempts, _) = copied("s3", (5 << 30) + 1, |_| Reply::ok(""), |_| Reply::head(0));
    assert!(matches!(done, Err(Error::Unsupported(_))), "{done:?}");
    assert_eq!(attempts, 0);
    assert!(copied("s3", 5 << 30, |_| Reply::ok(""), |_| Reply::head(0)).0.is_ok());
    assert!(copied("gs", 6 << 30, |_| Reply::ok(""), |_| Reply::head(0)).0.is_ok());
}

#[test]
fn what_is_to_be_copied_has_its_length_and_its_place() {
    let (url, asked) = serve(|_, _| Reply::head(77));
    let store = Store::new("s3://bucket", options("s3", &url, &[])).unwrap();
    let connection = store.connect_to_store(1).unwrap();
    let copy = |from: &str, to: &str, size| {
        connection.copy(from.as_ref(), to.as_ref(), size, &Control::new())
    };
    let shorter = copy("s3://bucket/from", "s3://bucket/to", 78);
    assert!(matches!(shorter, Err(Error::CorruptData { .. })), "{shorter:?}");
    for (from, to) in [("s3://bucket/from", "s3://other/to"), ("s3://other/from", "s3://bucket/to")]
    {
        assert!(matches!(copy(from, to, 77), Err(Error::Unsupported(_))));
    }
    assert_eq!(asked.lock().unwrap().len(), 1);
}

#[test]
fn a_large_copy_takes_longer() {
    // A gigabyte takes minutes, and each retry allows more time.
    let work = copying(1 << 30);
    assert!(work >= Duration::from_secs(60));
    let retry = RetryState::new(crate::config::Limits::default(), Arc::default());
    assert!(retry.answer(work) > work);
}

/// Removes an object of 77 bytes that was seen. The store has these answers to the n-th attempt,
/// and to the n-th look after the first attempt. Also returns how many of both there were.
fn removed(
    attempts: impl Fn(usize) -> Reply + Send + Sync + 'static,
    looks: impl Fn(usize) -> Reply + Send + Sync + 'static,
) -> (Result<()>, usize, usize) {
    let (url, asked) = serve(move |question, before| match question.split_once(' ').unwrap().0 {
        "HEAD" if before < 2 => Reply::head(77),
        "HEAD" => looks(before - 2),
        _ => attempts(before),
    });
    let store = Store::new("s3://bucket", options("s3", &url, &[("max_retries", "3")])).unwrap();
    let connection = store.connect_to_store(1).unwrap();
    let (path, control) = (Path::new("s3://bucket/file"), Control::new());
    assert_eq!(connection.look(path, &control).unwrap(), Some(77));
    let done = connection.remove_seen(path, &control);
    let asked = asked.lock().unwrap();
    let of = |method: &str| asked.iter().filter(|question| question.starts_with(method)).count();
    (done, of("DELETE"), of("HEAD") - 2)
}

fn is_precondition(done: &Result<()>) -> bool {
    matches!(done, Err(Error::Storage { kind: StorageFault::Precondition, action: "remove", .. }))
}

#[test]
fn a_removal_that_was_not_answered_is_not_tried_again_blindly() {
    let busy = |before| {
        if before == 0 { Reply::of(503, "SlowDown") } else { Reply::ok("") }
    };
    let (done, attempts, looks) = removed(busy, |_| Reply::head(77));
    assert!(done.is_ok(), "{done:?}");
    assert_eq!((attempts, looks), (2, 1));
    // The attempt was carried out.
    let (done, attempts, looks) = removed(busy, |_| Reply::of(404, ""));
    assert!(done.is_ok(), "{done:?}");
    assert_eq!((attempts, looks), (1, 1));
    // And another object was stored since.
    let (done, attempts, looks) = removed(busy, |_| Reply::head(78));
    assert!(is_precondition(&done), "{done:?}");
    assert_eq!((attempts, looks), (1, 1));
}

#[test]
fn a_condition_of_a_removal_is_kept_or_looked_after() {
    let refuses = |status, code: &'static str| {
        move |before| {
            if before == 0 { Reply::of(status, code) } else { Reply::ok("") }
        }
    };
    for (status, code) in
        [(412, "PreconditionFailed"), (501, "NotImplemented"), (400, "InvalidRequest")]
    {
        let (done, attempts, looks) = removed(refuses(status, code), |_| Reply::head(78));
        assert!(is_precondition(&done), "{code}: {done:?}");
        assert_eq!((attempts, looks), (1, 1), "{code}");
        // The object has not changed, so the store does not support the condition.
        let (done, attempts, looks) = removed(refuses(status, code), |_| Reply::head(77));
        assert!(done.is_ok(), "{code}: {done:?}");
        assert_eq!((attempts, looks), (2, 1), "{code}");
    }
    let (done, attempts, _) = removed(|_| Reply::of(403, "AccessDenied"), |_| Reply::head(77));
    assert!(matches!(done, Err(Error::Storage { kind: StorageFault::Denied, .. })));
    assert_eq!(attempts, 1);
    let (done, ..) = removed(|_| Reply::of(404, "NoSuchKey"), |_| Reply::head(77));
    assert!(done.is_ok(), "{done:?}");
}

#[test]
fn what_nobody_saw_is_not_removed() {
    let (url, asked) = serve(|_, _| Reply::ok(""));
    let store = Store::new("s3://bucket", options("s3", &url, &[])).unwrap();
    let connection = store.connect_to_store(1).unwrap();
    let done = connection.remove_seen("s3://bucket/file".as_ref(), &Control::new());
    assert!(matches!(done, Err(Error::Internal(_))), "{done:?}");
    assert!(asked.lock().unwrap().is_empty());
}
