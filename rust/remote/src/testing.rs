//! A server on loopback with answers that a test determines.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Answer of the server.
pub struct Reply {
    pub status: u16,
    /// Value of `Content-Length`, if the body is not sent, as for a HEAD request.
    pub length: Option<usize>,
    pub body: String,
    pub tag: &'static str,
    /// Answer before the body of the request is read. It is never read, and the connection stays
    /// open.
    pub early: bool,
    /// Delay before anything else.
    pub delay: Duration,
    /// Additional headers, each with its line end.
    pub headers: String,
    /// Send an endless body after the real one: a byte each interval, or as fast as possible.
    pub endless: Option<Duration>,
}

impl Reply {
    pub fn of(status: u16, code: &str) -> Self {
        Self {
            status,
            length: None,
            body: format!("<Error><Code>{code}</Code></Error>"),
            tag: "\"t\"",
            early: false,
            delay: Duration::ZERO,
            headers: String::new(),
            endless: None,
        }
    }

    pub fn ok(body: &str) -> Self {
        Self { body: body.into(), ..Self::of(200, "") }
    }

    pub fn head(length: usize) -> Self {
        Self { length: Some(length), ..Self::ok("") }
    }

    pub fn tagged(self, tag: &'static str) -> Self {
        Self { tag, ..self }
    }

    pub fn early(self) -> Self {
        Self { early: true, ..self }
    }

    pub fn with(self, name: &str, value: &str) -> Self {
        let headers = format!("{}{name}: {value}\r\n", self.headers);
        Self { headers, ..self }
    }

    /// Makes the body the first bytes of an object of `size` bytes, as a range.
    pub fn ranged(self, size: u64) -> Self {
        let last = self.body.len().saturating_sub(1);
        let reply = self.with("Content-Range", &format!("bytes 0-{last}/{size}"));
        Self { status: 206, ..reply }
    }

    pub fn endless(self, pause: Duration) -> Self {
        Self { length: Some(1 << 40), endless: Some(pause), ..self }
    }

    pub fn after(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }
}

/// The requests: "PUT /bucket/name?query", with " Referer" at the end if there was such a header.
pub type Asked = Arc<Mutex<Vec<String>>>;

/// Serves as long as the process runs. `answer` gets the request, and how often it was made before.
pub fn serve(answer: impl Fn(&str, usize) -> Reply + Send + Sync + 'static) -> (String, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (answer, asked) = (Arc::new(answer), Asked::default());
    let noted = Arc::clone(&asked);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (answer, asked) = (Arc::clone(&answer), Arc::clone(&noted));
            thread::spawn(move || {
                let mut reader = BufReader::new(stream.unwrap());
                while converse(&mut reader, &*answer, &asked).is_some() {}
            });
        }
    });
    (url, asked)
}

fn converse(
    reader: &mut BufReader<TcpStream>,
    answer: &dyn Fn(&str, usize) -> Reply,
    asked: &Asked,
) -> Option<()> {
    let mut first = String::new();
    reader.read_line(&mut first).ok().filter(|&read| read > 0)?;
    let (mut length, mut refers) = (0, "");
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|&read| read > 0)?;
        if line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        if name.eq_ignore_ascii_case("referer") {
            refers = " Referer";
        }
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok()?;
        }
    }
    let question = first.rsplit_once(' ')?.0.to_owned() + refers;
    let before = {
        let mut asked = asked.lock().unwrap();
        asked.push(question.clone());
        asked.iter().filter(|before| **before == question).count() - 1
    };
    let reply = answer(&question, before);
    if !reply.early {
        std::io::copy(&mut reader.by_ref().take(length), &mut std::io::sink()).ok()?;
    }
    thread::sleep(reply.delay);
    let told = format!(
        "HTTP/1.1 {} x\r\nContent-Length: {}\r\nETag: {}\r\nLast-Modified: Thu, 01 Jan 2026 \
        00:00:00 GMT\r\n{}\r\n{}",
        reply.status,
        reply.length.unwrap_or(reply.body.len()),
        reply.tag,
        reply.headers,
        reply.body
    );
    reader.get_mut().write_all(told.as_bytes()).ok()?;
    let piece = vec![b'x'; if reply.endless == Some(Duration::ZERO) { 1 << 16 } else { 1 }];
    while let Some(pause) = reply.endless {
        thread::sleep(pause);
        reader.get_mut().write_all(&piece).ok()?;
    }
    if reply.early {
        // Keeps the connection, and reads nothing more.
        thread::sleep(Duration::from_secs(3600));
    }
    Some(())
}

/// Returns options for a server, for one kind of store.
pub fn options(scheme: &str, url: &str, more: &[(&str, &str)]) -> Vec<(String, String)> {
    let kind: &[(&str, &str)] = match scheme {
        "gs" => &[("google_base_url", url), ("google_skip_signature", "true")],
        "az" => &[
            ("azure_endpoint", url),
            ("azure_storage_account_name", "account"),
            ("azure_skip_signature", "true"),
        ],
        _ => &[("aws_endpoint", url), ("aws_region", "us-east-1"), ("aws_skip_signature", "true")],
    };
    let all = kind.iter().chain(&[("allow_http", "true")]).chain(more);
    all.map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
}
