//! Endless answers and redirects to other hosts. Once, a store could fill the memory of a client,
//! hold it forever, or send it elsewhere with its credentials. Also checks each phrase of
//! `object_store` that `answers.rs` relies on, with a live client.

use std::path::Path;

use dcp_rs_core::store::{Condition, Remote as _};
use dcp_rs_core::{Control, StorageFault};
use object_store::{
    GetOptions, GetRange, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, UpdateVersion,
};
use tokio::runtime::Builder;

use super::*;
use crate::Store;
use crate::answers::Failure;
use crate::config::Config;
use crate::testing::{Reply, options, serve};

const NOW: Duration = Duration::ZERO;

fn store(scheme: &str, url: &str, more: &[(&str, &str)]) -> Store {
    Store::new(&format!("{scheme}://bucket"), options(scheme, url, more)).unwrap()
}

/// Returns the first bytes of an object.
fn start(store: &Store) -> dcp_rs_core::Result<Option<(Vec<u8>, u64)>> {
    let path = format!("{}/file", store.root());
    store.connect(1).unwrap().start(path.as_ref(), 4 << 20, false, &Control::new())
}

fn fault(error: &dcp_rs_core::Error) -> (StorageFault, &str, u32) {
    match error {
        dcp_rs_core::Error::Storage { kind, reason, attempts, .. } => (*kind, reason, *attempts),
        error => panic!("{error}"),
    }
}

#[test]
fn an_error_without_an_end_is_told_by_its_beginning() {
    let (url, _) = serve(|_, _| Reply::of(403, "AccessDenied").endless(NOW));
    for scheme in ["s3", "gs", "az"] {
        let error = start(&store(scheme, &url, &[])).unwrap_err();
        let (kind, reason, attempts) = fault(&error);
        assert_eq!((kind, attempts), (StorageFault::Denied, 1), "{scheme}: {error}");
        assert!(reason.contains("403 AccessDenied"), "{reason}");
    }
}

#[test]
fn a_listing_without_an_end_is_refused() {
    let (url, _) = serve(|_, _| Reply::ok("<ListBucketResult>").endless(NOW));
    let listed =
        store("s3", &url, &[]).connect(1).unwrap().list("s3://bucket/x".as_ref(), &Control::new());
    let error = listed.unwrap_err();
    assert_eq!(
        fault(&error),
        (StorageFault::Failed, "the answer is longer than 16777216 bytes", 1)
    );
}

