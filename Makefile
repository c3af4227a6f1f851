# The one entry point for people and for CI. Needs python3 (3.11+), a Rust toolchain and make; all
# else goes into $(VENV). Other interpreters and torch versions:
#   make test-python PYTHON=python3.13 VENV=.venv-313
#   make test-python VENV=.venv-2.11 TORCH=torch==2.11.0

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?=
# Arguments for pytest (make test ARGS='-k compat'), the demo or the benchmarks.
ARGS   ?=
# How long each fuzz target runs.
FUZZ_SECONDS ?= 60
# How long the soak and the differential test run.
SECONDS ?= 600
# What wheels are built for.
WHEEL_TARGETS ?= x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu x86_64-unknown-linux-musl aarch64-unknown-linux-musl
# The integrations that are tested.
FRAMEWORKS ?= transformers lightning
# How many steps the soak of the checkpoint manager saves, on each number of ranks.
STEPS  ?= 10000

BIN  := $(VENV)/bin
PY   := $(BIN)/python
UV   := $(BIN)/uv
RUST_SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find rust -path rust/fuzz -prune -o \( -name '*.rs' -o -name 'Cargo.toml' \) -print)
# What ruff formats and checks.
PYTHON_FOLDERS := $(wildcard python tests benches examples)

# PyO3 asks this interpreter; one value for all commands, or each would rebuild what the other built.
export PYO3_PYTHON := $(abspath $(PY))
# uv brings certificates of its own; behind a proxy those of the machine are the right ones.
export UV_SYSTEM_CERTS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build demo test test-rust test-python test-slow test-oldest test-frameworks check check-rust check-python \
	fmt bench crash soak soak-steps differential fuzz wheels dist clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  \1: \2/p' $(MAKEFILE_LIST)

# --- the environment: a stamp file for each step ---------------------------------------------------

