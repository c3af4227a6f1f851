//! Stock checkpoints that are damaged, incomplete or malicious.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use proptest::prelude::*;

use super::{copy, fixtures, open, refusal};
use crate::Error;
use crate::foreign::fault::Fault;
use crate::foreign::{metadata_pickle, tensor_pickle};
use crate::format::Value;

fn metadata(case: &str) -> Vec<u8> {
    fs::read(fixtures().join(case).join(".metadata")).unwrap()
}

fn short(text: &str) -> Vec<u8> {
    let op = match u8::try_from(text.len()) {
        Ok(len) => vec![0x8c, len],
        Err(_) => [&b"X"[..], &u32::try_from(text.len()).unwrap().to_le_bytes()].concat(),
    };
    [&*op, text.as_bytes()].concat()
}

fn global(module: &str, name: &str) -> Vec<u8> {
    [short(module), short(name), vec![0x93]].concat()
}

fn parse(bytes: &[u8]) -> Error {
    metadata_pickle::parse(bytes, Path::new(".metadata")).map(drop).unwrap_err()
}

#[test]
fn objects_in_place_of_metadata_are_named() {
    let call = |function: Vec<u8>| {
        [b"\x80\x04".to_vec(), function, short("touch owned"), b"\x85R.".to_vec()].concat()
    };
    let cases = [
        (call(global("os", "system")), "os.system"),
        (call(b"cposix\nsystem\n".to_vec()), "posix.system"),
        (call(global("builtins", "eval")), "builtins.eval"),
        (call(global("torch", "os.system")), "torch.os.system"),
        (call(global("torch.distributed.checkpoint.metadata", "os.system")), "metadata.os.system"),
        (call(global("torch", "load")), "torch.load"),
        (call(global("torch.serialization", "load")), "torch.serialization.load"),
        (b"\x80\x04(ios\nsystem\n.".to_vec(), "os.system"),
        (b"\x80\x04\x82\x01.".to_vec(), "extension registry"),
        (b"\x80\x04\x84\x01\0\0\0.".to_vec(), "extension registry"),
        (
            [
                b"\x80\x04".to_vec(),
                short("os"),
                b"\x940h\x00".to_vec(),
                short("system"),
                b"\x93.".to_vec(),
            ]
            .concat(),
            "os.system",
        ),
    ];
    for (bytes, name) in cases {
        match parse(&bytes) {
            Error::UnsafePickle { global, .. } => assert!(global.contains(name), "{global}"),
            e => panic!("{name}: {e}"),
        }
    }
}

#[test]
fn tricks_are_refused() {
    let class = global("torch.distributed.checkpoint.metadata", "Metadata");
    let with = |tail: &[u8]| [b"\x80\x04".to_vec(), class.clone(), tail.to_vec()].concat();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (with(b"}b."), "a state for"),
        (with(b")\x81}b}b."), "metadata.Metadata"),
        (with(b")\x81)R."), "metadata.Metadata"),
        (with(b"]R."), "a call of what"),
        (with(b")}\x92."), "metadata.Metadata"),
        (b"\x80\x04NQ.".to_vec(), "opcode 0x51"),
        (b"\x80\x04K\x01K\x02\x93.".to_vec(), "not text"),
        (b"\x80\x04Nr\xff\xff\xff\xff.".to_vec(), "memo index"),
        (b"\x80\x04j\xff\xff\xff\xff.".to_vec(), "memo index"),
        (b"\x80\x04\x94.".to_vec(), "too few"),
        (b"\x80\x04(\x94.".to_vec(), "too few"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffx.".to_vec(), "too early"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x0fN.".to_vec(), "a frame"),
        (b"\x80\x04\x8a\x09\0\0\0\0\0\0\0\0\0.".to_vec(), "not an instance"),
        (b"\x80\x04\x8c\x01\xff.".to_vec(), "not an instance"),
        (b"\x80\x04NN.".to_vec(), "left on the stack"),
        (b"\x80\x04N(.".to_vec(), "too few|left"),
        (b"\x80\x04N.N".to_vec(), "after the end"),
        (b"\x80\x04](NNa.".to_vec(), "not a list|too few|not a container"),
        (b"\x80\x04}(NNNu.".to_vec(), "not a dict"),
        (b"".to_vec(), "too early"),
        (b"\x80\x04N.".to_vec(), "not an instance of Metadata"),
    ];
    for (bytes, parts) in cases {
        let e = parse(&bytes).to_string();
        assert!(parts.split('|').any(|part| e.contains(part)), "{bytes:?}: {e}");
    }
    assert!(matches!(parse(b"\x80\x06N."), Error::Unsupported(_)));
}

