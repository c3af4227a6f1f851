//! A request that fails, or is abandoned, does not affect other requests.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use super::*;
use crate::testing::{Reply, options, serve};

/// More bytes than sockets buffer for a server that does not read.
const LARGE: usize = 32 << 20;

fn connected(url: &str, more: &[(&str, &str)]) -> Connected {
    let config = Config::new("s3://bucket", options("s3", url, more)).unwrap();
    Connected::new(Arc::new(config), Arc::default(), 2).unwrap()
}

fn upload() -> Upload {
    Upload { path: "s3://bucket/file".into(), id: "1".into(), condition: Condition::Always }
}

fn kind(error: &Error) -> StorageFault {
    match error {
        Error::Storage { kind, .. } => *kind,
        error => panic!("{error}"),
    }
}

/// The first part is answered before it is sent, and its connection stays open. The other parts
/// take their time.
fn parts_beside(first: Reply) -> Vec<Result<String>> {
    let first = Mutex::new(Some(first));
    let (url, _) = serve(move |question, _| {
        if question.contains("partNumber=1&") {
            return first.lock().unwrap().take().unwrap();
        }
        Reply::ok("").after(Duration::from_secs(1))
    });
    let connection = connected(&url, &[("read_timeout", "0.3")]);
    let body = Body::new(vec![7_u8; LARGE]);
    let send = |number| connection.put_part(&upload(), number, &body, &Control::new());
    thread::scope(|scope| {
        let sending: Vec<_> = (0..4).map(|number| scope.spawn(move || send(number))).collect();
        sending.into_iter().map(|sending| sending.join().unwrap()).collect()
    })
}

#[test]
fn a_refusal_is_told_and_hinders_no_other_request() {
    let sent = parts_beside(Reply::of(403, "AccessDenied").early());
    assert_eq!(kind(sent[0].as_ref().unwrap_err()), StorageFault::Denied);
    assert!(sent[1..].iter().all(Result::is_ok), "{sent:?}");
}

#[test]
fn an_answer_that_came_early_hinders_no_other_request() {
    let sent = parts_beside(Reply::ok("").early());
    assert!(sent.iter().all(Result::is_ok), "{sent:?}");
}

#[test]
fn after_a_refusal_the_store_can_be_asked() {
    let (url, _) = serve(|question, _| match question.split_once(' ').unwrap().0 {
        "PUT" => Reply::of(412, "PreconditionFailed").early(),
        _ => Reply::head(5),
    });
    let connection = connected(&url, &[]);
    let (path, control) = (Path::new("s3://bucket/file"), Control::new());
    let put = connection.put(path, &Body::new(vec![0; LARGE]), Condition::New, &control);
    assert_eq!(kind(&put.unwrap_err()), StorageFault::Precondition);
    assert_eq!(connection.look(path, &control).unwrap(), Some(5));
}

/// Once, the call waited until the client released borrowed memory.
#[test]
fn what_was_answered_does_not_wait_until_all_is_sent() {
    let (url, _) = serve(|_, _| Reply::ok("").early());
    let connection = connected(&url, &[("read_timeout", "1e19")]);
    let (done, is_done) = channel();
    thread::spawn(move || {
        let body = Body::new(vec![0; LARGE]);
        let _ = done.send(connection.put_part(&upload(), 0, &body, &Control::new()));
    });
    assert!(is_done.recv_timeout(Duration::from_secs(60)).is_ok());
}

/// A client that gives a store up in a fifth of a second if nobody ever served it.
fn impatient(url: &str) -> Connected {
    let mut config = Config::new("s3://bucket", options("s3", url, &[])).unwrap();
    config.limits.refused = Duration::from_millis(200);
    Connected::new(Arc::new(config), Arc::default(), 2).unwrap()
}

/// It took two minutes.
#[test]
fn a_store_that_nobody_serves_is_given_up_soon() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let asked = Instant::now();
    let failed = impatient(&url).look(Path::new("s3://bucket/file"), &Control::new());
    assert_eq!(kind(&failed.unwrap_err()), StorageFault::Failed);
    assert!(asked.elapsed() < Duration::from_secs(30), "{:?}", asked.elapsed());
}

#[test]
fn a_store_that_answered_before_is_waited_for_while_it_starts_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let url = format!("http://{address}");
    thread::spawn(move || {
        let answer = |listener: TcpListener| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 1024];
            let _ = stream.read(&mut asked);
            stream.write_all(b"HTTP/1.1 404 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        };
        answer(listener).unwrap();
        thread::sleep(Duration::from_secs(1));
        answer(TcpListener::bind(address).unwrap()).unwrap();
    });
    for name in ["a", "b"] {
        // Each call has a session of its own.
        let path = PathBuf::from(format!("s3://bucket/{name}"));
        assert_eq!(impatient(&url).look(&path, &Control::new()).unwrap(), None);
    }
}
