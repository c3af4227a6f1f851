//! Comparison with the `safetensors` crate: both accept a header and agree, or both refuse it.

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;

fn file(json: &str, payload: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(bytes.len() + payload, 7);
    bytes
}

fn ours(bytes: &[u8]) -> Result<Header, HeaderError> {
    parse(bytes, bytes.len() as u64)
}

/// Runs both parsers on one file. Returns `Ok(accepted)` if they agree.
pub(crate) fn compare(bytes: &[u8]) -> Result<bool, String> {
    match (ours(bytes), SafeTensors::read_metadata(bytes)) {
        (Err(_), Err(_)) => Ok(false),
        (Err(e), Ok(_)) => Err(format!("only we refuse: {e}")),
        (Ok(_), Err(e)) => Err(format!("only the crate refuses: {e}")),
        (Ok(header), Ok((n, theirs))) => {
            let tensors = theirs.tensors();
            if header.data_start != n as u64 + PREFIX_LEN || header.tensors.len() != tensors.len() {
                return Err("different payload or number of tensors".into());
            }
            for tensor in &header.tensors {
                let info = tensors[&tensor.name];
                let same = info.dtype.to_string() == tensor.dtype.name()
                    && info.shape.iter().map(|s| *s as u64).eq(tensor.shape.iter().copied())
                    && info.data_offsets == (usize_of(tensor.begin), usize_of(tensor.end));
                if !same {
                    return Err(format!("different tensor {}", tensor.name));
                }
            }
            let texts = theirs.metadata().clone().unwrap_or_default();
            if !texts.into_iter().collect::<BTreeMap<_, _>>().eq(&header.metadata) {
                return Err("different texts".into());
            }
            Ok(true)
        }
    }
}

fn usize_of(n: u64) -> usize {
    n.try_into().unwrap()
}

