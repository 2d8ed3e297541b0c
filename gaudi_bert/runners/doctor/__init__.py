"""Is this host, or this cluster, ready for what a pipeline asks?"""
