//! What people see, and which fault of the catalogue it is: every row of the bring-up guides' failure tables.
//!
//! A row that no fault can stand for says why. The words are ours.

/// One row of a failure table.
#[derive(Debug, Clone, Copy)]
pub struct Symptom {
    /// The table, and the row within it.
    pub table: Table,
    pub row: &'static str,
    pub symptom: &'static str,
    pub cause: &'static str,
    pub answer: Answer,
}

/// The tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// A phase's own, or the whole deployment's.
    Deploy,
    Phase0,
    Phase1,
    Phase2,
    Phase3,
    Phase4,
    Phase5,
    Phase6,
    /// Stale and shared buffers.
    Buffers,
    /// The attention kernel.
    Attention,
    /// Several launches in one binary.
    Merging,
}

impl Table {
    /// Each table and how many rows it has in the guides.
    ///
    /// Source: the phase guides and debug skills of mlir-air's LLM examples (e972f2942).
    pub const ALL: [(Table, usize); 11] = [
        (Table::Deploy, 6),
        (Table::Phase0, 5),
        (Table::Phase1, 7),
        (Table::Phase2, 6),
        (Table::Phase3, 6),
        (Table::Phase4, 5),
        (Table::Phase5, 4),
        (Table::Phase6, 5),
        (Table::Buffers, 11),
        (Table::Attention, 8),
        (Table::Merging, 11),
    ];
}

/// What stands for a row.
#[derive(Debug, Clone, Copy)]
pub enum Answer {
    /// Entries of the catalogue, the likeliest first.
    Faults(&'static [&'static str]),
    /// Why none does.
    None(&'static str),
}

use Answer::{Faults, None};

const fn row(table: Table, row: &'static str, symptom: &'static str, cause: &'static str, answer: Answer) -> Symptom {
    Symptom { table, row, symptom, cause, answer }
}

const COMPILE: &str =
    "the kernel does not compile or link: there is no run to judge; placement rules name the limit beforehand";
const SPEED: &str = "a matter of speed: phases 4 and 5 measure it, no number of the model is wrong";