#[test]
fn agrees_on_a_table_of_headers() {
    let t = |body: &str| format!("{{\"a\":{body}}}");
    let f32x2 = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let cases: &[(String, usize, bool)] = &[
        ("{}".into(), 0, true),
        ("{}   ".into(), 0, true),
        (" {}".into(), 0, true),
        ("{}".into(), 1, false),
        ("{} x".into(), 0, false),
        ("[]".into(), 0, false),
        ("null".into(), 0, false),
        (t(f32x2), 8, true),
        (t(f32x2), 7, false),
        (t(f32x2), 9, false),
        (t(r#"["F32",[2],[0,8]]"#), 8, true),
        (t(r#"{"dtype":{"F32":null},"shape":[2],"data_offsets":[0,8]}"#), 8, true),
        (t(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":[1,{}]}"#), 8, true),
        (t(r#"{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}"#), 8, false),
        (t(r#"{"shape":[2],"data_offsets":[0,8]}"#), 8, false),
        (t(r#"{"dtype":"f32","shape":[2],"data_offsets":[0,8]}"#), 8, false),
        (t(r#"{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}"#), 8, false),
        (t(r#"{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#), 8, false),
        (t(r#"{"dtype":"F32","shape":null,"data_offsets":[0,8]}"#), 8, false),
        (t(r#"{"dtype":"F32","shape":[],"data_offsets":[0,4]}"#), 4, true),
        (t(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}"#), 8, false),
        (t(r#"{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#), 8, false),
        (t(r#"{"dtype":"F32","shape":[2],"data_offsets":[1,9]}"#), 9, false),
        (t(r#"{"dtype":"F4","shape":[2],"data_offsets":[0,1]}"#), 1, true),
        (t(r#"{"dtype":"F4","shape":[3],"data_offsets":[0,1]}"#), 1, false),
        (t(r#"{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}"#), 3, true),
        (t(r#"{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,0]}"#), 0, false),
        (t(r#"{"dtype":"U8","shape":[18446744073709551615,2,0],"data_offsets":[0,0]}"#), 0, false),
        (t(r#"{"dtype":"U8","shape":[0,18446744073709551615,2],"data_offsets":[0,0]}"#), 0, true),
        (t(r#"{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0]}"#), 0, false),
        (r#"{"__metadata__":null}"#.into(), 0, true),
        (r#"{"__metadata__":{}}"#.into(), 0, true),
        (r#"{"__metadata__":{"k":"v","l":"\u0041"}}"#.into(), 0, true),
        (r#"{"__metadata__":{"k":1}}"#.into(), 0, false),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, false),
        (r#"{"a":"\ud800"}"#.into(), 0, false),
    ];
    for (json, payload, accepted) in cases {
        assert_eq!(compare(&file(json, *payload)), Ok(*accepted), "{json} with {payload} bytes");
    }
}

#[test]
fn agrees_on_lengths() {
    for bytes in [&b""[..], &[0; 7], &[0; 8], &[255; 8], &[3, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']] {
        assert_eq!(compare(bytes), Ok(false), "{bytes:?}");
    }
    let mut long = (MAX_HEADER_LEN + 1).to_le_bytes().to_vec();
    assert_eq!(compare(&long), Ok(false));
    long.resize(usize_of(MAX_HEADER_LEN + 1 + 8), b' ');
    long[8..10].copy_from_slice(b"{}");
    let e = ours(&long).unwrap_err();
    assert!(e.reason.contains("more than 100000000"), "{e}");
    assert_eq!(compare(&long), Ok(false));
    // The longest header that is accepted.
    long.pop();
    long[..8].copy_from_slice(&MAX_HEADER_LEN.to_le_bytes());
    assert_eq!(compare(&long), Ok(true));
}

#[test]
fn refuses_a_name_that_stands_twice_where_the_crate_keeps_the_last() {
    let info = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let bytes = file(&format!(r#"{{"a":{info},"a":{info}}}"#), 1);
    assert!(ours(&bytes).unwrap_err().reason.contains("\"a\" is there twice"));
    assert!(SafeTensors::read_metadata(&bytes).is_ok());
    let bytes = file(r#"{"__metadata__":{"k":"1","k":"2"}}"#, 0);
    assert!(ours(&bytes).unwrap_err().reason.contains("\"k\" is there twice"));
    assert!(SafeTensors::read_metadata(&bytes).is_ok());
}

#[test]
fn skips_the_value_of_an_unknown_field_where_the_crate_decodes_it() {
    let bytes = file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1e999}}"#, 1);
    assert!(ours(&bytes).is_ok());
    assert!(SafeTensors::read_metadata(&bytes).is_err());
}

#[test]
fn errors_say_where() {
    let bytes = file("{\n\"a\": 5}", 0);
    let e = ours(&bytes).unwrap_err();
    assert!((9..=16).contains(&e.offset), "{e}");
    let mut bytes = file("{\"aé\": 5}", 0);
    bytes[11] = 0xff;
    assert_eq!(ours(&bytes).unwrap_err().offset, 11);
}

#[test]
fn four_bit_values_count_in_pairs() {
    let fp4 = HeaderDtype::F4;
    assert_eq!(fp4.to_torch(&[3, 4]).unwrap().1, [3, 2]);
    assert_eq!(fp4.to_torch(&[4, 3]), None);
    assert_eq!(fp4.to_torch(&[]), None);
    assert_eq!(HeaderDtype::F6_E2M3.to_torch(&[4]), None);
    let (dtype, shape) = HeaderDtype::F8_E8M0.to_torch(&[4]).unwrap();
    assert_eq!((dtype.name(), shape), ("float8_e8m0fnu", vec![4]));
}

/// Headers that are mostly right: now and then something else replaces one of a few fields.
fn header() -> impl Strategy<Value = (String, usize)> {
    let dtype = prop_oneof![
        12 => prop::sample::select(vec![
            "F32", "U8", "BF16", "F4", "F6_E3M2", "C64", "F8_E8M0", "BOOL", "I64",
        ]),
        1 => Just("F99"),
    ];
    let shape = prop::collection::vec(prop_oneof![20 => 0_u64..5, 1 => Just(u64::MAX / 3)], 0..4);
    let nudge = prop_oneof![15 => Just(0_i64), 1 => -2_i64..3];
    let name = prop_oneof![
        8 => "[a-e]{1,3}",
        1 => Just("__metadata__".to_owned()),
        1 => Just("é\\n".to_owned()),
    ];
    let tensor = (name, dtype, shape, nudge.clone(), nudge.clone());
    (prop::collection::vec(tensor, 0..6), nudge, any::<bool>(), any::<prop::sample::Index>())
        .prop_map(|(tensors, tail, padded, turn)| {
            let mut at = 0_i64;
            let mut seen = HashSet::new();
            let mut parts = Vec::new();
            for (name, dtype, shape, nudge_begin, nudge_end) in tensors {
                if !seen.insert(name.clone()) {
                    continue; // the deliberate difference has a test of its own
                }
                let bits: u64 = match dtype {
                    "F4" => 4,
                    "F6_E3M2" => 6,
                    "U8" | "BOOL" | "F8_E8M0" => 8,
                    "BF16" => 16,
                    "F32" => 32,
                    _ => 64,
                };
                let len = shape.iter().fold(bits, |n, s| n.wrapping_mul(*s)) / 8 % 100_000;
                let end = at + i64::try_from(len).unwrap();
                let (begin_said, end_said) = (at + nudge_begin, end + nudge_end);
                at = end;
                parts.push(format!(
                    "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\
                     \"data_offsets\":[{begin_said},{end_said}]}}"
                ));
            }
            if !parts.is_empty() {
                let by = turn.index(parts.len());
                parts.rotate_left(by);
            }
            let pad = if padded { "  " } else { "" };
            (format!("{{{}}}{pad}", parts.join(",")), usize::try_from((at + tail).max(0)).unwrap())
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn agrees_on_near_headers((json, payload) in header()) {
        if let Err(difference) = compare(&file(&json, payload)) {
            return Err(TestCaseError::fail(format!("{difference}: {json}")));
        }
    }

    /// Changes one byte of a good file, or truncates it.
    #[test]
    fn agrees_on_damage((json, payload) in header(), at: prop::sample::Index, byte: u8, cut: bool) {
        let mut bytes = file(&json, payload);
        let at = at.index(bytes.len());
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        if let Err(difference) = compare(&bytes) {
            // Damage can make two names equal, which only our parser refuses.
            prop_assert!(difference.contains("is there twice"), "{difference}: {json}");
        }
    }

    #[test]
    fn agrees_on_noise(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        compare(&bytes).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn near_headers_are_often_accepted() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let accepted = (0..300)
        .filter(|_| {
            let (json, payload) = header().new_tree(&mut runner).unwrap().current();
            ours(&file(&json, payload)).is_ok()
        })
        .count();
    assert!((60..280).contains(&accepted), "{accepted} of 300");
}
