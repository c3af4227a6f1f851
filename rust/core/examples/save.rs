//! How fast a save is: `cargo run --release --example save -- <folder> [MiB] [direct|buffered] [threads] [fsync 0|1]`.
//!
//! Writes a model of tensors of 16 MiB (with some odd ones), then 20,000 tensors of 4 KiB, and checks what it wrote
//! by recovering the index from it.

use std::path::Path;
use std::time::Instant;

use dcp_rs_core::checkpoint::{RecoverOptions, commit, next_generation, recover};
use dcp_rs_core::format::{Index, Kind};
use dcp_rs_core::geometry::Dims;
use dcp_rs_core::write::{Part, Save, SaveInfo, SaveItem, WriteIo, WriteOptions};
use dcp_rs_core::{Control, Dtype, store};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let dir = Path::new(args.first().expect("a folder to write to"));
    let number = |at: usize, default: u64| args.get(at).map_or(default, |text| text.parse().expect("a number"));
    let io = match args.get(2).map(String::as_str) {
        Some("direct") => WriteIo::Direct,
        Some("buffered") => WriteIo::Buffered,
        _ => WriteIo::Auto,
    };
    let threads = usize::try_from(number(3, 0)).expect("a number of threads");
    let options = WriteOptions {
        io,
        threads,
        fsync: number(4, 1) == 1,
        ..WriteOptions::default()
    };

    let large: Vec<u64> = (0..number(1, 2176) / 16)
        .map(|i| (16 << 20) - if i % 3 == 0 { 1536 } else { 0 })
        .collect();
    report("large", dir, &large, options);
    report("small", dir, &vec![4096; 20_000], options);
}

fn report(what: &str, dir: &Path, lengths: &[u64], options: WriteOptions) {
    let contents: Vec<Vec<u8>> = (0_u64..)
        .zip(lengths)
        .map(|(i, &length)| {
            (0..length)
                .map(|at| ((at * 2_654_435_761 + i) >> 9).to_le_bytes()[0])
                .collect()
        })
        .collect();
    let parts: Vec<Part> = (0..)
        .zip(&contents)
        .map(|(item, data)| Part { item, at: 0, data })
        .collect();
    let items: Vec<SaveItem> = (0_u64..).zip(lengths).map(|(i, &length)| item(i, length)).collect();
    let total: u64 = lengths.iter().sum();

    let mut clock = Instant::now();
    let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed();
    let info = SaveInfo {
        save_id: [7; 16],
        generation: next_generation(dir).unwrap(),
        token: store::random_token().unwrap(),
        rank: 0,
        world_size: 1,
    };
    let save = Save::create(dir, items, info, &options, &Control::new()).unwrap();
    let created = lap();
    save.write(&parts, &Control::new()).unwrap();
    let written = lap();
    let index = save.finish(&Control::new()).unwrap();
    let finished = lap();
    commit(dir, None, index.clone(), options.fsync, &Control::new()).unwrap();
    let committed = lap();
    let took = created + written + finished + committed;
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let rate = total as f64 / took.as_secs_f64() / 1e9;
    println!(
        "{what}: {} tensors, {} MB, {options:?}\n  {rate:.2} GB/s, {took:.3?}: created {created:.3?}, written {written:.3?}, \
         finished {finished:.3?}, committed {committed:.3?}",
        lengths.len(),
        total / 1_000_000,
    );
    let rebuilt = recover(dir, &RecoverOptions::default(), &Control::new()).unwrap();
    println!("  recovered and compared in {:.3?}", lap());
    let digests = |bytes: Vec<u8>| -> Vec<u64> {
        let index = Index::from_bytes(bytes, dir).unwrap();
        (0..index.chunk_count())
            .flat_map(|c| index.chunk(c).digests.unwrap())
            .map(|d| index.digest(d))
            .collect()
    };
    assert_eq!(digests(rebuilt), digests(index));
}

fn item(number: u64, length: u64) -> SaveItem {
    let shape = Dims::from_slice(&[length / 2]);
    SaveItem {
        name: format!("model.layers.{number}.weight"),
        kind: Kind::Tensor,
        dtype: Dtype::from_name("bfloat16"),
        flags: 0,
        path: None,
        position: None,
        offsets: Dims::from_slice(&[0]),
        sizes: shape.clone(),
        shape,
        length,
    }
}
