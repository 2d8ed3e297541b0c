"""The commands `estimate` and `report`, and the pictures that they draw."""
