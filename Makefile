# Everything runs in .venv, which `make install` makes; a target that needs it makes it first.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

# TORCH=oldest or newest: with what these files name, not what is pinned, and in an environment of its own.
TORCH ?=
VERSIONS := $(if $(TORCH),requirements-torch-$(TORCH).txt requirements-triton-$(TORCH).txt)
VENV := $(if $(TORCH),build/torch-$(TORCH),.venv)
RUN := $(VENV)/bin/python
STAMP := $(VENV)/installed
CONSTRAINTS := $(VENV)/constraints.txt
PIP_INSTALL := $(RUN) -m pip install --constraint $(CONSTRAINTS)
BUILD_INPUTS := pyproject.toml constraints.txt setup.py CMakeLists.txt $(shell find cmake csrc -type f)

.PHONY: help install demo experiments bench test test-slow test-exhaustive test-cpus test-amx test-stable test-work record-work test-asan \
	test-torch-allocator test-composer test-mds test-deepspeed test-transformers-oldest test-transformers-newest test-triton-oldest test-triton-newest \
	mutate wheels build-arm build/arm/module docs lint format clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '%-22s %s\n' "$$target" "$$text"; done
	@echo 'make test-cpus, test-composer, test-mds, ...: what else .ci/run calls, each for an environment of its own'

install: $(STAMP)  ## make .venv with the pinned tools, and build the project into it

$(STAMP): $(BUILD_INPUTS) $(VERSIONS)
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),grep -vE "^(torch|triton|setuptools)==",cat) constraints.txt | cat - $(VERSIONS) > $(CONSTRAINTS)
	$(PIP_INSTALL) setuptools cmake ninja pybind11 torch
	$(PIP_INSTALL) --no-build-isolation --editable ".[dev]"
	$(RUN) -m seqwarm_kernels info
	touch $@

demo: $(STAMP)  ## run the demo; ARGS="--help" lists its options
	$(RUN) -m seqwarm_kernels demo $(ARGS)

# Of docs/benchmarks/experiments.md. Stopped and called again, it goes on.
OUT ?= reports/experiments
experiments: $(STAMP)  ## train the experiments at toy size, an hour on 2 cores; TEXT="my_corpus/", ARGS="--only a"
	$(RUN) -m bench training --out $(OUT) $(if $(TEXT),--text $(TEXT)) $(ARGS)

PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses $(WORKERS)

test: $(STAMP)  ## run the fast tests, of every property one; ARGS="-k name" selects some
	$(PYTEST) --dist loadgroup $(ARGS)

bench: $(STAMP)  ## time each operator beside the same in plain PyTorch, two minutes
	$(RUN) -m pytest bench/operators.py --benchmark-group-by=group --benchmark-columns=median,iqr,rounds --benchmark-max-time=0.5 \
		--benchmark-sort=name -p no:cacheprovider -q $(ARGS)

# One test reads WikiText-2, if a folder beside the project holds it. `make test` needs no such folder.
test-slow: export SEQWARM_TEST_DATA ?= $(abspath $(wildcard ../shared/data))
test-slow: $(STAMP)  ## run the tests that `make test` leaves out, without the exhaustive ones
	$(PYTEST) -m "slow and not exhaustive" $(ARGS)

# Property tests that are not marked run with ten times the examples of `make test`.
test-exhaustive: $(STAMP) build/composer/installed  ## run the exhaustive tests: whole grids, fuzzing, kills, wheels
	$(PYTEST) -m "exhaustive or (hypothesis and not slow)" --hypothesis-profile exhaustive $(ARGS)
	PYTHONPATH=build/composer $(PYTEST) -m exhaustive tests/trainers/composer $(ARGS)

# An older CPU is asked of libtorch, whose answer picks our kernels, and of oneDNN, which multiplies for them.
test-cpus: $(STAMP)  # run the native kernels' tests as on CPUs with AVX2 only, and with neither
	for capability in avx2 default; do \
		echo "ATEN_CPU_CAPABILITY=$$capability"; \
		ATEN_CPU_CAPABILITY=$$capability ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 \
			$(RUN) -m pytest --numprocesses $(WORKERS) -k "native or (attention_decoding and not triton)" tests/ops $(ARGS) || exit 1; \
	done

