//! File ranges on their way to a destination: read into a worker's buffer, through the page cache
//! or past it (`O_DIRECT`).

use std::fs::File;
use std::io;

use super::segments::Segment;
use crate::store::{Buffer, read_at, read_direct_at};

/// Reads all segments to their places in a buffer; past the page cache where `direct` gives the
/// alignment that takes.
///
/// The buffer has at least `room` bytes. What was counted for a job decides what pages it lies in,
/// and not how much of that the job happens to use.
///
/// An error comes with the offset of the segment it happened at.
pub fn fill(
    buffer: &mut Buffer,
    file: &File,
    segments: &[Segment],
    direct: Option<u64>,
    room: u64,
) -> Result<(), (u64, io::Error)> {
    let align = direct.unwrap_or(1);
    let size = segments.last().map_or(0, |s| s.buffer_end(align));
    let memory = unit(size.max(room)).and_then(|size| buffer.at_least(size)).map_err(|e| (0, e))?;
    for segment in segments {
        let result = place(memory, segment, align).and_then(|(range, need)| match direct {
            Some(_) => read_direct_at(file, range, segment.start, need, unit(align)?),
            None => read_at(file, range, segment.start),
        });
        result.map_err(|e| (segment.start, e))?;
    }
    Ok(())
}

/// The part of the buffer for a segment, in whole units, and how many of its bytes are needed.
fn place<'a>(
    memory: &'a mut [u8],
    segment: &Segment,
    align: u64,
) -> io::Result<(&'a mut [u8], usize)> {
    let (at, end) = (unit(segment.at)?, unit(segment.buffer_end(align))?);
    let need = unit(segment.end - segment.start)?;
    let range = memory.get_mut(at..end).ok_or(io::ErrorKind::InvalidInput)?;
    Ok((range, need))
}

fn unit(n: u64) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::ErrorKind::OutOfMemory.into())
}
