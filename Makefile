# `make run` and `make test` do all set-up on a machine that has Python 3.11+ (with venv and pip), g++ and make.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Why is the sky blue? Answer in two sentences.
BIN := $(VENV)/bin
CLIENTS := $(VENV)/clients
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
SOURCES := pyproject.toml constraints.txt $(shell find native -type f)
CPP_FILES := $(filter %.cpp %.h,$(SOURCES))

# PyPI's torch brings 4 GB of CUDA. The address of PyTorch's index of CPU builds (pytorch.org names it) leaves them out: pip prefers
# those to PyPI's of the same version.
TORCH_INDEX ?=

# The kernels' instruction sets: native, the best one of this machine; runnable, each one that it can run, and the emulated tiles,
# which only tests use; all; or names with commas between them.
export QUIRE_ISAS ?= native
BUILT_FOR = $(QUIRE_ISAS) $(shell uname -m; sed -nE '/^(flags|Features)/{p;q}' /proc/cpuinfo \
	| grep -oE '(avx|amx|fma|f16c|asimddp|i8mm|bf16)[a-z0-9_]*' | sort)

# Test processes that run at once; files stay whole, so that fixtures of a module are made once, and come in the order of
# tests/conftest.py. Bytecode is kept even
# where the environment says otherwise: compiling the tests and LiteLLM takes each run 20 s of processor time.
JOBS ?= 2
FAST_TESTS := tests/scheduler tests/text tests/test_config.py tests/test_resolve.py \
	$(patsubst %,tests/guards/test_%.py,clocks dependencies imports public_names sizes)
REAL_MODEL_TESTS := tests/test_examples.py tests/test_structured_generation.py tests/cli/test_run.py tests/lessons/compare

# What a failed step has made is no reason to pass over it the next time.
.DELETE_ON_ERROR:

.PHONY: FORCE run torch test test-fast test-bare test-arm test-gpu lint check format wheel wheel-check container-check bench soak faults inputs docs clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

run: $(VENV)/.installed  ## set everything up, then answer PROMPT
	@$(BIN)/quire run "$(PROMPT)"

torch: $(VENV)/.installed-torch  ## add PyTorch: for GPUs, models op by op, Transformers' models

test: $(VENV)/.installed-dev $(VENV)/.installed-clients  ## set everything up, then run the tests
	$(BIN)/quire pull --quiet
	PYTHONDONTWRITEBYTECODE= QUIRE_TEST_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(VENV)/.installed-dev  ## the tests that need no server: seconds, without PyTorch
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --without-torch $(FAST_TESTS) $(ARGS)

test-bare: $(VENV)/.installed-pytest  ## the fast tests, all verbs and the real model without PyTorch, as `make run` installs: 2 minutes
	$(BIN)/quire pull --quiet
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --without-torch -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		$(FAST_TESTS) tests/test_without_torch.py $(ARGS)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --without-torch -n $(JOBS) --dist loadfile -m model $(REAL_MODEL_TESTS) $(ARGS)

test-arm: $(VENV)/.installed-dev  ## the kernels for ARM64 on emulated processors: needs g++-aarch64-linux-gnu and qemu-user
	@$(PIP) cmake ninja 'nanobind>=2.9,<4'
	@$(BIN)/cmake -S native -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
		-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python -DQUIRE_ISAS=all
	@$(BIN)/cmake --build build/aarch64 --target print_digests
	$(BIN)/python -m pytest -q tests/kernels/test_arm.py $(ARGS)

test-gpu: $(VENV)/.installed-triton  ## kernels for GPUs, without one: run in Triton's interpreter, compiled for four cards
	$(BIN)/python -m pytest -n $(JOBS) tests/kernels/triton tests/runtime/device $(ARGS)
	PYTHONPATH=$(VENV)/triton-3.6 $(BIN)/python -m pytest -n $(JOBS) tests/kernels/triton/test_compiled.py $(ARGS)

lint: $(VENV)/.installed-dev  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

check: test-bare lint test  ## everything CI checks: format, lint, types, tests, docs

format: $(VENV)/.installed-dev  ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

# One wheel per processor for CPython 3.11, one for 3.12 and all later ones; a machine may lack one of these Pythons.
PYTHON311 ?= python3.11
PYTHON312 ?= python3.12

wheel:  ## wheels for x86-64 and ARM, to dist/: needs g++, g++-aarch64-linux-gnu, Python 3.11 and 3.12
	$(PYTHON) release/wheels.py --python $(PYTHON311) --python $(PYTHON312) $(ARGS)