#[test]
fn nesting_and_sharing_cost_no_more_than_they_say() {
    let fields = |planner: Vec<u8>| {
        [
            b"\x80\x04".to_vec(),
            global("torch.distributed.checkpoint.metadata", "Metadata"),
            b")\x81}(".to_vec(),
            short("state_dict_metadata"),
            b"}".to_vec(),
            short("storage_data"),
            b"}".to_vec(),
            short("planner_data"),
            planner,
            b"ub.".to_vec(),
        ]
        .concat()
    };
    let deep = [b")".to_vec(), vec![0x85; 100_000]].concat();
    let root = |planner| metadata_pickle::parse(&fields(planner), Path::new("m")).unwrap().root;
    let left_out = |key: &str| {
        let keys = Value::List(vec![Value::Str(key.into())]);
        Value::Dict(vec![(Value::Str("dcp_rs.left_out".into()), keys)])
    };
    assert_eq!(root(deep), left_out("all of it"));
    assert_eq!(root(b"]\x94h\x00a".to_vec()), left_out("all of it"));
    let mut laughs = [b"(".to_vec(), short("ha"), b"\x94".to_vec()].concat();
    for level in 0..30 {
        laughs.push(b'(');
        laughs.extend([b'h', level].repeat(10));
        laughs.extend(b"t\x94");
    }
    laughs.push(b't');
    assert!(parse(&fields(laughs)).to_string().contains("without bound"));
    assert_eq!(root(global("torch", "float32")), left_out("all of it"));
    // A set and a large integer, beside a plain value.
    let mixed = [b"}(".to_vec(), short("a"), b"\x8f".to_vec(), short("b"), b"\x8a\x09".to_vec()];
    let mixed = [mixed.concat(), vec![1; 9], short("c"), b"K\x01u".to_vec()].concat();
    let text = |text: &str| Value::Str(text.into());
    let lost = Value::List(vec![text("a"), text("b")]);
    let kept = vec![(text("c"), Value::Int(1)), (text("dcp_rs.left_out"), lost)];
    assert_eq!(root(mixed), Value::Dict(kept));
}

/// A `.metadata` in which entries and stored data share their objects.
struct Forged {
    /// Number of dimensions of every tensor.
    dims: usize,
    /// True if each tensor has one chunk, which is empty.
    has_chunk: bool,
    /// Number of extensions of the stored data.
    extensions: usize,
    /// Number of additional attributes of the object with the location of stored data.
    junk: usize,
    entries: Vec<(String, Vec<u8>)>,
    stored: Vec<u8>,
}

impl Forged {
    const TENSOR: &[u8] = b"h\x00";
    const VALUE: &[u8] = b"h\x01";

    fn new(dims: usize, has_chunk: bool) -> Self {
        let (entries, stored) = (Vec::new(), Vec::new());
        Self { dims, has_chunk, extensions: 0, junk: 0, entries, stored }
    }

    /// Adds an entry that refers to the one tensor or value.
    fn entry(&mut self, entry: &[u8]) {
        self.entries.push((format!("{:05}", self.entries.len()), entry.to_vec()));
    }

    /// Stores the last entry.
    fn store(&mut self) {
        let (name, _) = self.entries.last().unwrap();
        let index = [b"h\x02)\x81}h\x03", &*short(name), b"sb\x94"].concat();
        self.stored.extend([&*index, b"h\x04"].concat());
    }

    /// Stores the first stored entry once more.
    fn store_again(&mut self) {
        self.stored.extend(b"h\x05h\x04");
    }

