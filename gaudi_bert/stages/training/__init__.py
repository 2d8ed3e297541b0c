"""What trains, judges and hands on a pretraining model."""
