"""An example of each command, for the foot of its help; and the choices of options, for help and for completion."""

from __future__ import annotations

# Tests parse each one.
EXAMPLES = {
    "estimate": "gaudi-bert estimate wikipedia-512",
    "prepare": "gaudi-bert prepare text/ --train-vocab 30000 --out examples/",
    "tokenize": "gaudi-bert tokenize texts.jsonl --tokenizer model/ --max-sequence-length 512 --out tokens/",
    "import": "gaudi-bert import rows.parquet --out tfrecords/",
    "histogram": "gaudi-bert histogram my-tfrecords/ --out histogram.json",
    "plan": "gaudi-bert plan histogram.json --out plan.json --algorithm optimal",
    "write": "gaudi-bert write my-tfrecords/ --plan plan.json --out packed/",
    "pack": "gaudi-bert pack my-tfrecords/ --out packed/ --verify",
    "verify": "gaudi-bert verify my-tfrecords/ packed/",
    "convert": "gaudi-bert convert packed/ --to hdf5 --out packed-hdf5/",
    "inspect": "gaudi-bert inspect packed/ --record 7 --vocab vocab.txt",
    "train": "gaudi-bert train --data packed/ --out run/ --model bert-base --set training.learning_rate=1e-4",
    "evaluate": "gaudi-bert evaluate --data packed-held-out/ --checkpoint run/",
    "verify-model": "gaudi-bert verify-model --checkpoint run/",
    "export": "gaudi-bert export --checkpoint run/ --format huggingface --out model/",
    "finetune": (
        "gaudi-bert finetune --task classification --data train.jsonl --evaluation dev.jsonl --model model/ --out tuned/"
    ),
    "predict": "gaudi-bert predict --model tuned/ --data new.jsonl --out answers.jsonl",
    "embed": "gaudi-bert embed --model model/ --data texts.jsonl --out vectors.npy",
    "run": "gaudi-bert run demo --stages prepare,histogram,plan,write,verify",
    "init": "gaudi-bert init wiki",
    "report": "gaudi-bert report work/demo",
    "settings": "gaudi-bert settings training",
    "doctor": "gaudi-bert doctor --pipeline wiki.yaml",
}

_ENGINES = ("tensorflow", "pytorch")
_ALGORITHMS = ("nnls", "optimal", "nnlshp", "ennlshp", "spfhp", "lpfhp", "greedy", "ffd", "none")
_PRECISIONS = ("float32", "bfloat16")
_BAD_ROWS = ("stop", "skip")
_TOO_LONG = ("error", "truncate", "split", "drop")

# By command and option; `*` is every command.
_CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    ("*", "engine"): _ENGINES,
    ("*", "algorithm"): _ALGORITHMS,
    ("*", "precision"): _PRECISIONS,
    ("*", "on_bad_row"): _BAD_ROWS,
    ("*", "too_long"): _TOO_LONG,
    ("run", "on"): ("local", "docker", "kubernetes"),
    ("plan", "leftovers"): ("best-fit", "complement"),
    ("convert", "to"): ("hdf5", "parquet", "predecessor"),
    ("export", "format_"): ("huggingface", "google", "savedmodel"),
    ("embed", "pooling"): ("cls", "mean", "max"),
    ("verify-model", "attention"): ("sdpa", "eager", "flex_attention"),
}


def choices_of(command: str, option: str) -> tuple[str, ...]:
    """What an option may be, where it is one of a few words."""
    return _CHOICES.get((command, option)) or _CHOICES.get(("*", option), ())
