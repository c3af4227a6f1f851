//! Answers to the benchmarks, line by line.

use std::fs::OpenOptions;
use std::io::{BufRead, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Instant;

use memmap2::{MmapMut, MmapRaw};

use crate::Failure;
use crate::raw::{self, Address, PAGE, PIECE, Piece};

const WRITES_IN_FLIGHT: usize = 4;
/// Bytes of a read that is kept nowhere.
const READ: usize = 1 << 20;

struct Limit {
    paths: Vec<String>,
    pieces: Vec<Piece>,
    memory: MmapMut,
    kept: Vec<MmapRaw>,
}

impl Limit {
    fn new(paths: Vec<String>) -> Result<Self, Failure> {
        let (pieces, room) = raw::pieces(&paths, PIECE)?;
        let memory = raw::memory(room.max(PIECE))?;
        Ok(Self { paths, pieces, memory, kept: vec![] })
    }

    fn copy(&mut self) -> Result<f64, Failure> {
        if self.kept.is_empty() {
            self.kept = raw::map(&self.paths, true)?;
        }
        let memory = Address(self.memory.as_mut_ptr());
        raw::copy(&self.kept, &self.pieces, memory)
    }

    fn direct(&mut self) -> Result<f64, Failure> {
        raw::direct(&self.paths, &self.pieces, Address(self.memory.as_mut_ptr()))
    }

    fn drain(&mut self) -> Result<f64, Failure> {
        let pieces = raw::again(raw::pieces(&self.paths, READ)?.0, READ);
        let mut memory = raw::memory(READ * raw::READS_IN_FLIGHT)?;
        raw::direct(&self.paths, &pieces, Address(memory.as_mut_ptr()))
    }

    fn write(path: &str, bytes: usize) -> Result<f64, Failure> {
        let bytes = bytes.next_multiple_of(PAGE);
        let mut memory = MmapMut::map_anon(PIECE)?;
        memory.fill(7);
        let pieces: Vec<_> = (0..bytes)
            .step_by(PIECE)
            .map(|offset| Piece { file: 0, offset, length: PIECE.min(bytes - offset), place: 0 })
            .collect();
        let start = Instant::now();
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)?;
        raw::timed(WRITES_IN_FLIGHT, &pieces, |piece| {
            Ok(file.write_all_at(&memory[..piece.length], piece.offset as u64)?)
        })?;
        file.sync_all()?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn answer(&mut self, line: &str) -> Result<f64, Failure> {
        let words: Vec<&str> = line.split('\t').collect();
        match words[..] {
            ["copy"] => self.copy(),
            ["direct"] => self.direct(),
            ["drain"] => self.drain(),
            ["write", path, bytes] => Self::write(path, bytes.parse()?),
            _ => Err("one of: copy, direct, drain, write PATH BYTES".into()),
        }
    }
}

pub fn run(files: Vec<String>) -> Result<(), Failure> {
    let mut limit = Limit::new(files)?;
    let mut out = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        match limit.answer(&line?) {
            Ok(seconds) => writeln!(out, "{{\"seconds\": {seconds}}}")?,
            Err(error) => writeln!(out, "{{\"error\": {:?}}}", error.to_string())?,
        }
        out.flush()?;
    }
    Ok(())
}
