# Each target sets up what it needs: a virtual environment, torch, CMake and ninja from PyPI, the build.
#
#   make build | test | test-python | test-jax | test-cpp | test-example | demo | bench | lint | format | tidy | docs | clean
#        wheel | test-wheel | test-wheel-python | release
#
# Variables: TORCH=2.15.0 (own .venv-2.15.0 and build folder), PYTHON=python3.12 (makes the environment), JOBS (compile
# jobs), TEST_JOBS (processes that run the Python tests; 0 is this one), FUSEGRAD_CUDA=AUTO|ON|OFF,
# FUSEGRAD_CUDA_ARCHS="90a;100", FUSEGRAD_NVCC=path or pypi, FUSEGRAD_JAX=OFF (neither JAX nor the library for it),
# FUSEGRAD_JAXLIB=folder (an older jaxlib than the environment's, by whose headers the library for JAX is built),
# FUSEGRAD_UNITY=OFF (each file compiled by itself, for work on one), TORCHES (of the wheel), PYTHONS (of the release),
# DEMO_OUT=demo (the demo's folder), DEMO_ARGS (options of both its programs), PYTHON_TESTS (files or folders),
# PYTEST_ARGS, BENCH_ARGS.
DEFAULT_TORCH := 2.11.0
TORCH ?= $(DEFAULT_TORCH)
JOBS ?= $(shell nproc)
# Tests measure a GPU's memory: where there is one, they run in one process.
TEST_JOBS ?= $(if $(wildcard /dev/nvidia0),0,$(JOBS))
VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(TORCH))
BUILD := build/torch-$(TORCH)
BIN := $(CURDIR)/$(VENV)/bin
LINT := .venv-lint/bin
# Looked up by the shell: make's own wildcard remembers the folders as they were before the environment was made.
SITE = $(shell echo $(VENV)/lib/python3.*/site-packages)
# Without byte code of all of torch: Python makes that of what it imports.
PIP_INSTALL := install --quiet --disable-pip-version-check --no-compile

# Python keeps its byte code: processes of tests would compile torch's requirements anew.
unexport PYTHONDONTWRITEBYTECODE
# What ccache must be told to keep what is compiled with a precompiled header, as C++ tests are.
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: test test-python test-jax test-cpp test-example demo bench lint format tidy wheel test-wheel test-the-wheel test-wheel-python release docs build clean FORCE
.DEFAULT_GOAL := build

# --- environments ---------------------------------------------------------------------------------------------

