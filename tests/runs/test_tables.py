"""`train` on a packed table: the losses of `transformers` on single rows, a folder that it opens, stopped and resumed."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)

import torch
import transformers

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.common.errors import InputError, StoppedError
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.runs.tables import TableEvaluation, WordTargets, open_packed_table, train_on_table
from gaudi_bert.training.batches import TrainingOrder
from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint
from gaudi_bert.training.loop import compute_learning_rate
from tests.builders.agree import agree, identical
from tests.builders.command_line import refusal, succeed
from tests.builders.effort import once, sampled
from tests.builders.encoders import CONFIGS, SIZES, TOKENIZER
from tests.builders.json_lines import lines_of, losses_of
from tests.builders.launched import MPIRUN, TORCHRUN, finished, kill_at
from tests.builders.reporters import QUIET, Listener, StopAfter
from tests.builders.tables import LENGTH, loss_of_rows, single_rows, table_batches, write_table

pytestmark = pytest.mark.usefixtures("one_thread")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
UPDATES = {
    "updates": 20, "warmup_updates": 5, "global_batch_sequences": 24, "micro_batch_packs": 3, "log_every_updates": 1,
    "save_every_updates": 8, "evaluate_every_updates": 10, "threads": 1,
}  # fmt: skip
ROW_LENGTHS = "8,12,24"
AUTO = {"roberta": "AutoModelForMaskedLM", "bert": "AutoModelForMaskedLM", "gpt2": "AutoModelForCausalLM"}


def config_of(name: str) -> Any:
    if name == "gpt2":
        return transformers.GPT2Config(
            vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    return CONFIGS["minilm" if name == "bert" else name](**NO_DROPOUT)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed tables `train` and `evaluation`, and a folder of each model."""

    def make(folder: Path) -> None:
        write_table(folder / "train", 300, 1)
        write_table(folder / "evaluation", 60, 2)
        for name in ("train", "evaluation"):
            words = ("--row-lengths", ROW_LENGTHS, "--out", folder / name / "rows", "--verify")
            succeed("pack", folder / name / "tokens", *words)
        for name, auto in AUTO.items():
            torch.manual_seed(3)
            getattr(transformers, auto).from_config(config_of(name)).save_pretrained(folder / name)

    return once(tmp_path_factory, "word-models", make)


def settings(**training: Any) -> PipelineSettings:
    values = {"training": {**UPDATES, "threads": None, **training}, "task": {"masked_lm_probability": 0.2}}
    return section_from_mapping(PipelineSettings, values, "test")


def trained(files: Path, model: str, out: Path, reporter: Any = QUIET, packs: str = "packed", **training: Any) -> Any:
    data, evaluation = files / "train" / packs, files / "evaluation" / packs
    return train_on_table(settings(**training), data, files / model, evaluation, out, reporter=reporter).content


def of_table(files: Path, name: str, data: str) -> tuple[Any, WordTargets]:
    """A table, and what is predicted of it."""
    from gaudi_bert.tasks.task_models import make_mask_vocabulary

    source = open_packed_table(files / data / "packed")
    if name == "gpt2":
        return source, WordTargets("causal-language-modelling", settings().training.seed, 0.2)
    return source, WordTargets(
        "masked-language-modelling", settings().training.seed, 0.2, make_mask_vocabulary(source.tokenizer)
    )


