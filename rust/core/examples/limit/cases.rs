//! What the engine is given to read, beside the limits of the same.

use std::fs::File;
use std::os::unix::fs::FileExt;

use dcp_rs_core::copy::copy_streaming;
use dcp_rs_core::read::{Destination, IoMode, ReadReq};
use memmap2::MmapRaw;
use smallvec::smallvec;

use crate::Failure;
use crate::engine::{Case, Data, MIB, bytes, drop_cache, engine, requests, table};
use crate::raw::{self, Address, PIECE, Piece, cores};

pub fn warm(data: &Data, memory: Address, rounds: usize) -> Result<(), Failure> {
    type Copy = unsafe fn(*mut u8, *const u8, usize);
    unsafe fn plain(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: as the caller vouches.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
    }
    let paths = data.paths();
    let pieces = raw::pieces(&paths, PIECE)?.0;
    let copy_all = |maps: &[MmapRaw], copy: Copy| {
        raw::copy(maps, &pieces, memory, copy).unwrap();
        data.total
    };
    let map = |populate| raw::map(&paths, populate).unwrap();
    let pread = |buffer: usize| {
        let files: Vec<_> = paths.iter().map(|path| File::open(path).unwrap()).collect();
        let read = |piece: &Piece| {
            thread_local!(static BOUNCE: std::cell::RefCell<Vec<u8>> = std::cell::RefCell::new(vec![0; MIB]));
            for done in (0..piece.length).step_by(buffer) {
                let n = buffer.min(piece.length - done);
                BOUNCE.with_borrow_mut(|bounce| {
                    files[piece.file].read_exact_at(&mut bounce[..n], (piece.offset + done) as u64)?;
                    // SAFETY: the piece lies within the destination, and no other does.
                    unsafe { copy_streaming(memory.at(piece.place + done), bounce.as_ptr(), n) };
                    Ok::<_, Failure>(())
                })?;
            }
            Ok(())
        };
        raw::timed(cores(), &pieces, read).unwrap();
        data.total
    };
    let kept = map(true);
    let (plain_reqs, checked_reqs) = (requests(data, memory, false), requests(data, memory, true));
    let cases: Vec<Case> = vec![
        (
            "limit: kept mapping, streaming stores",
            Box::new(|| copy_all(&kept, copy_streaming)),
        ),
        ("kept mapping, memcpy", Box::new(|| copy_all(&kept, plain))),
        (
            "fresh mapping, streaming stores",
            Box::new(|| copy_all(&map(false), copy_streaming)),
        ),
        ("fresh mapping, memcpy", Box::new(|| copy_all(&map(false), plain))),
        (
            "fresh populated mapping, streaming stores",
            Box::new(|| copy_all(&map(true), copy_streaming)),
        ),
        ("pread into 512 KiB, streaming stores", Box::new(|| pread(512 << 10))),
        ("pread into 128 KiB, streaming stores", Box::new(|| pread(128 << 10))),
        (
            "engine, auto",
            Box::new(|| bytes(engine(data, &plain_reqs, IoMode::Auto, false))),
        ),
        (
            "engine, mmap",
            Box::new(|| bytes(engine(data, &plain_reqs, IoMode::Mmap, false))),
        ),
        (
            "engine, buffered",
            Box::new(|| bytes(engine(data, &plain_reqs, IoMode::Buffered, false))),
        ),
        (
            "engine, direct (of a resident file)",
            Box::new(|| bytes(engine(data, &plain_reqs, IoMode::Direct, false))),
        ),
        (
            "engine, auto, verify",
            Box::new(|| bytes(engine(data, &checked_reqs, IoMode::Auto, true))),
        ),
    ];
    table("warm, one batch of the whole", rounds, || (), &cases);
    Ok(())
}

pub fn small(data: &Data, memory: Address, rounds: usize) {
    for (count, size, gap) in [(20_000, 4096, 0), (20_000, 4096, 4096), (200_000, 256, 0)] {
        let (_, offset, length) = data.tensors[0];
        assert!(count * (size + gap) <= length, "the first tensor is large enough");
        let reqs: Vec<_> = (0..count)
            .map(|i| ReadReq {
                chunk_offset: (offset + i * (size + gap)) as u64,
                chunk_length: size as u64,
                shape: smallvec![(size / 256) as u64, 64],
                itemsize: 4,
                src_strides: smallvec![256, 4],
                dst: Destination(memory.at(i * (size + 64))),
                dst_strides: smallvec![256, 4],
                ..requests(data, memory, false)[0].clone()
            })
            .collect();
        let shuffled: Vec<_> = (0..count).map(|i| reqs[i * 7919 % count].clone()).collect();
        let copy_all = || {
            let kept = raw::map(&data.paths(), false).unwrap();
            for req in &reqs {
                let from = kept[0]
                    .as_ptr()
                    .wrapping_add(usize::try_from(req.chunk_offset).unwrap());
                // SAFETY: within the mapping and the destination.
                unsafe { std::ptr::copy_nonoverlapping(from, req.dst.0, size) };
            }
            count * size
        };
        let cases: Vec<Case> = vec![
            ("fresh mapping, memcpy, one thread", Box::new(copy_all)),
            (
                "engine, auto",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Auto, false))),
            ),
            (
                "engine, auto, shuffled",
                Box::new(|| bytes(engine(data, &shuffled, IoMode::Auto, false))),
            ),
            (
                "engine, buffered",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Buffered, false))),
            ),
        ];
        table(
            &format!("warm, {count} tensors of {size} bytes, {gap} bytes between"),
            rounds,
            || (),
            &cases,
        );
    }
    for size in [4096, 65_536, 1 << 20, 8 << 20] {
        let mut req = requests(data, memory, false)[0].clone();
        req.shape = smallvec![size / 2];
        let reqs = [req];
        let cases: Vec<Case> = vec![
            (
                "engine, mmap",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Mmap, false))),
            ),
            (
                "engine, auto",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Auto, false))),
            ),
            (
                "engine, buffered",
                Box::new(|| bytes(engine(data, &reqs, IoMode::Buffered, false))),
            ),
        ];
        table(
            &format!("warm, one request of {size} bytes"),
            rounds * 10,
            || (),
            &cases,
        );
    }
}

