//! How prefill's attention is cut into tasks, and which positions a row sees: the same for every datapath.

/// The positions that the rows of a task see: always from the first on.
#[derive(Clone, Copy)]
pub(in crate::compute) struct Sight {
    /// Row r sees the positions below `seen + r * step`.
    pub(in crate::compute) seen: usize,
    pub(in crate::compute) step: usize,
}

impl Sight {
    #[inline(always)]
    pub(in crate::compute) fn of(self, row: usize) -> usize {
        self.seen + row * self.step
    }

    /// The first row at or after `row` that sees position `position`; `end` if none before `end` does.
    #[inline(always)]
    pub(in crate::compute) fn first_to_see(self, position: usize, row: usize, end: usize) -> usize {
        match self.step {
            0 if self.seen > position => row,
            0 => end,
            _ => (position + 1).saturating_sub(self.seen).clamp(row, end),
        }
    }
}

/// The `rows` tokens from `first` on of a sequence of `seq`, cut into blocks of `block`, each once per kv head.
pub(in crate::compute) struct Split {
    pub(in crate::compute) rows: usize,
    pub(in crate::compute) first: usize,
    pub(in crate::compute) seq: usize,
    pub(in crate::compute) block: usize,
    pub(in crate::compute) heads: usize,
    pub(in crate::compute) kv_heads: usize,
    pub(in crate::compute) head_dim: usize,
    pub(in crate::compute) causal: bool,
}

/// One task: some tokens, with all heads of a group.
pub(in crate::compute) struct Piece {
    /// Tokens.
    pub(in crate::compute) rows: usize,
    /// Element of `q` and `out` at which the first head of the first token starts.
    pub(in crate::compute) q: usize,
    /// The group's kv head.
    pub(in crate::compute) kv_head: usize,
    pub(in crate::compute) sight: Sight,
}

impl Split {
    /// Task `index`, if there are so many. The last tokens see the most: their tasks go first, so that the workers end
    /// together.
    #[inline(always)]
    pub(in crate::compute) fn piece(&self, index: usize) -> Option<Piece> {
        let Split { rows, first: start, seq, block, heads, kv_heads, head_dim, causal } = *self;
        let blocks = rows.div_ceil(block);
        if index >= blocks * kv_heads {
            return None;
        }
        let (first, kv_head) = ((blocks - 1 - index / kv_heads) * block, index % kv_heads);
        Some(Piece {
            rows: block.min(rows - first),
            q: first * heads * head_dim + kv_head * (heads / kv_heads) * head_dim,
            kv_head,
            // Causal or not, no row sees more positions than there are.
            sight: if causal { Sight { seen: start + first + 1, step: 1 } } else { Sight { seen: seq, step: 0 } },
        })
    }
}
