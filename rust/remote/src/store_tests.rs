//! An upload that was completed by an attempt whose answer was lost: each store says it in its way.

use dcp_rs_core::store::Remote as _;
use dcp_rs_core::{Control, Error, StorageFault};

use super::*;
use crate::Store;
use crate::testing::{Reply, options, serve};

const SIZE: usize = 12 << 20;

/// Completes an upload on a store that answers the n-th attempt, and the n-th look at the object, so. Returns also how many of both there were.
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
    };
    let parts = (1..=2).map(|number| format!("{number}")).collect();
    let done = connection.complete(&upload, parts, SIZE as u64, &Control::new());
    let asked = asked.lock().unwrap();
    let looked = asked.iter().filter(|question| question.starts_with("HEAD")).count();
    (done, asked.len() - looked, looked)
}

/// Of the first attempt nothing is known, and the object is there a moment later only; the second meets an upload that is none any more.
fn second(status: u16, code: &'static str) -> impl Fn(usize) -> Reply + Send + Sync {
    move |before| match before {
        0 => Reply::of(503, "ServerBusy"),
        _ => Reply::of(status, code),
    }
}

fn late(before: usize) -> Reply {
    match before {
        0 => Reply::of(404, ""),
        // What looks is tried again.
        1 | 2 => Reply::of(503, "SlowDown"),
        _ => Reply::head(SIZE),
    }
}

#[test]
fn a_lost_completion_is_found() {
    for (scheme, status, code) in [
        ("s3", 404, "NoSuchUpload"),
        ("gs", 404, "NoSuchUpload"),
        ("az", 400, "InvalidBlockList"),
    ] {
        let (done, attempts, looks) = completed(scheme, second(status, code), late);
        assert!(done.is_ok(), "{scheme}: {done:?}");
        assert_eq!((attempts, looks), (2, 4), "{scheme}");
    }
}

#[test]
fn another_length_is_not_what_was_stored() {
    for scheme in ["s3", "gs", "az"] {
        let (done, ..) = completed(scheme, second(404, "NoSuchUpload"), |_| Reply::head(SIZE - 1));
        let Err(Error::Storage { kind, reason, .. }) = done else {
            panic!("{scheme}: {done:?}")
        };
        assert_eq!(kind, StorageFault::NotFound, "{scheme}");
        assert!(reason.contains("no such upload"), "{reason}");
    }
}

#[test]
fn what_is_refused_is_not_looked_at() {
    let (done, attempts, looks) = completed("s3", |_| Reply::of(403, "AccessDenied"), |_| Reply::head(SIZE));
    assert!(matches!(
        done,
        Err(Error::Storage {
            kind: StorageFault::Denied,
            ..
        })
    ));
    assert_eq!((attempts, looks), (1, 0));
}

#[test]
fn many_parts_take_longer() {
    let limits = crate::config::Limits::default();
    let patience = Patience::new(limits);
    assert!(patience.answer(JOINING * 10_000) > limits.silence * 10);
}
