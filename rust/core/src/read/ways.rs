//! Thin rows of a wide matrix: each read alone, or all with what lies between. What a disk charges for a read and for a byte
//! decides, and is found out by trying both with the first jobs of a load. Pure, but for the lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::policy::SEEK_COST;

/// Jobs tried each way, for every one in flight: [`Way::Apart`], which comes second, and [`Way::Through`]. Counted are those that begin
/// when as many are under way as there will be, and end before the other way begins: one for every one in flight.
const TRIED: [usize; 2] = [2, 3];
/// A load has this many times the jobs that are tried, or none is.
const WORTH_TRYING: usize = 4;
/// Jobs of each way that tell how long one takes.
const ENOUGH: usize = 8;

/// How rows are read that have something between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each alone.
    Apart,
    /// With what lies between.
    Through,
}

/// What a job fetches each way, where both are worth a thought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Bytes, with what lies between the rows.
    pub through: u64,
    /// Bytes of the rows alone.
    pub apart: u64,
    /// How many rows.
    pub reads: u64,
}

impl Choice {
    /// The quicker way, where a read costs as much as `seek_cost` bytes more.
    pub fn way(self, seek_cost: u64) -> Way {
        if self.through <= self.reads.saturating_mul(seek_cost).saturating_add(self.apart) {
            Way::Through
        } else {
            Way::Apart
        }
    }
}

impl std::ops::AddAssign for Choice {
    fn add_assign(&mut self, other: Self) {
        self.through += other.through;
        self.apart += other.apart;
        self.reads += other.reads;
    }
}

/// What jobs of one way did, with as many in flight as of the other.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    jobs: usize,
    reads: u64,
    bytes: u64,
    time: Duration,
}

/// How many bytes more a read costs as much as, by what was measured. None where that does not tell.
fn seek_cost(through: Sample, apart: Sample) -> Option<u64> {
    if through.jobs < ENOUGH || apart.jobs < ENOUGH || through.bytes == 0 || apart.reads == 0 {
        return None;
    }
    // Bytes read through in the time that the rows took.
    let nanoseconds = through.time.as_nanos().max(1);
    let worth = u128::from(through.bytes).saturating_mul(apart.time.as_nanos()) / nanoseconds;
    let more = worth.saturating_sub(u128::from(apart.bytes)) / u128::from(apart.reads);
    Some(u64::try_from(more).unwrap_or(u64::MAX))
}

/// The trial of one load, and what came of it.
pub struct Ways {
    /// What a read costs; [`UNKNOWN`] as long as that is tried.
    cost: AtomicU64,
    in_flight: usize,
    state: Mutex<State>,
}

const UNKNOWN: u64 = u64::MAX;

impl Default for Ways {
    /// Of a load that tries nothing.
    fn default() -> Self {
        Self::new(0, 0)
    }
}

/// By way.
#[derive(Default)]
struct State {
    begun: [usize; 2],
    ended: [usize; 2],
    samples: [Sample; 2],
}

/// A job under way, in the way that it goes.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    pub way: Way,
    /// Whether it is tried, and is to end as such.
    tried: bool,
    /// How many had begun the other way, if it counts where no more have.
    counts_with: Option<usize>,
}

impl Turn {
    fn untried(way: Way) -> Self {
        Self {
            way,
            tried: false,
            counts_with: None,
        }
    }
}

impl Ways {
    /// For a load of so many jobs that may go either way, so many of them in flight.
    pub fn new(jobs: usize, in_flight: usize) -> Self {
        let in_flight = in_flight.max(ENOUGH);
        let tries = jobs >= WORTH_TRYING * (TRIED[0] + TRIED[1]) * in_flight;
        Self {
            cost: AtomicU64::new(if tries { UNKNOWN } else { SEEK_COST }),
            in_flight,
            state: Mutex::default(),
        }
    }

