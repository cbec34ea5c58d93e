# make run     start the example Hub on http://127.0.0.1:8000 (PORT, RUNTIME=docker, SIMULATED_GPUS, FGPU_PER_GPU)
# make test    install what the tests need, and run all but the slow parts;  make test-all  runs these too
# make test-quick  only those that need no Hub, engine or browser: a minute
# make test-kube   those that need a Kubernetes cluster; builds it the first time, in some minutes (root, Debian 12)
# make docs    the documentation as a site, in build/docs
# make dist    what a release is made of, in dist/: wheels and sdists of both packages, checksums, SBOM
# make gpu-check  what only a GPU can say, in parts (PARTS="facts hub::memory", MINUTES=10; LIST=1 says which, and what to carry; SIMULATED=1)
# make isolation  build libfgpu, the probes and the simulated driver, into fgpuspawner/native
# make image   build a session image (NAME=tensorflow-1.15; BASE=host: without a registry, from this machine's packages)

SHELL := /bin/bash
PY := .venv/bin/python
export PORT ?= 8000
export RUNTIME ?= local
export SIMULATED_GPUS ?= auto
export FGPU_PER_GPU ?= 2
BASE ?=
NAME ?= base

.PHONY: run test test-quick test-all test-kube gpu-check lint format docs isolation image bench clean

run:
	@scripts/setup.sh run
	@if [ "$(RUNTIME)" = docker ]; then $(MAKE) --no-print-directory image-if-missing; fi
	@exec $(PY) scripts/run.py

.PHONY: image-if-missing
image-if-missing:
	@docker image inspect fgpuspawner/base:0.1 >/dev/null 2>&1 || $(MAKE) --no-print-directory image

image:
	@scripts/setup.sh run
	@scripts/image.sh $(NAME) $(BASE)

test:
	@scripts/setup.sh test
	@scripts/test.sh

test-quick:
	@scripts/setup.sh test
	@scripts/test.sh --quick

test-all:
	@scripts/setup.sh test
	@scripts/test.sh --slow

test-kube:
	@scripts/setup.sh test
	@scripts/test.sh --kube

# Installs nothing: a machine with a GPU may have no network. OUT is a folder for the results.
gpu-check:
	@$(or $(wildcard $(PY)),python3) tests/gpu/check.py $(PARTS) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(LIST),--list) $(if $(CARRY),--carry) \
	  $(if $(SIMULATED),--simulated) $(if $(OUT),--out '$(OUT)')

lint:
	@scripts/setup.sh test
	@scripts/test.sh --lint

format:
	@scripts/setup.sh test
	@.venv/bin/ruff check --fix --quiet . ; .venv/bin/ruff format --quiet .

docs:
	@scripts/setup.sh docs
	@$(PY) scripts/site.py

.PHONY: dist
dist:
	@scripts/setup.sh run
	@scripts/dist.sh

isolation:
	@scripts/setup.sh run
	@$(PY) scripts/build_isolation.py

bench:
	@scripts/setup.sh test
	@$(PY) bench/spawn.py

clean:
	rm -rf .venv .node labextension/node_modules labextension/lib labextension/dist \
	  labextension/jupyterlab_fgpu/labextension isolation/build fgpuspawner/native
