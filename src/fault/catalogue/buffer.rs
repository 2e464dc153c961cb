//! Buffers and the device: what is stale, half there, or not run at all.

use super::{Entry, Gate, Injection, Kind, Lens, entry, everywhere};
use crate::fault::launch::Tamper;
use crate::fault::{Stages, hooks, kernels};

const fn site(
    id: &'static str,
    kind: Kind,
    texts: [&'static str; 3],
    kernels: &'static [&'static str],
    sites: &'static [&'static str],
    tamper: Tamper,
) -> Entry {
    let injection = Injection::Launch { kernels, sites, stages: Stages::Both, tamper };
    entry(id, kind, texts, &[Gate::Added, Gate::Noise, Gate::Kl], Lens::Layer, injection)
}

/// Reported by the device, and so refused.
const fn refused(id: &'static str, texts: [&'static str; 3], word: &'static str, tamper: Tamper) -> Entry {
    let injection = Injection::Launch { kernels: &["silu_mul"], sites: &["silu_mul"], stages: Stages::Both, tamper };
    entry(id, Kind::Device, texts, &[Gate::Refused], Lens::Message(word), injection)
}

const PRODUCTS: &[&str] = &["gemm_bf16", "gemv"];

pub(super) static ENTRIES: &[Entry] = &[
    site(
        "read_before_written",
        Kind::Buffer,
        [
            "the residual add reads o_proj's output of the layer before",
            "two launches in the wrong order, or no barrier between them",
            "order the launches by what they read",
        ],
        &["gemm_bf16", "gemv", "add"],
        &["o_proj", "attention_add"],
        kernels::read_before_written,
    ),
    site(
        "half_written",
        Kind::Buffer,
        [
            "the second half of an output stays as it was",
            "a DMA of half the length",
            "check the length of every transfer",
        ],
        PRODUCTS,
        &["up_proj"],
        kernels::half_written,
    ),
    site(
        "buffers_aliased",
        Kind::Buffer,
        [
            "gate and up share one buffer",
            "two intermediates under one key",
            "one buffer for each value that lives at the same time",
        ],
        &["silu_mul"],
        &["silu_mul"],
        kernels::gate_overwritten,
    ),
    Entry {
        catches: &[Gate::Phase1],
        lens: Lens::Kernel("silu_mul"),
        injection: Injection::Launch {
            kernels: &["silu_mul"],
            sites: &[],
            stages: Stages::Both,
            tamper: kernels::right_once,
        },
        ..everywhere(site(
            "right_once",
            Kind::Buffer,
            [
                "the first run is right, every later one leaves the first one's output",
                "an input marked static is not written again",
                "mark as static only what never changes; run everything three times",
            ],
            &[],
            &[],
            kernels::right_once,
        ))
    },
    Entry {
        strengths: &[0.5],
        catches: &[Gate::Phase1, Gate::Added, Gate::Noise],
        lens: Lens::Kernel("gem"),
        injection: Injection::Launch {
            kernels: PRODUCTS,
            sites: &[],
            stages: Stages::Both,
            tamper: kernels::rare_bit_flips,
        },
        ..everywhere(site(
            "rare_bit_flips",
            Kind::Buffer,
            [
                "one bit of one element is wrong in some of the runs",
                "a race between launches, or marginal hardware",
                "repeat runs and compare bits",
            ],
            &[],
            &[],
            kernels::rare_bit_flips,
        ))
    },
    entry(
        "context_not_synced",
        Kind::Buffer,
        [
            "decode works on the attention context of the step before",
            "a host write without a sync to the device",
            "sync an input after writing it",
        ],
        &[Gate::Decode, Gate::Kl],
        Lens::Step(|_| 0),
        Injection::Hook(hooks::context_not_synced),
    ),
    Entry {
        catches: &[Gate::Refused],
        lens: Lens::Message("write of bytes"),
        ..site(
            "overrun",
            Kind::Buffer,
            [
                "a kernel writes beyond its output",
                "one tile too many, or a buffer of another shape",
                "size buffers by the kernel's padded shape",
            ],
            PRODUCTS,
            &["gate_proj"],
            kernels::overruns,
        )
    },
    site(
        "nan_output",
        Kind::Buffer,
        [
            "one element of an output is NaN",
            "a buffer read before anything was written to it",
            "poison buffers and look for survivors",
        ],
        PRODUCTS,
        &["v_proj"],
        kernels::nan_in_output,
    ),
    site(
        "dispatch_skipped",
        Kind::Device,
        [
            "a dispatch is reported as complete and did not run",
            "a queue that dropped a command",
            "check the completion state; poison outputs",
        ],
        PRODUCTS,
        &["down_proj"],
        kernels::skipped,
    ),
    site(
        "zeros_as_success",
        Kind::Device,
        [
            "a dispatch leaves zeros and reports success",
            "a herd outside of a segment was dropped while lowering",
            "wrap it; look for it in the IR",
        ],
        PRODUCTS,
        &["o_proj"],
        kernels::zeros,
    ),
    site(
        "timeout_as_success",
        Kind::Device,
        [
            "a dispatch that timed out passes for complete, its output partly written",
            "the wait's return value is dropped",
            "treat anything but completed as an error",
        ],
        PRODUCTS,
        &["gate_proj"],
        kernels::timed_out_as_success,
    ),
    site(
        "kernel_of_another_shape",
        Kind::Device,
        [
            "a kernel compiled for half the rows",
            "an object file of another shape was found in the build folder",
            "put the shape into the object's name",
        ],
        PRODUCTS,
        &["down_proj"],
        kernels::half_the_rows,
    ),
    refused(
        "timeout",
        ["a dispatch times out, and says so", "a dead-lock in the kernel", "reset the context; lower the tile count"],
        "timeout",
        kernels::timed_out,
    ),
    refused(
        "error_state",
        ["the device is in an error state, and says so", "an earlier fault of the context", "reset the context"],
        "error state",
        kernels::error_state,
    ),
];
