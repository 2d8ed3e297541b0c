"""Running a model over rows that are only read: packs of a few static shapes, answers in the order of the rows."""