def losses_of_the_twin(files: Path, name: str, steps: int) -> list[float]:
    """Training as one would write it with `transformers` and PyTorch: padded rows, AdamW, clipping, the learning rate."""
    training = settings().training
    model = getattr(transformers, AUTO[name]).from_pretrained(files / name).train()
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    scales = {id(parameter) for module in norms for parameter in module.parameters()}
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for key, parameter in model.named_parameters():
        groups[not (key.endswith("bias") or id(parameter) in scales)].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": training.weight_decay}, {"params": groups[False], "weight_decay": 0.0}],
        betas=(training.beta_1, training.beta_2),
        eps=training.epsilon,
    )
    source, targets = of_table(files, name, "train")
    order = TrainingOrder(training.seed, 4096)
    batches = table_batches(source, targets, training.micro_batch_packs, order)
    losses = []
    for update in range(1, training.updates + 1):
        rows = [row for batch in itertools.islice(batches, steps) for row in single_rows(batch)]
        loss = loss_of_rows(model, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(update, training)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "engine"), sampled([("roberta", "auto"), ("bert", "pytorch"), ("bert", "tensorflow"), ("gpt2", "auto")], 2)
)
def test_losses_are_those_of_transformers_on_single_rows(files: Path, name: str, engine: str, tmp_path: Path) -> None:
    if engine == "tensorflow":
        pytest.importorskip("tensorflow", exc_type=ImportError)
    listener, out = Listener(), tmp_path / "out"
    result = trained(files, name, out, listener, engine=engine)
    planned = train_on_table(
        settings(), files / "train" / "packed", files / name, None, tmp_path / "no", reporter=QUIET, dry_run=True
    )
    assert not (tmp_path / "no").exists()
    losses = losses_of(out)
    wanted = losses_of_the_twin(files, name, planned.plan.accumulation_steps)
    agree(losses[0], wanted[0], 1e-5)
    agree(losses, wanted, 1e-4)
    assert losses[-1] < losses[0] - 0.1

    # What is in the folder is the model that was evaluated, and `transformers` opens it without a word.
    model, report = getattr(transformers, AUTO[name]).from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == result.model
    source, targets = of_table(files, name, "evaluation")
    held_out = TableEvaluation(source, targets, 300, 3, None)
    rows = [row for batch, _ in held_out.read_batches(0, 1) for row in single_rows(batch)]
    with torch.no_grad():
        agree(result.evaluation.loss, loss_of_rows(model.eval(), rows).item(), 1e-5)
    assert result.evaluation.sequences == len(rows) == source.count("sequences")
    assert transformers.AutoTokenizer.from_pretrained(out)("alpha")["input_ids"] == TOKENIZER.encode("alpha").ids
    (*_, evaluated) = (line for line in lines_of(out / "metrics.jsonl") if line["kind"] == "evaluation")
    identical(evaluated["loss"], result.evaluation.loss)
    data = files / "train" / "packed"
    again = train_on_table(settings(), data, files / name, files / "evaluation" / "packed", out, reporter=QUIET)
    assert again.skipped
    assert again.content == result


def test_an_evaluation_has_every_pack_once_and_the_same_masks_by_any_number_of_processes(files: Path) -> None:
    table, targets = of_table(files, "roberta", "train")

    def evaluated(batch_packs: int, size: int, take: int | None = None) -> list[tuple[bytes, ...]]:
        found = []
        for rank in range(size):
            for batch, _ in TableEvaluation(table, targets, 300, batch_packs, take).read_batches(rank, size):
                assert len(batch["targets"]) == batch_packs
                real = batch["sequence_weights"].any(axis=1)
                assert not batch["target_weights"][~real].any()
                found += [tuple(batch[name][row].tobytes() for name in sorted(batch)) for row in np.flatnonzero(real)]
        return sorted(found)

    one = evaluated(1, 1)
    assert len(one) == table.count("packs")
    assert evaluated(5, 1) == evaluated(4, 3) == one
    assert len(evaluated(4, 1, take=6)) == 6
    short = replace(table, tables=(table.tables[0].model_copy(update={"max_sequence_length": 47}),))
    with pytest.raises(
        InputError, match=r"packed-00000-.*: row \d+ contains 48 tokens, but must contain 47 tokens with ids from 0 to 290; "
    ):
        next(TableEvaluation(short, targets, 300, 1, None).read_batches(0, 1))


