"""The kinds of runs: BERT on records, any model of words on packed tables, a task on labelled rows, rows learnt together."""