# The first Python 3.10 to 3.13 that can make environments and has its headers; pyenv's names may exist and not run.
PYTHON ?=
define make_venv
	for python in $(or $(PYTHON),python3.12 python3.13 python3.11 python3.10 python3); do \
	  if $$python -c 'import ensurepip, os, sys, sysconfig as s, venv; \
	      sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13) and \
	                    os.path.exists(s.get_path("include") + "/Python.h")))' 2>/dev/null; then \
	    echo "Making $(1) with $$($$python --version)"; $$python -m venv $(1); break; fi; done
	test -x $(1)/bin/python || { echo "No Python 3.10 to 3.13 with venv and headers was found (tried: \
	$(or $(PYTHON),python3.12 python3.13 python3.11 python3.10 python3)). Debian, Ubuntu: apt-get install python3-venv \
	python3-dev. Or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(1)/bin/python -m pip $(PIP_INSTALL) --upgrade 'pip>=24'
	touch $@
endef

$(VENV)/.made:
	$(call make_venv,$(VENV))

.venv-lint/.made:
	$(call make_venv,.venv-lint)

# An extra of pyproject.toml, never with another torch.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.made
	$(BIN)/python tools/requirements.py $* > $(VENV)/requirements-$*.txt
	echo "Installing the requirements of '$*' and torch $(TORCH) into $(VENV)"
	$(BIN)/python -m pip $(PIP_INSTALL) torch==$(TORCH) -r $(VENV)/requirements-$*.txt
	touch $@

# Whose own requirements cannot be had beside the tests'.
$(VENV)/.installed-test-alone: pyproject.toml $(VENV)/.made
	$(BIN)/python tools/requirements.py test-alone > $(VENV)/requirements-test-alone.txt
	$(BIN)/python -m pip $(PIP_INSTALL) --no-deps -r $(VENV)/requirements-test-alone.txt
	touch $@

.venv-lint/.installed: pyproject.toml .venv-lint/.made
	.venv-lint/bin/python tools/requirements.py lint > .venv-lint/requirements.txt
	.venv-lint/bin/python -m pip $(PIP_INSTALL) -r .venv-lint/requirements.txt
	touch $@

# --- build ----------------------------------------------------------------------------------------------------

# The package is installed into the environment as a wheel lays it out, its Python files as links: edits take
# effect at once.
build: $(BUILD)/build.ninja
	$(BIN)/ninja -C $(BUILD) -j $(JOBS) package_files
	test ! -f $(SITE)/fusegrad/__init__.py || test -L $(SITE)/fusegrad/__init__.py || rm -rf $(SITE)/fusegrad*  # a wheel's
	rm -rf $(SITE)/fusegrad/lib $(SITE)/fusegrad/_C.*
	$(BIN)/cmake --install $(BUILD) --prefix $(SITE)/fusegrad > $(BUILD)/install.log
	find $(SITE)/fusegrad -maxdepth 1 -type l -delete
	ln -s $(addprefix $(CURDIR)/,$(wildcard python/fusegrad/*.py python/fusegrad/py.typed) \
	  $(patsubst %/__init__.py,%,$(wildcard python/fusegrad/*/__init__.py))) $(SITE)/fusegrad/

OPTIONS := FUSEGRAD_CUDA FUSEGRAD_CUDA_ARCHS FUSEGRAD_NVCC FUSEGRAD_JAX FUSEGRAD_JAXLIB FUSEGRAD_UNITY FUSEGRAD_TORCHES FUSEGRAD_MANYLINUX
# JAX is installed for the tests; another target builds its library where it is there already.
JAX_THERE := $(VENV)/.installed-jax
JAX := $(if $(filter OFF,$(FUSEGRAD_JAX)),,$(if $(filter test test-python,$(MAKECMDGOALS)),$(JAX_THERE),$(wildcard $(JAX_THERE))))
CMAKE_OPTIONS := $(foreach o,$(OPTIONS),$(if $($(o)),-D$(o)='$($(o))',-U$(o)))
# CMake reads these when it first configures a folder and never again: a build would keep flags that are gone.
CMAKE_OPTIONS += -DCMAKE_CXX_FLAGS='$(CXXFLAGS)' -DCMAKE_CUDA_FLAGS='$(CUDAFLAGS)'
$(BUILD)/options: FORCE
	mkdir -p $(BUILD)
	echo "$(CMAKE_OPTIONS)" | cmp --silent - $@ || echo "$(CMAKE_OPTIONS)" > $@

$(BUILD)/build.ninja: $(BUILD)/options $(VENV)/.installed-build $(JAX)
	$(BIN)/cmake -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DPython_EXECUTABLE=$(BIN)/python \
	  -DFUSEGRAD_TESTS=ON $(CMAKE_OPTIONS)
	touch $@

# --- what people ask for --------------------------------------------------------------------------------------

test: test-python test-cpp test-example

PYTHON_TESTS ?= tests/python
test-python: build $(VENV)/.installed-test $(VENV)/.installed-test-alone
	$(BIN)/python -m pytest $(PYTHON_TESTS) -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS)

# The oldest JAX and the newest, without torch, with one library for both.
OLDEST_JAX ?= 0.8.0
test-jax: build
	$(BIN)/python tools/test_jax.py $(OLDEST_JAX) newest

