"""The Gaudi runtime."""