    fn bytes(&self) -> Vec<u8> {
        const METADATA: &str = "torch.distributed.checkpoint.metadata";
        let object = |class: Vec<u8>, fields: &[(&str, Vec<u8>)]| {
            let fields: Vec<u8> = fields
                .iter()
                .flat_map(|(name, value)| [short(name), value.clone()].concat())
                .collect();
            [class, b")\x81}(".to_vec(), fields, b"ub".to_vec()].concat()
        };
        let of = |name| global(METADATA, name);
        let zeros = [b"(".to_vec(), b"K\0".repeat(self.dims), b"t".to_vec()].concat();
        let chunk = object(
            of("ChunkStorageMetadata"),
            &[("offsets", zeros.clone()), ("sizes", zeros.clone())],
        );
        let properties = [
            of("TensorProperties"),
            b")\x81(".to_vec(),
            global("torch", "float32"),
            global("torch.serialization", "_get_layout"),
            short("torch.strided"),
            b"\x85R\x89".to_vec(),
            of("_MEM_FORMAT_ENCODING"),
            b"K\0\x85R\x89tb".to_vec(),
        ]
        .concat();
        let chunks = if self.has_chunk {
            [b"]".to_vec(), chunk, b"a".to_vec()].concat()
        } else {
            b"]".to_vec()
        };
        let extensions =
            [b"](".to_vec(), short("zstd").repeat(self.extensions), b"e".to_vec()].concat();
        let mut place = vec![
            ("relative_path", short("f")),
            ("offset", b"K\0".to_vec()),
            ("length", b"K\0".to_vec()),
            ("transform_descriptors", extensions),
        ];
        place.extend(vec![("junk", b"N".to_vec()); self.junk]);
        let shared = [
            object(
                of("TensorStorageMetadata"),
                &[("properties", properties), ("size", zeros), ("chunks", chunks)],
            ),
            [of("BytesStorageMetadata"), b")\x81".to_vec()].concat(),
            of("MetadataIndex"),
            short("fqn"),
            object(global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), &place),
        ];
        let remembered: Vec<u8> =
            shared.into_iter().flat_map(|part| [part, b"\x94".to_vec()].concat()).collect();
        let entries: Vec<u8> = self
            .entries
            .iter()
            .flat_map(|(name, entry)| [short(name), entry.clone()].concat())
            .collect();
        let dict = |pairs: &[u8]| [b"}(", pairs, b"u"].concat();
        let metadata = object(
            of("Metadata"),
            &[
                ("shared", [b"](".to_vec(), remembered, b"e".to_vec()].concat()),
                ("state_dict_metadata", dict(&entries)),
                ("storage_data", dict(&self.stored)),
            ],
        );
        [b"\x80\x04".to_vec(), metadata, b".".to_vec()].concat()
    }
}

/// References of a few bytes. Each of them allocates up to 2.5 KB.
#[test]
fn shared_entries_and_stored_data_are_counted_each_time() {
    let entries = |count| {
        let mut forged = Forged::new(64, false);
        (0..count).for_each(|_| forged.entry(Forged::TENSOR));
        forged.bytes()
    };
    let tensors = |count| {
        let mut forged = Forged::new(64, true);
        for _ in 0..count {
            forged.entry(Forged::TENSOR);
            forged.store();
        }
        forged.bytes()
    };
    let values = |count| {
        let mut forged = Forged::new(1, false);
        forged.entry(Forged::VALUE);
        forged.store();
        (1..count).for_each(|_| forged.store_again());
        forged.bytes()
    };
    let cases = [
        (entries(2), entries(120_000), "an entry"),
        (tensors(2), tensors(25_000), "stored data"),
        (values(2), values(250_000), "stored data"),
    ];
    for (few, many, what) in cases {
        metadata_pickle::parse(&few, Path::new(".metadata")).unwrap();
        assert!(many.len() < 2 << 20, "{} bytes may make more than 64 MiB", many.len());
        let e = parse(&many);
        assert_error!(e, Error::Unsupported(_), &format!("{what} that grows without bound"));
    }
}

/// A name of one MiB. Each reference of four bytes looks it up again.
#[test]
fn a_long_name_counts_each_time_that_it_is_looked_up() {
    let mut forged = Forged::new(1, false);
    forged.entries.push(("k".repeat(1 << 20), Forged::VALUE.to_vec()));
    forged.store();
    metadata_pickle::parse(&forged.bytes(), Path::new(".metadata")).unwrap();
    (0..100).for_each(|_| forged.store_again());
    let e = parse(&forged.bytes());
    assert!(e.to_string().contains("stored data that grows without bound"), "{e}");
}

