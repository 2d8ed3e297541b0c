"""As few packs as possible and the proof: linear program, bounds, whole packs by search."""
