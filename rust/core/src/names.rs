//! A map from names to numbers, for names that are stored elsewhere. A map that owned its keys
//! would have a copy of each.

use std::hash::{BuildHasher as _, RandomState};

use hashbrown::HashTable;

/// A map from names to numbers. `name_of` must always be the same: it returns the name of a number
/// that was added.
#[derive(Debug, Default)]
pub(crate) struct ByName {
    numbers: HashTable<u32>,
    hashes: RandomState,
}

impl ByName {
    /// Reserves memory for this many more names.
    pub(crate) fn reserve<'a>(&mut self, more: usize, name_of: impl Fn(u32) -> &'a str) {
        let Self { numbers, hashes } = self;
        numbers.reserve(more, |&number| hashes.hash_one(name_of(number)));
    }

    /// Returns the number of a name, if it was added.
    pub(crate) fn get<'a>(&self, name: &str, name_of: impl Fn(u32) -> &'a str) -> Option<u32> {
        let hash = self.hashes.hash_one(name);
        self.numbers.find(hash, |&number| name_of(number) == name).copied()
    }

    /// Returns the number of a name. A new name is added with the number `number`.
    pub(crate) fn get_or_add<'a>(
        &mut self,
        name: &str,
        number: u32,
        name_of: impl Fn(u32) -> &'a str,
    ) -> u32 {
        let Self { numbers, hashes } = self;
        let entry = numbers.entry(
            hashes.hash_one(name),
            |&number| name_of(number) == name,
            |&number| hashes.hash_one(name_of(number)),
        );
        *entry.or_insert(number).get()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_have_the_numbers_that_they_had_first(
            names in prop::collection::vec("[a-c]{0,3}", 0..200),
            room in 0..50_usize,
        ) {
            let mut expected: HashMap<&str, u32> = HashMap::new();
            let mut found = ByName::default();
            let name_of = |number: u32| names[number as usize].as_str();
            found.reserve(room, name_of);
            for (number, name) in (0..).zip(&names) {
                prop_assert_eq!(found.get(name, name_of), expected.get(name.as_str()).copied());
                let first = *expected.entry(name).or_insert(number);
                prop_assert_eq!(found.get_or_add(name, number, name_of), first);
                prop_assert_eq!(found.get(name, name_of), Some(first));
            }
        }
    }
}
