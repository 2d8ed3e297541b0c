"""The tests, one import root: `tests.oracles` holds naive twins, `tests.builders` what makes test data."""
