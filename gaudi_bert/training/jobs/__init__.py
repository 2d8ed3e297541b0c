"""The kinds of training runs.

`records.py` trains a BERT on pretraining records, and `tables.py` trains a masked or causal language model on packed tables.
`rows.py` fine-tunes a model for a task on labelled rows. `finetune.py` contains the stage finetune, and the job for tasks
with one loss over all rows of an update.
"""
