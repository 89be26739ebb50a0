# Both `make demo` and `make test` work as the first command typed in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where this is set, as in many containers, each process compiles torch and transformers for itself: 25 s a time.
unexport PYTHONDONTWRITEBYTECODE
# At the versions that Clew is developed with. Python compiles what it imports; to compile everything beforehand takes
# twice as long as the rest of the installation.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt

# Environments with real inference servers, some gigabytes: kept outside the checkout, and built again when missing.
ENGINES ?= $(HOME)/.cache/clew/engines

.PHONY: demo tour test slow stress hangs test-engines docs chaos bench gpu clean

demo: $(VENV)/demo
	$(BIN)/python -m examples.addition.demo

# The demo, unless its run is there, then five faults planted into it, each found by one command.
tour: $(VENV)/demo
	$(BIN)/python -m examples.addition.demo --unless-complete
	$(BIN)/python -m examples.addition.tour

test: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	@# Pyright takes one core, beside the first tests. Before them, what they import is compiled once, not by each worker.
	@# Not the files with the most tests first, but in order: the long tests lie in the first folders.
	$(BIN)/pyright > $(VENV)/pyright.txt & \
	$(BIN)/python -m pytest --collect-only -qq > /dev/null; \
	$(BIN)/python -m pytest -m "not slow and not engines" -n 3 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$! && types=0 || types=1; cat $(VENV)/pyright.txt; exit $$(( tests || types ))

# What takes too long for every change; CI runs it too.
slow: $(VENV)/dev
	@# The stress tests measure time: one runs on each core, and no others beside them. Of the rest, the file of the demo
	@# takes as long as half of the others, and has few tests: in order of the folders it begins early, and does not run
	@# alone at the end.
	$(BIN)/python -m pytest -m slow tests/stress -n 2; alone=$$?; \
	$(BIN)/python -m pytest -m slow --ignore tests/stress -n 2 --dist loadfile --no-loadscope-reorder && exit $$alone

# All agents of the stress test, and the example of an agent until it has learnt. `make slow` has two agents with each
# kind of fault, every second sound one, and some steps of the example.
stress: $(VENV)/dev
	CLEW_ALL_AGENTS=1 $(BIN)/python -m pytest -m "not engines" tests/stress tests/end_to_end/test_agents.py -n 2

# Before a real vLLM and a real SGLang, as far as they run without a GPU. Two files at a time: servers take long to start.
test-engines: $(VENV)/dev
	vllm=$$($(BIN)/python tests/engines/install.py vllm $(ENGINES)/vllm) && \
	sglang=$$($(BIN)/python tests/engines/install.py sglang $(ENGINES)/sglang) && \
	CLEW_VLLM_PYTHON=$$vllm CLEW_SGLANG_PYTHON=$$sglang \
	$(BIN)/python -m pytest -m engines tests/engines -n 2 --dist loadfile --no-loadscope-reorder

# The site, build/site/index.html; a warning is an error.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

# Real hangs, diagnosed by `clew hang`, and the confusion table.
hangs: $(VENV)/dev
	$(BIN)/python -m tests.hangs.run

chaos: $(VENV)/dev
	$(BIN)/python -m bench.chaos

bench: $(VENV)/bench
	$(BIN)/python -m bench.all

# With the Python that is there and its torch, never the environment: a GPU's image brings its own. Installs nothing.
gpu:
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m bench.gpu

# A newer pip than Python brings: it finds what fits together in a third of the time.
$(BIN):
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(VENV)/demo: pyproject.toml constraints.txt | $(BIN)
	$(INSTALL) -e '.[train]'
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(BIN)
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/docs: pyproject.toml constraints.txt | $(BIN)
	$(INSTALL) -e '.[docs]'
	touch $@

$(VENV)/bench: pyproject.toml constraints.txt bench/areal.txt | $(BIN)
	$(INSTALL) -e '.[dev,bench]'
	$(INSTALL) --no-deps --upgrade --target $(VENV)/areal -r bench/areal.txt
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
