//! The draft that a drafter proposes with: lent to it, or kept by all who use it, so that a server may
//! take another one while requests run.

use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;

use longdraft_models::draft::Draft;

use super::ReducedHead;

/// A draft of any kind.
#[derive(Clone)]
pub enum AnyDraft<'a> {
    /// Of somebody who outlives the drafter.
    Lent(&'a dyn Draft),
    /// Of everybody who has it.
    Shared(Arc<dyn Draft>),
}

impl<'a> From<&'a dyn Draft> for AnyDraft<'a> {
    fn from(draft: &'a dyn Draft) -> Self {
        Self::Lent(draft)
    }
}

impl From<Arc<dyn Draft>> for AnyDraft<'_> {
    fn from(draft: Arc<dyn Draft>) -> Self {
        Self::Shared(draft)
    }
}

impl<'a> AnyDraft<'a> {
    /// This draft as one of a method, if it is.
    pub fn of_kind<D: Draft>(&self) -> Option<Held<'a, D>> {
        match self {
            Self::Lent(draft) => draft.of_kind().map(Held::Lent),
            Self::Shared(draft) => {
                let any: Arc<dyn Any + Send + Sync> = Arc::<dyn Draft>::clone(draft);
                any.downcast().ok().map(Held::Shared)
            }
        }
    }

    /// Name of its method.
    pub fn method(&self) -> &'static str {
        match self {
            Self::Lent(draft) => draft.method(),
            Self::Shared(draft) => draft.method(),
        }
    }
}

/// A draft with the head that it proposes through, where that has fewer tokens than the target's.
#[derive(Clone)]
pub struct Proposer {
    /// The draft.
    pub draft: Arc<dyn Draft>,
    /// Its head.
    pub head: Option<Arc<ReducedHead>>,
}

/// A draft of one kind.
pub enum Held<'a, D> {
    /// Of somebody who outlives the drafter.
    Lent(&'a D),
    /// Of everybody who has it.
    Shared(Arc<D>),
}

impl<D> Deref for Held<'_, D> {
    type Target = D;

    fn deref(&self) -> &D {
        match self {
            Self::Lent(draft) => draft,
            Self::Shared(draft) => draft,
        }
    }
}

impl<'a, D> From<&'a D> for Held<'a, D> {
    fn from(draft: &'a D) -> Self {
        Self::Lent(draft)
    }
}
