//! The direction in which a copy advances.
//!
//! Cores compare the low twelve bits of the address of a load with those of earlier stores. A load
//! that agrees waits until the store is known to be elsewhere, which can make a copy five times
//! slower. So no kernel may load near what it stored shortly before, modulo [`PAGE`]. If it would
//! when it walks up, it does not when it walks down.

/// Addresses that differ by a multiple of this look alike to the core.
const PAGE: usize = 4096;
/// How far behind a load the stores may still be on their way. It is several times what the store
/// buffers of today's cores hold for one of four positions.
const NEAR: usize = 1024;

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walk {
    /// To larger addresses.
    Up,
    /// To smaller addresses.
    Down,
}

/// Returns the direction in which fewer of `PLACES` positions load near recent stores of another
/// position or their own. Positions are `dst_step` and `src_step` bytes apart, and `len` bytes are
/// copied at each; a few lines end before it matters.
///
/// If the steps are multiples of 4,096, no position does.
pub fn walk<const PLACES: usize>(
    dst: usize,
    dst_step: usize,
    src: usize,
    src_step: usize,
    len: usize,
) -> Walk {
    if len <= NEAR {
        return Walk::Up;
    }
    let (mut up, mut down) = (0, 0);
    for i in 0..PLACES {
        for j in 0..PLACES {
            let store = dst.wrapping_add(i * dst_step);
            let ahead = store.wrapping_sub(src.wrapping_add(j * src_step)) % PAGE;
            // A walk up reaches what is ahead after it was stored; a walk down, what is behind.
            up += usize::from((1..NEAR).contains(&ahead));
            down += usize::from(ahead > PAGE - NEAR);
        }
    }
    if down < up { Walk::Down } else { Walk::Up }
}

/// Returns the largest distance between positions of at most `most` bytes that keeps their
/// addresses alike, so that one direction suits all of them. Distances below 4,096 are multiples
/// of `unit`.
pub fn even_step(most: usize, unit: usize) -> usize {
    let unit = if most < PAGE { unit } else { PAGE };
    most / unit * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many pairs of positions load what was stored up to `NEAR` bytes before.
    fn conflicts(
        walk: Walk,
        places: usize,
        dst: usize,
        dst_step: usize,
        src: usize,
        src_step: usize,
    ) -> usize {
        let pairs = (0..places).flat_map(|i| (0..places).map(move |j| (i, j)));
        pairs
            .filter(|(i, j)| {
                // Simulates a load at every line of a page against the stores of earlier lines.
                let store = (dst + i * dst_step) % PAGE;
                let load = (src + j * src_step) % PAGE;
                (64..NEAR).step_by(64).any(|before| {
                    let at = match walk {
                        Walk::Up => store + 2 * PAGE - before,
                        Walk::Down => store + PAGE + before,
                    };
                    // Two lines overlap modulo a page.
                    let apart = (at + PAGE - load) % PAGE;
                    !(64..=PAGE - 64).contains(&apart)
                })
            })
            .count()
    }

    #[test]
    fn no_position_loads_near_recent_stores_if_steps_are_whole_pages() {
        for src in [0, 1, 17, 64, 4000] {
            for dst in (0..PAGE).step_by(64) {
                for steps in [(0, 0), (PAGE, PAGE), (65_536, 65_536), (8192, 1 << 30)] {
                    let way = walk::<4>(dst, steps.0, src, steps.1, PAGE);
                    assert_eq!(conflicts(way, 4, dst, steps.0, src, steps.1), 0, "{src} {dst}");
                    let way = walk::<1>(dst, 0, src, 0, PAGE);
                    assert_eq!(conflicts(way, 1, dst, 0, src, 0), 0, "{src} {dst}");
                }
            }
        }
    }

    #[test]
    fn few_positions_load_near_recent_stores_at_any_steps() {
        for src in [0, 1, 64, 4000] {
            for dst in (0..PAGE).step_by(64) {
                for dst_step in (64..PAGE).step_by(64) {
                    for src_step in [dst_step, 2 * dst_step, 1024, 2048, PAGE, 4160, 12_345] {
                        let way = walk::<4>(dst, dst_step, src, src_step, PAGE);
                        let found = conflicts(way, 4, dst, dst_step, src, src_step);
                        assert!(found <= 8, "{found} of 16: {src} {dst} {dst_step} {src_step}");
                    }
                }
            }
        }
    }

    #[test]
    fn steps_are_whole_pages_where_they_are_that_long() {
        for most in [0, 64, 100, 1024, 4095, 4096, 5000, 65_535, 65_536, 1 << 30] {
            let step = even_step(most, 64);
            assert!(step <= most && most - step < PAGE && step.is_multiple_of(64));
            assert!(step < PAGE || step.is_multiple_of(PAGE));
        }
    }
}
