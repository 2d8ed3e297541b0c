"""How many examples hypothesis tries of a property: few and always the same in `make test`, many new ones in `test-long`."""

from __future__ import annotations

from hypothesis import settings

FIXED, LONG = "fixed", "long"
LONGER = 20


def register_profiles() -> None:
    """Make both profiles known, and the fixed one the usual; `--hypothesis-profile=long` chooses the other."""
    settings.register_profile(FIXED, derandomize=True, deadline=None)
    settings.register_profile(LONG, max_examples=100 * LONGER, deadline=None, print_blob=True)
    settings.load_profile(FIXED)


def examples(count: int) -> settings:
    """Decorate a property with this for `count` examples in `make test`, and 20 times as many in `make test-long`."""
    return settings(max_examples=count * (LONGER if settings.get_current_profile_name() == LONG else 1))
