"""From record files to arrays: scan, index, groups in memory."""
