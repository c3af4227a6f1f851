//! Planner data: a small self-describing encoding that replaces a pickle (section 5 of
//! `docs/format.md`).

const MAX_DEPTH: u32 = 64;

/// A value of planner data.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Python's `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer of up to 64 bits.
    Int(i64),
    /// A float.
    Float(f64),
    /// Text.
    Str(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A list.
    List(Vec<Value>),
    /// A dict, in order.
    Dict(Vec<(Value, Value)>),
}

impl Value {
    /// Appends the encoding. Refuses lengths over `u32::MAX`, nesting over 64, and keys that
    /// contain a list or a dict.
    ///
    /// # Errors
    /// A message that says what cannot be encoded.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), &'static str> {
        self.encode_at(out, 0)
    }

    fn encode_at(&self, out: &mut Vec<u8>, depth: u32) -> Result<(), &'static str> {
        if depth > MAX_DEPTH {
            return Err("planner data is nested more than 64 deep");
        }
        match self {
            Self::None => out.push(0),
            Self::Bool(false) => out.push(1),
            Self::Bool(true) => out.push(2),
            Self::Int(i) => {
                out.push(3);
                out.extend(i.to_le_bytes());
            }
            Self::Float(f) => {
                out.push(4);
                out.extend(f.to_le_bytes());
            }
            Self::Str(s) => {
                out.push(5);
                encode_len(s.len(), out)?;
                out.extend(s.as_bytes());
            }
            Self::Bytes(b) => {
                out.push(6);
                encode_len(b.len(), out)?;
                out.extend(b);
            }
            Self::Tuple(items) | Self::List(items) => {
                out.push(if matches!(self, Self::Tuple(_)) { 7 } else { 8 });
                encode_len(items.len(), out)?;
                for item in items {
                    item.encode_at(out, depth + 1)?;
                }
            }
            Self::Dict(pairs) => {
                out.push(9);
                encode_len(pairs.len(), out)?;
                for (key, value) in pairs {
                    key.encode_at(out, depth + 1)?;
                    if !key.is_key() {
                        return Err("planner data has a list or a dict in a key of a dict");
                    }
                    value.encode_at(out, depth + 1)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the encoding of a value that can be encoded, such as a decoded one.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        // Ignored: a value that cannot be encoded is refused when the index is built.
        let _ = self.encode(&mut out);
        out
    }

    /// Returns whether this can be the path of a tensor: a tuple of at least one part.
    pub fn is_path(&self) -> bool {
        matches!(self, Self::Tuple(parts) if !parts.is_empty() && parts.iter().all(Self::is_part))
    }

    /// Returns whether this lists containers: `None`, or a list of (position, path, kind). The path
    /// of the state dict itself is empty.
    pub fn is_nesting(&self) -> bool {
        let is_container = |container: &Self| match container {
            Self::Tuple(fields) => matches!(
                fields.as_slice(),
                [Self::Int(position), Self::Tuple(path), Self::Str(_)]
                    if u32::try_from(*position).is_ok() && path.iter().all(Self::is_part)
            ),
            _ => false,
        };
        match self {
            Self::None => true,
            Self::List(containers) => containers.iter().all(is_container),
            _ => false,
        }
    }

    /// Returns whether this can be a part of a path: a string key, a position in a list, or a tuple
    /// of one key of another type.
    fn is_part(&self) -> bool {
        match self {
            Self::Str(_) | Self::Int(_) => true,
            Self::Tuple(key) => matches!(key.as_slice(), [key] if key.is_other_key()),
            _ => false,
        }
    }

    /// Returns whether this can be a key that is not a string.
    fn is_other_key(&self) -> bool {
        match self {
            Self::None | Self::Bool(_) | Self::Int(_) => true,
            Self::Float(number) => number.is_finite(),
            Self::Tuple(items) => {
                items.iter().all(|item| matches!(item, Self::Str(_)) || item.is_other_key())
            }
            _ => false,
        }
    }

    /// Returns whether this can be a key of a dict: it contains no list and no dict.
    fn is_key(&self) -> bool {
        match self {
            Self::List(_) | Self::Dict(_) => false,
            Self::Tuple(items) => items.iter().all(Self::is_key),
            _ => true,
        }
    }

    /// Decodes a value that fills `bytes` exactly.
    ///
    /// # Errors
    /// The offset in `bytes` and the reason.
    pub fn decode(bytes: &[u8]) -> Result<Self, (usize, &'static str)> {
        let (value, rest) = Self::decode_prefix(bytes)?;
        if rest.is_empty() {
            Ok(value)
        } else {
            Err((bytes.len() - rest.len(), "bytes after the value"))
        }
    }

    /// Decodes a value at the start of `bytes`. Also returns the rest of the bytes.
    ///
    /// # Errors
    /// The offset in `bytes` and the reason.
    pub fn decode_prefix(bytes: &[u8]) -> Result<(Self, &[u8]), (usize, &'static str)> {
        let mut cursor = Cursor { bytes, at: 0 };
        let value = cursor.value(0).map_err(|reason| (cursor.at, reason))?;
        Ok((value, &bytes[cursor.at..]))
    }
}

fn encode_len(len: usize, out: &mut Vec<u8>) -> Result<(), &'static str> {
    let len = u32::try_from(len).map_err(|_| "planner data holds a value of over 4 GiB")?;
    out.extend(len.to_le_bytes());
    Ok(())
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], &'static str> {
        let end = self.at.checked_add(n).ok_or("length overflows")?;
        let taken = self.bytes.get(self.at..end).ok_or("value ends early")?;
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        Ok(self.take(N)?.try_into().expect("take returns N bytes"))
    }

    /// Reads a length or count, and compares it with the remaining bytes: no item takes less than a
    /// byte.
    fn len(&mut self) -> Result<usize, &'static str> {
        let len =
            usize::try_from(u32::from_le_bytes(self.array()?)).map_err(|_| "length overflows")?;
        if len > self.bytes.len() - self.at {
            return Err("length exceeds what is left");
        }
        Ok(len)
    }

    fn value(&mut self, depth: u32) -> Result<Value, &'static str> {
        if depth > MAX_DEPTH {
            return Err("nested more than 64 deep");
        }
        let [tag] = self.array()?;
        Ok(match tag {
            0 => Value::None,
            1 => Value::Bool(false),
            2 => Value::Bool(true),
            3 => Value::Int(i64::from_le_bytes(self.array()?)),
            4 => Value::Float(f64::from_le_bytes(self.array()?)),
            5 => {
                let len = self.len()?;
                let text =
                    std::str::from_utf8(self.take(len)?).map_err(|_| "string is not UTF-8")?;
                Value::Str(text.to_owned())
            }
            6 => {
                let len = self.len()?;
                Value::Bytes(self.take(len)?.to_vec())
            }
            7 => Value::Tuple(self.values(depth)?),
            8 => Value::List(self.values(depth)?),
            9 => {
                let len = self.len()?;
                let mut pairs = Vec::new();
                for _ in 0..len {
                    let key = self.value(depth + 1)?;
                    if !key.is_key() {
                        return Err("a list or a dict in a key of a dict");
                    }
                    pairs.push((key, self.value(depth + 1)?));
                }
                Value::Dict(pairs)
            }
            _ => return Err("unknown tag"),
        })
    }

    /// Reads items one by one, so that a false count does not reserve memory.
    fn values(&mut self, depth: u32) -> Result<Vec<Value>, &'static str> {
        let len = self.len()?;
        let mut values = Vec::new();
        for _ in 0..len {
            values.push(self.value(depth + 1)?);
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn leaves() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(Value::None),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            (-1e300..1e300).prop_map(Value::Float),
            ".*".prop_map(Value::Str),
            prop::collection::vec(any::<u8>(), 0..20).prop_map(Value::Bytes),
        ]
    }

    fn keys() -> impl Strategy<Value = Value> {
        leaves().prop_recursive(2, 6, 3, |inner| {
            prop::collection::vec(inner, 0..3).prop_map(Value::Tuple)
        })
    }

    fn values() -> impl Strategy<Value = Value> {
        leaves().prop_recursive(6, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Tuple),
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::List),
                prop::collection::vec((keys(), inner), 0..5).prop_map(Value::Dict),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes(value in values()) {
            let mut bytes = Vec::new();
            value.encode(&mut bytes).unwrap();
            prop_assert_eq!(Value::decode(&bytes), Ok(value));
            for cut in 0..bytes.len() {
                prop_assert!(Value::decode(&bytes[..cut]).is_err());
            }
        }

        #[test]
        fn any_bytes_are_safe_to_decode(bytes in prop::collection::vec(0_u8..12, 0..200)) {
            let _ = Value::decode(&bytes);
        }
    }

    #[test]
    fn a_key_holds_no_list_and_no_dict() {
        let dict = |key| Value::Dict(vec![(key, Value::None)]);
        let empty: [(Value, &[u8]); 3] = [
            (Value::List(vec![]), &[8, 0, 0, 0, 0]),
            (Value::Dict(vec![]), &[9, 0, 0, 0, 0]),
            (Value::Tuple(vec![Value::List(vec![])]), &[7, 1, 0, 0, 0, 8, 0, 0, 0, 0]),
        ];
        for (key, encoded) in empty {
            assert!(dict(key).encode(&mut Vec::new()).is_err());
            let bytes = [&[9, 1, 0, 0, 0][..], encoded, &[0]].concat();
            assert!(Value::decode(&bytes).is_err(), "{bytes:?}");
        }
        let mut bytes = Vec::new();
        let tuple = dict(Value::Tuple(vec![Value::Int(1), Value::Tuple(vec![])]));
        tuple.encode(&mut bytes).unwrap();
        assert_eq!(Value::decode(&bytes), Ok(tuple));
    }

    #[test]
    fn parts_of_paths_are_text_places_and_other_keys() {
        let path = |part| Value::Tuple(vec![Value::Str("a".into()), part]);
        let key = |key| Value::Tuple(vec![key]);
        for part in [
            Value::Str(String::new()),
            Value::Int(3),
            key(Value::Int(3)),
            key(Value::None),
            key(Value::Bool(true)),
            key(Value::Float(-0.5)),
            key(Value::Tuple(vec![])),
            key(Value::Tuple(vec![Value::Str("b".into()), Value::Tuple(vec![Value::Int(1)])])),
        ] {
            assert!(path(part.clone()).is_path(), "{part:?}");
        }
        for part in [
            Value::None,
            Value::Bool(true),
            Value::Float(1.0),
            Value::Tuple(vec![]),
            Value::Tuple(vec![Value::Int(1), Value::Int(2)]),
            key(Value::Str("a".into())),
            key(Value::Float(f64::NAN)),
            key(Value::Bytes(vec![1])),
            key(Value::Tuple(vec![Value::Float(f64::INFINITY)])),
        ] {
            assert!(!path(part.clone()).is_path(), "{part:?}");
        }
        assert!(!Value::Tuple(vec![]).is_path());
    }

    #[test]
    fn nesting_is_a_list_of_containers() {
        let container = |position, path, kind| Value::Tuple(vec![Value::Int(position), path, kind]);
        let (root, dict) = (Value::Tuple(vec![]), Value::Str("dict".into()));
        let good = container(0, root.clone(), dict.clone());
        assert!(Value::None.is_nesting() && Value::List(vec![]).is_nesting());
        assert!(
            Value::List(vec![
                good.clone(),
                container(7, Value::Tuple(vec![Value::Int(0)]), dict.clone())
            ])
            .is_nesting()
        );
        for bad in [
            container(-1, root.clone(), dict.clone()),
            container(1 << 32, root.clone(), dict.clone()),
            container(0, Value::List(vec![]), dict.clone()),
            container(0, Value::Tuple(vec![Value::None]), dict),
            container(0, root, Value::Int(1)),
            Value::Int(0),
        ] {
            assert!(!Value::List(vec![good.clone(), bad]).is_nesting());
        }
        assert!(!good.is_nesting() && !Value::Dict(vec![]).is_nesting());
    }

    #[test]
    fn depth_and_counts_are_bounded() {
        let mut deep = Value::None;
        for _ in 0..70 {
            deep = Value::List(vec![deep]);
        }
        assert!(deep.encode(&mut Vec::new()).is_err());
        let mut bytes = Vec::new();
        for _ in 0..70 {
            bytes.extend([8, 1, 0, 0, 0]);
        }
        bytes.push(0);
        assert!(Value::decode(&bytes).is_err());
        assert!(Value::decode(&[8, 255, 255, 255, 255, 0]).is_err());
    }
}
