//! Memory that direct writes can start from.

/// A buffer whose bytes begin at a multiple of an alignment.
pub(super) struct Staging {
    memory: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Staging {
    /// Zeroed; the system gives the memory when it is first touched.
    pub(super) fn new(len: usize, alignment: usize) -> Self {
        let memory = vec![0; len + alignment];
        let begin = memory.as_ptr().align_offset(alignment);
        Self { memory, begin, len }
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.begin..self.begin + self.len]
    }
}
