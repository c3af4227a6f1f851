//! Splitting of a write into jobs. Pure.

use std::ops::Range;

/// Bytes in memory, and their destination in the files.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span<'a> {
    /// Index of the file.
    pub file: u32,
    /// First byte in that file.
    pub offset: u64,
    /// Index of the first digest.
    pub digest: usize,
    /// The bytes. They begin at a block of a digest.
    pub data: &'a [u8],
}

impl Span<'_> {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }

    /// Returns the part of the data that goes to these bytes of the file.
    pub(super) fn within(&self, bytes: &Range<u64>) -> Range<usize> {
        let begin = bytes.start.saturating_sub(self.offset);
        let end = bytes.end.min(self.end()).saturating_sub(self.offset).max(begin);
        to_usize(begin)..to_usize(end)
    }
}

/// A range of a file that spans cover without a gap: one write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    /// Index of the file.
    pub file: u32,
    /// The bytes of the file.
    pub bytes: Range<u64>,
    /// The spans that overlap it.
    pub spans: Range<usize>,
}

/// Cuts spans into jobs of at most `job_bytes` (a multiple of `alignment`). The spans are not
/// empty, and sorted by file and offset. A job ends at a multiple of `alignment` in its file, or
/// where the spans end.
pub(super) fn cut(spans: &[Span], job_bytes: u64, alignment: u64) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    for (number, span) in spans.iter().enumerate() {
        let mut at = span.offset;
        while at < span.end() {
            let open = jobs.last_mut().filter(|job| job.file == span.file && job.bytes.end == at);
            if let Some(job) = open {
                let limit = limit(job.bytes.start, job_bytes, alignment);
                if at < limit {
                    at = span.end().min(limit);
                    job.bytes.end = at;
                    job.spans.end = number + 1;
                    continue;
                }
            }
            let end = span.end().min(limit(at, job_bytes, alignment));
            jobs.push(Job { file: span.file, bytes: at..end, spans: number..number + 1 });
            at = end;
        }
    }
    jobs
}

fn limit(start: u64, job_bytes: u64, alignment: u64) -> u64 {
    (start - start % alignment).saturating_add(job_bytes)
}

/// Converts the length of something in memory.
pub(super) fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("the length of something in memory")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    static BYTES: [u8; 100_000] = [0; 100_000];

    fn span(file: u32, offset: u64, length: usize) -> Span<'static> {
        Span { file, offset, digest: 0, data: &BYTES[..length] }
    }

    fn job(file: u32, bytes: Range<u64>, spans: Range<usize>) -> Job {
        Job { file, bytes, spans }
    }

    #[test]
    fn gathers_and_cuts() {
        assert_eq!(cut(&[], 8, 4), []);
        let small: Vec<_> = (0..10).map(|i| span(0, 4096 + i * 100, 100)).collect();
        assert_eq!(cut(&small, 8192, 4096), [job(0, 4096..5096, 0..10)]);
        let large = [span(0, 4100, 20_000), span(0, 24_100, 10)];
        assert_eq!(
            cut(&large, 8192, 4096),
            [job(0, 4100..12288, 0..1), job(0, 12288..20480, 0..1), job(0, 20480..24110, 0..2)]
        );
        let apart = [span(0, 4096, 10), span(0, 4107, 10), span(1, 4117, 10)];
        assert_eq!(
            cut(&apart, 8192, 4096),
            [job(0, 4096..4106, 0..1), job(0, 4107..4117, 1..2), job(1, 4117..4127, 2..3)]
        );
    }

    proptest! {
        #[test]
        fn jobs_cover_the_spans(
            pieces in prop::collection::vec((1_usize..30_000, 0_u64..3), 0..30),
            blocks in 1_u64..5,
        ) {
            let (mut offset, mut file) = (4096, 0);
            let mut spans = Vec::new();
            for (length, gap) in pieces {
                if gap == 2 {
                    file += 1;
                }
                offset += gap;
                spans.push(span(file, offset, length));
                offset += length as u64;
            }
            let jobs = cut(&spans, blocks * 4096, 4096);
            let mut covered: Vec<(u32, Range<u64>)> = Vec::new();
            for job in &jobs {
                prop_assert!(!job.bytes.is_empty());
                prop_assert!(job.bytes.end - job.bytes.start <= blocks * 4096);
                let reach: Vec<_> = (0..spans.len())
                    .filter(|&i| {
                        let span = &spans[i];
                        span.file == job.file
                            && span.offset < job.bytes.end
                            && span.end() > job.bytes.start
                    })
                    .collect();
                prop_assert_eq!(reach, job.spans.clone().collect::<Vec<_>>());
                match covered.last_mut() {
                    Some((file, bytes)) if *file == job.file && bytes.end == job.bytes.start => {
                        prop_assert!(bytes.end.is_multiple_of(4096));
                        bytes.end = job.bytes.end;
                    }
                    _ => covered.push((job.file, job.bytes.clone())),
                }
            }
            let mut expected: Vec<(u32, Range<u64>)> = Vec::new();
            for span in &spans {
                match expected.last_mut() {
                    Some((file, bytes)) if *file == span.file && bytes.end == span.offset => {
                        bytes.end = span.end();
                    }
                    _ => expected.push((span.file, span.offset..span.end())),
                }
            }
            prop_assert_eq!(covered, expected);
        }
    }
}