#[test]
fn a_byte_now_and_then_holds_nobody_for_ever() {
    let (url, _) = serve(|_, _| {
        let reply = Reply::ok("x").with("Content-Range", "bytes 0-4194303/1073741824");
        Reply { status: 206, ..reply }.endless(Duration::from_millis(20))
    });
    let began = Instant::now();
    let error = start(&store("s3", &url, &[("retry_timeout", "0.5")])).unwrap_err();
    let (_, reason, _) = fault(&error);
    assert!(reason.contains("too slowly") || reason.contains("in time"), "{reason}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[test]
fn a_length_is_believed_as_far_as_bytes_come() {
    let (url, asked) = serve(|_, before| match before {
        0 => Reply::ok(&"x".repeat(4 << 20)).ranged(3_000_000_000),
        _ => Reply::of(403, "AccessDenied"),
    });
    let connection = store("s3", &url, &[]).connect(1).unwrap();
    let path = Path::new("s3://bucket/index.dcprs");
    let error = dcp_rs_core::store::read_files(&[path.to_owned()], &*connection, &Control::new())
        .unwrap_err();
    assert_eq!(fault(&error).0, StorageFault::Denied);
    // 64 MiB of the three gigabytes, and no memory for more.
    assert!(asked.lock().unwrap().len() <= 1 + 8);
}

#[test]
fn a_store_leads_to_no_other_host() {
    let (elsewhere, asked) = serve(|_, _| Reply::ok("x").ranged(1));
    let elsewhere = elsewhere.replace("127.0.0.1", "localhost");
    for (scheme, status) in [("s3", 307), ("s3", 301), ("gs", 302), ("az", 308)] {
        let to = format!("{elsewhere}/bucket/file");
        let (url, _) = serve(move |_, _| {
            Reply::of(status, "PermanentRedirect")
                .with("Location", &to)
                .with("x-amz-bucket-region", "eu-west-1")
        });
        let error = start(&store(scheme, &url, &[])).unwrap_err();
        let (kind, reason, attempts) = fault(&error);
        assert_eq!((kind, attempts), (StorageFault::Failed, 1), "{error}");
        assert!(reason.contains("to another host, localhost"), "{reason}");
        assert!(reason.contains("in the region eu-west-1"), "{reason}");
    }
    assert!(asked.lock().unwrap().is_empty());
}

#[test]
fn a_web_server_may_and_is_not_told_where_from() {
    let (elsewhere, asked) = serve(|_, _| Reply::ok("x").ranged(1));
    let (url, _) =
        serve(move |_, _| Reply::of(302, "").with("Location", &format!("{elsewhere}/other")));
    let store = Store::new(&url, []).unwrap();
    let found =
        store.connect(1).unwrap().start(format!("{url}/file").as_ref(), 4, false, &Control::new());
    assert_eq!(found.unwrap(), Some((b"x".to_vec(), 1)));
    assert_eq!(*asked.lock().unwrap(), ["GET /other"]);
}

#[test]
fn no_redirect_leads_from_the_internet_into_a_private_network() {
    let url = |text: &str| Url::parse(text).unwrap();
    let public = url("http://93.184.216.34/model");
    for to in [
        "http://127.0.0.1/x",
        "http://localhost:8080/x",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.1.2.3/x",
        "http://100.64.0.1/x",
        "http://[::1]/x",
        "http://[fd00::1]/x",
        "http://[::ffff:192.168.0.1]/x",
        "http://0.0.0.0/x",
    ] {
        assert!(!leads_on(std::slice::from_ref(&public), &url(to)), "{to}");
        assert!(leads_on(&[url("http://192.168.0.7/x")], &url(to)), "{to}");
        assert!(!leads_on(&[url("http://127.0.0.1/x"), public.clone()], &url(to)), "{to}");
    }
    assert!(leads_on(std::slice::from_ref(&public), &url("https://93.184.216.35/x")));
    assert!(leads_on(&[url("http://127.0.0.1/x")], &public));
    assert!(!leads_on(&[url("https://93.184.216.34/x")], &public));
}

/// Once, the same token again and again kept a call, and its memory, for ever.
#[test]
fn a_listing_that_repeats_itself_ends() {
    let page = |token: String| {
        let body = format!(
            "<ListBucketResult><Contents><Key>x/f</Key><Size>1</Size>\
             <LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>\
             <NextContinuationToken>{token}</NextContinuationToken></ListBucketResult>"
        );
        Reply::ok(&body)
    };
    let list = |url: &str| {
        let connection = store("s3", url, &[]).connect(1).unwrap();
        connection.list("s3://bucket/x".as_ref(), &Control::new()).unwrap_err()
    };
    let (url, asked) = serve(move |_, _| page("again".into()));
    let error = list(&url);
    assert!(fault(&error).1.contains("the same page again"), "{error}");
    assert_eq!(asked.lock().unwrap().len(), 2);
    let (url, asked) = serve(move |_, before| page(["a", "b", "c", "a"][before % 4].into()));
    assert!(fault(&list(&url)).1.contains("the same page again"));
    assert!(asked.lock().unwrap().len() < 9);
}

#[test]
fn a_store_that_asks_to_wait_is_left_alone() {
    let (url, asked) = serve(|_, before| match before {
        0 => Reply::of(503, "SlowDown").with("Retry-After", "1"),
        _ => Reply::ok("x").ranged(1),
    });
    let began = Instant::now();
    assert!(start(&store("s3", &url, &[])).unwrap().is_some());
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(asked.lock().unwrap().len(), 2);
    // The wait is longer than the time limit, so there is none.
    let (url, asked) = serve(|_, _| Reply::of(503, "SlowDown").with("Retry-After", "3600"));
    assert_eq!(fault(&start(&store("s3", &url, &[])).unwrap_err()).2, 1);
    assert_eq!(asked.lock().unwrap().len(), 1);
}

#[test]
fn what_passes_and_what_blames_credentials_is_known_by_its_code() {
    for code in ["RequestTimeout", "SlowDown", "ThrottlingException"] {
        let (url, asked) = serve(move |_, before| match before {
            0 => Reply::of(400, code),
            _ => Reply::ok("x").ranged(1),
        });
        assert!(start(&store("s3", &url, &[])).unwrap().is_some(), "{code}");
        assert_eq!(asked.lock().unwrap().len(), 2);
    }
    for (status, code) in
        [(400, "ExpiredToken"), (403, "ExpiredToken"), (401, ""), (400, "InvalidToken")]
    {
        let (url, _) = serve(move |_, _| Reply::of(status, code));
        let error = start(&store("s3", &url, &[])).unwrap_err();
        let (kind, reason, attempts) = fault(&error);
        assert_eq!((kind, attempts), (StorageFault::Denied, 1), "{error}");
        assert!(reason.contains("credentials are"), "{reason}");
    }
    let (url, _) = serve(|_, _| Reply {
        body: "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>"
            .into(),
        ..Reply::of(400, "")
    });
    let error = start(&store("s3", &url, &[])).unwrap_err();
    assert!(fault(&error).1.contains("in the region eu-west-1: set aws_region"), "{error}");
    // A HEAD request gets no body.
    let (url, _) = serve(|_, _| Reply {
        length: Some(0),
        body: String::new(),
        ..Reply::of(400, "").with("x-amz-bucket-region", "eu-west-1")
    });
    let error = start(&store("s3", &url, &[])).unwrap_err();
    let told = "the store answered 400: the bucket is in the region eu-west-1: set aws_region";
    assert_eq!(fault(&error), (StorageFault::Failed, told, 1));
}

/// Once, it was retried for two minutes.
#[test]
fn plain_http_without_permission_fails_at_once() {
    // The client for gs:// allows it if the endpoint is http://.
    for scheme in ["s3", "az"] {
        let error = start(&store(scheme, "http://127.0.0.1:1", &[("allow_http", "false")]));
        let error = error.unwrap_err();
        let (kind, reason, attempts) = fault(&error);
        assert_eq!((kind, attempts), (StorageFault::Failed, 1), "{scheme}: {error}");
        assert!(reason.contains("set allow_http"), "{reason}");
    }
}

#[test]
fn times_are_seconds_or_have_a_unit() {
    let (url, _) = serve(|_, _| Reply::ok("x").ranged(1));
    for value in ["2", "0.5", "2s", "1m"] {
        let options = [("connect_timeout", value), ("pool_idle_timeout", value)];
        assert!(start(&store("s3", &url, &options)).unwrap().is_some(), "{value}");
    }
    let error = store("s3", &url, &[("connect_timeout", "soon")]).connect(1).err().unwrap();
    assert!(error.to_string().contains("connect_timeout is not a number of seconds"), "{error}");
}

#[test]
fn without_another_word_retries_end_with_the_time() {
    let (url, asked) = serve(|_, _| Reply::of(503, "SlowDown"));
    let began = Instant::now();
    assert!(start(&store("s3", &url, &[("retry_timeout", "1.2")])).is_err());
    assert!(began.elapsed() < Duration::from_secs(10));
    // A limit on the number alone would have ended it earlier.
    assert!(asked.lock().unwrap().len() >= 3);
    assert_eq!(crate::config::Limits::default().retries, u32::MAX);
}

/// Serves an instance's metadata with a role, and the bucket that the role may read.
fn instance(refuses: &'static str) -> (String, crate::testing::Asked) {
    serve(move |question, before| match question {
        "PUT /latest/api/token" => Reply::ok("token"),
        "GET /latest/meta-data/iam/security-credentials/" => Reply::ok("role"),
        "GET /latest/meta-data/iam/security-credentials/role" => Reply::ok(concat!(
            r#"{"AccessKeyId": "key", "SecretAccessKey": "secret", "Token": "token", "Code": "Success","#,
            r#" "Expiration": "2099-01-01T00:00:00Z"}"#
        )),
        _ if before == 0 && !refuses.is_empty() => Reply::of(403, refuses),
        _ => Reply::ok("x").ranged(1),
    })
}

fn asked_of_metadata(asked: &crate::testing::Asked) -> usize {
    let asked = asked.lock().unwrap();
    asked.iter().filter(|question| question.contains("/latest/")).count()
}

/// Once, every call asked for new credentials: 22 requests for one save of one rank.
#[test]
fn a_role_is_asked_for_its_credentials_once() {
    let role = |url: &str| {
        let given = [("aws_metadata_endpoint", url), ("aws_skip_signature", "false")];
        store("s3", url, &given)
    };
    let (url, asked) = instance("");
    for _ in 0..3 {
        assert!(start(&role(&url)).unwrap().is_some());
    }
    assert_eq!(asked_of_metadata(&asked), 3);
    // New credentials are requested if these were refused, but not if they only lack a permission.
    for (code, again) in [("ExpiredToken", 6), ("AccessDenied", 3)] {
        let (url, asked) = instance(code);
        assert_eq!(fault(&start(&role(&url)).unwrap_err()).0, StorageFault::Denied);
        assert!(start(&role(&url)).unwrap().is_some());
        assert_eq!(asked_of_metadata(&asked), again, "{code}");
    }
}

#[test]
fn a_bundle_of_authorities_is_read() {
    let given = |file: &str| store("s3", "https://127.0.0.1:1", &[("aws_ca_bundle", file)]);
    for file in ["/does/not/exist.pem", "/dev/null"] {
        let refused = given(file).connect(1).err().unwrap().to_string();
        assert!(refused.contains("aws_ca_bundle") && refused.contains(file), "{refused}");
    }
}

/// Returns a client, and the runtime for it.
fn client(scheme: &str, url: &str) -> (tokio::runtime::Runtime, Arc<dyn ObjectStore>) {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let config = Config::new(&format!("{scheme}://bucket"), options(scheme, url, &[])).unwrap();
    let client = {
        let _entered = runtime.enter();
        config.client(Arc::default()).unwrap().objects
    };
    (runtime, client)
}

#[test]
fn the_words_of_the_client_are_those_that_are_known() {
    // "status code: ", which `Failure::status` needs, and the texts of each class of error.
    for (status, kind) in [
        (404, StorageFault::NotFound),
        (412, StorageFault::Precondition),
        (403, StorageFault::Denied),
        (401, StorageFault::Denied),
        (400, StorageFault::Failed),
        (500, StorageFault::Failed),
    ] {
        let (url, _) = serve(move |_, _| Reply::of(status, "Other"));
        for scheme in ["s3", "gs", "az"] {
            let (runtime, client) = client(scheme, &url);
            let failure = Failure::of(&runtime.block_on(client.get(&"file".into())).unwrap_err());
            assert_eq!((failure.status, failure.kind), (Some(status), kind), "{scheme}");
            assert!(failure.was_sent);
        }
    }
    // "ETag required", "Version required": nothing was sent.
    let (url, asked) = serve(|_, _| Reply::ok(""));
    for scheme in ["s3", "gs", "az"] {
        let (runtime, client) = client(scheme, &url);
        let nothing = UpdateVersion { e_tag: None, version: None };
        let options = PutOptions::from(PutMode::Update(nothing));
        let put = runtime.block_on(client.put_opts(&"file".into(), "x".into(), options));
        assert!(!Failure::of(&put.unwrap_err()).may_be_done(), "{scheme}");
    }
    assert!(asked.lock().unwrap().is_empty());
    // "non-partial response": a range was requested, and the whole file came.
    let (url, _) = serve(|_, _| Reply::ok("all of it"));
    for scheme in ["s3", "gs", "az"] {
        let (runtime, client) = client(scheme, &url);
        let options = GetOptions { range: Some(GetRange::Bounded(0..3)), ..GetOptions::default() };
        let failure =
            Failure::of(&runtime.block_on(client.get_opts(&"file".into(), options)).unwrap_err());
        assert!(failure.reason.contains("whole files only"), "{}", failure.reason);
    }
    // "InternalError" in the body of a successful answer.
    for code in ["InternalError", "SlowDown"] {
        let (url, _) = serve(move |_, _| Reply { status: 200, ..Reply::of(200, code) });
        let store = store("s3", &url, &[("max_retries", "1")]);
        let connection = store.connect_to_store(1).unwrap();
        let upload = dcp_rs_core::store::Upload {
            path: "s3://bucket/file".into(),
            id: "1".into(),
            condition: Condition::Always,
        };
        let done = connection.complete(&upload, vec!["1".into()], 1, &Control::new());
        assert_eq!(fault(&done.unwrap_err()).2, 2, "{code}: it is tried again");
    }
}
