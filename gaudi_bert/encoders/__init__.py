"""Running any encoder of `transformers` on packs.

How a model has to be fed packs (its masks, positions and other inputs) is determined by trials on the model itself. This
package contains these trials, models that run on packs, pooling, and the reading of weights.
"""