test-cpp: build
	$(BIN)/ninja -C $(BUILD) -j $(JOBS)
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

# The C++ example, built as a user's project against the installed package.
test-example: build
	prefix=$$($(BIN)/python -c 'import fusegrad; print(fusegrad.utils.cmake_prefix_path)'); \
	$(BIN)/cmake -S examples/cpp -B $(BUILD)-example -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
	  -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$$prefix" > $(BUILD)/example.log
	$(BIN)/ninja -C $(BUILD)-example
	$(BIN)/ctest --test-dir $(BUILD)-example --verbose

DEMO_OUT ?= demo
demo: build $(VENV)/.installed-demo
	$(BIN)/python examples/train_lm.py --demo --out $(DEMO_OUT) $(DEMO_ARGS)
	$(BIN)/python examples/distil_lm.py --demo --out $(DEMO_OUT) --teacher $(DEMO_OUT)/eager.pt $(DEMO_ARGS)

bench: build $(VENV)/.installed-peers
	$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

# One by one: a peer that cannot be had beside this torch must not keep the others out. The benchmarks say which are
# there.
$(VENV)/.installed-peers: pyproject.toml $(VENV)/.made
	$(BIN)/python tools/requirements.py bench | while read -r peer; do \
	  $(BIN)/python -m pip $(PIP_INSTALL) torch==$(TORCH) "$$peer" || echo "Left out: $$peer" >&2; done
	touch $@

# The wheel: of every Python from 3.10 on, with a library for each of these torches. Those that an environment here has
# are taken from there; of others PyPI's headers and libraries are fetched. The build folder is that of `make build`,
# whose objects it takes: what is next made there is configured again.
TORCHES ?= $(shell cat cmake/torches.txt)
environment_of = .venv$(if $(filter-out $(DEFAULT_TORCH),$1),-$1)
folder_of = $(or $(shell ls -d $(call environment_of,$1)/lib/python3.*/site-packages/torch 2>/dev/null),build/torches/$1/torch)
empty :=
WHEEL_TORCHES = $(subst $(empty) $(empty),;,$(foreach version,$(TORCHES),$(CURDIR)/$(call folder_of,$(version))))
MANYLINUX := manylinux_2_28_$(shell uname -m)
# auditwheel would copy libraries of other packages: torch and CUDA bring theirs.
OTHERS_LIBRARIES := 'libtorch*.so' 'libc10*.so' 'libgomp*.so*' 'libcuda.so.*'

build/torches/%/torch/version.py: tools/fetch_headers.py $(VENV)/.made
	echo "Fetching the headers of torch $*"
	$(BIN)/python tools/fetch_headers.py torch $* build/torches/$*

# The library for JAX loads with the jaxlib by whose headers it was built, and with later ones: the wheel's is the oldest.
WHEEL_JAXLIB = $(if $(filter OFF,$(FUSEGRAD_JAX)),,$(or $(FUSEGRAD_JAXLIB),$(CURDIR)/build/jaxlibs/$(OLDEST_JAX)/jaxlib))
build/jaxlibs/%/jaxlib/version.py: tools/fetch_headers.py $(VENV)/.made
	echo "Fetching the headers of jaxlib $*"
	$(BIN)/python tools/fetch_headers.py jaxlib $* build/jaxlibs/$*