@pytest.mark.slow
def test_rows_of_several_lengths_learn_what_rows_of_one_do(files: Path, tmp_path: Path) -> None:
    """All sequences in each of twenty updates."""
    source = open_packed_table(files / "train" / "packed")
    batch, listener = {"global_batch_sequences": source.count("sequences"), "engine": "pytorch"}, Listener()
    one, several = (
        trained(files, "bert", tmp_path / packs, listener, packs, micro_batch_packs=most, **batch)
        for packs, most in (("packed", source.count("packs")), ("rows", 300))
    )
    assert re.search(r"an update contains 300\.0 sequences on average: 1\.0 x .* 1\.0 x .* 1\.0 x ", listener.text), (
        listener.text
    )
    losses = [losses_of(tmp_path / packs) for packs in ("packed", "rows")]
    agree(losses[1], losses[0], 1e-5, scale=1.0)
    agree(several.evaluation.loss, one.evaluation.loss, 1e-5)
    assert (several.sequences, several.evaluation.words) == (one.sequences, one.evaluation.words)


def test_a_run_of_fresh_weights_is_taken_by_finetune_and_embed(files: Path, tmp_path: Path) -> None:
    values = {"model_type": "roberta", **{name: value for name, value in SIZES.items() if name != "vocab_size"}}
    (tmp_path / "config.json").write_text(json.dumps({**values, "max_position_embeddings": LENGTH + 2}), encoding="utf-8")
    words = ["train", "--data", files / "train" / "packed", "--model", "config.json", "--out", "run"]
    words += [f"--set=training.{key}={value}" for key, value in {**UPDATES, "updates": 6, "warmup_updates": 2}.items()]
    done = json.loads(succeed(*words, "--json", folder=tmp_path).stdout)
    assert (done["task"], done["model"], done["updates"]) == ("masked-language-modelling", "RobertaForMaskedLM", 6)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["vocab_size"], config["pad_token_id"], config["eos_token_id"]) == (TOKENIZER.get_vocab_size(), 1, 2)
    opened, report = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    (tmp_path / "rows.jsonl").write_text('{"text": "alpha beta", "label": "x"}\n{"text": "zeta", "label": "y"}\n')
    words = ["--data", "rows.jsonl", "--model", "run"]
    task = ("--task", "classification", f"--set=finetune.max_sequence_length={LENGTH}")
    tuned = succeed("finetune", *task, *words, "--out", "tuned", "--dry-run", folder=tmp_path)
    assert "run (roberta of transformers): 3 layers" in tuned.stderr
    succeed("embed", *words, "--out", "vectors.npy", "--pooling", "cls", folder=tmp_path)
    with torch.no_grad():
        first = opened.eval().roberta(torch.tensor([TOKENIZER.encode("zeta").ids])).last_hidden_state[0, 0]
    agree(np.load(tmp_path / "vectors.npy")[1], first.numpy(), 1e-5, scale=1.0)


# --- stopped, killed, in two processes


def weights_of(out: Path) -> dict[str, Any]:
    stored = read_checkpoint(find_checkpoint(out))
    return {**stored.variables, **{f"moment {name}": value for name, value in stored.first_moments.items()}}


def test_a_stopped_run_ends_with_the_same_bits(files: Path, tmp_path: Path) -> None:
    """In rows of several lengths; with dropout, which the folder's config leaves at 0."""
    torch.manual_seed(3)
    model = transformers.AutoModelForMaskedLM.from_config(CONFIGS["roberta"]())
    assert model.config.hidden_dropout_prob > 0
    model.save_pretrained(tmp_path / "m")
    whole = trained(files, str(tmp_path / "m"), tmp_path / "whole", packs="rows")
    with pytest.raises(StoppedError):
        trained(files, str(tmp_path / "m"), tmp_path / "stopped", StopAfter(7), "rows")
    listener = Listener()
    assert trained(files, str(tmp_path / "m"), tmp_path / "stopped", listener, "rows").evaluation == whole.evaluation
    assert "train: resuming after update 8" in listener.text
    identical(weights_of(tmp_path / "stopped"), weights_of(tmp_path / "whole"))