/// Every row.
pub static SYMPTOMS: &[Symptom] = &[
    row(
        Table::Deploy,
        "1",
        "the architecture is rejected",
        "out of scope",
        None("phase 0 refuses it by name; nothing runs"),
    ),
    row(Table::Deploy, "2", "the reference is missing", "never captured", Faults(&["capture_of_another_checkpoint"])),
    row(Table::Deploy, "3", "a phase's gate fails", "any fault", None("the phase's own table has the causes")),
    row(
        Table::Deploy,
        "4",
        "phase 7 fails",
        "the gates or the numbers cannot be trusted",
        Faults(&["no_steps", "null_previous_prompt"]),
    ),
    row(
        Table::Deploy,
        "5",
        "a sibling model regresses",
        "a change of what models share",
        None("every fixture is gated in every run"),
    ),
    row(
        Table::Deploy,
        "6",
        "somebody asks to skip a phase",
        "haste",
        None("no fault of a run; a verdict without its extent is VACUOUS"),
    ),
    row(
        Table::Phase0,
        "1",
        "HF does not load the model",
        "a missing package or a gated repository",
        None("no run: the checkpoint is reported as not available"),
    ),
    row(
        Table::Phase0,
        "2",
        "a tensor's name or shape is not found",
        "a wrong name map, head_dim or kv_heads",
        Faults(&["head_dim_derived", "kv_heads_halved"]),
    ),
    row(
        Table::Phase0,
        "3",
        "the config differs from HF's",
        "a wrong default",
        Faults(&["eps_of_another_family", "rope_theta_default", "tied_head"]),
    ),
    row(
        Table::Phase0,
        "4",
        "NaN among the logits",
        "a damaged download, or the path of a dtype",
        Faults(&["nan_in_weight", "corrupted_file", "reference_nan"]),
    ),
    row(
        Table::Phase0,
        "5",
        "the first choice is nonsense",
        "chat template or BOS",
        Faults(&["template_missing", "bos_doubled", "ids_of_another_tokenizer"]),
    ),
    row(Table::Phase1, "1", "a repeat count beyond 255", "repeats of a GEMV's outer loop", None(COMPILE)),
    row(Table::Phase1, "2", "buffer descriptors run out", "a width no tile divides", None(COMPILE)),
    row(Table::Phase1, "3", "L2 is too small", "a GEMV's panel", None(COMPILE)),
    row(
        Table::Phase1,
        "4",
        "zeros or NaN",
        "a herd outside of a launch and segment",
        Faults(&["zeros_as_success", "nan_output"]),
    ),
    row(
        Table::Phase1,
        "5",
        "cosine about 0",
        "N no multiple of the tiles",
        Faults(&["gemm_last_block_dropped", "kernel_of_another_shape"]),
    ),
    row(
        Table::Phase1,
        "6",
        "attention gives NaN",
        "built for other sizes",
        Faults(&["nan_output", "kernel_of_another_shape"]),
    ),
    row(Table::Phase1, "7", "compiling takes more than ten minutes", "too many launches in one binary", None(COMPILE)),
    row(
        Table::Phase2,
        "1",
        "the metric falls at q, k or v",
        "layout, or weights not contiguous",
        Faults(&["q_and_k_exchanged", "rows_zero", "row_flipped"]),
    ),
    row(
        Table::Phase2,
        "2",
        "the metric falls at attention",
        "mask or flags",
        Faults(&["attention_not_causal", "mask_hides_self", "mask_sees_next", "scale_missing"]),
    ),
    row(
        Table::Phase2,
        "3",
        "the metric falls at down",
        "the GEMM's low-precision tier",
        Faults(&["down_sums_in_bf16", "gemm_sums_in_bf16"]),
    ),
    row(Table::Phase2, "4", "NaN", "a stale or never written buffer", Faults(&["nan_output", "read_before_written"])),
    row(
        Table::Phase2,
        "5",
        "the metric falls at a residual",
        "bias, or heads moved by padding",
        Faults(&["residual_dropped", "bias_behind_rope", "residual_twice"]),
    ),
    row(
        Table::Phase2,
        "6",
        "the whole is fine, some rows are not",
        "an edge of the mask",
        Faults(&["keys_beyond_block_dropped", "padding_attended"]),
    ),
    row(
        Table::Phase3,
        "1",
        "a cliff at one layer",
        "that layer's weights or buffer key",
        Faults(&["attention_key_collides", "mlp_key_collides", "layers_swapped"]),
    ),
    row(
        Table::Phase3,
        "2",
        "a slow drift below 0.85",
        "precision of sums",
        Faults(&["gemm_sums_in_bf16", "tensor_truncated"]),
    ),
    row(
        Table::Phase3,
        "3",
        "layers are fine, the choice is not",
        "precision of the head",
        Faults(&["head_low_precision", "head_partition_duplicated", "final_norm_ones"]),
    ),
    row(
        Table::Phase3,
        "4",
        "the choice is outside of HF's five",
        "a real bug",
        Faults(&["layers_shifted", "rope_interleaved", "heads_by_modulo"]),
    ),
    row(
        Table::Phase3,
        "5",
        "prefill is right, generation is not",
        "the KV update",
        Faults(&["kv_row_missing", "kv_row_late", "rope_late_in_decode"]),
    ),
    row(Table::Phase3, "6", "NaN", "a damaged buffer", Faults(&["nan_output", "overrun"])),
    row(Table::Phase4, "1", "merging does not compile", "see the merging table", None(COMPILE)),
    row(Table::Phase4, "2", "right, then wrong", "buffers", Faults(&["right_once"])),
    row(
        Table::Phase4,
        "3",
        "attention hangs or gives NaN",
        "see the attention table",
        Faults(&["timeout", "nan_output"]),
    ),
    row(
        Table::Phase4,
        "4",
        "a metric falls after an optimisation",
        "whatever it changed",
        Faults(&["read_before_written", "buffers_aliased"]),
    ),
    row(Table::Phase4, "5", "no gain after merging", "the old path is still called", None(SPEED)),
    row(Table::Phase5, "1", "a symbol is defined twice", "one object per K", None(COMPILE)),
    row(Table::Phase5, "2", "a repeat count beyond 255", "K too long for one loop", None(COMPILE)),
    row(Table::Phase5, "3", "L2 is too small", "tile_m", None(COMPILE)),
    row(Table::Phase5, "4", "no gain from merging", "static weights are written each time", None(SPEED)),
    row(
        Table::Phase6,
        "1",
        "fails at the second token or later",
        "the KV cache",
        Faults(&["kv_row_missing", "kv_heads_exchanged", "decode_hides_self"]),
    ),
    row(
        Table::Phase6,
        "2",
        "fails at the first token",
        "prefill or head",
        Faults(&["head_partition_duplicated", "padding_counted", "last_token_dropped"]),
    ),
    row(
        Table::Phase6,
        "3",
        "an import fails",
        "the adapter is another model's",
        Faults(&["capture_of_another_checkpoint"]),
    ),
    row(Table::Phase6, "4", "slower than phases 4 and 5", "overhead in the main path", None(SPEED)),
    row(Table::Phase6, "5", "a large setup in the profile", "the wrong region is timed", None(SPEED)),
    row(
        Table::Buffers,
        "H1",
        "the first call is right, later ones repeat another's values",
        "weights not static, or the wrong ones",
        Faults(&["right_once", "attention_key_collides"]),
    ),
    row(
        Table::Buffers,
        "H2",
        "stale output, NaN at first",
        "an output not marked intermediate",
        Faults(&["half_written", "read_before_written"]),
    ),
    row(
        Table::Buffers,
        "H3",
        "one layer is right, a chain of them is not",
        "one buffer set for several layers",
        Faults(&["attention_key_collides", "mlp_key_collides", "kv_layer_shared"]),
    ),
    row(Table::Buffers, "H4", "zeros, and success", "a herd outside of a segment", Faults(&["zeros_as_success"])),
    row(
        Table::Buffers,
        "X1",
        "wrong at the first call already",
        "the kernel",
        Faults(&["norm_unweighted", "gelu_for_silu", "silu_on_up"]),
    ),
    row(
        Table::Buffers,
        "X2",
        "wrong at some position or layer only",
        "layout of the KV cache",
        Faults(&["kv_heads_exchanged", "kv_wraps", "kv_head_missing"]),
    ),
    row(
        Table::Buffers,
        "X3",
        "a later result changes an earlier array",
        "a view of a reused buffer",
        Faults(&["null_previous_prompt"]),
    ),
    row(
        Table::Buffers,
        "X4",
        "every layer is like the first",
        "a static argument in a shared pool",
        Faults(&["layers_shifted", "attention_key_collides"]),
    ),
    row(Table::Buffers, "X5", "two binaries damage each other", "one key for both", Faults(&["buffers_aliased"])),
    row(
        Table::Buffers,
        "X6",
        "six seconds, and a partial output",
        "a time-out nobody looked at",
        Faults(&["timeout_as_success"]),
    ),
    row(
        Table::Buffers,
        "X7",
        "right at the first call, time-out at the second",
        "a launch geometry that works once",
        Faults(&["timeout"]),
    ),
    row(
        Table::Attention,
        "F1",
        "hangs when head_dim is split",
        "a bug of the position-first variant",
        Faults(&["timeout"]),
    ),
    row(Table::Attention, "F2", "NaN", "built with sizes per launch and not per tile", Faults(&["nan_output"])),
    row(
        Table::Attention,
        "F3",
        "large constant garbage",
        "the same",
        Faults(&["null_constant", "kernel_of_another_shape"]),
    ),
    row(Table::Attention, "F4", "hangs at one large shape", "L1 overflows", Faults(&["timeout"])),
    row(
        Table::Attention,
        "F5",
        "plausible, correlation 0.1",
        "another attention pattern",
        Faults(&["attention_not_causal", "heads_by_modulo", "decode_window"]),
    ),
    row(Table::Attention, "F6", "imprecise when timed", "iterations reuse state", Faults(&["right_once"])),
    row(Table::Attention, "F7", "now and then a hang or NaN", "open", Faults(&["rare_bit_flips", "timeout"])),
    row(
        Table::Attention,
        "F8",
        "a lot of rounding noise",
        "the default rounding toward minus infinity",
        None("it is the npu2 datapath itself: judged by a limit of its own"),
    ),
    row(Table::Merging, "M1", "buffer descriptors run out", "an unaligned width", None(COMPILE)),
    row(Table::Merging, "M2", "no route, no channel", "names used twice, too many streams", None(COMPILE)),
    row(Table::Merging, "M3", "herds of other shapes", "they cannot be reconciled", None(COMPILE)),
    row(Table::Merging, "M4", "a load is undefined", "a bare herd", None(COMPILE)),
    row(Table::Merging, "M5", "a stride must be 1", "the inner stride of bf16", None(COMPILE)),
    row(Table::Merging, "M6", "compiling takes more than five minutes", "size", None(COMPILE)),
    row(
        Table::Merging,
        "M7",
        "NaN everywhere after merging down at an unaligned width",
        "the order of the launches",
        Faults(&["nan_output", "read_before_written"]),
    ),
    row(
        Table::Merging,
        "M8",
        "a link error, or another variant in silence",
        "two objects with one symbol",
        Faults(&["kernel_of_another_shape", "gelu_for_silu"]),
    ),
    row(Table::Merging, "M9", "a repeat count beyond 255", "a GEMV's repeats", None(COMPILE)),
    row(Table::Merging, "M10", "dead-lock after more loop tiling", "too many tasks in flight", Faults(&["timeout"])),
    row(Table::Merging, "M11", "dead-lock with two streams into a tile", "a DMA channel's fault", Faults(&["timeout"])),
];
