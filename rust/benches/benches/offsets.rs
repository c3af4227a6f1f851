//! Kernels that copy, with the destination at each of these distances from the source modulo 4,096:
//! `cargo bench -p dcp-rs-benches --bench offsets`. Cores compare only the low twelve bits of
//! addresses, so a kernel may be slow at some of them. The table at the end shows the best rate of
//! each, and the best over the worst, which should be at most 1.4.
#![allow(unsafe_code, missing_docs)] // copies raw memory; criterion's macros document nothing

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use dcp_rs_benches::{chunk, file, tensor};
use dcp_rs_core::Dtype;
use dcp_rs_core::copy::{Accumulate, Loop, Stores, copy_strided, copy_with_digest_unfenced, fence};
use dcp_rs_core::format::{Index, IndexBuilder, SourceKind};
use dcp_rs_core::geometry::Dims;
use dcp_rs_core::quant::{Coded, Format, Order, Target};

const OFFSETS: [usize; 10] = [0, 64, 128, 192, 256, 512, 1024, 2048, 3072, 4032];
const SIZES: [(&str, usize); 3] = [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("64 MiB", 64 << 20)];
/// Elements on a side of a transposed matrix.
const SIDE: usize = 128;
const PAGE: usize = 4096;
/// Columns of a quantized matrix, and rows and columns of its blocks.
const COLUMNS: usize = 4096;
const BLOCK: usize = 128;
/// Codes that are decoded at a time, as a load does it.
const WINDOW: usize = 256 << 10;

/// Copies this many bytes, or adds as many elements, from the second to the first.
type Kernel = fn(*mut u8, *const u8, usize);

const KERNELS: [(&str, Kernel); 10] = [
    ("memcpy", |dst, src, len| {
        // SAFETY: both sides have `len` bytes, here and below.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
    }),
    ("copy", |dst, src, len| runs(dst, src, len, len)),
    ("copy with digest", |dst, src, len| {
        for at in (0..len).step_by(1 << 20) {
            let part = (len - at).min(1 << 20);
            // SAFETY: the part ends within `len`.
            black_box(unsafe {
                let (dst, src) = (dst.add(at), src.add(at));
                copy_with_digest_unfenced(dst, src, part, 0, part, Stores::Streaming)
            });
        }
        fence();
    }),
    ("rows of 512", |dst, src, len| runs(dst, src, len, 512)),
    ("rows of 2,048", |dst, src, len| runs(dst, src, len, 2048)),
    ("rows of 4,160", |dst, src, len| runs(dst, src, len, 4160)),
    ("rows of 8,192", |dst, src, len| runs(dst, src, len, 8192)),
    ("transpose", |dst, src, len| {
        let (item, row) = (2, 2 * SIDE as u64);
        let loops = [
            Loop { n: SIDE as u64, src: item, dst: row },
            Loop { n: SIDE as u64, src: row, dst: item },
        ];
        for at in (0..len).step_by(2 * SIDE * SIDE) {
            // SAFETY: the matrix ends within `len`, which is a whole number of them.
            unsafe { copy_strided(dst.add(at), src.add(at), &loops, item, Stores::Streaming) };
        }
    }),
    ("add bfloat16", |dst, src, len| {
        let stored = Dtype::from_name("bfloat16").expect("a dtype");
        let add = Accumulate::new(stored, 0.5, false).expect("a number");
        // SAFETY: as many sums of four bytes as elements of two fit in `len` bytes.
        unsafe { add.run(dst, src, &[], len as u64 / 2) };
    }),
    ("dequantize FP8 blocks", |dst, src, len| {
        // SAFETY: the codes are half as long as what they become.
        let (codes, out) = unsafe {
            (std::slice::from_raw_parts(src, len / 2), std::slice::from_raw_parts_mut(dst, len))
        };
        for (codes, out) in codes.chunks(WINDOW).zip(out.chunks_mut(2 * WINDOW)) {
            let rows = codes.len() / COLUMNS;
            let scales = &SCALES[..4 * rows.div_ceil(BLOCK) * (COLUMNS / BLOCK)];
            let sizes = [rows as u64, COLUMNS as u64];
            let rows = out.chunks_exact_mut(2 * COLUMNS);
            let done = QUANTIZED.decode(&[0, 0], &sizes, &[codes, scales], rows, Stores::Streaming);
            done.expect("whole rows");
        }
        fence();
    }),
];

