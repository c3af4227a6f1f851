//! Aligned memory for direct (`O_DIRECT`) reads and writes.

use std::io;

use memmap2::MmapMut;

use super::platform;

/// Bytes of a huge page, if pages have 4 KiB. With larger pages a request has few of them anyway.
const HUGE_PAGE: usize = 2 << 20;
/// Buffers of at least this many bytes consist of whole huge pages.
const HUGE_FROM: usize = HUGE_PAGE / 2;
/// Smaller buffers grow in steps of this many bytes.
const STEP: usize = 64 << 10;

/// Memory that begins at a page, and grows to the size that its user needs.
///
/// A large buffer uses huge pages, if the system has them. A request to a disk is a list of ranges
/// of physical memory of limited length. 1 MiB in small pages is up to 256 ranges, and often two
/// requests. In a huge page it is one range.
#[derive(Default)]
pub(crate) struct Buffer {
    memory: Option<MmapMut>,
    begin: usize,
}

impl Buffer {
    /// Returns at least `len` bytes. If the buffer has to grow, its content is lost.
    pub(crate) fn at_least(&mut self, len: usize) -> io::Result<&mut [u8]> {
        let begin = self.begin;
        let memory = match self.memory.take().filter(|memory| memory.len() - begin >= len) {
            Some(memory) => memory,
            None => self.map(len)?,
        };
        Ok(&mut self.memory.insert(memory)[self.begin..])
    }

    fn map(&mut self, len: usize) -> io::Result<MmapMut> {
        let size = Self::footprint(len);
        self.begin = 0;
        if !takes_huge_pages(len) {
            return MmapMut::map_anon(size);
        }
        // The untouched bytes before the first huge page only cost address space.
        let room = size.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let Ok(memory) = MmapMut::map_anon(room) else {
            return MmapMut::map_anon(len.next_multiple_of(STEP));
        };
        let begin = memory.as_ptr().align_offset(HUGE_PAGE);
        platform::ask_for_huge_pages(&memory, begin, size);
        self.begin = begin;
        Ok(memory)
    }

    /// Returns the address of the first byte; null while the buffer is empty.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        let begin = |memory: &MmapMut| memory.as_ptr().wrapping_add(self.begin);
        self.memory.as_ref().map_or(std::ptr::null(), begin)
    }

    /// Returns the most memory that a buffer takes for `len` bytes.
    pub(crate) fn footprint(len: usize) -> usize {
        let unit = if takes_huge_pages(len) { HUGE_PAGE } else { STEP };
        len.max(1).checked_next_multiple_of(unit).unwrap_or(usize::MAX)
    }

    /// Returns the largest size, at least [`STEP`], of a buffer that takes no more than `room`.
    pub(crate) fn largest_within(room: usize) -> usize {
        if room >= HUGE_PAGE {
            room - room % HUGE_PAGE
        } else {
            (room - room % STEP).clamp(STEP, HUGE_FROM - STEP)
        }
    }
}

fn takes_huge_pages(len: usize) -> bool {
    len >= HUGE_FROM && platform::has_huge_pages()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_grows_and_begins_at_a_page() {
        let mut buffer = Buffer::default();
        assert!(buffer.as_ptr().is_null());
        for len in [0, 1, 4096, 300_000, HUGE_FROM - 1, HUGE_FROM, HUGE_PAGE, HUGE_PAGE + 1, 10] {
            let bytes = buffer.at_least(len).unwrap();
            assert!(bytes.len() >= len);
            bytes.fill(1);
            let first = bytes.as_ptr();
            assert_eq!(first, buffer.as_ptr());
            assert!(first.addr().is_multiple_of(rustix::param::page_size()), "{len}");
        }
        assert_eq!(buffer.at_least(HUGE_PAGE).unwrap()[HUGE_PAGE], 1, "it was made anew");
        assert!(buffer.at_least(usize::MAX).is_err());
        assert!(buffer.as_ptr().is_null());
    }

    #[test]
    fn what_fits_takes_no_more_than_there_is() {
        for room in [STEP, 2 * STEP - 1, 300_000, HUGE_FROM - 1, HUGE_FROM, 3 << 20, 64 << 20] {
            let len = Buffer::largest_within(room);
            assert!(Buffer::footprint(len) <= room, "{room}: {len}");
            assert!(len * 3 > room, "{room}: {len}");
        }
    }
}
