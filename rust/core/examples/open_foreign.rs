//! How long a checkpoint that others wrote takes to open: `cargo run --release --example open_foreign -- PATH [THREADS]`.

use std::path::Path;
use std::time::Instant;

use dcp_rs_core::checkpoint::{self, Found};

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("a path");
    let threads = args.next().map_or(0, |n| n.parse().expect("a number of threads"));
    let path = Path::new(&path);
    for _ in 0..5 {
        let start = Instant::now();
        let kind = match checkpoint::find(path, None) {
            Ok(Found::Foreign(kind)) => kind,
            Ok(Found::Native) => return println!("it has an index"),
            Err(e) => return println!("{e}"),
        };
        match checkpoint::index(path, &kind, None, threads) {
            Ok(index) => println!(
                "{:.4} s: {} tensors in {} files, an index of {} bytes",
                start.elapsed().as_secs_f64(),
                index.tensor_count(),
                index.file_count(),
                index.bytes().len()
            ),
            Err(e) => return println!("{e}"),
        }
    }
}
