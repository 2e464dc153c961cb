# Thin calls of the binary and of cargo; `make help` lists them.

# The fixture, checkpoint folder or Hugging Face id.
MODEL ?= tiny_llama
# Which checkpoint of a manifest that has several: instruct or base. Empty: the model's default.
VARIANT ?=
# Prompt set: base, instruct, chat, long or all. Empty: the variant's own.
PROMPTS ?=
# The text that `make run` continues.
PROMPT ?= The capital of France is
# Tokens to generate. Empty: 100 for run, 20 for profile.
N_TOKENS ?=
# emu, vnpu or npu. Empty: emu.
DEVICE ?=
# The interpreter for `make fixtures`; its packages are named in fixtures/hf/capture.py.
PYTHON ?= python3
CARGO ?= cargo

# How the binary is called; `make verify PHASEGATE=path/to/phasegate` builds nothing.
PHASEGATE = $(CARGO) run --release --quiet --
DEVICE_OPTION = $(if $(DEVICE),--device $(DEVICE))
VARIANT_OPTION = $(if $(VARIANT),--variant $(VARIANT))
COMMON = $(DEVICE_OPTION) $(VARIANT_OPTION)
SETS = $(COMMON) $(if $(PROMPTS),--prompts $(PROMPTS))

# Passed through the environment, so that no shell reads what a prompt holds.
export PROMPT

.DEFAULT_GOAL := help
.PHONY: help compile run chat verify verify-full diagnosis profile inspect model fixtures test check review bench bench-scale bench-peers clean xrt test-vnpu

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "variables: MODEL VARIANT PROMPTS PROMPT N_TOKENS DEVICE"

compile: ## build the release binary
	$(CARGO) build --release

run: ## generate from PROMPT
	@$(PHASEGATE) run $(MODEL) $(COMMON) --prompt "$$PROMPT" --n-tokens $(or $(N_TOKENS),100)

chat: ## talk with MODEL; with CHAT_PROMPT, say that and end
	@$(PHASEGATE) chat $(MODEL) $(COMMON) $(if $(CHAT_PROMPT),--prompt "$$CHAT_PROMPT")

verify: ## compare the first 2 prompts with HF, token by token
	@$(PHASEGATE) verify $(MODEL) $(SETS) --max-prompts 2

verify-full: ## the same for the whole prompt set
	@$(PHASEGATE) verify-full $(MODEL) $(SETS)

diagnosis: ## compare one prompt with HF, layer by layer
	@$(PHASEGATE) diagnosis $(MODEL) $(COMMON)

profile: ## time setup, prefill and decode, down to every call site
	@$(PHASEGATE) profile $(MODEL) $(COMMON) --n-tokens $(or $(N_TOKENS),20)

inspect: ## show config and tensors
	@$(PHASEGATE) inspect $(MODEL) $(VARIANT_OPTION)

model: ## fetch and convert smollm2_135m into models/
	@$(PHASEGATE) fetch smollm2_135m

fixtures: ## capture the HF references anew (needs PYTHON with torch and transformers)
	@set -e; for manifest in fixtures/*/manifest.toml; do \
		folder=$${manifest%/*}; name=$${folder##*/}; checkpoint=$$folder/checkpoint; \
		[ -d $$checkpoint ] || checkpoint=models/$$name; \
		if [ ! -d $$checkpoint ]; then echo "not captured: $$name: $$checkpoint is not there; make model"; continue; fi; \
		$(PYTHON) fixtures/hf/capture.py $$checkpoint $$folder --name $$name; \
	done

test: ## every test
	$(CARGO) test --workspace

check: ## format, lints, every test
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) test --workspace

xrt: ## unpack XRT 2.25 into target/xrt (no root; downloads about 15 MB from this machine's Debian archive)
	@xrt-sys/scripts/fetch.sh target/xrt

test-vnpu: ## phases 1 to 3 and the faults of the virtual NPU under the real XRT (after make xrt)
	@xrt-sys/scripts/test-vnpu.sh target/xrt

review: ## look through changed baselines
	$(CARGO) insta review

bench: ## kernels, prefill, decode and gates beside the machine's limits
	$(CARGO) bench --bench kernels --bench model --bench gates

bench-scale: ## a generated 1B checkpoint (writes 2.5 GB under target)
	$(CARGO) bench --bench scale

bench-peers: ## smollm2_135m beside HF transformers, in one run (needs PYTHON with torch and transformers)
	$(PYTHON) fixtures/hf/bench.py models/smollm2_135m -- $(CARGO) bench --quiet --bench model -- smollm2_135m --serve

clean: ## remove what was built, and pending baselines
	$(CARGO) clean
	find snapshots -name '*.snap.new' -delete