$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "dcp-rs needs Python 3.11 or newer; found: $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12"; exit 1; }
	@command -v cargo >/dev/null || { echo "dcp-rs needs a Rust toolchain (cargo): https://rustup.rs"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet uv
	@touch $@

$(VENV)/.deps: $(VENV)/.uv pyproject.toml
	$(UV) pip install --quiet --python $(PY) -r pyproject.toml --extra cli --group dev $(TORCH)
	@touch $@

$(VENV)/.built: $(VENV)/.deps $(RUST_SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" VIRTUAL_ENV="$(abspath $(VENV))" maturin develop --release --uv --quiet
	@touch $@

build: $(VENV)/.built  ## Build the extension into the virtual environment

# --- what people run -------------------------------------------------------------------------------

demo: $(VENV)/.built  ## Save and restore a real model's state with stock DCP and dcp-rs, and compare
	$(PY) -m dcp_rs.demo $(ARGS)

test: test-rust test-python  ## All tests but the slow ones

test-rust: $(VENV)/.uv
	cargo test --package dcp-rs-core

test-python: $(VENV)/.built
	$(PY) -m pytest $(ARGS)

test-slow: $(VENV)/.built  ## The slow Python tests as well
	$(PY) -m pytest --slow $(ARGS)

# Each has an environment of its own, with the newest release there is. The extension is the one that was built: it works with every Python from 3.11.
test-frameworks: $(VENV)/.built  ## The integrations, each with the newest release of its framework (FRAMEWORKS, ARGS)
	@set -e; for name in $(FRAMEWORKS); do \
		echo "== $$name"; \
		[ -x .venv-$$name/bin/python ] || $(PYTHON) -m venv .venv-$$name; \
		$(UV) pip install --quiet --upgrade --python .venv-$$name/bin/python \
			-r tests/frameworks/$$name.txt -r tests/frameworks/common.txt -r pyproject.toml; \
		$(UV) pip list --quiet --python .venv-$$name/bin/python | grep -E "^(torch|safetensors|$$(sed '/^#/d' tests/frameworks/$$name.txt | paste -sd '|')) "; \
		PYTHONPATH="$(abspath python)" .venv-$$name/bin/python -m pytest tests/frameworks/test_$$name.py $(ARGS); \
	done

test-oldest:  ## The Python tests with the oldest torch that pyproject.toml allows
	$(MAKE) test-python VENV=.venv-oldest TORCH=torch==$$($(PYTHON) tests/support/oldest.py torch)

check: check-rust check-python  ## Formatting, lints, types and docs

check-rust: $(VENV)/.uv
	cargo fmt --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --quiet
	@if command -v cargo-deny >/dev/null; then cargo deny check; \
		else echo 'cargo-deny is not installed: licences and advisories were not checked'; fi

check-python: $(VENV)/.built
	$(BIN)/ruff check $(PYTHON_FOLDERS)
	$(BIN)/ruff format --check $(PYTHON_FOLDERS)
	$(BIN)/mypy --strict python/

fmt: $(VENV)/.deps  ## Format everything
	cargo fmt
	$(BIN)/ruff check --fix-only --quiet $(PYTHON_FOLDERS)
	$(BIN)/ruff format $(PYTHON_FOLDERS)

bench: $(VENV)/.bench  ## Benchmarks against stock DCP and others, side by side
	$(PY) benches/run.py $(ARGS)

$(VENV)/.bench: $(VENV)/.built
	$(UV) pip install --quiet --python $(PY) --group bench
	@touch $@

crash: $(VENV)/.built  ## Kill 2,000 saves, fail every write, cut the power at every moment, and look at what is left (ARGS)
	PYTHONPATH=tests $(PY) -m crash --faults --power 2000 $(ARGS)

soak: $(VENV)/.built  ## Saves and loads for SECONDS, with memory and open files watched
	$(PY) tests/soak.py $(SECONDS)

differential: $(VENV)/.built  ## Saves and loads by stock DCP and dcp-rs of whatever hypothesis draws, compared, for SECONDS
	PYTHONPATH=tests nice $(PY) -m differential --seconds $(SECONDS) $(ARGS)

soak-steps: $(VENV)/.built  ## Save, prune, kill and resume STEPS steps on 1 and on 4 ranks
	$(PY) tests/soak_steps.py $(STEPS) $(ARGS)

# Found inputs go to rust/fuzz/corpus (ignored), on top of the seeds. No parser needs 64 MiB at once for inputs of this size.
fuzz:  ## Every fuzz target for FUZZ_SECONDS each (needs nightly Rust and cargo-fuzz)
	@cargo +nightly fuzz --version >/dev/null 2>&1 \
		|| { echo 'needs: rustup toolchain install nightly; cargo install cargo-fuzz'; exit 1; }
	@set -e; for target in $$(cargo +nightly fuzz list --fuzz-dir rust/fuzz); do \
		echo "fuzzing $$target for $(FUZZ_SECONDS) s"; \
		mkdir -p rust/fuzz/corpus/$$target; \
		cargo +nightly fuzz run --fuzz-dir rust/fuzz $$target rust/fuzz/corpus/$$target rust/fuzz/seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -max_len=65536 -malloc_limit_mb=64 -timeout=10 -print_final_stats=1; \
	done

# Wheels for other platforms are linked by zig, which comes from PyPI. glibc 2.28 and musl 1.2 are as old as torch's own wheels ask for.
wheels: $(VENV)/.wheel-tools  ## A wheel for each of WHEEL_TARGETS, in dist/, checked by auditwheel
	@set -e; for target in $(WHEEL_TARGETS); do \
		rustup target add --toolchain "$$(rustup show active-toolchain | cut -d' ' -f1)" $$target; \
		case $$target in *-musl) policy=musllinux_1_2;; *) policy=manylinux_2_28;; esac; \
		PATH="$(abspath $(BIN)):$$PATH" maturin build --release --zig --target $$target --compatibility $$policy --out dist; \
	done
	@for wheel in dist/*linux*.whl; do $(BIN)/auditwheel show $$wheel; done

$(VENV)/.wheel-tools: $(VENV)/.deps
	$(UV) pip install --quiet --python $(PY) ziglang auditwheel
	@touch $@

dist: $(VENV)/.deps  ## The sdist, and the wheel built from it, in dist/
	rm -rf dist
	PATH="$(abspath $(BIN)):$$PATH" maturin build --release --sdist --out dist

clean:  ## Remove what make built; virtual environments too
	rm -rf target rust/fuzz/target dist .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests benches -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	rm -f python/dcp_rs/_core*.so
