"""The flow of `verify`: packs of any kind are proven group by group, at once or in parts, and the result is stored."""
