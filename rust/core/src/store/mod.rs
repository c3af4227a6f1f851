//! Files and folders; knows nothing of what is in them.

pub(crate) mod disk;
mod publish;
mod random;

pub use publish::publish;
pub(crate) use publish::publish_on;
pub use random::{random_bytes, random_token};
