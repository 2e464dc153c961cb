#!/usr/bin/env bash
# The NPU path under the real XRT: level 1 without a device, level 2 on the virtual NPU, whose ELFs are made first.
# usage: test-vnpu.sh XRT [arguments of cargo test]
#
# Only the test programs are run with the virtual NPU preloaded; they were linked to find XRT and its C library by
# themselves. Which models: PHASEGATE_MODELS, by default those that the README promises.
set -euo pipefail

xrt=$(realpath "${1:?usage: test-vnpu.sh XRT}")
shift
[ -e "$xrt/.complete" ] || { echo "test-vnpu.sh: no XRT in $xrt: make xrt" >&2; exit 1; }
cargo=${CARGO:-cargo}
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
elves=$xrt/../vnpu/elves

# By itself: together with the tests it would be linked against XRT.
"$cargo" build --release --quiet --package phasegate-vnpu
"$target/release/vnpu-elves" "$xrt" "$elves"

models=tiny_llama
[ ! -d models/smollm2_135m ] || models+=,smollm2_135m
export PHASEGATE_MODELS=${PHASEGATE_MODELS:-$models}
# A model that is asked for and not there is a failure, and so is an ELF that is not sealed.
export PHASEGATE_KERNELS=$elves PHASEGATE_REQUIRE=vnpu,sealed,$PHASEGATE_MODELS PHASEGATE_DEVICES=vnpu
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="env LD_PRELOAD=$target/release/libphasegate_vnpu.so"
export INSTA_UPDATE=no
exec "$cargo" test --features vnpu --test vnpu --test phase1 --test phase2 --test phase3 "$@"
