# The one entry point for people and for CI. Needs python3 (3.11+), a Rust toolchain and make; all
# else goes into $(VENV). Other interpreters and torch versions:
#   make test-python PYTHON=python3.13 VENV=.venv-313
#   make test-python VENV=.venv-2.11 TORCH=torch==2.11.0

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?=
# Arguments for pytest (make test ARGS='-k compat'), the demo or the benchmarks.
ARGS   ?=
# How many processes share the Python tests, by files: one more than cores, as some wait; 0 for a debugger.
JOBS   ?= 3
# How long each fuzz target runs.
FUZZ_SECONDS ?= 60
# How long the soak and the differential test run.
SECONDS ?= 600
# What wheels are built for.
WHEEL_TARGETS ?= x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu x86_64-unknown-linux-musl aarch64-unknown-linux-musl
# The integrations that are tested.
FRAMEWORKS ?= transformers lightning accelerate torchtitan vllm quantizers
# How many steps the soak of the checkpoint manager saves, on each number of ranks.
STEPS  ?= 10000

BIN  := $(VENV)/bin
PY   := $(BIN)/python
# In the order of tests/conftest.py: what needs the simulated device comes last.
PYTEST := -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
UV   := $(BIN)/uv
RUST_SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find rust -path rust/fuzz -prune -o \( -name '*.rs' -o -name 'Cargo.toml' \) -print)
# What ruff formats and checks.
PYTHON_FOLDERS := $(wildcard python tests benches examples .ci docs/*.py)

# PyO3 asks this interpreter; one value for all commands, or each would rebuild what the other built.
export PYO3_PYTHON := $(abspath $(PY))
# Hundreds of processes import torch and the tests: what one compiled, the others read.
unexport PYTHONDONTWRITEBYTECODE
# uv brings certificates of its own; behind a proxy those of the machine are the right ones.
export UV_SYSTEM_CERTS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build demo test test-all test-rust test-python test-slow test-fs test-oldest mutants test-frameworks check check-rust check-python \
	fmt bench crash soak soak-steps differential fuzz fuzz-foreign wheels sdist dist check-dist release-check test-wheel docs docs-serve \
	test-posix sanitize free-threaded audit lint-workflows s3s-fs clean

help:  ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*##  *\(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z0-9-]*\):.*##  *\(.*\)/  \1: \2/p' $(MAKEFILE_LIST)

# --- the environment: a stamp file for each step ---------------------------------------------------

$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "dcp-rs needs Python 3.11 or newer; found: $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12"; exit 1; }
	@command -v cargo >/dev/null || { echo "dcp-rs needs a Rust toolchain (cargo): https://rustup.rs"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet uv
	@touch $@

$(VENV)/.deps: $(VENV)/.uv pyproject.toml
	$(UV) pip install --quiet --python $(PY) -r pyproject.toml --group dev --group stores $(TORCH)
	@$(PY) -c 'import hypothesis, torch.distributed.checkpoint, torch.distributed.tensor'  # compiled here, once
	@touch $@

# Two builds of one extension: `.built` is what users get and what is timed; `.fast` compiles in a third
# of the time, with assertions, for the tests. The one that was made last is there, and tests take either.
MATURIN_DEVELOP = PATH="$(abspath $(BIN)):$$PATH" VIRTUAL_ENV="$(abspath $(VENV))" maturin develop --uv --quiet

$(VENV)/.built: $(VENV)/.deps $(RUST_SOURCES)
	$(MATURIN_DEVELOP) --release
	@touch $(VENV)/.fast $@

$(VENV)/.fast: $(VENV)/.deps $(RUST_SOURCES)
	$(MATURIN_DEVELOP)
	@rm -f $(VENV)/.built
	@touch $@

build: $(VENV)/.built  ## Build the extension into the virtual environment

# --- what people run -------------------------------------------------------------------------------

demo: $(VENV)/.built  ## Save and restore a real model's state with stock DCP and dcp-rs, and compare
	$(PY) examples/demo.py $(ARGS)

# Rust's tests compile while Python's packages are installed, and run while the extension compiles: none of it keeps
# two cores busy alone.
test:  ## All tests but the slow ones: minutes
	@$(MAKE) --no-print-directory --jobs=2 rust-tests $(VENV)/.simulated
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-rust $(VENV)/.fast; rust=$$?; \
		$(MAKE) --no-print-directory test-python && exit $$rust

.PHONY: rust-tests
rust-tests:
	+cargo test --quiet --no-run --package dcp-rs-core --package dcp-rs-remote --tests

# Where it cannot be built, each test that needs it says why.
$(VENV)/.simulated: $(VENV)/.deps tests/support/simulated/device.cpp
	-@PYTHONPATH=tests $(PY) -c 'from support.simulated import install; install()'
	@touch $@

test-all: test-rust $(VENV)/.fast  ## The slow Python tests as well
	$(PY) $(PYTEST) --slow $(ARGS)

# `+`: cargo takes its share of make's jobs.
test-rust: $(VENV)/.uv  ## The Rust tests alone
	+cargo test --no-fail-fast --package dcp-rs-core --package dcp-rs-remote --tests
	+cargo test --package dcp-rs-core --package dcp-rs-remote --doc

test-python: $(VENV)/.fast  ## The Python tests alone
	$(PY) $(PYTEST) $(ARGS)

test-slow: $(VENV)/.fast  ## The slow Python tests alone
	$(PY) $(PYTEST) --only-slow $(ARGS)

# Each has an environment of its own, with the newest release there is. The extension is the one that was built: it works with every Python from 3.11.
test-frameworks: $(VENV)/.fast  ## The integrations, each with the newest release of its framework (FRAMEWORKS, ARGS)
	@set -e; for name in $(FRAMEWORKS); do \
		echo "== $$name"; \
		[ -x .venv-$$name/bin/python ] || $(PYTHON) -m venv .venv-$$name; \
		$(UV) pip install --quiet --upgrade --python .venv-$$name/bin/python \
			-r tests/frameworks/$$name.txt -r tests/frameworks/common.txt -r pyproject.toml \
			$$([ ! -f tests/frameworks/$$name.overrides.txt ] || echo --override tests/frameworks/$$name.overrides.txt); \
		$(UV) pip list --quiet --python .venv-$$name/bin/python | grep -E "^(torch|safetensors|$$(sed '/^#/d' tests/frameworks/$$name.txt | paste -sd '|')) "; \
		PYTHONPATH="$(abspath python)" .venv-$$name/bin/python -m pytest tests/frameworks/test_$$name.py $(ARGS); \
	done

# Each bug has to be found by tests of `make test`. Those in Rust are built one after another.
mutants: $(VENV)/.built  ## Plausible bugs, one at a time in a copy of the tree: the tests have to find each (ARGS: names)
	PYTHONPATH=tests $(PY) -m mutants $(ARGS)

# The package `bindfs` of the system is needed, and `fuse3`: what is missing is skipped by name.
test-fs: $(VENV)/.fast  ## Runs on file systems unlike a local disk: mounts that rename deleted files, fail, or cache
	$(PY) $(PYTEST) --slow tests/filesystems $(ARGS)

test-oldest:  ## The Python tests with the oldest torch that pyproject.toml allows
	$(MAKE) test-python VENV=.venv-oldest TORCH=torch==$$($(PYTHON) tests/support/oldest.py torch)

check: check-rust check-python  ## Formatting, lints, types and docs

# Of other platforms the core, which has all that they differ in: the client of object stores needs a C compiler for each.
check-rust: $(VENV)/.uv
	cargo fmt --check
	cargo clippy --workspace --all-targets -- -D warnings
	@for target in aarch64-apple-darwin; do \
		if rustup target list --installed 2>/dev/null | grep -qx $$target; then \
			cargo check --quiet --package dcp-rs-core --target $$target || exit 1; \
		else echo "the target $$target is not installed: that it compiles was not checked"; fi; \
	done
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --quiet
	@if command -v cargo-deny >/dev/null; then cargo deny check; \
		else echo 'cargo-deny is not installed: licences and advisories were not checked'; fi

check-python: $(VENV)/.deps
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

crash: $(VENV)/.fast  ## Kill, starve and cut off thousands of saves and runs, and look at what is left (ARGS)
	PYTHONPATH=tests $(PY) -m crash --faults --power 2000 $(ARGS)
	PYTHONPATH=tests $(PY) -m crash --store --kills 100 --kills-of-four 20
	PYTHONPATH=tests $(PY) -m crash.nfs
	PYTHONPATH=tests $(PY) -m crash.nodes

# A server of S3 in Rust. What it is built from is not kept.
S3S_FS ?= 0.14.1
s3s-fs: $(BIN)/s3s-fs  ## A server of objects that the tests of stores ask as well, where it is installed (needs the network)
$(BIN)/s3s-fs: | $(VENV)/.uv
	cargo install s3s-fs --version $(S3S_FS) --locked --features binary --root $(VENV) --target-dir target/s3s-fs
	rm -rf target/s3s-fs

soak: $(VENV)/.fast  ## Saves and loads for SECONDS, with memory and open files watched
	PYTHONPATH=tests $(PY) -m differential soak --seconds $(SECONDS) $(ARGS)

differential: $(VENV)/.fast  ## Saves and loads by stock DCP and dcp-rs of whatever hypothesis draws, compared, for SECONDS
	PYTHONPATH=tests nice $(PY) -m differential --seconds $(SECONDS) $(ARGS)

soak-steps: $(VENV)/.fast  ## Save, prune, kill and resume STEPS steps on 1 and on 4 ranks
	$(PY) tests/soak_steps.py $(STEPS) $(ARGS)

# Found inputs go to rust/fuzz/corpus (ignored), on top of the seeds. No parser needs 64 MiB at once for inputs of this size.
fuzz-foreign: $(VENV)/.fast  ## Mutated files of torch, read by torch and dcp-rs and compared, for FUZZ_SECONDS each
	@for kind in torch metadata; do \
		PYTHONPATH=tests nice $(PY) -m differential $$kind --keep-going --seconds $(FUZZ_SECONDS) $(ARGS) || exit 1; \
	done

fuzz:  ## Every fuzz target for FUZZ_SECONDS each (needs nightly Rust and cargo-fuzz)
	@cargo +nightly fuzz --version >/dev/null 2>&1 \
		|| { echo 'needs: rustup toolchain install nightly; cargo install cargo-fuzz'; exit 1; }
	@set -e; for target in $$(cargo +nightly fuzz list --fuzz-dir rust/fuzz); do \
		echo "fuzzing $$target for $(FUZZ_SECONDS) s"; \
		mkdir -p rust/fuzz/corpus/$$target; \
		cargo +nightly fuzz run --fuzz-dir rust/fuzz $$target rust/fuzz/corpus/$$target rust/fuzz/seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -max_len=65536 -malloc_limit_mb=64 -timeout=10 -print_final_stats=1; \
	done

# --- what is published -----------------------------------------------------------------------------

# Wheels for other platforms are linked by zig, which comes from PyPI. glibc 2.28 and musl 1.2 are as old as torch's own wheels ask for.
wheels: $(VENV)/.wheel-tools  ## A wheel for each of WHEEL_TARGETS, and the sdist, in dist/, checked
	@set -e; for target in $(WHEEL_TARGETS); do \
		rustup target list --installed | grep -qx $$target || rustup target add $$target; \
		case $$target in *-musl) policy=musllinux_1_2;; *) policy=manylinux_2_28;; esac; \
		PATH="$(abspath $(BIN)):$$PATH" maturin build --release --zig --target $$target --compatibility $$policy --out dist; \
	done
	$(MAKE) sdist check-dist

sdist: $(VENV)/.wheel-tools  ## The sdist, in dist/
	PATH="$(abspath $(BIN)):$$PATH" maturin sdist --out dist

check-dist: $(VENV)/.wheel-tools  ## Look into what is in dist/: tags, licence, SBOM, contents
	$(PY) .ci/dist.py dist
	$(BIN)/twine check --strict dist/*

release-check: $(VENV)/.deps  ## Whether version, citation, changelog and first pages agree (TAG=v1.2.3: and the tag)
	$(PY) .ci/dist.py --release $(TAG)

$(VENV)/.wheel-tools: $(VENV)/.deps
	$(UV) pip install --quiet --python $(PY) --group wheels
	@touch $@

dist: $(VENV)/.deps  ## The sdist, and the wheel of this machine built from it, in dist/
	rm -rf dist
	PATH="$(abspath $(BIN)):$$PATH" maturin build --release --sdist --out dist

# The wheel is built once; what is tested is what it installs, in an environment that has nothing else of this tree, by the tests of the sdist.
#   make test-wheel TORCH=torch==2.8.0 WHEEL=dist/*manylinux*x86_64.whl ARGS='tests/cli -x'
WHEEL ?=
WHEEL_PLACE := build/wheel$(if $(TORCH),-$(subst =,,$(TORCH)))
test-wheel: $(VENV)/.deps  ## The Python tests on a built wheel, away from this tree (WHEEL, TORCH, PYTHON, ARGS)
	rm -rf $(WHEEL_PLACE) && mkdir -p $(WHEEL_PLACE)
	PATH="$(abspath $(BIN)):$$PATH" maturin sdist --out $(WHEEL_PLACE)
	@[ -n "$(WHEEL)" ] || PATH="$(abspath $(BIN)):$$PATH" maturin build --quiet --release --out $(WHEEL_PLACE)
	$(UV) venv --quiet --python $(PYTHON) $(WHEEL_PLACE)/venv
	$(UV) pip install --quiet --python $(WHEEL_PLACE)/venv/bin/python "$$(ls $(if $(WHEEL),$(WHEEL),$(WHEEL_PLACE)/*.whl))" $(TORCH) --group tests --group stores
	tar -xzf $(WHEEL_PLACE)/dcp_rs-*.tar.gz -C $(WHEEL_PLACE)
	cd $(WHEEL_PLACE)/dcp_rs-*/ && ../venv/bin/python -c 'import dcp_rs, torch; assert "site-packages" in dcp_rs.__file__; print("dcp-rs", dcp_rs.__version__, dcp_rs.__file__, "torch", torch.__version__)' \
		&& ../venv/bin/python $(PYTEST) $(ARGS)

# --- the site --------------------------------------------------------------------------------------

export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.docs  ## The site, in site/: broken links, missing names and snippets that fail are errors
	$(BIN)/mkdocs build
	$(PY) -m pytest tests/docs $(ARGS)

docs-serve: $(VENV)/.docs  ## The site at localhost:8000, made anew at every change
	$(BIN)/mkdocs serve

$(VENV)/.docs: $(VENV)/.built
	$(UV) pip install --quiet --python $(PY) --group docs
	@touch $@

# --- other platforms, others' code, the workflows --------------------------------------------------

# What Linux alone has is taken away: the core works as it does on macOS.
test-posix: $(VENV)/.uv  ## The core's tests without what only Linux has
	RUSTFLAGS='--cfg posix_only' CARGO_TARGET_DIR=target/posix cargo test --package dcp-rs-core

# Miri knows no files and no streaming stores, and takes minutes for what takes milliseconds: it runs some of what is pure.
MIRI_TESTS := copy::run::tests::equals copy::strided copy::signs format::name format::value geometry:: --skip many_
sanitize:  ## The core's tests under AddressSanitizer, and those of its copies under Miri (needs nightly Rust)
	@cargo +nightly --version >/dev/null 2>&1 || { echo 'needs: rustup toolchain install nightly'; exit 1; }
	RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/sanitize cargo +nightly test --package dcp-rs-core --tests \
		--target $$(rustc --print host-tuple)
	@cargo +nightly miri --version >/dev/null 2>&1 \
		|| { echo 'Miri did not run; it needs: rustup component add --toolchain nightly miri rust-src'; exit 1; }
	PROPTEST_CASES=2 MIRIFLAGS=-Zmiri-disable-isolation CARGO_TARGET_DIR=target/miri \
		cargo +nightly miri test --package dcp-rs-core --lib -- $(MIRI_TESTS)

free-threaded: $(VENV)/.built  ## Import the extension on a free-threaded Python, and save and load (PYTHON=python3.14t)
	$(PY) -c 'import sys, torch, dcp_rs; assert not sys._is_gil_enabled(); s = {"w": torch.arange(4.0)}; dcp_rs.save(s, "build/ft", no_dist=True); dcp_rs.load(s, "build/ft", no_dist=True)'

audit: $(VENV)/.deps  ## Advisories on what is depended on, Rust and Python
	@if command -v cargo-deny >/dev/null; then cargo deny check advisories; else echo 'cargo-deny is not installed'; exit 1; fi
	$(UV) pip install --quiet --python $(PY) pip-audit
	@mkdir -p build
	$(UV) pip compile --quiet pyproject.toml -o build/requirements.txt --no-header --no-annotate
	$(BIN)/pip-audit --strict --requirement build/requirements.txt --disable-pip --no-deps

# actionlint comes as a program of its own; where there is none, the schema of workflows and zizmor are what looks.
lint-workflows: $(VENV)/.deps  ## The workflows: their schema, and what is unsafe in them
	$(UV) pip install --quiet --python $(PY) --group workflows
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --persona pedantic .github
	@if command -v actionlint >/dev/null; then actionlint; else echo 'actionlint is not installed: expressions of workflows were not checked'; fi

clean:  ## Remove what make built; virtual environments too
	rm -rf target rust/fuzz/target dist build site .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests benches -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	rm -f python/dcp_rs/_core*.so
