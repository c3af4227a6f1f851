//! Strided copies in memory: their shape ([`Strided`]), and their execution (`run`, `stream`).

mod accumulate;
mod digest;
mod float8;
mod run;
mod signs;
mod stream;
mod strided;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod walk;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod xxh3;

pub(crate) use run::{copy_run_unfenced, copy_strided_unfenced};

pub use accumulate::Accumulate;
pub(crate) use accumulate::round_to_bfloat16;
pub use digest::copy_with_digest_unfenced;
pub use float8::float8;
pub use run::copy_strided;
pub use signs::{SignBits, Signs};
pub use stream::fence;
pub use strided::{Loop, Strided};

/// How to write the cache lines of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Through the cache, for small amounts that are used soon.
    Cached,
    /// Around the cache if a run is long enough, so that lines are not read before they are
    /// overwritten.
    Streaming,
}
