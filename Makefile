# make demo       sets up, builds, and runs a real program inside half the memory it needs
# make check      formats, lints, rules, unit and model tests: before each commit
# make test       sets up, builds, and runs all tests that must hold (as root: they need userfaultfd)
# make dist       makes the packages that people install, in target/dist
# make soak       looks for rare faults for HOURS=1 hours: torture, stress, schedules, fuzzing, kills
# make soundness  looks for undefined behaviour, races and broken protocols (miri, schedules, orderings)
# make doc        documents everything, private items too
# make msrv       builds with the oldest compiler that Cargo.toml declares
# make bench      measures foliomem next to the kernel's zram swap (as root; settings are restored)

export PATH := $(HOME)/.cargo/bin:$(PATH)
export CARGO_TARGET_DIR := target
python := target/venv/bin/python
HOURS ?= 1
programs := -p foliomem-agent -p foliomem-lab -p foliomem-bench
# foliomem itself needs no library of the system.
static := x86_64-unknown-linux-musl

# The programs of the tests: conftest.py finds the others beside foliomem.
tested := $(CURDIR)/target/tested
as_tested := --config scripts/tested.toml
# As the release: an agent that could unwind would need a library of the system.
aborts := --config 'profile.dev.panic="abort"'

.PHONY: build programs test-programs dist demo lint unit check test e2e doc soak soundness msrv bench

build:
	scripts/setup
	$(MAKE) programs

programs:
	cargo build --release $(programs)
	cargo build --release --target $(static) -p foliomem-cli
	install -m 755 $(CARGO_TARGET_DIR)/$(static)/release/foliomem $(CARGO_TARGET_DIR)/release/foliomem

# Without LTO, and with the dependencies that unit tests and lints need as well: nothing is compiled twice.
test-programs:
	cargo build $(as_tested) -p foliomem-lab -p foliomem-bench
	cargo build $(as_tested) $(aborts) -p foliomem-agent
	cargo build $(as_tested) $(aborts) --target $(static) -p foliomem-cli
	mkdir -p $(tested)
	cd $(CARGO_TARGET_DIR)/debug && install -m 755 foliomem-lab foliomem-bench foliomem-bench-access foliomem-bench-swap \
		libfoliomem_agent.so ../$(static)/debug/foliomem $(tested)

dist: build
	scripts/setup dist
	scripts/dist

demo: build
	scripts/demo

lint:
	cargo fmt --check
	cargo xtask tidy
	cargo xtask deny
	scripts/soundness orderings
	target/venv/bin/typos
	cargo clippy --workspace --all-targets -- -D warnings

unit:
	cargo test --workspace

check:
	scripts/setup check
	$(MAKE) lint unit

# Builds and lints need all CPUs, and so do tests: only setting up waits for something else.
test: export CARGO_INCREMENTAL = 0
test:
	scripts/setup
	scripts/setup test & $(MAKE) test-programs && wait $$!
	$(MAKE) lint unit
	scripts/soundness shuttle
	$(python) -m mypy --config-file python/foliomem_lab/pyproject.toml python/foliomem_lab/src
	cd python/foliomem_lab && $(CURDIR)/$(python) -m pytest -q
	$(python) -m mypy --config-file python/foliomem/pyproject.toml python/foliomem/src
	cd python/foliomem && $(CURDIR)/$(python) -m pytest -q
	$(MAKE) e2e

# Two workers, then what must have the machine for itself.
# Other programs than those of test-programs: make e2e FOLIOMEM_BIN=PATH
e2e: export FOLIOMEM_BIN ?= $(tested)/foliomem
e2e: export FOLIOMEM_MOVED = $(CURDIR)/target/moved
e2e:
	rm -rf $(FOLIOMEM_MOVED) && mkdir -p $(FOLIOMEM_MOVED)
	$(python) -m pytest -q -n 2 --dist loadgroup --durations 15 -m "not alone" tests/e2e
	$(python) -m pytest -q -m alone tests/e2e

soak: build
	scripts/setup test
	scripts/soak $(HOURS)

doc:
	RUSTDOCFLAGS='-D warnings -A rustdoc::private_intra_doc_links' cargo doc --workspace --no-deps --document-private-items

soundness:
	scripts/soundness

msrv:
	scripts/setup msrv
	cargo +$$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml) check --workspace --target-dir target/msrv

bench: build
	FOLIOMEM_PYTHON=$(python) target/release/foliomem bench swap
	FOLIOMEM_PYTHON=$(CURDIR)/$(python) target/release/foliomem bench programs
