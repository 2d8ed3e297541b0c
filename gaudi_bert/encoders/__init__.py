"""Running any encoder of `transformers` on packs.

Which masks, positions and other inputs a model needs to process packs is determined by trials on the model itself. This
package contains these trials, models that run on packs, pooling, and the reading of weights.
"""
