"""`PackedEncoder` gives each text what `transformers` gives it alone, in order; or refuses the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from tokenizers import Tokenizer, pre_tokenizers  # noqa: E402

from gaudi_bert.common.errors import InputError  # noqa: E402
from gaudi_bert.pytorch import PackedEncoder  # noqa: E402
from tests.builders.agree import agree  # noqa: E402
from tests.builders.encoders import LABELS, TEXTS, TOKENIZER, model_of  # noqa: E402


def alone(model: Any, ids: list[int]) -> Any:
    """What the model gives one text by itself, without a mask."""
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids]))


POOLED = {
    "cls": lambda hidden: hidden[0, 0],
    "mean": lambda hidden: hidden[0].mean(0),
    "max": lambda hidden: hidden[0].max(0).values,
    "last": lambda hidden: hidden[0, -1],
}


@pytest.mark.parametrize(("name", "static"), [("roberta", True), ("modernbert", False), ("minilm", True)])
def test_vectors_are_those_of_each_text_alone(name: str, static: bool) -> None:
    model, shapes = model_of(name), set()
    encoder = PackedEncoder(model, TOKENIZER, max_sequence_length=64, static_shapes=static)
    model.register_forward_pre_hook(lambda _, __, given: shapes.add(tuple(given["input_ids"].shape)), with_kwargs=True)
    encoder.embed(TEXTS)
    assert not static or [length for _, length in shapes] == [64]
    hidden = [alone(model, TOKENIZER.encode(text).ids)[0] for text in TEXTS]
    for pooling, pool in POOLED.items():
        vectors = encoder.embed(TEXTS, pooling=pooling)
        assert (vectors.dtype, vectors.shape) == (np.float32, (len(TEXTS), 32))
        agree(vectors, torch.stack([pool(each) for each in hidden]).numpy(), 1e-5, scale=1.0)
    agree(np.linalg.norm(encoder.embed(TEXTS[:3], normalize=True), axis=1), np.ones(3), 1e-6, scale=1.0)
    assert encoder.embed([]).shape == (0, 32)


@pytest.mark.parametrize(
    ("name", "more", "expect"),
    [
        ("minilm", LABELS, lambda logits: logits.softmax(-1)[0]),
        ("modernbert", {**LABELS, "problem_type": "multi_label_classification"}, lambda logits: logits.sigmoid()[0]),
        ("roberta", {"num_labels": 1}, lambda logits: logits[0]),
    ],
)
def test_answers_for_texts(name: str, more: dict, expect: Any) -> None:
    model = model_of(name, "AutoModelForSequenceClassification", **more)
    answers = PackedEncoder(model, TOKENIZER, max_sequence_length=64).predict(TEXTS)
    assert len(answers) == len(TEXTS)
    for text, answer in zip(TEXTS, answers, strict=True):
        actual = list(answer["probabilities"].values()) if "id2label" in more else [answer["value"]]
        agree(actual, expect(alone(model, TOKENIZER.encode(text).ids).logits).tolist(), 1e-5, scale=1.0)
    assert "forward" not in vars(model.base_model), "the encoder is left as it was"


def test_tags_for_words() -> None:
    model = model_of("roberta", "AutoModelForTokenClassification", **LABELS)
    torch.nn.init.normal_(model.classifier.weight)
    texts = [text for text in TEXTS if text]
    answers = PackedEncoder(model, TOKENIZER, max_sequence_length=64).predict(texts)
    spaced = Tokenizer.from_str(TOKENIZER.to_str())
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    several = 0
    for text, answer in zip(texts, answers, strict=True):
        encoding = spaced.encode(text.split(), is_pretokenized=True)
        logits = alone(model, encoding.ids).logits[0]
        first = [encoding.word_ids.index(word) for word in range(len(text.split()))]
        tags = [["O", "B-x", "I-x"][int(logits[position].argmax())] for position in first]
        inside = {at for tag in answer["tags"] for at in range(tag["start"], tag["end"])}
        starts = np.cumsum([0, *(len(word) + 1 for word in text.split())])[:-1]
        assert [tag != "O" for tag in tags] == [int(start) in inside for start in starts]
        several += len(answer["tags"]) > 1
    assert several > 5


def test_a_tokenizer_of_transformers_and_texts_that_are_cut() -> None:
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, pad_token="<pad>", model_max_length=12)
    model = model_of("roberta")
    encoder = PackedEncoder(model, fast)
    assert encoder.max_sequence_length == 12
    expected = []
    for text in TEXTS:
        ids = TOKENIZER.encode(text).ids
        expected.append(alone(model, ids if len(ids) <= 12 else [*ids[:11], ids[-1]])[0][0].mean(0))
    agree(encoder.embed(TEXTS), torch.stack(expected).numpy(), 1e-5, scale=1.0)


CLASSES = "AutoModelForSequenceClassification"


def encoder_of(kind: str = "AutoModel", **more: Any) -> PackedEncoder:
    return PackedEncoder(model_of("roberta", kind, **more), TOKENIZER)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PackedEncoder(torch.nn.Linear(2, 2), TOKENIZER), "Linear: .*not known"),
        (
            lambda: PackedEncoder(model_of("deberta"), TOKENIZER),
            "model type 'deberta-v2': no mask keeps its sequences separate",
        ),
        (lambda: PackedEncoder(model_of("roberta"), "tokenizer"), "str: the type is not supported; pass a tokenizer"),
        (lambda: encoder_of(vocab_size=200), "tokens, but the model has only 200; pass"),
        (
            lambda: PackedEncoder(model_of("roberta"), TOKENIZER, max_sequence_length=65),
            "max_sequence_length = 65: .*3 and 64",
        ),
        (lambda: encoder_of().embed(["a"], pooling="first"), "pooling = 'first': .*cls"),
        (lambda: encoder_of(CLASSES, id2label={0: "a", 1: "a"}), "labels 0 and 1 are both called 'a'"),
        (
            lambda: encoder_of(CLASSES, id2label={0: "a", 2: "c"}),
            "id2label has no name for label 1; add names for all 2 labels",
        ),
        (lambda: encoder_of().predict(["a"]), "RobertaModel: .*AutoModelForSequenceClassification"),
        (lambda: encoder_of().embed(["a", 3]), r"texts\[1\]: .*int"),
        (lambda: encoder_of().embed("alpha beta"), "texts = 'alpha beta': .*list of texts"),
        (lambda: encoder_of(CLASSES).predict("alpha"), "texts = 'alpha': .*list of texts"),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_outputs_that_are_no_numbers_are_refused_by_the_number_of_the_text() -> None:
    model, read = model_of("roberta"), [TOKENIZER.encode(text).ids for text in TEXTS]
    token = read[2][1]
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[token] = float("nan")
    first = next(number for number, ids in enumerate(read) if token in ids)
    with pytest.raises(InputError, match=rf"texts\[{first}\]"):
        PackedEncoder(model, TOKENIZER).embed(TEXTS)
