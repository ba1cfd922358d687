# A thin front for CMake and Ninja; `make help` lists what there is.
BUILD ?= build
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 120
LONG_FUZZ_SECONDS ?= 1200
BENCH ?= engine
CMAKE_FLAGS ?=

.DEFAULT_GOAL := all
.SUFFIXES:
export JOBS

.PHONY: help all demo test test-long deps install asan tsan fuzz bench format tidy oracle gpu-test \
        gpu-bench clean need-build-tools

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | \
	    while IFS='|' read -r target what; do printf '%-18s %s\n' "$$target" "$$what"; done
	@printf '%s\n' '' 'Variables: BUILD=build JOBS=n PREFIX=/usr/local DESTDIR= CMAKE_FLAGS= FUZZ_SECONDS=120' \
	    '           LONG_FUZZ_SECONDS=1200 BENCH=engine'

all: need-build-tools ## build; the program is build/switchyard (this is the default)
	@mkdir -p $(BUILD)
	@cmake -G Ninja -S . -B $(BUILD) $(CMAKE_FLAGS) >$(BUILD)/configure.log 2>&1 || \
	    { cat $(BUILD)/configure.log; exit 1; }
	@cmake --build $(BUILD) -j $(JOBS) $(if $(TARGET),--target $(TARGET))

need-build-tools:
	@for tool in cmake ninja pkg-config; do command -v $$tool >/dev/null || \
	    { echo "make: there is no $$tool; 'make deps' installs what is needed" >&2; exit 1; }; done

demo: ## install missing packages, build, and answer questions with models/demo
	@tools/deps.sh build
	@$(MAKE) --no-print-directory all TARGET=switchyard
	@tools/demo.sh $(BUILD)/switchyard

test: ## install what tests need and run what CI runs (at most 25 minutes on 2 cores)
	@tools/deps.sh test
	@FUZZ_SECONDS=$(FUZZ_SECONDS) tools/test.sh short

test-long: ## the rest: long tests, whole suite under ASan, static analysis, more fuzzing
	@tools/deps.sh long
	@FUZZ_SECONDS=$(LONG_FUZZ_SECONDS) tools/test.sh long

deps: ## install missing system packages for everything
	@tools/deps.sh all

install: all ## install into PREFIX (below DESTDIR): program, libraries, headers, pkg-config
	@DESTDIR="$(DESTDIR)" cmake --install $(BUILD) --prefix "$(PREFIX)"

asan: ## run the sanitizer subset with AddressSanitizer and UBSan, in build-asan
	@tools/test.sh asan

tsan: ## run the sanitizer subset with ThreadSanitizer, in build-tsan
	@tools/test.sh tsan

fuzz: ## run every fuzz target, FUZZ_SECONDS together, in build-fuzz
	@FUZZ_SECONDS=$(FUZZ_SECONDS) tools/test.sh fuzz

bench: all ## measure speed: switchyard bench $(BENCH)
	@$(BUILD)/switchyard bench $(BENCH)

format: ## format all sources with clang-format
	@python3 -B tools/check_format.py . --fix

tidy: all ## static analysis with clang-tidy
	@tools/check_tidy.sh $(BUILD)

oracle: ## compute the reference values again with PyTorch and transformers (GPU machine)
	@$${PYTHON:-python3} -B tools/families/oracle.py tests/golden/families build/oracle/families
	@echo "oracle: compare with: diff -r tests/golden/families build/oracle/families"
	@tools/demo-model/oracle.sh

gpu-test: ## build the CUDA tests and run them, if there are nvcc and a GPU
	@tools/gpu.sh test $(BUILD)

gpu-bench: ## measure the CUDA kernels, if there are nvcc and a GPU
	@tools/gpu.sh bench $(BUILD)

clean: ## remove all build folders
	@rm -rf build build-asan build-tsan build-fuzz build-cover $(BUILD)
