//! Names of indexes, and of tensors in the header of a data file.

use crate::paths::{Reach, reach};

/// Index file. Its rename into place commits a save.
pub const INDEX_NAME: &str = "index.dcprs";

const RESERVED: &str = "__metadata__";
const ESCAPED: &str = "__metadata__~";

/// Returns the id of a save in the usual text form.
pub fn uuid(id: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(id));
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    parts.join("-")
}

/// Parses an id in text form, with or without hyphens.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits = text.replace('-', "");
    let id = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    let id = id.to_be_bytes();
    (uuid(id) == text || digits == text).then_some(id)
}

/// Returns the name of one rank's index in a rank-local save.
pub fn rank_index_name(rank: u32) -> String {
    format!("__{rank}.{INDEX_NAME}")
}

/// Parses the name of a rank's index; returns `None` unless [`rank_index_name`] writes it in
/// exactly this form.
pub(crate) fn parse_rank_index_name(name: &str) -> Option<u32> {
    let rank = name.strip_prefix("__")?.split('.').next()?.parse().ok()?;
    (rank_index_name(rank) == name).then_some(rank)
}

/// Returns the name of the tensor `fqn` in a data file's header. It only differs for the one name
/// that safetensors reserves.
pub fn to_header_name(fqn: &str) -> String {
    if fqn == RESERVED || fqn.starts_with(ESCAPED) { format!("{fqn}~") } else { fqn.to_owned() }
}

/// Inverts [`to_header_name`]; returns `None` for a name that it never returns.
pub fn from_header_name(name: &str) -> Option<&str> {
    if name == RESERVED {
        None
    } else if name.starts_with(ESCAPED) {
        name.strip_suffix('~')
    } else {
        Some(name)
    }
}

/// Returns an error if `name` cannot be the name of a data file. An external one may have any path.
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
        for fqn in
            ["", "w", "__metadata__", "__metadata__~", "__metadata__~~", "__metadata__x", "~"]
        {
            let name = to_header_name(fqn);
            assert_ne!(name, RESERVED);
            assert_eq!(from_header_name(&name), Some(fqn));
        }
    }

    #[test]
    fn header_names_that_nobody_writes_are_refused() {
        for name in ["__metadata__", "__metadata__~x", "__metadata__~é", "__metadata__~~ "] {
            assert_eq!(from_header_name(name), None, "{name}");
        }
    }

    #[test]
    fn ids_of_saves_are_text_and_back() {
        let id = [1, 35, 69, 103, 137, 171, 205, 239, 0, 17, 34, 51, 68, 85, 102, 119];
        let text = "01234567-89ab-cdef-0011-223344556677";
        assert_eq!(uuid(id), text);
        assert_eq!(parse_uuid(text), Some(id));
        assert_eq!(parse_uuid(&text.replace('-', "")), Some(id));
        for other in [
            "",
            "0123",
            &text.to_uppercase(),
            &text[1..],
            "0-1234567-89ab-cdef-0011-22334455667",
            &format!("+{}", &text[1..]),
        ] {
            assert_eq!(parse_uuid(other), None, "{other}");
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
