//! What is on disk, and nothing about how it gets there: `docs/format.md` in code.
