"""From plain text to BERT's pretraining examples: documents, sentences, WordPiece, next-sentence pairs, masks, records."""
