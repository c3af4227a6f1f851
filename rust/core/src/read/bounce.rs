//! Reads of file ranges into a worker's buffer, buffered or with direct I/O (`O_DIRECT`).

use std::fs::File;
use std::io;

use super::segments::Segment;
use crate::store::{Buffer, read_at, read_direct_at};

/// Reads all segments to their offsets in a buffer. `direct` selects direct I/O, and is its
/// alignment.
///
/// The buffer has at least `room` bytes, the bound of its job. This bound, and not the part of it
/// that the job uses, decides whether the buffer gets huge pages.
///
/// An error comes with the offset of its segment.
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

/// Returns the part of the buffer for a segment, in whole units, and the number of bytes that are
/// needed.
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
