//! JSON as Python writes and reads it.

use std::borrow::Cow;

use serde_json::Value;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Parses JSON as Python's `json.loads` does: `NaN` and `Infinity` are numbers, and become null. A
/// byte order mark is skipped.
pub(crate) fn parse(text: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice(&readable(text))
}

/// Returns the text in the standard's JSON.
fn readable(text: &[u8]) -> Cow<'_, [u8]> {
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    let (mut made, mut from) = (Vec::new(), 0);
    let (mut at, mut is_string) = (0, false);
    while at < text.len() {
        let rest = &text[at..];
        let number = ["NaN", "Infinity", "-Infinity"]
            .iter()
            .find(|number| !is_string && rest.starts_with(number.as_bytes()));
        at += match (rest[0], number) {
            (_, Some(number)) => {
                made.extend_from_slice(&text[from..at]);
                made.extend_from_slice(b"null");
                from = at + number.len();
                number.len()
            }
            (b'\\', _) => 2,
            (byte, _) => {
                is_string ^= byte == b'"';
                1
            }
        };
    }
    if from == 0 {
        return Cow::Borrowed(text);
    }
    made.extend_from_slice(&text[from..]);
    Cow::Owned(made)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::parse;

    #[test]
    fn numbers_that_only_python_knows() {
        let text = r#"{"a": [NaN, -Infinity,Infinity], "NaN\"": "Infinity", "b\\": NaN}"#;
        let expected = json!({"a": [null, null, null], "NaN\"": "Infinity", "b\\": null});
        assert_eq!(parse(text.as_bytes()).unwrap(), expected);
        let marked = [b"\xef\xbb\xbf", text.as_bytes()].concat();
        assert_eq!(parse(&marked).unwrap(), expected);
        for bad in ["", "{", "[Nan]", "[NaNa]", "\"NaN", "[-NaN]", "\\"] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