wheel-check: $(VENV)/.installed  ## run the wheels of dist/ in bare roots, and through uvx and pipx: needs root, debootstrap, qemu-user-static, binfmt-support
	$(BIN)/quire pull --quiet
	$(BIN)/python release/check_wheels.py dist/*.whl $(ARGS)
	$(BIN)/python release/check_installers.py dist/*.whl

container-check: $(VENV)/.installed  ## build deploy/Dockerfile without Docker, from dist/, and start it: needs root, debootstrap
	$(BIN)/quire pull --quiet
	$(BIN)/python release/check_container.py $(ARGS)

bench: $(VENV)/.installed-dev  ## speed beside other engines, quality, host time per step: benchmarks/README.md
	$(BIN)/python -m benchmarks.peers $(ARGS)
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python -m benchmarks.host_step

soak: $(VENV)/.installed-dev  ## what a server bears: ten minutes of mixed clients, overload, hang-ups, attacks of one client on another, damaged model files
	$(BIN)/python -m benchmarks.soak --only L,A $(ARGS)

faults: $(VENV)/.installed-dev  ## what a server survives: signals, kills, exceptions, cut connections
	$(BIN)/python -m benchmarks.soak --only F $(ARGS)

inputs: $(VENV)/.installed-dev  ## what it is given: bad bytes, and bodies made from its description, by the thousand
	$(BIN)/python -m benchmarks.soak --only B $(ARGS)
	QUIRE_TEST_CASES=400 $(BIN)/python -m pytest -q tests/server/test_conformance.py

docs: $(VENV)/.installed-dev  ## regenerate the generated pages
	$(BIN)/python -m tests.cli.reference
	$(BIN)/python -m quire.server.openapi
	$(BIN)/python -m tests.guards.shown_commands docs/learn/*.md
	$(BIN)/python -m tests.models.page

clean:  ## remove the environment and build products
	rm -rf $(VENV) build dist

# The venv's own pip is used as it is: users' pip configuration (mirrors, proxies) applies. Its interpreter is there before its
# pip: a set-up that was killed in between is made again.
$(VENV)/.created:
	@$(PYTHON) native/check_machine.py
	@echo "creating $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# A checkout that moved to another processor, or is asked for other sets, is built again.
$(VENV)/.built-for: FORCE | $(VENV)/.created
	@echo '$(BUILT_FOR)' | cmp -s - $@ || echo '$(BUILT_FOR)' > $@

# At once, unless make was told how many jobs to run: pip reads the index and unpacks while the compilers run.
$(VENV)/.installed: $(VENV)/.built-for $(SOURCES) | $(VENV)/.created
	@echo "building Quire and installing its dependencies (about a minute: the kernels are compiled for this processor)" >&2
	@$(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j2) $(VENV)/.installed-quire $(VENV)/.installed-dependencies
	@touch $@

$(VENV)/.installed-quire: $(VENV)/.built-for $(SOURCES) | $(VENV)/.created
	@$(PIP) --no-deps -e .
	@touch $@

$(VENV)/.installed-dependencies: pyproject.toml constraints.txt | $(VENV)/.created
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
		> $(VENV)/dependencies.txt
	@$(PIP) -r $(VENV)/dependencies.txt
	@touch $@

$(VENV)/.installed-pytest: $(VENV)/.installed
	@$(PIP) pytest pytest-xdist hypothesis
	@touch $@

# The installed Quire names its extras: installing it again would compile the kernels again.
$(VENV)/.installed-torch: $(VENV)/.installed
	@echo "installing torch (the largest download)" >&2
	@$(PIP) 'quire[torch]' $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-torch
	@echo "installing what the tests need" >&2
	@$(PIP) 'quire[dev]'
	@touch $@

# The newest Triton, and beside it the oldest one that kernels are compiled with: its interpreter cannot use the newest NumPy.
$(VENV)/.installed-triton: $(VENV)/.installed-dev
	@echo "installing Triton, twice" >&2
	@$(PIP) 'quire[gpu]'
	@rm -rf $(VENV)/triton-3.6
	@$(PIP) --no-deps --target $(VENV)/triton-3.6 triton==3.6.0
	@touch $@

# Clients whose pinned versions contradict Quire's, or each other's, have environments of their own: tests/server/clients.
$(VENV)/.installed-clients: constraints-clients-openai2.txt constraints-clients-openai3.txt | $(VENV)/.created
	@echo "installing LiteLLM, instructor, pydantic-ai and llm beside Quire" >&2
	@rm -rf $(CLIENTS)
	@install() { \
		$(PYTHON) -m venv --without-pip $(CLIENTS)/$$1 && \
		$(BIN)/python -m pip --python $(CLIENTS)/$$1/bin/python install --disable-pip-version-check --quiet --no-compile \
			-c constraints-clients-$$1.txt "$$2" "$$3"; \
	}; \
	install openai2 'litellm[mcp]' instructor && install openai3 'pydantic-ai-slim[openai,anthropic]' llm
	@touch $@