# A build with other options in a copy of the project, $(1)/tree, so that the one in use stays as it is.
define build_copy
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake -G Ninja -S . -B $(1) -D SEQWARM_EMULATE_AMX=ON $(2) \
		-D CMAKE_BUILD_TYPE=Checks -D Python_EXECUTABLE=$(abspath $(RUN)) \
		-D SEQWARM_TORCH_VERSION=$$($(RUN) -c "import torch; print(torch.__version__)") \
		-D SEQWARM_SHORT_CALLS=ON -D SEQWARM_MODULE=$(SHORT_CALLS) \
		-D TORCH_INSTALL_PREFIX=$$($(RUN) -c "import os, torch; print(os.path.dirname(torch.__file__))") \
		-D pybind11_DIR=$$($(RUN) -m pybind11 --cmakedir)
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake --build $(1)
	rm -rf $(1)/tree && mkdir -p $(1)/tree
	cp -r seqwarm_kernels tests pyproject.toml $(1)/tree
	rm -f $(1)/tree/seqwarm_kernels/*.so && cp $(1)/_*.so $(1)/tree/seqwarm_kernels
endef
SHORT_CALLS = $$($(RUN) -c "import torch; from seqwarm_kernels.ops.kernels import module_name; print(module_name(torch.__version__))")

# A copy of the project with the kernels on PyTorch's stable ABI, as in a wheel, and without the module for this torch.
STABLE := build/stable/tree
test-stable: $(STAMP)  # run the native kernels' tests with the kernels on PyTorch's stable ABI
	rm -rf $(STABLE) && mkdir -p $(STABLE) && cp -r seqwarm_kernels tests pyproject.toml $(STABLE)
	rm $(STABLE)/seqwarm_kernels/_C_*
	cd $(STABLE) && OMP_NUM_THREADS=1 $(abspath $(RUN)) -m pytest --numprocesses $(WORKERS) \
		-k "native or test_kernels or (attention_decoding and not triton)" tests/ops tests/attention tests/resizing $(ARGS)

# On CPUs without AVX512-BF16 these products are not used, and the tests run without them.
AMX := build/amx
test-amx: $(STAMP)  # run the native kernels' tests in bfloat16 with AMX, emulated on CPUs with AVX512-BF16
	$(call build_copy,$(AMX),-D CMAKE_CXX_FLAGS_CHECKS=-O1)
	cd $(AMX)/tree && SEQWARM_EMULATED_AMX=1 OMP_NUM_THREADS=1 $(abspath $(RUN)) -m pytest --numprocesses $(WORKERS) \
		-k native tests/ops/test_attention_native.py tests/ops/test_attention_native_short.py \
		tests/ops/test_attention_kernels.py $(ARGS)

# The records are of a compiler and a CPU; on others the tests are skipped, until `python -m tests.block_counts` records them.
WORK := build/work
RUN_WORK = cd $(WORK)/tree && OMP_NUM_THREADS=1 $(abspath $(RUN)) -m
test-work: $(STAMP)  # count the basic blocks that native kernels execute, with AMX emulated and without: no more than recorded
	$(call build_copy,$(WORK),-D SEQWARM_COUNT_WORK=ON -D CMAKE_CXX_FLAGS_CHECKS=-O1)
	$(RUN_WORK) pytest tests/block_counts $(ARGS)
	export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16; $(RUN_WORK) pytest tests/block_counts $(ARGS)

record-work: $(STAMP)  # record these counts, after a change that is meant to do other work
	$(call build_copy,$(WORK),-D SEQWARM_COUNT_WORK=ON -D CMAKE_CXX_FLAGS_CHECKS=-O1)
	$(RUN_WORK) tests.block_counts
	export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16; $(RUN_WORK) tests.block_counts
	cp $(WORK)/tree/tests/block_counts/records.json tests/block_counts

# First with AMX, whose products are our own in C++, then those in bfloat16 without it.
ASAN := build/asan
RUN_ASAN = cd $(ASAN)/tree && OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 SEQWARM_EMULATED_AMX=1 \
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	$(abspath $(RUN)) -m pytest --numprocesses $(WORKERS) $(ARGS)
test-asan: $(STAMP)  # run the native kernels' tests with AddressSanitizer and UBSan watching, with AMX emulated and without
	$(call build_copy,$(ASAN),-D SEQWARM_SANITIZE=ON -D CMAKE_CXX_FLAGS_CHECKS="-O1 -g1")
	$(RUN_ASAN) -k "native or (attention_decoding and not triton)" tests/ops
	export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16; $(RUN_ASAN) -k native \
		tests/ops/test_attention_native_short.py tests/ops/test_attention_kernels.py

# A folder of packages that come before .venv's, for what cannot live there: Composer would bring an old torch.
build/%/installed: $(STAMP) requirements-%.txt
	rm -rf $(@D)
	$(RUN) -m pip install --no-deps --target $(@D) --requirement requirements-$*.txt
	touch $@

test-composer: build/composer/installed  # run the tests with Composer's trainer
	PYTHONPATH=$(<D) $(PYTEST) -m "not exhaustive" -k composer tests/trainers/composer tests/trainers/test_contract.py \
		tests/trainers/test_context_parallel.py tests/trainers/test_families.py $(ARGS)

test-mds: build/mds/installed  # run the tests of sources of tokens with mosaicml-streaming
	PYTHONPATH=$(<D) $(PYTEST) -m "not exhaustive" \
		tests/data/test_sources.py tests/data/test_mds_source.py tests/data/test_token_sources.py \
		tests/faults/test_damaged_sources.py tests/faults/test_short_answers.py tests/data/test_padding.py \
		tests/data/test_source_processes.py $(ARGS)

test-deepspeed: build/deepspeed/installed  # run the tests with DeepSpeed's engine
	PYTHONPATH=$(<D) $(PYTEST) tests/trainers/test_deepspeed.py $(ARGS)

test-transformers-oldest: build/transformers-oldest/installed  # run the tests of models and trainers with the oldest transformers
test-transformers-newest: build/transformers-newest/installed  # run the tests of models and trainers with the newest transformers
test-transformers-oldest test-transformers-newest:
	PYTHONPATH=$(<D) $(PYTEST) \
		tests/models tests/allocator/test_transformers.py $$(grep -lE 'hugging_?face' tests/trainers/test_*.py) $(ARGS)

# Other versions refuse other code, and order the instructions of the Gluon kernels differently.
test-triton-oldest: build/triton-oldest/installed  # compile the attention kernels with the oldest supported Triton, which refuses more
test-triton-newest: build/triton-newest/installed  # compile the attention kernels with the newest Triton, which renames what is experimental
test-triton-oldest test-triton-newest:
	PYTHONPATH=$(<D) $(RUN) -m bench attention_compiled --chips 90 --head-dims 64
	PYTHONPATH=$(<D) $(PYTEST) -m "not exhaustive" -k gluon tests/test_bench_compiled.py $(ARGS)

# Stopped and called again, it goes on. It works in copies of the project.
mutate: $(STAMP) build/composer/installed  ## change the code one place at a time: do tests fail? hours; ARGS="--only FILE --limit 10"
	PYTHONPATH=$(abspath build/composer) $(RUN) -m tools.mutation --workers $(WORKERS) $(ARGS)

# The wheel has the kernels on the stable ABI: for any torch from 2.11 on and any Python.
wheels: $(STAMP)  ## build the source distribution and a wheel into dist/
	$(RUN) -m build --sdist --no-isolation --outdir dist
	SEQWARM_SHORT_CALLS=0 $(RUN) -m build --wheel --no-isolation --outdir dist

# Of a torch for CUDA it needs the headers and libc10_cuda.so, not the CUDA libraries. A GPU is not needed, but nvcc's headers are.
CUDA_TORCH := build/cuda-torch
test-torch-allocator: $(STAMP)  # compare the replay of the caching allocator with torch's own, in a torch for CUDA of 1.2 GB
	$(RUN) -m pip install --no-deps --target $(CUDA_TORCH) --upgrade torch==2.11.0
	SEQWARM_CUDA_TORCH=$(abspath $(CUDA_TORCH))/torch $(PYTEST) tests/allocator/test_torch_allocator.py $(ARGS)

# Linked to empty libraries in the place of libtorch's, which .venv does not have for Arm; its headers are for all CPUs.
ARM := build/arm
ARM_CXX := aarch64-linux-gnu-g++
build-arm: $(STAMP)  # compile the kernels for Arm, on any CPU; root gets the compiler by apt-get
	@command -v $(ARM_CXX) || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qqy g++-aarch64-linux-gnu; } \
		|| echo "make build-arm skipped: $(ARM_CXX) is missing, and only root can install it"
	@! command -v $(ARM_CXX) || $(MAKE) $(ARM)/module

$(ARM)/module:
	mkdir -p $(ARM)/torch/lib
	ln -sfn "$$($(RUN) -c "import os, torch; print(os.path.dirname(torch.__file__))")/include" $(ARM)/torch/include
	for name in c10 torch torch_cpu torch_python; do \
		$(ARM_CXX) -shared -x c++ /dev/null -o $(ARM)/torch/lib/lib$$name.so || exit 1; \
	done
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake -G Ninja -S . -B $(ARM) -D CMAKE_SYSTEM_NAME=Linux \
		-D CMAKE_SYSTEM_PROCESSOR=aarch64 -D CMAKE_CXX_COMPILER=$(ARM_CXX) \
		-D TORCH_INSTALL_PREFIX=$(abspath $(ARM))/torch
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake --build $(ARM)

docs: $(STAMP)  ## build the site into build/docs; a warning is an error
	$(RUN) -m sphinx -W --keep-going -n -q -b html docs build/docs $(ARGS)

lint: $(STAMP)  ## check style, formatting and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(STAMP)  ## put imports and layout in order
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info seqwarm_kernels/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find seqwarm_kernels tests bench experiments tools examples -name __pycache__ -type d -prune -exec rm -rf {} +
