# make demo   sets up, builds, and runs a real program inside half the memory it needs
# make test   sets up, builds, and runs all tests (as root: they need userfaultfd)
# make soundness   looks for undefined behaviour, races and broken protocols (miri, schedules, orderings)
# make bench  measures foliomem next to the kernel's zram swap (as root; settings are restored)

export PATH := $(HOME)/.cargo/bin:$(PATH)
export CARGO_TARGET_DIR := target

.PHONY: build demo test soundness lint bench

build:
	scripts/setup
	cargo build --release -p foliomem-cli -p foliomem-agent -p foliomem-lab -p foliomem-bench

demo: build
	scripts/demo

lint:
	cargo fmt --check
	cargo xtask tidy
	cargo clippy --workspace --all-targets -- -D warnings

test: build lint
	scripts/setup test
	cargo test --workspace
	scripts/soundness orderings shuttle
	target/venv/bin/python -m mypy --config-file python/foliomem_lab/pyproject.toml python/foliomem_lab/src
	cd python/foliomem_lab && $(CURDIR)/target/venv/bin/python -m pytest -q
	target/venv/bin/python -m pytest -q tests/e2e

soundness:
	scripts/soundness

bench: build
	FOLIOMEM_PYTHON=target/venv/bin/python target/release/foliomem bench swap
	FOLIOMEM_PYTHON=$(CURDIR)/target/venv/bin/python target/release/foliomem bench programs
