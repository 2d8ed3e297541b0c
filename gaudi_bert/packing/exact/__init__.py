"""As few packs as possible and the proof: linear program, bounds, integer packs by search."""
