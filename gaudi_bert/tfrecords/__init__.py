"""The stages and the format of TFRecords: reading, counting, planning, packing, verifying, converting and inspecting."""