/// All stored data can share the object with the location, and each would search all its
/// attributes.
#[test]
fn an_object_has_few_attributes() {
    let mut forged = Forged::new(1, true);
    forged.entry(Forged::TENSOR);
    forged.store();
    forged.junk = 60;
    metadata_pickle::parse(&forged.bytes(), Path::new(".metadata")).unwrap();
    forged.junk += 1;
    let e = parse(&forged.bytes());
    assert_error!(e, Error::CorruptIndex { .. }, "without a file");
}

#[test]
fn a_chunk_is_stored_once() {
    let mut forged = Forged::new(1, true);
    forged.entry(Forged::TENSOR);
    forged.store();
    metadata_pickle::parse(&forged.bytes(), Path::new(".metadata")).unwrap();
    forged.store_again();
    let e = parse(&forged.bytes());
    assert_error!(e, Error::CorruptIndex { .. }, "stored twice");
}

/// A message with a list of references to one name would be as long as all of them.
#[test]
fn the_first_of_the_extensions_is_named() {
    let mut forged = Forged::new(1, true);
    forged.extensions = 3;
    forged.entry(Forged::TENSOR);
    forged.store();
    let e = parse(&forged.bytes());
    assert!(matches!(e, Error::Unsupported(_)) && e.to_string().ends_with("extension zstd"), "{e}");
}

#[test]
fn half_written_and_cut_checkpoints_are_noticed() {
    let dir = copy("torch-2.15.0/sharded");
    fs::remove_file(dir.path().join("__1_0.distcp")).unwrap();
    let e = refusal(dir.path(), None);
    assert_error!(e, Error::CorruptData { .. }, "__1_0.distcp: it is missing");

    let dir = copy("torch-2.15.0/sharded");
    let file = OpenOptions::new().write(true).open(dir.path().join("__1_0.distcp")).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let e = refusal(dir.path(), None);
    assert_error!(e, Error::CorruptData { .. }, "lead out of a file");

    let dir = copy("torch-2.15.0/sharded");
    fs::rename(dir.path().join(".metadata"), dir.path().join(".metadata.tmp")).unwrap();
    let e = refusal(dir.path(), None);
    assert_error!(e, Error::NotFound { .. }, "did not finish");

    // The data of another checkpoint under the same names.
    let dir = copy("torch-2.15.0/sharded");
    fs::write(dir.path().join("__0_0.distcp"), vec![0; 100_000]).unwrap();
    let e = refusal(dir.path(), None);
    assert_error!(e, Error::CorruptData { .. }, "neither a torch.save");
}

/// Replaces every occurrence in a data file.
fn patch(path: &Path, from: &[u8], to: &[u8]) -> usize {
    assert_eq!(from.len(), to.len());
    let bytes = fs::read(path).unwrap();
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let places = bytes.windows(from.len()).enumerate().filter(|(_, window)| *window == from);
    places.map(|(at, _)| file.write_all_at(to, at as u64).unwrap()).count()
}

#[test]
fn archives_that_cannot_be_read_in_place_are_named() {
    let cases: [(&[u8], &[u8], &str); 6] = [
        (b"little", b"bigbig", "byte order \"bigbig\""),
        (b"FloatStorage", b"QInt8Storage", "stored in a torch.QInt8Storage"),
        (b"_rebuild_tensor_v2", b"_rebuild_sparse_te", "stored by torch._utils._rebuild_sparse_te"),
        (b"torch._utils", b"os.path_more", "stored with os.path_more._rebuild_tensor_v2"),
        (b"FloatStorage", b"DoubleStorag", "stored in a torch.DoubleStorag"),
        // Directory entries that say "deflated".
        (
            b"PK\x01\x02\0\0\0\0\x08\x08\0\0",
            b"PK\x01\x02\0\0\0\0\x08\x08\x08\0",
            "is compressed (method 8)",
        ),
    ];
    for (from, to, part) in cases {
        let dir = copy("torch-2.15.0/threads");
        for name in ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"] {
            patch(&dir.path().join(name), from, to);
        }
        let e = refusal(dir.path(), None);
        assert!(matches!(e, Error::Unsupported(_)), "{e}");
        assert!(e.to_string().contains(part) && e.to_string().contains("tensor \"w"), "{e}");
    }
}

