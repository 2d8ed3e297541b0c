"""Plain text -> pretraining examples."""
