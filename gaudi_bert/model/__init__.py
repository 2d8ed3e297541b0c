"""BERT for packed inputs: embeddings, mask, encoder, heads, losses. TensorFlow, static shapes, no files."""