wheel: $(foreach version,$(TORCHES),$(call folder_of,$(version))/version.py) $(VENV)/.installed-build $(VENV)/.installed-wheel \
  $(addsuffix /version.py,$(WHEEL_JAXLIB:$(CURDIR)/%=%))
	rm -rf $(BUILD)/wheel dist/*.whl
	FUSEGRAD_TORCHES='$(WHEEL_TORCHES)' CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  CMAKE_ARGS="$(CMAKE_OPTIONS) -DFUSEGRAD_TORCHES='$(WHEEL_TORCHES)' -DFUSEGRAD_JAXLIB='$(WHEEL_JAXLIB)' \
	    -DFUSEGRAD_MANYLINUX=ON -DFUSEGRAD_TESTS=OFF" \
	  $(BIN)/python -m pip wheel --verbose --disable-pip-version-check --no-build-isolation --no-deps \
	  --config-settings build-dir=$(BUILD) --wheel-dir $(BUILD)/wheel .
	PATH=$(BIN):$$PATH $(BIN)/auditwheel repair $(addprefix --exclude ,$(OTHERS_LIBRARIES)) --plat $(MANYLINUX) \
	  --only-plat --wheel-dir dist $(BUILD)/wheel/*.whl
	rm -f $(BUILD)/options  # so that `make build` configures anew

# In an environment that has TORCH and nothing else, with no compiler on the PATH; then a C++ program against it.
test-wheel: wheel
	$(MAKE) test-the-wheel
test-the-wheel: $(VENV)/.installed-build $(VENV)/.installed-wheel
	$(BIN)/python tools/test_wheel.py dist $(BUILD)/clean

# Python tests on that wheel.
test-wheel-python: $(VENV)/.installed-test
	rm -rf $(SITE)/fusegrad  # links to the sources, through which pip would write
	$(BIN)/python -m pip $(PIP_INSTALL) --force-reinstall --no-deps dist/*.whl
	$(BIN)/python -m pytest $(PYTHON_TESTS) -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS)

# The wheel for all torches, tested with each of them by the first of PYTHONS and with the last torch by all of PYTHONS.
PYTHONS ?= python3.10 python3.13
release: wheel
	for torch in $(TORCHES); do for python in $(PYTHONS); do \
	  if [ $$python = $(firstword $(PYTHONS)) ] || [ $$torch = $(lastword $(TORCHES)) ]; then \
	    $(MAKE) test-the-wheel TORCH=$$torch PYTHON=$$python VENV=.venv-release/$$torch-$$python; fi; done; done
	ls -l dist

CXX_FILES = $$(git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh')
lint: .venv-lint/.installed $(BUILD)/build.ninja
	$(LINT)/clang-format --dry-run --Werror $(CXX_FILES) || { echo "To mend it: make format" >&2; exit 1; }
	$(LINT)/python tools/performance.py --check
	$(LINT)/ruff check . && $(LINT)/ruff format --check . || { echo "To mend it: make format" >&2; exit 1; }
	$(LINT)/mypy
	$(LINT)/python tools/check_rooms.py
	# What users' own checkers see, with torch's types.
	$(LINT)/mypy --config-file tests/typing/mypy.ini --python-executable $(BIN)/python
	$(LINT)/pyright --project tests/typing --pythonpath $(BIN)/python
	$(LINT)/python tools/tidy.py $(BUILD)

format: .venv-lint/.installed
	$(LINT)/clang-format -i $(CXX_FILES)
	$(LINT)/ruff check --fix .
	$(LINT)/ruff format .

# All of csrc, whose files it must see one by one.
tidy: .venv-lint/.installed
	$(MAKE) $(BUILD)-tidy/build.ninja BUILD=$(BUILD)-tidy FUSEGRAD_UNITY=OFF
	$(LINT)/python tools/tidy.py $(BUILD)-tidy --all

docs: build $(VENV)/.installed-docs
	command -v doxygen >/dev/null || { echo "doxygen is missing (Debian, Ubuntu: apt-get install doxygen)" >&2; exit 1; }
	mkdir -p $(BUILD)/doxygen
	(cat docs/Doxyfile; echo "OUTPUT_DIRECTORY = $(BUILD)/doxygen") | doxygen -
	DOXYGEN_XML=$(CURDIR)/$(BUILD)/doxygen/xml $(BIN)/sphinx-build -q -W --keep-going -b html docs site
	@echo "Open site/index.html"

clean:
	rm -rf build dist site .venv .venv-*
