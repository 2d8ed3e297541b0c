"""Every file that outlives a stage: its place, its name, its type, and when it is finished."""
