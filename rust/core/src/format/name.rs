//! Names: of the index, and of tensors in the header of a data file.

use crate::paths::{Reach, reach};

/// The file whose rename into place commits a save.
pub const INDEX_NAME: &str = "index.dcprs";

const RESERVED: &str = "__metadata__";
const ESCAPED: &str = "__metadata__~";

/// The index of one rank of a rank-local save.
pub fn rank_index_name(rank: u32) -> String {
    format!("__{rank}.{INDEX_NAME}")
}

/// The rank whose index is called `name`; `None` where [`rank_index_name`] would not have written it so.
pub(crate) fn parse_rank_index_name(name: &str) -> Option<u32> {
    let rank = name.strip_prefix("__")?.split('.').next()?.parse().ok()?;
    (rank_index_name(rank) == name).then_some(rank)
}

/// What a data file's header calls the tensor `fqn`: the same, but for the one name that safetensors keeps for itself.
pub fn to_header_name(fqn: &str) -> String {
    if fqn == RESERVED || fqn.starts_with(ESCAPED) {
        format!("{fqn}~")
    } else {
        fqn.to_owned()
    }
}

/// The inverse of [`to_header_name`].
pub fn from_header_name(name: &str) -> &str {
    if name.starts_with(ESCAPED) {
        &name[..name.len() - 1]
    } else {
        name
    }
}

/// Why `name` cannot be the name of a data file, if it cannot. That of an external one may be any path.
pub(super) fn check_file_name(name: &str, external: bool) -> Result<(), &'static str> {
    match reach(name) {
        Reach::Nowhere if name.is_empty() => Err("file name is empty"),
        Reach::Nowhere => Err("file name holds a NUL"),
        Reach::Plain => Ok(()),
        Reach::Inside | Reach::Outside if external => Ok(()),
        Reach::Inside | Reach::Outside => Err("file name leads out of the folder"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_names_are_reversible() {
        for fqn in [
            "",
            "w",
            "__metadata__",
            "__metadata__~",
            "__metadata__~~",
            "__metadata__x",
            "~",
        ] {
            let name = to_header_name(fqn);
            assert_ne!(name, RESERVED);
            assert_eq!(from_header_name(&name), fqn);
        }
    }

    #[test]
    fn indexes_of_ranks_have_one_name_each() {
        for rank in [0, 7, 123, u32::MAX] {
            assert_eq!(parse_rank_index_name(&rank_index_name(rank)), Some(rank));
        }
        for name in [
            INDEX_NAME,
            "__.index.dcprs",
            "__01.index.dcprs",
            "__+1.index.dcprs",
            "__1.index.dcprs.0123456789abcdef.tmp",
            "__4294967296.index.dcprs",
        ] {
            assert_eq!(parse_rank_index_name(name), None, "{name}");
        }
    }

    #[test]
    fn file_names_stay_in_the_folder() {
        for bad in ["", "/etc/passwd", "..", "a/../b", "./a", "a//b", "a\\b", "a\0b"] {
            assert!(check_file_name(bad, false).is_err(), "{bad:?}");
        }
        for good in ["a.safetensors", "sub/a.safetensors", "..a", "a..b"] {
            assert!(check_file_name(good, false).is_ok(), "{good:?}");
        }
        for anywhere in ["../a.distcp", "/a", "./a", "a//b", "a/", "a\\b"] {
            assert!(check_file_name(anywhere, true).is_ok(), "{anywhere:?}");
        }
        assert!(check_file_name("", true).is_err() && check_file_name("a\0b", true).is_err());
    }
}
