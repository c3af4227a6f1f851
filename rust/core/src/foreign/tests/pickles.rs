//! Pickles with all values kept, and parts of them written again.

use proptest::prelude::*;

use crate::foreign::fault::{Fault, FaultResult};
use crate::foreign::pickle::{Described, Pickle, Rules};

const KEEP: Rules = Rules { allow: |_, _| true, persistent: true, keep: true, places: true };

fn kept(bytes: &[u8]) -> FaultResult<Pickle<'_>> {
    Pickle::parse(bytes, &KEEP)
}

/// Writes the value of a pickle again, and checks that the result can be read.
fn written(bytes: &[u8]) -> Vec<u8> {
    let pickle = kept(bytes).unwrap();
    let (out, _) = pickle.write(pickle.top()).unwrap();
    assert!(kept(&out).is_ok(), "{bytes:?}: {out:?}");
    out
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn anything_may_be_called_where_all_is_kept() {
    // getattr(Outer, "Kind")(1)
    let nested = b"\x80\x02c__builtin__\ngetattr\ncm\nOuter\nX\x04\0\0\0Kind\x86RK\x01\x85R.";
    let out = written(nested);
    assert!(contains(&out, b"cm\nOuter\n"));
    assert!(contains(&out, b"Kind"));
    let pickle = kept(nested).unwrap();
    match pickle.describe(pickle.top()) {
        Described::Object(name) => assert_eq!(name, "m.Outer.Kind"),
        Described::Plain(what) => panic!("{what}"),
    }
    // The class of a module, which files of torch before 1.6 have together with its source code.
    let pickle = kept(b"\x80\x02(X\x06\0\0\0modulecm\nNet\nNNtQ)\x81.").unwrap();
    assert!(matches!(pickle.describe(pickle.top()), Described::Object(name) if name == "m.Net"));
    let (out, persistent) = pickle.write(pickle.top()).unwrap();
    assert!(persistent.is_empty() && contains(&out, b"cm\nNet\n") && !out.contains(&b'Q'));
    for (bytes, part) in [
        (&b"\x80\x02K\x01)R."[..], "a call of what"),
        (b"\x80\x02cm\nf\n]R.", "a call of what"),
        (b"\x80\x04cm\nf\n]}\x92.", "a call of what"),
    ] {
        match kept(bytes) {
            Err(Fault::Corrupt { reason, .. }) => assert!(reason.contains(part), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn opcodes_of_other_protocols_become_those_of_protocol_2() {
    let cases: [(&[u8], &[u8]); 7] = [
        (b"\x80\x04\x8f\x94(K\x01K\x02\x90.", b"c__builtin__\nset\n](J\x01\0\0\0J\x02\0\0\0e\x85R"),
        (b"\x80\x04(K\x01\x91\x94.", b"c__builtin__\nfrozenset\n](J\x01\0\0\0e\x85R"),
        (b"\x80\x05\x96\x01\0\0\0\0\0\0\0x.", b"c__builtin__\nbytearray\nc_codecs\n"),
        (b"\x80\x04cm\nC\n)}\x92.", b"ccopyreg\n__newobj_ex__\n(cm\nC\n"),
        (b"\x80\x02T\x03\0\0\0abc.", b"X\x03\0\0\0abc"),
        (b"\x80\x02I4294967296\n.", b"\x8a\x08\0\0\0\0\x01\0\0\0"),
        // A tuple in a list that it contains: ([...],)
        (b"\x80\x02]q\0h\0\x85q\x01a0h\x01.", b"(]r\0\0\0\0((j\0\0\0\0tr\x01\0\0\0et0j\x01\0\0\0"),
    ];
    for (bytes, part) in cases {
        let out = written(bytes);
        assert!(contains(&out, part), "{bytes:?}: {out:?}");
    }
    for bytes in [
        &b"\x80\x040."[..],
        b"\x80\x041.",
        b"\x80\x04(K\x01\x91(K\x01\x90.",
        b"\x80\x04](K\x01\x90.",
        b"\x80\x02Iabc\n.",
        b"\x80\x02T\xff\xff\xff\xffabc.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\xffx.",
    ] {
        assert!(matches!(kept(bytes), Err(Fault::Corrupt { .. })), "{bytes:?}");
    }
}

#[test]
fn what_is_written_is_no_longer_than_its_pickle_accounts_for() {
    // A text that is used often is written once.
    let text = [&b"X\0\0\x10\0"[..], &vec![b'x'; 1 << 20], b"q\0"].concat();
    let used = [b"\x80\x02(", &text[..], &b"h\0".repeat(100_000), b"t."].concat();
    assert!(written(&used).len() < 2 << 20);
    // The name of a global is written with every global that has it.
    let text = [&b"X\xf4\x01\0\0"[..], &[b'x'; 500], b"q\0"].concat();
    let global = b"h\0h\0\x93".repeat(100_000);
    let named = [b"\x80\x04(", &text[..], &global, b"t."].concat();
    let pickle = kept(&named).unwrap();
    match pickle.write(pickle.top()) {
        Err(Fault::Unsupported(what)) => assert!(what.contains("without bound"), "{what}"),
        other => panic!("{:?}", other.map(|(bytes, _)| bytes.len())),
    }
    // A tuple that many lists inside it refer back to.
    let lists: Vec<u8> = (0..200).flat_map(|i: u8| [b']', b'q', i]).collect();
    let back: Vec<u8> = (0..200).flat_map(|i: u8| [b'h', i, b'h', 200, b'a', b'0']).collect();
    let tuple =
        [b"\x80\x02(", &lists[..], &b"K\x01".repeat(100_000), b"tq\xc8", &back, b"."].concat();
    let pickle = kept(&tuple).unwrap();
    match pickle.write(pickle.top()) {
        Err(Fault::Unsupported(what)) => assert!(what.contains("without bound"), "{what}"),
        other => panic!("{:?}", other.map(|(bytes, _)| bytes.len())),
    }
    // Calls are nested in calls.
    let calls = [b"\x80\x02cm\nf\n", &b")R".repeat(100_000)[..], b"."].concat();
    let pickle = kept(&calls).unwrap();
    assert!(
        matches!(pickle.write(pickle.top()), Err(Fault::Unsupported(what)) if what.contains("deep"))
    );
    assert!(matches!(pickle.describe(pickle.top()), Described::Object(name) if name == "m.f"));
}

#[test]
fn names_within_classes_are_written_as_python_writes_them() {
    assert_eq!(
        written(b"\x80\x04\x8c\x01m\x94\x8c\x05A.B.C\x94\x93\x94."),
        b"\x80\x02c__builtin__\ngetattr\nc__builtin__\ngetattr\ncm\nA\n\
          X\x01\0\0\0B\x86RX\x01\0\0\0C\x86Rr\0\0\0\0."
    );
}

#[test]
fn an_ordered_dict_of_a_list_of_pairs_is_one() {
    let pair = |key: u8| [b"](X\x01\0\0\0", &[key][..], b"K", &[key], b"e"].concat();
    let of = |list: &[u8]| [b"\x80\x02ccollections\nOrderedDict\nq\0](", list, b"e\x85R."].concat();
    let bytes = of(&[pair(b'a'), pair(b'b')].concat());
    let pickle = kept(&bytes).unwrap();
    let pairs = pickle.as_dict(pickle.top()).unwrap();
    let keys: Vec<_> = pairs.iter().map(|(key, _)| pickle.as_str(*key).unwrap()).collect();
    assert_eq!(keys, ["a", "b"]);
    assert_eq!(pickle.mapping_kind(pickle.top()), "OrderedDict");
    for (place, value) in pickle.places(pickle.top()).iter().zip([b"Ka", b"Kb"]) {
        assert_eq!(pickle.bytes(*place), value);
    }
    for other in [&b"K\x01"[..], b"]", b"](K\x01K\x02K\x03e", b"K\x01K\x02\x86"] {
        let bytes = of(other);
        let pickle = kept(&bytes).unwrap();
        assert!(pickle.as_dict(pickle.top()).is_none(), "{other:?}");
    }
    // If its `__init__` is not called, it has no pairs.
    let made = [&bytes[..bytes.len() - 2], b"\x81."].concat();
    let pickle = kept(&made).unwrap();
    assert!(pickle.as_dict(pickle.top()).is_none());
    // One list for many dicts.
    let lists = [&pair(b'a')[..], &b"q\x01"[..], &b"h\x01".repeat(3000)].concat();
    let dicts = b"h\0h\x02R".repeat(1000);
    let bytes = [
        b"\x80\x02ccollections\nOrderedDict\nq\x000](",
        &lists[..],
        b"e\x85q\x020(",
        &dicts,
        b"t.",
    ]
    .concat();
    match kept(&bytes) {
        Err(Fault::Unsupported(what)) => {
            assert!(what.contains("without bound") || what.contains("makes more than"), "{what}");
        }
        other => panic!("{}", other.is_ok()),
    }
}

/// Opcodes with their arguments.
const PARTS: &[&[u8]] = &[
    b"(",
    b")",
    b"t",
    b"}",
    b"]",
    b"u",
    b"e",
    b"a",
    b"s",
    b"N",
    b"R",
    b"b",
    b"\x81",
    b"\x92",
    b"\x94",
    b"h\0",
    b"h\x01",
    b"h\x02",
    b"\x85",
    b"\x86",
    b"Q",
    b"0",
    b"1",
    b"\x8f",
    b"(\x90",
    b"\x90",
    b"\x91",
    b"K\x01",
    b"X\x01\0\0\0k",
    b"U\x01k",
    b"cm\na.b\n",
    b"ccollections\nOrderedDict\n",
    b"C\x01x",
    b"\x96\x01\0\0\0\0\0\0\0x",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Kept values can be described, written and walked, or are refused. Written values can be
    /// read.
    #[test]
    fn noise_is_safe(bytes in prop::collection::vec(prop::sample::select(PARTS), 0..40)) {
        let bytes = [b"\x80\x04", &bytes.concat()[..], b"."].concat();
        if let Ok((pickle, _)) = Pickle::parse_prefix(bytes, &KEEP) {
            let _ = pickle.describe(pickle.top());
            if let Ok((out, _)) = pickle.write(pickle.top()) {
                prop_assert!(kept(&out).is_ok(), "{out:?}");
            }
        }
    }
}
