"""The stages and the storage format of TFRecords: reading, counting, packing, verifying, converting and inspecting them."""
