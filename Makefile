# make pack   text -> examples -> histogram -> plan -> packed TFRecords -> verified
# make train  packed TFRecords -> trained and evaluated BERT -> report.html
# Both run PIPELINE (default: the demo); SET="packing.depth=4 training.updates=100" changes settings of it.

PIPELINE ?= pipelines/demo.yaml
WORK ?= work
SET ?=
IMAGES ?= data train-cpu
PYTHON ?=
PYTEST_ARGUMENTS ?= -n auto

BIN := .venv/bin
PRODUCT := .venv/.product-complete
HOROVOD := .venv/.horovod-complete
TESTING := .venv/.testing-complete
SETTINGS := $(foreach setting,$(SET),--set '$(setting)')
RUN := $(BIN)/gaudi-bert run $(PIPELINE) --work $(WORK) $(SETTINGS)

.DELETE_ON_ERROR:
.PHONY: help setup setup-horovod setup-test pack train test check bench images clean
# The stages of one work folder are run in order, whatever -j says.
.NOTPARALLEL:

help:
	@echo "targets: setup pack train test check bench images clean; variables: PIPELINE, SET, WORK, PYTHON, IMAGES"

setup: $(PRODUCT)
setup-horovod: $(HOROVOD)
setup-test: $(TESTING)

$(PRODUCT): pyproject.toml constraints.txt scripts/make-venv.sh
	@PYTHON='$(PYTHON)' scripts/make-venv.sh product
	@touch $@

# Built from source, two to three minutes the first time.
$(HOROVOD): $(PRODUCT)
	@scripts/make-venv.sh horovod
	@touch $@

$(TESTING): $(HOROVOD)
	@PYTHON='$(PYTHON)' scripts/make-venv.sh test
	@touch $@

pack: setup
	$(RUN) --stages prepare,histogram,plan,write,verify

train: $(if $(findstring resources.workers,$(SET)),setup-horovod,setup)
	$(RUN) --stages train,evaluate,report

test: setup-test
	$(BIN)/python -m pytest $(PYTEST_ARGUMENTS)

check: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gaudi_bert
	$(BIN)/python -m pytest -q tests/test_architecture.py

bench: setup-test
	for part in packing records prepare training; do $(BIN)/python benchmarks/$$part.py || exit 1; done

images:
	scripts/make-images.sh $(IMAGES)

clean:
	rm -rf .venv $(WORK) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
