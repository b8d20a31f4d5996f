//! Which row goes on from which, and in which order rows are stepped.

/// Where a row takes the state from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    /// What was there before the first row.
    Start,
    /// The row that was stepped right before it.
    Last,
    /// The copy that was put aside last; it stays there.
    Copied,
    /// The same, which nobody else needs.
    Taken,
}

/// A row's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) row: usize,
    pub(super) from: From,
    /// Whether the state after it is put aside for further children.
    pub(super) branches: bool,
}

/// The rows of a call in the order of their steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walk {
    parents: Vec<Option<usize>>,
    pub(super) steps: Vec<Step>,
    is_chain: bool,
}

impl Walk {
    /// Rows that follow one another.
    pub fn chain(rows: usize) -> Self {
        let parents = (0..rows).map(|row| row.checked_sub(1)).collect();
        let step = |row| Step {
            row,
            from: if row == 0 { From::Start } else { From::Last },
            branches: false,
        };
        Self { parents, steps: (0..rows).map(step).collect(), is_chain: true }
    }

    /// Documents laid end to end, runs of equal ids: each begins anew.
    pub fn documents(ids: &[i32]) -> Self {
        let parent = |row: usize| row.checked_sub(1).filter(|before| ids[*before] == ids[row]);
        let parents: Vec<Option<usize>> = (0..ids.len()).map(parent).collect();
        let step = |(row, parent): (usize, &Option<usize>)| {
            let from = if parent.is_some() { From::Last } else { From::Start };
            Step { row, from, branches: false }
        };
        let steps = parents.iter().enumerate().map(step).collect();
        let is_chain = parents.iter().filter(|parent| parent.is_none()).count() == 1;
        Self { parents, steps, is_chain }
    }

    /// Nodes of a tree, each after its parent; those without one go on from the start.
    pub fn tree(parents: &[Option<usize>]) -> Self {
        if parents.iter().enumerate().all(|(row, parent)| *parent == row.checked_sub(1)) {
            return Self::chain(parents.len());
        }
        let mut children = vec![Vec::new(); parents.len()];
        for (row, parent) in parents.iter().enumerate() {
            if let Some(children) = parent.and_then(|parent| children.get_mut(parent)) {
                children.push(row);
            }
        }
        let mut steps = Vec::with_capacity(parents.len());
        let roots = (0..parents.len()).filter(|row| parents[*row].is_none());
        let mut waiting: Vec<(usize, From)> = roots.map(|row| (row, From::Start)).collect();
        waiting.reverse();
        while let Some((row, from)) = waiting.pop() {
            let branches = children[row].len() > 1;
            steps.push(Step { row, from, branches });
            // The first child goes on at once, the last one takes the copy that the others read.
            for (place, child) in children[row].iter().enumerate().rev() {
                let from = match place {
                    0 => From::Last,
                    _ if place + 1 == children[row].len() => From::Taken,
                    _ => From::Copied,
                };
                waiting.push((*child, from));
            }
        }
        Self { parents: parents.to_vec(), steps, is_chain: false }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.parents.len()
    }

    /// Whether the state after the walk is that after its last row, which all others lead to.
    pub fn is_chain(&self) -> bool {
        self.is_chain
    }

    /// Whether rows are a root and its descendants, each the one after its parent.
    pub fn is_path(&self, rows: &[usize]) -> bool {
        let goes_on = |(place, row): (usize, &usize)| {
            let parent = place.checked_sub(1).map(|before| rows[before]);
            self.parents.get(*row).is_some_and(|own| *own == parent)
        };
        rows.iter().enumerate().all(goes_on)
    }

    /// The row that a row goes on from.
    pub(super) fn parent(&self, row: usize) -> Option<usize> {
        self.parents[row]
    }
}
