# Two commands matter: `make demo` and `make test`. Both do all the set-up themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# The stamp is older than pyproject.toml: installed for other requirements, install again.
$(VENV)/stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(MAKE) --no-print-directory pages
	touch $@

SECONDS ?= 60

# A test starts processes by the hundred: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo pages test quick fuzz modes native wheel sanitize arm check lint types man format clean
demo: $(VENV)/stamp            ## the whole pipeline, six processes, on the embedded model
	sh examples/demo.sh

# An editable install leaves them out. man(1) looks in share/man beside a bin that is on PATH.
pages:                         ## the manual pages, for `man toast`
	for page in man/man*/*; do \
		mkdir -p "$(VENV)/share/$${page%/*}"; \
		ln -sf "$(CURDIR)/$$page" "$(VENV)/share/$$page"; \
	done

# Whoever has no test left takes half of the other's. TOAST_TEST_EXAMPLES=10: ten times the examples.
test: $(VENV)/stamp            ## every test
	$(BIN)/python -m pytest -n 2 --dist worksteal

quick: $(VENV)/stamp           ## those in tests/quick.txt: most units, the oracles of model and pipe
	$(BIN)/python -m pytest -n 2 --dist worksteal @tests/quick.txt

fuzz: $(VENV)/stamp            ## attacks with new seeds: SECONDS=60; SEED=frames-123 repeats one
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

modes: $(VENV)/stamp           ## every recorded architecture in every mode, natively and not: minutes
	$(BIN)/python -m tests.modes $(NAMES)

native: $(VENV)/stamp          ## build the native products now; commands build them in the background
	$(BIN)/python -m toastkit.native.building.libraries

# What pip would install it for has the C library of this machine, or a newer one.
wheel: $(VENV)/stamp           ## dist/: native products compiled, for this platform and its MLX
	rm -rf build toastkit/native/ready
	platform="$$($(BIN)/python -m toastkit.native.building.wheel)" && \
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist \
		--config-settings="--build-option=--plat-name=$$platform" .; \
	status=$$?; rm -rf build toastkit/native/ready; exit $$status

KERNELS := $(wildcard tests/unit/test_native_kernels*.py) \
	$(addprefix tests/unit/test_native_,rows.py recurrent.py)

# Python itself is not compiled for them, so that the compiler's library comes in first. Races are
# in how work is shared out, for which few examples do; numpy's threads would be taken for some.
sanitize: $(VENV)/stamp        ## tests of the C++ kernels with sanitizers: EXAMPLES=0.1, a tenth
	TOAST_TEST_SANITIZERS=address,undefined ASAN_OPTIONS=detect_leaks=0 \
	TOAST_TEST_EXAMPLES=$(or $(EXAMPLES),1) \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so)" \
		$(BIN)/python -m pytest -n 2 --dist worksteal -p no:faulthandler $(KERNELS)
	TOAST_TEST_SANITIZERS=thread TSAN_OPTIONS="die_after_fork=0 halt_on_error=1" \
	OPENBLAS_NUM_THREADS=1 TOAST_TEST_EXAMPLES=$(or $(EXAMPLES),0.05) \
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" \
		$(BIN)/python -m pytest -n 2 --dist worksteal -p no:faulthandler --capture=sys $(KERNELS)

# Wants mmdebstrap, qemu-user and g++-aarch64-linux-gnu.
arm: $(VENV)/stamp             ## those tests as 64-bit ARM, emulated; skipped where that cannot be
	tests/arm.sh "$(CURDIR)/.pytest_cache/arm" $(BIN)/python -n 2 --dist worksteal $(KERNELS)

check: lint types test         ## formatter, linter, types, man pages, tests

lint: $(VENV)/stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

UNTOLD := arg-type assignment call-overload dict-item method-assign misc operator str-bytes-safe \
	str-unpack union-attr var-annotated

# Of benchmarks, which nothing else runs: that what they call is there and takes what it is given.
types: $(VENV)/stamp
	$(BIN)/mypy toastkit
	$(BIN)/mypy --cache-dir .mypy_cache/benchmarks $(UNTOLD:%=--disable-error-code=%) benchmarks/*.py

man:                           ## needs mandoc
	mandoc -T lint -W warning man/man1/*.1 man/man5/*.5 man/man7/*.7

format: $(VENV)/stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
