//! The example server, asked over TCP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

use dcp_rs_core::Checkpoint;

use super::api::fixture;

#[path = "../../examples/serve_rows.rs"]
mod example;

#[test]
fn it_serves_rows() {
    let path = fixture("tests/fixtures/stock/torch-2.15.0/hf");
    let checkpoint = Checkpoint::open(path).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // It ends with the process.
    std::thread::spawn(move || example::serve(&listener, checkpoint));

    let mut client = TcpStream::connect(address).unwrap();
    let mut answers = BufReader::new(client.try_clone().unwrap());
    let mut ask = |request: &str| {
        writeln!(client, "{request}").unwrap();
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        let length = line
            .strip_prefix("ok ")
            .map_or(0, |head| head.trim().rsplit(' ').next().unwrap().parse().unwrap());
        let mut bytes = vec![0; length];
        answers.read_exact(&mut bytes).unwrap();
        (line, bytes)
    };
    let floats =
        |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    // `a` is arange(6) as [2, 3].
    assert_eq!(ask("1 1 a"), ("ok float32 1x3 12\n".into(), floats(&[3.0, 4.0, 5.0])));
    assert_eq!(
        ask("0 2 a"),
        ("ok float32 2x3 24\n".into(), floats(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]))
    );
    assert_eq!(ask("2 0 a"), ("ok float32 0x3 0\n".into(), vec![]));
    for (request, reason) in [
        ("1 2 a", "2 rows from 1 on, and a has 2"),
        ("18446744073709551615 1 a", "and a has 2"),
        ("0 1 nothing", "holds no tensor of this name"),
        ("0 1", "expected FIRST COUNT NAME"),
        ("a 0 1", "expected FIRST COUNT NAME"),
    ] {
        let (line, _) = ask(request);
        assert!(line.starts_with("error ") && line.contains(reason), "{request}: {line}");
    }
    // The next client is served as well.
    assert_eq!(ask("0 1 a").1, floats(&[0.0, 1.0, 2.0]));
}
