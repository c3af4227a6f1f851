//! What operating systems do each in their own way: asked for here, and told apart nowhere else in this crate.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
mod other;

#[cfg(target_os = "linux")]
pub(super) use linux::*;
#[cfg(not(target_os = "linux"))]
pub(super) use other::*;
