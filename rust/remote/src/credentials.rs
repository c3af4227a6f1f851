//! Providers of credentials that live as long as the process. A role is asked for its credentials
//! once, and again when they expire, but not in every call.

use std::collections::HashMap;
use std::sync::Mutex;

use object_store::aws::AwsCredentialProvider;
use object_store::azure::AzureCredentialProvider;
use object_store::gcp::GcpCredentialProvider;

/// Limit on the providers, since a process may use new keys every hour.
const MOST: usize = 64;

pub static AWS: Kept<AwsCredentialProvider> = Kept(Mutex::new(None));
pub static GOOGLE: Kept<GcpCredentialProvider> = Kept(Mutex::new(None));
pub static AZURE: Kept<AzureCredentialProvider> = Kept(Mutex::new(None));

/// The providers of one kind of store, by the fingerprint of a configuration.
pub struct Kept<P>(Mutex<Option<Of<P>>>);

struct Of<P> {
    process: u32,
    providers: HashMap<u64, P>,
}

impl<P: Clone> Kept<P> {
    /// Returns the provider of this configuration. Making one sends no request.
    pub fn get<E>(&self, fingerprint: u64, make: impl FnOnce() -> Result<P, E>) -> Result<P, E> {
        if let Some(Some(provider)) = self.with(|kept| kept.get(&fingerprint).cloned()) {
            return Ok(provider);
        }
        let made = make()?;
        let kept = self.with(|kept| {
            if kept.len() >= MOST {
                kept.clear();
            }
            kept.entry(fingerprint).or_insert_with(|| made.clone()).clone()
        });
        Ok(kept.unwrap_or(made))
    }

    /// Makes the next call ask for new credentials, because those of this configuration were
    /// refused.
    pub fn forget(&self, fingerprint: u64) {
        self.with(|kept| kept.remove(&fingerprint));
    }

    /// Returns `None` instead of waiting, if another thread uses the providers, or did so when this
    /// process was forked.
    fn with<T>(&self, work: impl FnOnce(&mut HashMap<u64, P>) -> T) -> Option<T> {
        let mut kept = self.0.try_lock().ok()?;
        let process = std::process::id();
        if kept.as_ref().is_some_and(|of| of.process != process) {
            // Threads of the parent process may hold its locks.
            std::mem::forget(kept.take());
        }
        let new = || Of { process, providers: HashMap::new() };
        Some(work(&mut kept.get_or_insert_with(new).providers))
    }
}

/// Makes the next call ask for new credentials, for any kind of store.
pub fn forget(fingerprint: u64) {
    AWS.forget(fingerprint);
    GOOGLE.forget(fingerprint);
    AZURE.forget(fingerprint);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_made_for_a_configuration_and_another_after_a_fork() {
        let kept = Kept(Mutex::new(None));
        let get = |fingerprint, made| kept.get(fingerprint, || Ok::<_, ()>(made)).unwrap();
        assert_eq!((get(1, 'a'), get(1, 'b'), get(2, 'c')), ('a', 'a', 'c'));
        kept.forget(1);
        assert_eq!(get(1, 'd'), 'd');
        // The state in a fork.
        kept.0.lock().unwrap().as_mut().unwrap().process = 0;
        assert_eq!(get(1, 'e'), 'e');
        let held = kept.0.lock().unwrap();
        assert_eq!(get(1, 'f'), 'f');
        drop(held);
        (0..1000).for_each(|n| assert_eq!(get(100 + n, 'g'), 'g'));
        assert!(kept.0.lock().unwrap().as_ref().unwrap().providers.len() <= MOST);
    }
}