/// The part that shard `i` of `n` columns takes of every tensor, seen as rows of 8 KiB.
fn columns(data: &Data, memory: Address, i: u64, n: u64, transpose: bool) -> Vec<ReadReq> {
    let (row, mut reqs) = (8192, requests(data, memory, false));
    let mut place = 0;
    for req in &mut reqs {
        let (rows, width) = (req.chunk_length / row, row / n);
        req.shape = smallvec![rows, width / 2];
        req.src_offset = i * width;
        req.src_strides = smallvec![row, 2];
        req.dst_strides = if transpose {
            smallvec![2, rows * 2]
        } else {
            smallvec![width, 2]
        };
        req.dst = Destination(memory.at(place));
        place += usize::try_from(rows * width).unwrap();
    }
    reqs
}

pub fn shards(data: &Data, memory: Address, rounds: usize) {
    let whole = requests(data, memory, false);
    let quarter = columns(data, memory, 1, 4, false);
    let half = columns(data, memory, 1, 2, false);
    let thin = columns(data, memory, 3, 64, false);
    let transposed = columns(data, memory, 0, 1, true);
    let cases: Vec<Case> = vec![
        ("whole", Box::new(|| bytes(engine(data, &whole, IoMode::Mmap, false)))),
        (
            "columns, a half",
            Box::new(|| bytes(engine(data, &half, IoMode::Mmap, false))),
        ),
        (
            "columns, a quarter",
            Box::new(|| bytes(engine(data, &quarter, IoMode::Mmap, false))),
        ),
        (
            "columns, a 64th (128 bytes a row)",
            Box::new(|| bytes(engine(data, &thin, IoMode::Mmap, false))),
        ),
        (
            "columns, a quarter, buffered",
            Box::new(|| bytes(engine(data, &quarter, IoMode::Buffered, false))),
        ),
        (
            "transposed",
            Box::new(|| bytes(engine(data, &transposed, IoMode::Mmap, false))),
        ),
    ];
    table("warm, shards (bytes wanted a second)", rounds, || (), &cases);
}

pub fn cold(data: &Data, memory: Address, rounds: usize) {
    let reqs = requests(data, memory, false);
    let quarter = columns(data, memory, 1, 4, false);
    let paths = data.paths();
    let direct = |size: usize| {
        let pieces = raw::pieces(&paths, size).unwrap().0;
        raw::direct(&paths, &pieces, memory).unwrap();
        data.total
    };
    let drain = |size: usize| {
        let pieces = raw::again(raw::pieces(&paths, size).unwrap().0, size);
        raw::direct(&paths, &pieces, memory).unwrap();
        data.total
    };
    let cases: Vec<Case> = vec![
        ("limit: O_DIRECT, 1 MiB, 16 in flight", Box::new(|| direct(MIB))),
        ("O_DIRECT, 2 MiB, 16 in flight", Box::new(|| direct(2 * MIB))),
        ("O_DIRECT, 256 KiB, 16 in flight", Box::new(|| direct(256 << 10))),
        ("O_DIRECT, 1 MiB, 16 in flight, kept nowhere", Box::new(|| drain(MIB))),
        (
            "engine, auto",
            Box::new(|| bytes(engine(data, &reqs, IoMode::Auto, false))),
        ),
        (
            "engine, buffered",
            Box::new(|| bytes(engine(data, &reqs, IoMode::Buffered, false))),
        ),
        (
            "engine, mmap",
            Box::new(|| bytes(engine(data, &reqs, IoMode::Mmap, false))),
        ),
        (
            "engine, auto, columns, a quarter",
            Box::new(|| bytes(engine(data, &quarter, IoMode::Auto, false))),
        ),
    ];
    table(
        "cold (page cache dropped and checked)",
        rounds,
        || drop_cache(data),
        &cases,
    );
    drop_cache(data);
    let stats = engine(data, &quarter, IoMode::Auto, false);
    println!(
        "  columns, a quarter: {} bytes read for {} wanted",
        stats.bytes_read, stats.bytes_wanted
    );
}