/// A matrix of FP8 codes that is decoded as the largest size of bfloat16.
static QUANTIZED: LazyLock<Coded> = LazyLock::new(|| {
    let rows = SIZES[2].1 / 2 / COLUMNS;
    let mut builder = IndexBuilder::new(SourceKind::Native);
    let codes = add(&mut builder, "codes", "float8_e4m3fn", [rows, COLUMNS], 1);
    let scale = add(&mut builder, "scale", "float32", [rows / BLOCK, COLUMNS / BLOCK], 4);
    let bytes = builder.build().expect("a valid index");
    let index = Index::from_bytes(bytes, Path::new("index.dcprs")).expect("a valid index");
    Coded {
        index: Arc::new(index),
        shape: Dims::from_slice(&[rows as u64, COLUMNS as u64]),
        target: Target::BFloat16,
        format: Format::Fp8,
        order: Order::Rows,
        block: [BLOCK as u64; 2],
        codes,
        scale,
        zeros: None,
        global: None,
    }
});
/// Scales of all its blocks.
static SCALES: LazyLock<Vec<u8>> =
    LazyLock::new(|| 0.5_f32.to_le_bytes().repeat(SIZES[2].1 / 2 / BLOCK / BLOCK));

/// Adds a tensor in a file of its own. Returns its number.
fn add(builder: &mut IndexBuilder, name: &str, dtype: &str, shape: [usize; 2], item: usize) -> u32 {
    let sizes = shape.map(|size| size as u64);
    let length = (shape[0] * shape[1] * item) as u64;
    let file = file(format!("{name}.safetensors"), length);
    let file = builder.add_file(file).expect("a new file");
    let tensor = builder.add_tensor(tensor(name.into(), dtype, &sizes)).expect("a new tensor");
    builder.add_chunk(chunk((tensor, file), 0, length, &[0, 0], &sizes)).expect("a new chunk");
    tensor
}

/// Copies runs, each from twice as far as it goes to: half of each row of a matrix.
fn runs(dst: *mut u8, src: *const u8, len: usize, run: usize) {
    let count = (len / run) as u64;
    let rows = [Loop { n: count, src: 2 * run as u64, dst: run as u64 }];
    let loops = if count > 1 { &rows[..] } else { &[] };
    // SAFETY: the destination has `len` bytes, and the source twice as many.
    unsafe { copy_strided(dst, src, loops, run as u64, Stores::Streaming) };
}

/// The shortest time of each kernel by size and offset.
static BEST: Mutex<BTreeMap<(usize, usize, usize), Duration>> = Mutex::new(BTreeMap::new());

fn copying(c: &mut Criterion) {
    let most = SIZES[2].1;
    let from = vec![7_u8; 2 * most + PAGE];
    let mut to = vec![1_u8; most + 2 * PAGE];
    let src = from[from.as_ptr().align_offset(PAGE)..].as_ptr();
    let skip = to.as_ptr().align_offset(PAGE);
    for (number, (name, kernel)) in KERNELS.iter().enumerate() {
        for (size, (label, len)) in SIZES.into_iter().enumerate() {
            let mut group = c.benchmark_group(format!("{name}, {label}"));
            group.throughput(Throughput::Bytes(len as u64));
            group.warm_up_time(Duration::from_millis(50));
            group.measurement_time(Duration::from_millis(300)).sample_size(10);
            for offset in OFFSETS {
                let dst = to[skip + offset..].as_mut_ptr();
                group.bench_function(BenchmarkId::from_parameter(offset), |b| {
                    b.iter_custom(|times| {
                        let begin = Instant::now();
                        for _ in 0..times {
                            kernel(dst, black_box(src), len);
                        }
                        let took = begin.elapsed();
                        let each = took / u32::try_from(times).expect("few");
                        let mut best = BEST.lock().expect("no panic");
                        let best = best.entry((number, size, offset)).or_insert(each);
                        *best = each.min(*best);
                        took
                    });
                });
            }
        }
    }
}

/// Prints bytes of the destination a nanosecond by kernel, size and offset.
fn table() {
    let best = BEST.lock().expect("no panic");
    println!(
        "\n| GB/s | size | {} | best over worst |",
        OFFSETS.map(|o| o.to_string()).join(" | ")
    );
    println!("|---|---|{}", "---:|".repeat(OFFSETS.len() + 1));
    for (number, (name, _)) in KERNELS.iter().enumerate() {
        for (size, (label, len)) in SIZES.into_iter().enumerate() {
            let times = OFFSETS.map(|offset| best.get(&(number, size, offset)));
            let Some(times) = times.into_iter().collect::<Option<Vec<_>>>() else { continue };
            #[expect(clippy::cast_precision_loss, reason = "a rate")]
            let rates = times.iter().map(|time| len as f64 / 1e9 / time.as_secs_f64());
            let rates: Vec<f64> = rates.collect();
            let worst = rates.iter().copied().fold(f64::INFINITY, f64::min);
            let fastest = rates.iter().copied().fold(0.0, f64::max);
            let cells = rates.iter().map(|rate| format!("{rate:.1}")).collect::<Vec<_>>();
            println!("| {name} | {label} | {} | {:.2} |", cells.join(" | "), fastest / worst);
        }
    }
}

criterion_group!(benches, copying);

fn main() {
    if let Some(cpu) = std::fs::read_to_string("/proc/cpuinfo").ok().as_deref().and_then(|text| {
        text.lines().find_map(|line| line.strip_prefix("model name")).map(str::to_owned)
    }) {
        println!("processor{cpu}");
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
    table();
}
