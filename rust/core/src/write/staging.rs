//! Memory that direct reads and writes can use.

/// A buffer whose bytes begin at a multiple of an alignment.
pub(crate) struct Staging {
    memory: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Staging {
    /// Zeroed; the system gives the memory when it is first touched.
    pub(crate) fn new(len: usize, alignment: usize) -> Self {
        let memory = vec![0; len + alignment];
        let begin = memory.as_ptr().align_offset(alignment);
        Self { memory, begin, len }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.begin..self.begin + self.len]
    }
}
