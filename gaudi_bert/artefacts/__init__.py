"""Every file that outlives a stage: its path, its name, its type, and when it is finished."""
