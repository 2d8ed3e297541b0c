"""What a run serves to Prometheus: the text, and a real training that is scraped while it runs."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import pipeline_from_mapping
from gaudi_bert.stages.training.train import train
from gaudi_bert.training.logs.metrics_server import MetricsServer
from tests.builders import training_data as data

SAMPLE = re.compile(r"(gaudi_bert_[a-z_]+) ([-+0-9.e]+)")


def scrape(port: int, path: str = "/metrics") -> dict[str, float]:
    """The samples, each with its type before it, as a scraper takes them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    samples: dict[str, float] = {}
    for help_line, type_line, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        match = SAMPLE.fullmatch(sample)
        assert match is not None, sample
        assert help_line.startswith(f"# HELP {match[1]} ")
        assert type_line == f"# TYPE {match[1]} {'counter' if match[1].endswith('_total') else 'gauge'}"
        assert match[1] not in samples
        samples[match[1]] = float(match[2])
    return samples


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_newest_report_of_each_kind_is_served() -> None:
    with MetricsServer(0, updates=800) as server:
        assert scrape(server.port) == {"gaudi_bert_updates": 800}
        server.update("train", 50, {"loss": 7.25, "sequences": 100, "tokens": 2345})
        server.update("train", 100, {"loss": 6.5, "sequences": 200, "tokens": 4690})
        server.update("evaluation", 100, {"loss": 6.75, "sequences": 200})
        assert scrape(server.port, "/metrics?a=b") == {
            "gaudi_bert_updates": 800,
            "gaudi_bert_update": 100,
            "gaudi_bert_train_loss": 6.5,
            "gaudi_bert_evaluation_loss": 6.75,
            "gaudi_bert_sequences_total": 200,
            "gaudi_bert_tokens_total": 4690,
        }
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(server.port, "/")


def test_a_port_that_is_taken_is_said() -> None:
    with (
        MetricsServer(0, updates=1) as server,
        pytest.raises(FailedError, match=rf"metrics_port = {server.port}: .*another"),
    ):
        MetricsServer(server.port, updates=1)


class Scraper(Reporter):
    """Scrapes in a thread of its own whenever the run reports, as soon as it says how far it is."""

    def __init__(self, port: int) -> None:
        super().__init__(quiet=True)
        self.port = port
        self.found: dict[int, dict[str, float]] = {}

    def say(self, text: str) -> None:
        match = re.match(r"train: update (\d+)/", text)
        if match is not None:
            thread = threading.Thread(target=lambda: self.found.update({int(match[1]): scrape(self.port)}))
            thread.start()
            thread.join(30)


def test_a_real_training_is_scraped_while_it_runs_and_not_afterwards(tmp_path: Path) -> None:
    packed = data.write_packed(tmp_path / "data", data.make_packs(29))
    port = free_port()
    settings = pipeline_from_mapping(
        {
            "model": {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20},
            "training": {
                "updates": 6,
                "warmup_updates": 1,
                "global_batch_sequences": 8,
                "micro_batch_packs": 4,
                "log_every_updates": 2,
                "metrics_port": port,
            },
        },
        "test",
    )
    scraper = Scraper(port)
    train(settings, packed, None, tmp_path / "run", reporter=scraper)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(scraper.found) == [2, 4, 6]
    for line in lines:
        served = scraper.found[line["update"]]
        assert served["gaudi_bert_updates"] == 6
        assert served["gaudi_bert_update"] == line["update"]
        assert served["gaudi_bert_train_masked_lm_loss"] == line["masked_lm_loss"]
        assert served["gaudi_bert_train_tokens_per_second"] == line["tokens_per_second"]
        assert served["gaudi_bert_tokens_total"] == line["tokens"]
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(port)
