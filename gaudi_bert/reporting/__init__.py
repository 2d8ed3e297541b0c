"""The stages `estimate` and `report`, and the pictures that they draw."""