    /// The way of the next job.
    pub fn begin(&self, choice: Choice) -> Turn {
        let cost = self.cost.load(Ordering::Relaxed);
        if cost != UNKNOWN {
            return Turn::untried(choice.way(cost));
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_left = |way: Way| state.begun[way as usize] < TRIED[way as usize] * self.in_flight;
        let Some(way) = [Way::Through, Way::Apart].into_iter().find(|&way| is_left(way)) else {
            // The last that are tried are not done yet, and go on among their like.
            return Turn::untried(Way::Apart);
        };
        let (own, other) = (way as usize, way.other() as usize);
        let counts = state.begun[own] >= self.in_flight && state.begun[other] == state.ended[other];
        state.begun[own] += 1;
        Turn {
            way,
            tried: true,
            counts_with: counts.then_some(state.begun[other]),
        }
    }

    /// After a job: how many reads it made, of how many bytes, and how long it took.
    pub fn end(&self, turn: Turn, reads: u64, bytes: u64, time: Duration) {
        if !turn.tried {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (own, other) = (turn.way as usize, turn.way.other() as usize);
        state.ended[own] += 1;
        if turn.counts_with == Some(state.begun[other]) {
            let sample = &mut state.samples[own];
            sample.jobs += 1;
            sample.reads += reads;
            sample.bytes += bytes;
            sample.time += time;
        }
        if state.ended == TRIED.map(|each| each * self.in_flight) {
            let [apart, through] = state.samples;
            let cost = seek_cost(through, apart).unwrap_or(SEEK_COST);
            self.cost.store(cost.min(UNKNOWN - 1), Ordering::Relaxed);
        }
    }
}

impl Way {
    fn other(self) -> Self {
        match self {
            Self::Apart => Self::Through,
            Self::Through => Self::Apart,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: Choice = Choice {
        through: 1 << 20,
        apart: 256 << 10,
        reads: 64,
    };

    /// A load of so many jobs like [`ROWS`], so many in flight, of a disk on which a job takes so long each way: how they went.
    fn load(jobs: usize, in_flight: usize, through: Duration, apart: Duration) -> Vec<Way> {
        let ways = Ways::new(jobs, in_flight);
        let mut under_way = std::collections::VecDeque::new();
        let mut went = vec![];
        let end = |turn: Turn| match turn.way {
            Way::Through => ways.end(turn, 1, ROWS.through, through),
            Way::Apart => ways.end(turn, ROWS.reads, ROWS.apart, apart),
        };
        for _ in 0..jobs {
            if under_way.len() == in_flight {
                end(under_way.pop_front().unwrap());
            }
            let turn = ways.begin(ROWS);
            went.push(turn.way);
            under_way.push_back(turn);
        }
        under_way.into_iter().for_each(end);
        went
    }

    #[test]
    fn the_quicker_way_is_gone_on_with() {
        let (short, long) = (Duration::from_millis(2), Duration::from_millis(3));
        for (through, apart, expected) in [(short, long, Way::Through), (long, short, Way::Apart)] {
            let went = load(1000, 16, through, apart);
            assert!(went[..48].iter().all(|&way| way == Way::Through));
            // Some begin while the last of the trial are not done.
            assert!(went[48..95].iter().all(|&way| way == Way::Apart));
            assert!(went[95..].iter().all(|&way| way == expected), "{expected:?}");
        }
    }

    #[test]
    fn what_is_too_little_to_try_goes_by_what_disks_cost_as_a_rule() {
        let (slow, quick) = (Duration::from_millis(3), Duration::from_millis(1));
        assert!(load(200, 16, slow, quick).iter().all(|&way| way == Way::Through));
        let wide = Choice { reads: 4, ..ROWS };
        assert_eq!(Ways::new(10, 16).begin(wide).way, Way::Apart);
        assert_eq!(Ways::default().begin(wide).way, Way::Apart);
    }

    #[test]
    fn jobs_beside_others_of_the_other_way_do_not_count() {
        let ways = Ways::new(1000, 8);
        let through: Vec<Turn> = (0..24).map(|_| ways.begin(ROWS)).collect();
        let apart: Vec<Turn> = (0..16).map(|_| ways.begin(ROWS)).collect();
        // All at once: none tells what its way costs alone, however long it took.
        for turn in through {
            ways.end(turn, 1, ROWS.through, Duration::from_secs(100));
        }
        for turn in apart {
            ways.end(turn, ROWS.reads, ROWS.apart, Duration::from_micros(1));
        }
        assert_eq!(ways.cost.into_inner(), SEEK_COST);
    }

    #[test]
    fn a_read_costs_what_was_measured() {
        let sample = |jobs, reads, bytes, micros| Sample {
            jobs,
            reads,
            bytes,
            time: Duration::from_micros(micros),
        };
        // 1 GB/s, and 100,000 reads of 4,000 bytes a second: 10 us each, of which 4 are its bytes.
        let (through, apart) = (sample(10, 10, 10_000_000, 10_000), sample(10, 1000, 4_000_000, 10_000));
        assert_eq!(seek_cost(through, apart), Some(6_000));
        // No dearer than its bytes: nothing more.
        assert_eq!(seek_cost(through, sample(10, 10, 10_000_000, 9_000)), Some(0));
        assert_eq!(seek_cost(sample(1, 1, 1, 1), apart), None, "too few to tell");
        assert_eq!(seek_cost(through, Sample::default()), None);
        assert_eq!(
            seek_cost(sample(10, 10, 10, 0), sample(10, 1, 0, u64::MAX / 2)),
            Some(u64::MAX)
        );
    }
}