#[test]
fn archives_that_contradict_themselves_are_refused() {
    let cases: [(&[u8], &[u8], &str); 6] = [
        (b"data/0PK\x01", b"data/1PK\x01", "no record data/0"),
        (b"data/0FB", b"data/1FB", "no header of that name"),
        (b"PK\x05\x06", b"PK\x05\x05", "does not end here"),
        (b"PK\x06\x06", b"PK\x06\x05", "zip64"),
        (b"PK\x01\x02", b"PK\x01\x03", "an entry was expected"),
        (b"FloatStorage", b"HalfStorage\n", "corrupt data"),
    ];
    for (from, to, part) in cases {
        let dir = copy("torch-2.15.0/plain");
        let count = patch(&dir.path().join("__0_0.distcp"), from, to);
        assert!(count > 0, "{part}");
        let e = refusal(dir.path(), None);
        assert!(matches!(e, Error::CorruptData { .. }), "{part}: {e}");
        assert!(e.to_string().contains(part), "{e}");
    }
}

#[test]
fn tensors_of_other_kinds_are_unsupported() {
    let pickle = |tail: &[u8]| [b"\x80\x02".to_vec(), tail.to_vec(), b".".to_vec()].concat();
    let cases: [(&[u8], &str); 5] = [
        (b"ctorch._utils\n_rebuild_qtensor\n)R", "_rebuild_qtensor"),
        (b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n)R", "_rebuild_meta_tensor_no_storage"),
        (b"ctorch._utils\n_rebuild_wrapper_subclass\n)R", "_rebuild_wrapper_subclass"),
        (b"N", "not a tensor"),
        (
            b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\n\
              ctorch\nOther\n)}tR",
            "torch.Other",
        ),
    ];
    for (tail, part) in cases {
        match tensor_pickle::parse(&pickle(tail)) {
            Err(Fault::Unsupported(what)) => assert!(what.contains(part), "{what}"),
            other => panic!("{part}: {other:?}"),
        }
    }
    match tensor_pickle::parse(&pickle(b"cmine\nTensor\n)R")) {
        Err(Fault::Forbidden(global)) => assert_eq!(global, "mine.Tensor"),
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// With changed bytes, a `.metadata` gives an error, or an index that passes every check.
    #[test]
    fn damaged_metadata_is_refused_or_safe(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = metadata("torch-2.15.0/nested");
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let dir = fixtures().join("torch-2.15.0/nested");
        if let Ok(metadata) = metadata_pickle::parse(&bytes, &dir) {
            let files = crate::store::Files::Local;
            let _ = crate::foreign::distcp::index_items(files, &dir, metadata, 1);
        }
    }

    #[test]
    fn pickle_noise_is_safe(bytes in prop::collection::vec(prop_oneof![
        Just(b'('), Just(b')'), Just(b't'), Just(b'}'), Just(b']'), Just(b'u'), Just(b'e'),
        Just(b'a'), Just(b's'), Just(b'N'), Just(b'R'), Just(b'b'), Just(0x81), Just(0x94),
        Just(b'h'), Just(0), Just(1), Just(0x85), Just(0x86), Just(b'Q'),
        any::<u8>(),
    ], 0..60)) {
        let _ = metadata_pickle::parse(&bytes, Path::new("x"));
        let bytes = [&b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"[..], &bytes, b"."].concat();
        let _ = tensor_pickle::parse(&bytes);
    }

    /// With a changed byte in a data file, every tensor stays within the file, or there is an
    /// error.
    #[test]
    fn damaged_archives_are_refused_or_safe(at: prop::sample::Index, byte: u8) {
        let dir = copy("torch-2.4.1/sharded");
        let path = dir.path().join("__1_0.distcp");
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        fs::write(&path, bytes).unwrap();
        let _ = open(dir.path(), None);
    }
}
