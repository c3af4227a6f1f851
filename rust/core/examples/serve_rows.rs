//! Serves rows of a checkpoint's tensors over TCP: `cargo run --release --example serve_rows --
//! CHECKPOINT [ADDRESS]`.
//!
//! A client sends lines `FIRST COUNT NAME`. The answer to each is a line `ok DTYPE SHAPE NBYTES`,
//! as in `ok float32 2x3 24`, and so many bytes; or a line `error REASON`.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use dcp_rs_core::{Checkpoint, Error};

/// A client cannot make the server take more memory than this, in bytes.
const LONGEST_LINE: u64 = 4096;
const LARGEST_ANSWER: u64 = 256 << 20;

#[allow(dead_code)] // the test that includes this file calls `serve`
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: serve_rows CHECKPOINT [ADDRESS]")?;
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7878".into());
    let checkpoint = Checkpoint::open(path)?;
    let listener = TcpListener::bind(address)?;
    println!("serving {} tensors on {}", checkpoint.names().count(), listener.local_addr()?);
    serve(&listener, checkpoint)?;
    Ok(())
}

/// Answers every client in a thread of its own, until the listener fails.
pub fn serve(listener: &TcpListener, checkpoint: Checkpoint) -> io::Result<()> {
    let checkpoint = Arc::new(checkpoint);
    loop {
        let (client, _) = listener.accept()?;
        let checkpoint = Arc::clone(&checkpoint);
        // A client that goes away ends its own thread alone.
        std::thread::spawn(move || answer(&client, &checkpoint));
    }
}

fn answer(client: &TcpStream, checkpoint: &Checkpoint) -> io::Result<()> {
    let mut lines = BufReader::new(client);
    let mut answers = client;
    loop {
        let mut line = String::new();
        if (&mut lines).take(LONGEST_LINE).read_line(&mut line)? == 0 {
            return Ok(());
        }
        match rows(checkpoint, line.trim_end_matches(['\r', '\n'])) {
            Ok((head, bytes)) => {
                writeln!(answers, "ok {head} {}", bytes.len())?;
                answers.write_all(&bytes)?;
            }
            Err(reason) => writeln!(answers, "error {}", reason.replace('\n', " "))?,
        }
    }
}

/// Reads the rows that a line asks for. Returns their dtype and shape, and their bytes.
fn rows(checkpoint: &Checkpoint, line: &str) -> Result<(String, Vec<u8>), String> {
    let mut words = line.splitn(3, ' ');
    let mut number = || words.next()?.parse::<u64>().ok();
    let (Some(first), Some(count), Some(name)) = (number(), number(), words.next()) else {
        return Err("expected FIRST COUNT NAME".into());
    };
    let text = |error: Error| error.to_string();
    let tensor = checkpoint.tensor(name).map_err(text)?;
    let [height, row @ ..] = tensor.shape.as_slice() else {
        return Err(format!("{name} is a scalar: it has no rows"));
    };
    if first.checked_add(count).is_none_or(|end| end > *height) {
        return Err(format!("{count} rows from {first} on, and {name} has {height}"));
    }
    let nbytes =
        row.iter().fold(count * tensor.dtype.size(), |bytes, size| bytes.saturating_mul(*size));
    let nbytes = usize::try_from(nbytes).ok().filter(|_| nbytes <= LARGEST_ANSWER);
    let mut bytes = vec![0; nbytes.ok_or("too many rows for one answer")?];
    let (mut offsets, mut sizes) = (vec![0; tensor.shape.len()], tensor.shape.clone());
    (offsets[0], sizes[0]) = (first, count);
    checkpoint.read_region_into(name, &offsets, &sizes, &mut bytes).map_err(text)?;
    let shape: Vec<String> = sizes.iter().map(u64::to_string).collect();
    Ok((format!("{} {}", tensor.dtype.name(), shape.join("x")), bytes))
}
