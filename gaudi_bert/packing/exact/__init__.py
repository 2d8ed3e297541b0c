"""As few packs as possible and the proof: linear programme, bounds, whole packs by search."""
