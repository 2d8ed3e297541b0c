"""The stage `prepare`, which converts plain text to unpacked BERT pretraining examples.

Its steps are: documents, sentences, WordPiece tokens, next-sentence pairs, masking, and TFRecords.
"""
