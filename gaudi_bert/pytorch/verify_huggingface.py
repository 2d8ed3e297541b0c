"""Stage verify-model for a `transformers` model: which way of feeding it packs is right, tried on the model itself."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.pytorch import load_model, probe_model
from gaudi_bert.pytorch.probe import check_ways
from gaudi_bert.training.results import FeedingFinding, VerifyHuggingFaceResult


def verify_huggingface(
    folder: Path, *, target: str | None, attention: str | None, reporter: Reporter
) -> VerifyHuggingFaceResult:
    """Probe a model with its own weights.

    `target` is the way of feeding to test, None for all; `attention` is one of `transformers`' (sdpa, eager,
    flex_attention), the model's own when None.
    """
    check_ways([target] if target is not None else [])
    model = load_model(folder, attention)
    used = model.config._attn_implementation  # noqa: SLF001 - in no public attribute
    findings = probe_model(model, [target] if target is not None else None)
    for finding in findings:
        reporter.say(f"verify-model:   {finding.way}: {finding.verdict}")
    right = [finding.way for finding in findings if finding.is_right]
    if not right:
        reason = f"{findings[0].way}: {findings[0].verdict}" if target is not None else "no way of feeding it packs is right"
        remedy = f"gaudi-bert verify-model --huggingface {folder} tries the others" if target is not None else "feed it rows"
        raise FailedError(f"{folder} ({model.config.model_type}, {used}): {reason}; {remedy}")
    return VerifyHuggingFaceResult(
        model=str(folder),
        model_type=model.config.model_type,
        attention=str(used),
        right=tuple(right),
        findings=tuple(
            FeedingFinding(each.way, each.is_right, each.alone, each.neighbour, each.refusal) for each in findings
        ),
    )
