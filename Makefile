# make pack   text -> examples -> histogram -> plan -> packed TFRecords -> verified
# make train  packed TFRecords -> trained and evaluated BERT -> report.html
# make finetune  that BERT -> a task that it learns, and its answers -> report.html; runs FINETUNE (default: the demo's task)
# The first two run PIPELINE (default: the demo); SET="packing.depth=4 training.updates=100" changes settings of it.

PIPELINE ?= pipelines/demo.yaml
FINETUNE ?= pipelines/finetune-demo.yaml
WORK ?= work
SET ?=
IMAGES ?= data train-cpu
PYTHON ?=
PYTEST_ARGUMENTS ?= -n auto --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
# What .venv holds by now, from little to all: each part is installed over the ones that it needs.
LINT := .venv/.lint-complete
TEST_FAST := .venv/.test-fast-complete
TESTS := .venv/.tests-complete
# SET=training.engine=pytorch brings PyTorch in place of TensorFlow.
ENGINE := $(if $(findstring engine=pytorch,$(SET)),pytorch,tensorflow)
PRODUCT := .venv/.product-$(ENGINE)-complete
HOROVOD := .venv/.horovod-complete
REQUIREMENTS := pyproject.toml constraints.txt scripts/make-venv.sh
INSTALL = @PYTHON='$(PYTHON)' scripts/make-venv.sh $(1) && touch $@
SETTINGS := $(foreach setting,$(SET),--set '$(setting)')
RUN = $(BIN)/gaudi-bert run $(1) --work $(WORK) $(SETTINGS)
# Benchmarks are held to what they call, not to the types of their figures.
FIGURES := arg-type assignment call-overload dict-item index misc no-untyped-def operator union-attr unused-ignore
FAST := artefacts common config corpus packing reading tfrecords
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGUMENTS)

# Hundreds of processes are started by the tests: none compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help setup setup-horovod setup-test pack train finetune test test-all test-fast test-long test-imitated lint check docs
.PHONY: bench images
.PHONY: k8s clean
# The stages of one work folder are run in order, whatever -j says.
.NOTPARALLEL:

help:
	@echo "make setup       install what the demo needs into .venv"
	@echo "make pack        pack the data of a pipeline file, and prove that nothing was lost"
	@echo "make train       train on the packs, evaluate, and write a report"
	@echo "make finetune    fine-tune the demo's model for a task, and predict"
	@echo "make lint        check format, lint and types"
	@echo "make docs        build the documentation site in site/"
	@echo "make test-fast   run the tests of what packs and reads only"
	@echo "make test        run the tests that a change needs (minutes)"
	@echo "make test-all    run all tests, with Horovod (half an hour or more on two cores)"
	@echo "make test-long   try at random, 20 times as often as the tests do"
	@echo "make bench       print the figures of docs/figures.md"
	@echo "make images      build the container images"
	@echo "make k8s         render k8s/overlays/, the demo on clusters"
	@echo "make clean       remove what was built and the work folder"
	@echo
	@echo "PIPELINE=FILE  another pipeline file than pipelines/demo.yaml;   SET=KEY=VALUE  change a setting of it"
	@echo "WORK=FOLDER    another work folder than work;   FINETUNE=FILE, PYTHON=PATH, IMAGES=NAMES, PYTEST_ARGUMENTS=..."

setup: $(PRODUCT)
setup-horovod: $(HOROVOD)
setup-test: $(TESTS)

$(LINT): $(REQUIREMENTS)
	$(call INSTALL,lint)

$(TEST_FAST): $(REQUIREMENTS)
	$(call INSTALL,test-fast)

$(TESTS): $(REQUIREMENTS)
	$(call INSTALL,tests)

.venv/.product-%-complete: $(REQUIREMENTS)
	$(call INSTALL,product $*)

# Built from source, two to three minutes the first time.
$(HOROVOD): .venv/.product-tensorflow-complete
	$(call INSTALL,horovod)

pack: setup
	$(call RUN,$(PIPELINE)) --stages prepare,histogram,plan,write,verify

# Only TensorFlow's processes meet by Horovod.
HAS_PROCESSES := $(if $(filter tensorflow,$(ENGINE)),$(findstring resources.workers,$(SET)))

train: $(if $(HAS_PROCESSES),setup-horovod,setup)
	$(call RUN,$(PIPELINE)) --stages train,evaluate,report

finetune: $(if $(HAS_PROCESSES),setup-horovod,setup)
	$(call RUN,$(FINETUNE)) --stages finetune,predict,report

# All but what is marked `slow`.
test: $(TESTS)
	$(PYTEST) -m 'not slow'

# Everything; Horovod needs TensorFlow, which some Pythons have not.
test-all: $(TESTS) $(HOROVOD)
	$(PYTEST)

# The rooms of the data, without TensorFlow and PyTorch, without what takes long or tries at random.
test-fast: $(TEST_FAST)
	$(PYTEST) -m 'not slow and not hypothesis and not repeated' $(wildcard tests/test_[!er]*.py) $(addprefix tests/,$(FAST))

# What tries at random alone: properties with 20 times as many examples, and others each time; more kills, damage, schedules.
test-long: $(TESTS) $(HOROVOD)
	GAUDI_BERT_LONG_TESTS=1 $(PYTEST) -m 'hypothesis or repeated' --hypothesis-profile=long --timeout=0

# What computes, as if on another kind of processor.
test-imitated: $(TESTS)
	scripts/test-imitated.sh $(PYTEST_ARGUMENTS)

# Lint, format, types and import rules.
lint: $(LINT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gaudi_bert
	$(BIN)/mypy benchmarks $(addprefix --disable-error-code=,$(FIGURES))
	$(BIN)/python -m pytest -q tests/test_architecture.py

check: lint

# A broken link, a missing page or a public name without a docstring ends it.
docs: $(LINT)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(TESTS) $(HOROVOD)
	for part in packing records prepare training leaks pytorch predict; do $(BIN)/python benchmarks/$$part.py || exit 1; done
	$(BIN)/python benchmarks/finetuning.py --only speed-up trainer --rows 8000 --rounds 2

images:
	scripts/make-images.sh $(IMAGES)

# The demo on clusters, after a change of its pipeline files, of the manifests or of the version.
k8s: $(LINT)
	$(BIN)/python scripts/write_k8s_demo.py

clean:
	rm -rf .venv $(WORK) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