@pytest.mark.slow
def test_two_processes_killed_and_resumed_by_torchrun_leave_what_mpirun_leaves(files: Path, tmp_path: Path) -> None:
    """In rows of several lengths. That two processes learn what one does is in `tests/training/test_run.py`."""

    def command(out: str, *launcher: str) -> list[str]:
        words = ["-m", "gaudi_bert", "train", "--data", files / "train" / "rows", "--model", files / "roberta"]
        words += ["--evaluation-data", files / "evaluation" / "rows", "--out", tmp_path / out]
        changes = {"updates": 12, "micro_batch_packs": 1, "save_every_updates": 4, "evaluate_every_updates": 12}
        values = {f"training.{key}": value for key, value in {**UPDATES, **changes}.items()}
        values["task.masked_lm_probability"] = 0.2
        return [*launcher, *map(str, words), *(f"--set={key}={value}" for key, value in values.items())]

    kill_at(tmp_path / "killed" / "checkpoints" / "update-00000004.safetensors", command("killed", *TORCHRUN))
    assert not (tmp_path / "killed" / "training.json").exists()
    finished(command("killed", *TORCHRUN))
    finished(command("undisturbed", *(TORCHRUN if shutil.which("mpirun") is None else MPIRUN)))
    identical(weights_of(tmp_path / "killed"), weights_of(tmp_path / "undisturbed"))
    killed_model, model = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "undisturbed"))
    assert killed_model == model
    assert json.loads((tmp_path / "killed" / "training.json").read_text())["processes"] == 2


# --- what is refused, in a line


@pytest.fixture(scope="module")
def refused(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which commands go wrong."""
    folder = tmp_path_factory.mktemp("refused")
    for name in ("packed", "tokens"):
        shutil.copytree(files / "train" / name, folder / name)
    shutil.copytree(folder / "packed", folder / "without")
    (folder / "without" / NOTES_NAME / "tokenizer.json").unlink()
    write_table(folder / "other", 20, 3)
    other = json.loads(TOKENIZER.to_str().replace('"<mask>"', '"<hidden>"'))
    (folder / "other" / "packed" / NOTES_NAME / "tokenizer.json").write_text(json.dumps(other))
    types = {"short": "roberta", "clip": "clip", "list": ["roberta"]}
    for name, kind in types.items():
        (folder / f"{name}.json").write_text(json.dumps({**SIZES, "model_type": kind, "max_position_embeddings": 40}))
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--data without",
            r"without: the table was packed without its tokenizer; tokenize the texts with `gaudi-bert tokenize`, .*",
        ),
        ("--data tokens", "tokens: the table is not packed; run `gaudi-bert pack tokens --out packed/` first"),
        (
            "--data packed --evaluation-data other/packed",
            r"other/packed/.*: the token '<mask>' has no id, but its id in packed is 3; .*",
        ),
        ("--data other/packed --model roberta", r"other/packed/.* has no mask token; pass the tokenizer .*"),
        (
            "--data packed --model short.json",
            "packed: the packs have 48 tokens, but the model has only 38 positions; pack the table into .*",
        ),
        (
            "--data packed --model clip.json",
            "model type 'clip': transformers has no language modelling head .*; choose .*",
        ),
        (
            "--data packed --model list.json",
            "list.json: the file contains no model_type; pass the config.json of a .*",
        ),
        ("--data packed --model robreta", "--model robreta: did you mean roberta?"),
        (
            "--data packed --set training.loss=sequence",
            "training.loss = sequence: .* supported only for packed records; .* set it to token",
        ),
        (
            "--data packed --set training.init_checkpoint=x",
            "training.init_checkpoint: .* supported only for packed records; .* --model",
        ),
        ("--data packed --resume --overwrite", "--resume cannot be combined with --overwrite; pass only one of them"),
    ],
)
def test_what_is_refused(refused: Path, words: str, message: str) -> None:
    said = refusal("train", *words.split(), "--out", "out", folder=refused)
    assert re.fullmatch(message.replace("?", r"\?"), said), said
    assert not (refused / "out").exists()
