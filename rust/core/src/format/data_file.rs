//! Names of data files (section 1.1 of `docs/format.md`).

use std::fmt;

/// The parts of a data file's name. [`fmt::Display`] writes the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataFileName {
    /// Number of the save into the folder.
    pub generation: u64,
    /// Random token of the rank in the save.
    pub token: u64,
    /// The rank that wrote the file.
    pub rank: u32,
    /// Number of the file among those of the rank in the save.
    pub file: u32,
}

impl fmt::Display for DataFileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { generation, token, rank, file } = self;
        write!(f, "g{generation:08}-{token:016x}-r{rank:05}-f{file:05}.safetensors")
    }
}

impl DataFileName {
    /// Parses a name; returns `None` unless [`fmt::Display`] writes it in exactly this form.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let mut parts = name.strip_suffix(".safetensors")?.splitn(4, '-');
        let parsed = Self {
            generation: parts.next()?.strip_prefix('g')?.parse().ok()?,
            token: u64::from_str_radix(parts.next()?, 16).ok()?,
            rank: parts.next()?.strip_prefix('r')?.parse().ok()?,
            file: parts.next()?.strip_prefix('f')?.parse().ok()?,
        };
        (parsed.to_string() == name).then_some(parsed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn is_written_as_the_format_says() {
        let name = DataFileName { generation: 1, token: 0x5f0e_9a3c_77d1_b204, rank: 0, file: 0 };
        assert_eq!(name.to_string(), "g00000001-5f0e9a3c77d1b204-r00000-f00000.safetensors");
    }

    #[test]
    fn other_names_are_no_data_files() {
        for name in [
            "",
            "index.dcprs",
            "model.safetensors",
            "g1-5f0e9a3c77d1b204-r00000-f00000.safetensors",
            "g000000001-5f0e9a3c77d1b204-r00000-f00000.safetensors",
            "g+0000001-5f0e9a3c77d1b204-r00000-f00000.safetensors",
            "g00000001-5F0E9A3C77D1B204-r00000-f00000.safetensors",
            "g00000001-5f0e9a3c77d1b204-r0-f00000.safetensors",
            "g00000001-5f0e9a3c77d1b204-r00000-f00000-x.safetensors",
            "g00000001-5f0e9a3c77d1b204-r00000-f00000.safetensors.tmp",
            "sub/g00000001-5f0e9a3c77d1b204-r00000-f00000.safetensors",
            "g99999999999999999999-5f0e9a3c77d1b204-r00000-f00000.safetensors",
        ] {
            assert_eq!(DataFileName::parse(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_parses(generation: u64, token: u64, rank: u32, file: u32) {
            let name = DataFileName { generation, token, rank, file };
            prop_assert_eq!(DataFileName::parse(&name.to_string()), Some(name));
        }
    }
}
